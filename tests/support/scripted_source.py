"""A source whose records a test writes while the job runs: a file of JSON lines a split."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split

RECORDS = pa.schema([("account", pa.string()), ("at", pa.int64()), ("amount", pa.int64())])


@dataclass(frozen=True)
class ScriptedSource(Source):
    """Reads `<directory>/<split>.jsonl`; ends when `<directory>/ends` is there and all is read."""

    directory: str
    splits_count: int = 2

    @property
    def schema(self) -> pa.Schema:
        return RECORDS

    @property
    def bounded(self) -> bool:
        return True

    def splits(self) -> Sequence[Split]:
        return [Split(str(number), b"0") for number in range(self.splits_count)]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return _Reader(Path(self.directory), splits)

    def write(self, split: int, *rows: tuple[str, int, int]) -> None:
        """Append records to a split."""
        directory = Path(self.directory)
        directory.mkdir(exist_ok=True)
        lines = [json.dumps(dict(zip(RECORDS.names, row, strict=True))) for row in rows]
        with (directory / f"{split}.jsonl").open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def end(self) -> None:
        """Let the job end once it has read all."""
        (Path(self.directory) / "ends").touch()


class _Reader(SourceReader):
    def __init__(self, directory: Path, splits: Sequence[Split]) -> None:
        self._directory = directory
        self._next = {split.id: int(split.position) for split in splits}
        self._last: list[tuple[str, int]] = []

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        ends = (self._directory / "ends").exists()
        for split, at in self._next.items():
            rows = self._rows_of(split)[at:]
            if rows:
                self._next[split] = at + len(rows)
                self._last = [(split, len(rows))]
                return pa.RecordBatch.from_pylist(rows, schema=RECORDS)
        if ends:
            return EndOfInput()
        time.sleep(min(timeout_s, 0.02))
        return None

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        return self._last

    def snapshot(self) -> Sequence[Split]:
        return [Split(split, str(at).encode()) for split, at in self._next.items()]

    def close(self) -> None:
        pass

    def _rows_of(self, split: str) -> list[dict[str, Any]]:
        path = self._directory / f"{split}.jsonl"
        text = path.read_text() if path.exists() else ""
        # A line that is being written has no newline yet.
        return [json.loads(line) for line in text.split("\n")[:-1]]
