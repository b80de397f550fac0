"""Generated payments whose readers note how far they are, as the Flink jobs' sources do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from onceflow.core.spi import EndOfInput, PolledRows, ReaderContext, Source, SourceReader, Split
from onceflow.sources import DatagenSource

_INTERVAL_S = 0.02


@dataclass(frozen=True)
class MeteredSource(Source):
    """`source`, of a pace once `fast_rows` are out; both are those of all subtasks together.

    Leaves a file `progress-NAME-SUBTASK` in `directory`: lines "seconds since the epoch, rows so
    far", one every 20 ms at most.
    """

    source: DatagenSource
    directory: str
    name: str
    fast_rows: int | None = None
    rows_per_second: float = 0.0

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def bounded(self) -> bool:
        return self.source.bounded

    def splits(self) -> Sequence[Split]:
        return self.source.splits()

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        path = Path(self.directory) / f"progress-{self.name}-{context.subtask}"
        return _MeteredReader(self, self.source.reader(splits, context), path)


class _MeteredReader(SourceReader):
    def __init__(self, source: MeteredSource, reader: SourceReader, path: Path) -> None:
        self._reader = reader
        share = 1 / source.source.splits_count
        self._fast_rows = None if source.fast_rows is None else source.fast_rows * share
        self._rows_per_second = source.rows_per_second * share
        self._slow_since: float | None = None
        self._lines = path.open("w")
        self._noted_at = 0.0
        self._rows = 0

    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        if self._fast_rows is not None and self._rows >= self._fast_rows:
            now = time.monotonic()
            self._slow_since = self._slow_since or now
            due_s = (self._rows - self._fast_rows) / self._rows_per_second
            wait_s = self._slow_since + due_s - now
            if wait_s > 0:
                time.sleep(min(wait_s, timeout_s))
                return None
        batch = self._reader.poll(timeout_s)
        if isinstance(batch, pa.RecordBatch):
            self._rows += batch.num_rows
        if time.monotonic() - self._noted_at >= _INTERVAL_S:
            self._note()
        return batch

    def _note(self) -> None:
        self._noted_at = time.monotonic()
        self._lines.write(f"{time.time()} {self._rows}\n")
        self._lines.flush()

    def rows_by_split(self) -> Sequence[tuple[str, int]] | None:
        return self._reader.rows_by_split()

    def snapshot(self) -> Sequence[Split]:
        return self._reader.snapshot()

    def close(self) -> None:
        if not self._lines.closed:
            self._note()
            self._lines.close()
        self._reader.close()
