"""Sorts changes by key and leaves what they come to: at most one delete and one put a key.

What is left is itself a list of changes in order, with the effect of the whole list applied row by
row, so it may be reduced again together with changes that came later. Per key, in arrival order:

    upsert   the last put, if no delete came after it
    ignore   the first put after the last delete
    update   the last put, if there is no delete at all: after one there is no row to update
    each     the last delete, which is applied before the put
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from onceflow.sinks.sql.write_mode import WriteMode

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]


class SortedChanges:
    """Rows by key, with the last column telling deletes from puts; immutable."""

    def __init__(self, rows: pa.RecordBatch, key: Sequence[str]) -> None:
        self.rows = rows
        self.key = tuple(key)

    @property
    def columns(self) -> list[pa.Array]:
        """The key columns."""
        return [self.rows.column(name) for name in self.key]

    def has_deletes(self) -> bool:
        """Return whether any row deletes its key."""
        return pc.any(self.rows.column(self.rows.num_columns - 1)).as_py() is True

    def slice(self, start: int, count: int | None = None) -> SortedChanges:
        """Return `count` rows from `start` on, to the end without one."""
        return SortedChanges(self.rows.slice(start, count), self.key)

    def count_through(self, bound: Sequence[pa.Scalar]) -> int:
        """Return how many rows have a key that is not over `bound`."""
        at_most: Any = True
        for column, value in reversed(list(zip(self.columns, bound, strict=True))):
            at_most = pc.or_(pc.less(column, value), pc.and_(pc.equal(column, value), at_most))
        count: int = pc.sum(at_most).as_py() or 0
        return count

    def last_key(self) -> list[pa.Scalar]:
        """Return the key of the last row."""
        return [column[len(column) - 1] for column in self.columns]

    def blocks(self, rows_max: int) -> Iterator[SortedChanges]:
        """Cut into blocks of about `rows_max` rows; a key's two rows stay together."""
        total = self.rows.num_rows
        start = 0
        while start < total:
            end = min(start + rows_max, total)
            if end < total and all(
                column.slice(end - 1, 1).equals(column.slice(end, 1)) for column in self.columns
            ):
                end += 1
            yield self.slice(start, end - start)
            start = end


def reduced(
    changes: Sequence[pa.RecordBatch], key: Sequence[str], mode: WriteMode
) -> SortedChanges:
    """Return what `changes`, in arrival order, come to; sorted by `key`.

    The last column of each batch is boolean: whether the row deletes its key.
    """
    rows = pa.concat_batches(list(changes)) if len(changes) > 1 else changes[0]
    order = _order([rows.column(name) for name in key])
    keys = [rows.column(name).take(order) for name in key]
    starts = _group_starts(keys)
    deletes = rows.column(rows.num_columns - 1).take(order).to_numpy(zero_copy_only=False)
    kept = _kept(starts, deletes, mode)
    return SortedChanges(rows.take(order.take(pa.array(kept))), key)


def merged(
    runs: Sequence[Iterator[SortedChanges]], key: Sequence[str], mode: WriteMode
) -> Iterator[SortedChanges]:
    """Reduce `runs`, each sorted and reduced, in arrival order, holding one block of each."""
    heads = [next(run, None) for run in runs]
    while True:
        present = [head for head in heads if head is not None]
        if not present:
            return
        bound = _smallest([head.last_key() for head in present], present[0])
        parts: list[pa.RecordBatch] = []
        for position, head in enumerate(heads):
            if head is None:
                continue
            count = head.count_through(bound)
            if count:
                parts.append(head.rows.slice(0, count))
            heads[position] = (
                next(runs[position], None) if count == head.rows.num_rows else head.slice(count)
            )
        yield reduced(parts, key, mode)


def _order(keys: Sequence[pa.Array]) -> pa.Array:
    """Return the positions of the rows by key, those of one key in arrival order."""
    names = [str(position) for position in range(len(keys))]
    order: pa.Array = pc.sort_indices(
        pa.RecordBatch.from_arrays(list(keys), names=names),
        sort_keys=[(name, "ascending") for name in names],
    )
    return order


def _group_starts(keys: Sequence[pa.Array]) -> Positions:
    """Return where each key begins among sorted keys."""
    count = len(keys[0])
    differs: Flags = np.zeros(max(count - 1, 0), dtype=np.bool_)
    for column in keys:
        unequal = pc.not_equal(column.slice(1), column.slice(0, max(count - 1, 0)))
        differs |= unequal.to_numpy(zero_copy_only=False)
    return np.concatenate(([0], np.flatnonzero(differs) + 1)).astype(np.int64)


def _kept(starts: Positions, deletes: Flags, mode: WriteMode) -> Positions:
    """Return the positions that remain, in order."""
    count = len(deletes)
    if not count:
        return np.zeros(0, dtype=np.int64)
    ends = np.concatenate((starts[1:], [count])) - 1
    if not deletes.any():
        return starts if mode is WriteMode.IGNORE else ends
    last_delete = np.maximum.reduceat(np.where(deletes, np.arange(count), -1), starts)
    has_delete = last_delete >= 0
    if mode is WriteMode.IGNORE:
        puts = np.where(has_delete, last_delete + 1, starts)
        puts = puts[puts <= ends]
    elif mode is WriteMode.UPDATE:
        puts = ends[~has_delete]
    else:
        puts = ends[ends != last_delete]
    return np.sort(np.concatenate((last_delete[has_delete], puts)))


def _smallest(keys: Sequence[Sequence[pa.Scalar]], like: SortedChanges) -> Sequence[pa.Scalar]:
    columns = [
        pa.array([key[position] for key in keys], column.type)
        for position, column in enumerate(like.columns)
    ]
    return keys[int(_order(columns)[0].as_py())]
