"""Running aggregates of a RocksDB store: a bounded table in memory over the database.

Invariants:
    totals of a dirty slot are newer than the database's; those of any other are, or will be once
        the pending snapshot is written, what the database has
    slots <= 2 * capacity + the keys of one batch
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
import pyarrow as pa

from onceflow.core.state.accumulator_columns import AccumulatorShape
from onceflow.core.state.accumulators import AccumulatorTable
from onceflow.core.state.canonical import StateRows
from onceflow.core.state.key_arena import grown
from onceflow.core.state.key_columns import Ints, KeyColumn
from onceflow.core.state.key_groups import Hashes
from onceflow.core.state.rocksdb_database import Database
from onceflow.core.state.rocksdb_rows import (
    Pair,
    after,
    group_prefix,
    pairs_of,
    split_row_key,
    state_prefix,
)
from onceflow.core.state.rocksdb_writes import WriteQueue

PRELOAD_BATCH = 65_536


class RocksAccumulators(AccumulatorTable):
    """Running aggregates in numpy arrays for the keys used last; the database has the others."""

    def __init__(
        self,
        shape: AccumulatorShape,
        label: str,
        max_parallelism: int,
        writes: WriteQueue,
        database: Database,
        capacity: int,
    ) -> None:
        super().__init__(shape, label, max_parallelism)
        self._writes = writes
        self._database = database
        self._capacity = capacity
        self._dirty = np.zeros(1024, np.uint8)
        self._used = np.zeros(1024, np.int64)
        self._clock = 0
        self._complete = True
        """Whether every key is in memory, so that one that is not there is nowhere."""

    def preload(self, key_groups_owned: range) -> None:
        """Take the database's rows into memory, as many as fit."""
        prefix = state_prefix(self.shape.name)
        for group in key_groups_owned:
            start = group_prefix(group) + prefix
            rows = self._database.scan(start, after(start))
            while batch := list(islice(rows, PRELOAD_BATCH)):
                if len(self) + len(batch) > self._capacity:
                    self._complete = False
                    return
                self._load_pairs(group, batch)

    def _load_pairs(self, group: int, batch: list[tuple[bytes, bytes]]) -> None:
        kind = pa.large_binary()
        keys = pa.array([split_row_key(key)[2] for key, _ in batch], kind)
        values = pa.array([value for _, value in batch], kind)
        self.load(StateRows(np.full(len(batch), group, np.uint16), keys, values))

    def freeze(self) -> Callable[[], list[Pair]]:
        """Take the dirty totals; return what turns them into sorted pairs, on any thread."""
        slots = np.flatnonzero(self._dirty[: self._index.end])
        self._dirty[slots] = 0
        view = self.view_of(slots)
        return lambda: pairs_of(view.rows_of(slice(None)), self.shape.name)

    def _resolve(self, columns: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        used = self._index.end
        slots, _ = self._index.resolve(columns, hashes)
        end = self._index.end
        if end > used:
            for column in self._columns:
                column.reserve(used, end)
            self._reserve(used, end)
            if not self._complete:
                self._fetch(used)
        return slots

    def _reserve(self, used: int, end: int) -> None:
        self._dirty = grown(self._dirty, used, end)
        self._used = grown(self._used, used, end)
        self._dirty[used:end] = 0

    def _fetch(self, first: int) -> None:
        """Read the totals of the slots from `first` on that the database has."""
        slots = np.arange(first, self._index.end)
        rows = self.view_of(slots).rows_of(slice(None))
        keys = [
            group_prefix(group) + state_prefix(self.shape.name) + key
            for group, key in zip(rows.groups.tolist(), rows.keys.to_pylist(), strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        found = self._database.get_many([keys[index] for index in order])
        known = [(index, value) for index, value in zip(order, found, strict=True) if value]
        if known:
            chosen = np.fromiter((index for index, _ in known), np.int64, len(known))
            self._put(slots[chosen], pa.array([value for _, value in known], pa.large_binary()))

    def _updated(self, slots: Ints) -> None:
        self._clock += 1
        self._dirty[slots] = 1
        self._used[slots] = self._clock
        excess = len(self) - self._capacity
        if excess > 0 and (self._writes.settled or excess > self._capacity):
            self._evict()

    def _evict(self) -> None:
        """Write what is dirty, and keep the half of the keys that were used last."""
        self._writes.write(self.freeze()())
        keep = max(self._capacity // 2, 1)
        used = self._used[1 : self._index.end]
        slots = 1 + np.sort(np.argpartition(used, len(used) - keep)[len(used) - keep :])
        self._index = self._index.kept(slots)
        for column in self._columns:
            column.keep(slots)
        self._used[1 : len(slots) + 1] = self._used[slots]
        self._dirty[:] = 0
        self._complete = False
