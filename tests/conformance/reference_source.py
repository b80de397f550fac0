"""A correct source in a few lines, whose steps the broken sources of the gallery do wrong.

A split is a file of one number a line. Rows that were reported as done are counted in a file of
their own, as a server counts what a consumer group has committed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from onceflow.core.errors import SourceError
from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split
from onceflow.integration.conformance import SourceInput

BATCH_ROWS = 4
SPLITS = 3


class ReferenceReader(SourceReader):
    """Reads one batch of a split at a time, each split in turn."""

    def __init__(
        self, source: ReferenceSource, splits: Sequence[Split], context: ReaderContext
    ) -> None:
        self.source = source
        self.context = context
        self.next = {split.id: int(split.position) for split in splits}
        self.runs: list[tuple[str, int]] = []
        self.wakened = threading.Event()
        self.is_closed = False

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        for split_id in sorted(self.next, key=lambda split_id: self.next[split_id]):
            numbers = self.read_lines(split_id)[self.next[split_id] :][:BATCH_ROWS]
            if numbers:
                self.next[split_id] += len(numbers)
                self.runs = [(split_id, len(numbers))]
                return pa.record_batch([pa.array(numbers, pa.int64())], schema=self.source.schema)
        if self.source.bounded:
            return self.end()
        self.wait(timeout_s)
        return None

    def end(self) -> EndOfInput | None:
        return EndOfInput()

    def wait(self, timeout_s: float) -> None:
        self.wakened.wait(timeout_s)
        if not self.is_closed:
            self.wakened.clear()

    def read_lines(self, split_id: str) -> list[int]:
        path = self.source.path(split_id)
        if not path.exists():
            return self.miss(path)
        return [int(line) for line in path.read_text().split()]

    def miss(self, path: Path) -> list[int]:
        raise SourceError(f"the file {path} is gone; restore it")

    def snapshot(self) -> Sequence[Split]:
        return [Split(split_id, b"%d" % at) for split_id, at in self.next.items()]

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        return self.runs

    def list_ended_splits(self) -> Sequence[str]:
        if not self.source.bounded:
            return ()
        return [
            split_id for split_id, at in self.next.items() if at >= len(self.read_lines(split_id))
        ]

    def add_splits(self, splits: Sequence[Split]) -> None:
        self.next |= {split.id: int(split.position) for split in splits}

    def commit(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self.source.path(split.id).with_suffix(".done").write_bytes(split.position)

    def wake(self) -> None:
        self.wakened.set()

    def close(self) -> None:
        self.is_closed = True
        self.wakened.set()


@dataclass(frozen=True)
class ReferenceSource(Source):
    """Reads the files of a directory."""

    directory: str
    bounded: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    reader_class: ClassVar[type[ReferenceReader]] = ReferenceReader

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field("number", pa.int64(), nullable=False)])

    @property
    def discovery_interval_s(self) -> float | None:
        return 0.05

    def path(self, split_id: str) -> Path:
        return Path(self.directory) / f"{split_id}.txt"

    def list_ids(self) -> list[str]:
        return sorted(path.stem for path in Path(self.directory).glob("*.txt"))

    def splits(self) -> Sequence[Split]:
        return [Split(split_id, b"0") for split_id in self.list_ids()]

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        ids = {split.id for split in known}
        return [*known, *(self.begin(name) for name in self.list_ids() if name not in ids)]

    def begin(self, split_id: str) -> Split:
        return Split(split_id, b"0")

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return self.reader_class(self, splits, context)


class ReferenceInput(SourceInput):
    """The files of a directory, and every optional method."""

    def __init__(
        self, directory: Path, source_class: type[ReferenceSource] = ReferenceSource
    ) -> None:
        self._source = source_class(str(directory))
        self._numbers = iter(range(1_000_000))

    def fill(self, rows: int) -> Mapping[str, Sequence[object]]:
        return {f"split-{index}": self.append(f"split-{index}", rows) for index in range(SPLITS)}

    def source(self) -> Source:
        return self._source

    def source_with_end(self) -> Source:
        return replace(self._source, bounded=True)

    def append(self, split_id: str, rows: int) -> Sequence[object]:
        numbers = [next(self._numbers) for _ in range(rows)]
        path = self._source.path(split_id)
        text = path.read_text() if path.exists() else ""
        # Replace the file whole: a reader may read it now.
        path.with_suffix(".new").write_text(text + "".join(f"{number}\n" for number in numbers))
        path.with_suffix(".new").rename(path)
        return numbers

    def add_split(self, rows: int) -> tuple[str, Sequence[object]]:
        split_id = f"split-new-{next(self._numbers)}"
        return split_id, self.append(split_id, rows)

    def remove_split(self, split_id: str) -> str:
        self._source.path(split_id).unlink()
        return split_id

    def count_acknowledged(self, split_id: str) -> int:
        done = self._source.path(split_id).with_suffix(".done")
        return int(done.read_text()) if done.exists() else 0
