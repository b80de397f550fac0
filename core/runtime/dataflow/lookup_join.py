"""Joins of batches with a table in memory, by sorted hashes, a whole batch at a time.

A hash only finds candidates; the keys themselves are then compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.plan.lookup_tables import JoinedColumns
from onceflow.core.plan.work import JoinTable
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.state import hash_keys

_Rows = npt.NDArray[np.int64]


class LookupIndex:
    """The table's rows, sorted by the hashes of their keys, without rows with a null in the key."""

    def __init__(self, rows: pa.RecordBatch, on: Sequence[str]) -> None:
        rows = _without_null_keys(rows, on)
        hashes = hash_keys([rows.column(name) for name in on], on)
        # Stable, so that rows of one key stay in the order of the table.
        order = np.argsort(hashes, kind="stable")
        self._on = on
        self._hashes = hashes[order]
        self.rows = rows.take(pa.array(order))

    def matches(self, keys: Sequence[pa.Array]) -> tuple[_Rows, _Rows]:
        """Return the pairs of a row of `keys` and a row of `rows`, in the order of `keys`.

        Rows of one key come in the order of the table.
        """
        hashes = hash_keys(keys, self._on)
        begin = np.searchsorted(self._hashes, hashes, side="left")
        counts = np.searchsorted(self._hashes, hashes, side="right") - begin
        left: _Rows = np.repeat(np.arange(len(hashes), dtype=np.int64), counts)
        # The number of pairs before each pair's key. Subtracted from a running number it counts 0,
        # 1, 2, … within each key, without a loop.
        ahead = np.repeat(np.cumsum(counts) - counts, counts)
        right: _Rows = np.repeat(begin, counts) + np.arange(len(left)) - ahead
        # Equal hashes are only candidates: compare the keys themselves.
        is_same = np.ones(len(left), np.bool_)
        for name, key in zip(self._on, keys, strict=True):
            candidates = self.rows.column(name).take(pa.array(right))
            is_same &= pc.equal(key.take(pa.array(left)), candidates).to_numpy(zero_copy_only=False)
        return (left, right) if is_same.all() else (left[is_same], right[is_same])


class TableJoiner(RunningOperator):
    """An operator that adds a table's columns to each record, once for each match.

    A record without a match is dropped in an inner join, and gets nulls in a left join.
    """

    def __init__(self, uid: str, columns: JoinedColumns, schema: pa.Schema) -> None:
        super().__init__(uid)
        self._on, self._how, self._added = columns.on, columns.how, columns.added
        self._schema = schema

    def join(self, rows: pa.RecordBatch, index: LookupIndex) -> None:
        """Emit `rows` with the columns of `index`, in the order of `rows`."""
        whole = whole_keys(rows, self._on)
        keyed = np.flatnonzero(whole) if not whole.all() else None
        keys = [rows.column(name) for name in self._on]
        if keyed is not None:
            keys = [key.take(pa.array(keyed)) for key in keys]
        left, right = index.matches(keys)
        if keyed is not None:
            left = keyed[left]
        if self._how == "left":
            left, right = _with_unmatched(left, right, rows.num_rows)
        columns = rows.columns if _is_all(left, rows.num_rows) else _take(rows.columns, left)
        indices = pa.array(right, mask=right < 0)
        added = [index.rows.column(name).take(indices) for name in self._added]
        self.emit(pa.record_batch([*columns, *added], schema=self._schema))


class LookupJoiner(TableJoiner):
    """An operator that joins records with a table in memory."""

    def __init__(self, uid: str, work: JoinTable, schema: pa.Schema) -> None:
        table = work.table
        super().__init__(uid, JoinedColumns(table.schema, table.on, work.how), schema)
        self._index = LookupIndex(one_batch(table.rows), table.on)

    def process(self, batch: Batch) -> None:
        """Emit the joined rows, in the order of the batch."""
        self.join(batch.rows, self._index)


def _with_unmatched(left: _Rows, right: _Rows, rows: int) -> tuple[_Rows, _Rows]:
    """Add every row that is not in `left`, with -1 as its partner."""
    alone = np.ones(rows, np.bool_)
    alone[left] = False
    unmatched = np.flatnonzero(alone)
    if not len(unmatched):
        return left, right
    every = np.concatenate([left, unmatched])
    order = np.argsort(every, kind="stable")
    return every[order], np.concatenate([right, np.full(len(unmatched), -1)])[order]


def _is_all(left: _Rows, rows: int) -> bool:
    return len(left) == rows and bool((left == np.arange(rows)).all())


def _take(columns: Sequence[pa.Array], rows: _Rows) -> list[pa.Array]:
    indices = pa.array(rows)
    return [column.take(indices) for column in columns]


def whole_keys(rows: pa.RecordBatch, on: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return False for each row with a null in a column of `on`."""
    whole = np.ones(rows.num_rows, np.bool_)
    for name in on:
        column = rows.column(name)
        if column.null_count:
            whole &= column.is_valid().to_numpy(zero_copy_only=False)
    return whole


def _without_null_keys(rows: pa.RecordBatch, on: Sequence[str]) -> pa.RecordBatch:
    whole = whole_keys(rows, on)
    return rows if whole.all() else rows.filter(pa.array(whole))


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return the rows of `table` as one batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
