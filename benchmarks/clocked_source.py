"""A source that notes when it is first asked for records: the start of every measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from onceflow.core.spi import EndOfInput, PolledRows, ReaderContext, Source, SourceReader, Split

Polled = PolledRows | EndOfInput | None


@dataclass(frozen=True)
class ClockedSource(Source):
    """`source`, with one small file a reader and attempt in `directory`: when reading began."""

    source: Source
    directory: str

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def bounded(self) -> bool:
        return self.source.bounded

    def validate(self) -> None:
        self.source.validate()

    def splits(self) -> Sequence[Split]:
        return self.source.splits()

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        path = Path(self.directory) / f"reading-{context.attempt}-{context.subtask}"
        return _ClockedReader(self.source.reader(splits, context), path)

    def began(self, attempt: int) -> bool:
        """True if a reader of `attempt` was created."""
        return any(Path(self.directory).glob(f"reading-{attempt}-*"))

    def began_at_s(self, attempt: int) -> float:
        """Return when a reader of `attempt` was first asked, in seconds of the epoch.

        Raises:
            ValueError: None has been.
        """
        paths = Path(self.directory).glob(f"reading-{attempt}-*")
        return min(float(path.read_text()) for path in paths)


class _ClockedReader(SourceReader):
    def __init__(self, reader: SourceReader, path: Path) -> None:
        self._reader = reader
        self._path: Path | None = path

    def poll(self, timeout_s: float) -> Polled:
        if self._path is not None:
            fresh = self._path.with_name(f".{self._path.name}")
            fresh.write_text(repr(time.time()))
            fresh.replace(self._path)
            self._path = None
        return self._reader.poll(timeout_s)

    def wake(self) -> None:
        self._reader.wake()

    def take_record_times(self) -> Sequence[tuple[int, int]]:
        return self._reader.take_record_times()

    def snapshot(self) -> Sequence[Split]:
        return self._reader.snapshot()

    def commit(self, splits: Sequence[Split]) -> None:
        self._reader.commit(splits)

    def close(self) -> None:
        self._reader.close()
