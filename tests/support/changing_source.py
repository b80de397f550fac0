"""Records that put and delete rows of accounts: what a table holds at their end is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from tests.support.counting_source import SCHEMA, CountingSource
from typing_extensions import override

from onceflow.core.spi import EndOfInput, PolledRows, ReaderContext, SourceReader, Split

_SCHEMA = SCHEMA.append(pa.field("op", pa.string()))


@dataclass(frozen=True)
class ChangingSource(CountingSource):
    """Counts, with the column `op` beside: one change in three deletes the row of its account.

    All records of an account are in one split.
    """

    @property
    @override
    def schema(self) -> pa.Schema:
        return _SCHEMA

    @override
    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return _Reader(self, super().reader(splits, context))

    def deletes(self, record_id: int) -> bool:
        return (record_id // self.accounts + record_id % self.accounts) % 3 == 0

    def ids_at_the_end(self) -> list[int]:
        """Return the ids of the rows that are left: for each account the last one, or none."""
        last = range(self.records - self.accounts, self.records)
        return [record_id for record_id in last if not self.deletes(record_id)]


class _Reader(SourceReader):
    def __init__(self, source: ChangingSource, inner: SourceReader) -> None:
        self._source, self._inner = source, inner

    @override
    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        polled = self._inner.poll(timeout_s)
        if not isinstance(polled, pa.RecordBatch):
            return polled
        deletes = map(self._source.deletes, polled.column("id").to_pylist())
        operations = pa.array(["d" if delete else "u" for delete in deletes], pa.string())
        return polled.append_column("op", operations)

    @override
    def rows_by_split(self) -> Sequence[tuple[str, int]] | None:
        return self._inner.rows_by_split()

    @override
    def snapshot(self) -> Sequence[Split]:
        return self._inner.snapshot()

    @override
    def close(self) -> None:
        self._inner.close()
