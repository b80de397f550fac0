"""Running aggregates in memory over a RocksDB, which has the keys that were not used for longer.

Invariants:
    totals of a dirty slot are newer than the database's; those of any other are, or will be once
        the pending snapshot is written, what the database has
    slots <= 2 * capacity + the keys of one batch
    the slot of a removed key stays until the database will not bring it back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.aggregates.expiring_totals import Expiry
from onceflow.core.state.api.descriptors import StateTtlConfig
from onceflow.core.state.keys.key_columns import FixedKeys, Ints, KeyColumn
from onceflow.core.state.keys.key_groups import Hashes
from onceflow.core.state.keys.slot_index import decode_keys, encode_keys, grown
from onceflow.core.state.rocksdb.database import (
    Database,
    Pair,
    WriteQueue,
    after,
    group_prefix,
    pairs_of,
    split_row_key,
    state_prefix,
)
from onceflow.core.state.snapshots.canonical import StateRows

PRELOAD_BATCH = 65_536
ROWS_CLEANED_MAX = 256
"""So many rows of a table are looked at after a batch: a row costs some microseconds."""


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
        key_groups_owned: range,
        ttl: StateTtlConfig | None = None,
    ) -> None:
        super().__init__(shape, label, max_parallelism, ttl)
        self._writes = writes
        self._database = database
        self._capacity = capacity
        self._groups = key_groups_owned
        self._dirty = np.zeros(1024, np.bool_)
        self._used = np.zeros(1024, np.int64)
        self._stored = np.zeros(1024, np.bool_)
        """Whether the database may have the key, now or once the pending snapshot is written."""
        self._clock = 0
        self._complete = True
        """Whether every key is in memory, so that one that is not there is nowhere."""
        self._stored_clean_at: tuple[int, bytes] = (0, b"")
        """Place among the key groups, and the row in it, that is looked at next."""

    def preload(self) -> None:
        """Take the database's rows into memory, as many as fit."""
        prefix = state_prefix(self.shape.name)
        for group in self._groups:
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

    def namespaces(self, bits: int = 0) -> Ints:
        """Return those in memory and those of the database, without the last `bits`."""
        found = set(super().namespaces(bits).tolist())
        if not self._complete:
            prefix = state_prefix(self.shape.name)
            for group in self._groups:
                found.update(self._namespaces_below(group_prefix(group) + prefix, bits))
        return np.array(sorted(found), np.int64)

    def _namespaces_below(self, prefix: bytes, bits: int) -> Iterator[int]:
        """Yield the namespaces of the rows below `prefix`, reading one row of each."""
        start, stop = prefix, after(prefix)
        while row := next(self._database.scan(start, stop), None):
            namespace = int.from_bytes(row[0][len(prefix) :][:8], "big", signed=True)
            yield namespace >> bits
            next_one = ((namespace >> bits) + 1) << bits
            if next_one == 0:
                return
            start = prefix + (next_one % (1 << 64)).to_bytes(8, "big")

    def select(self, first: int, stop: int) -> Ints:
        """Return the slots of some namespaces, whose rows are all in memory then."""
        if not self._complete:
            for part in (range(max(first, 0), stop), range(first, min(stop, 0))):
                if len(part):
                    self._bring(part)
        return super().select(first, stop)

    def _bring(self, namespaces: range) -> None:
        """Take the rows of these namespaces, all of one sign, into memory."""
        bounds = [n.to_bytes(8, "big", signed=True) for n in (namespaces.start, namespaces[-1])]
        prefixes = [group_prefix(group) + state_prefix(self.shape.name) for group in self._groups]
        rows = chain.from_iterable(
            self._database.scan(prefix + bounds[0], after(prefix + bounds[1]))
            for prefix in prefixes
        )
        while batch := list(islice(rows, PRELOAD_BATCH)):
            self._bring_rows(batch)

    def _bring_rows(self, batch: list[tuple[bytes, bytes]]) -> Ints:
        """Take rows of the database into memory; return the slots of those that were not there."""
        kind = pa.large_binary()
        encoded = pa.array([split_row_key(key)[2] for key, _ in batch], kind)
        columns = decode_keys(encoded, self.shape.empty_keys())
        used = self._index.end
        slots, _ = self._index.resolve(columns, self.shape.slot_hashes(columns, None))
        self._reserve(used, self._index.end)
        new = np.flatnonzero(slots >= used)
        if len(new):
            self._put(slots[new], pa.array([batch[row][1] for row in new.tolist()], kind))
        return slots[new]

    def clean(self, count: int) -> None:
        """Look at further keys in memory, and at some rows if there are others; remove expired."""
        super().clean(count)
        if self.expiry is None or self._complete:
            return
        left = min(count, ROWS_CLEANED_MAX)
        for _ in self._groups:
            number, start = self._stored_clean_at
            prefix = group_prefix(self._groups[number]) + state_prefix(self.shape.name)
            rows = list(islice(self._database.scan(start or prefix, after(prefix)), left + 1))
            if len(rows) > left:
                self._stored_clean_at = number, rows[left][0]
                self._remove_expired(rows[:left], self.expiry)
                return
            left -= len(rows)
            self._stored_clean_at = (number + 1) % len(self._groups), b""
            self._remove_expired(rows, self.expiry)

    def _remove_expired(self, rows: list[tuple[bytes, bytes]], expiry: Expiry) -> None:
        """Remove the keys of rows that have expired; those in memory are looked at there."""
        if not rows:
            return
        expired = expiry.expired_rows(pa.array([value for _, value in rows], pa.large_binary()))
        if expired.any():
            self.remove(self._bring_rows([rows[row] for row in np.flatnonzero(expired).tolist()]))

    def freeze(self) -> Callable[[], list[Pair]]:
        """Take the dirty totals; return what turns them into sorted pairs, on any thread."""
        end = self._index.end
        # A key that has come and gone since the last snapshot is nobody's business.
        slots = np.flatnonzero(self._dirty[:end] & (self._stored | ~self._removed)[:end])
        self._dirty[:end] = False
        removed = self._removed[slots]
        self._stored[slots] = True
        view = self.view_of(slots)
        return lambda: pairs_of(
            _without_values(view.rows_of(slice(None)), removed), self.shape.name
        )

    def _resolve(self, columns: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        used = self._index.end
        slots = super()._resolve(columns, hashes)
        if self._index.end > used and not self._complete:
            self._fetch(used)
        return slots

    def find(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's slot, 0 where its namespace and key are nowhere."""
        self.bring(namespaces, keys, hashes)
        return super().find(namespaces, keys, hashes)

    def bring(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> None:
        """Have the rows of these namespaces and keys in memory, as far as there are any."""
        if self._complete or not len(hashes):
            return
        missing = np.flatnonzero(super().find(namespaces, keys, hashes) == 0)
        if len(missing):
            mine = tuple(column.take(missing) for column in keys)
            self._bring_keys(namespaces[missing], mine, hashes[missing])

    def _bring_keys(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> None:
        """Take the rows of these keys that the database has into memory."""
        encoded = encode_keys((FixedKeys((namespaces.view(np.uint64),)), *keys)).to_pylist()
        groups = self.group_of_hashes(hashes).tolist()
        prefix = state_prefix(self.shape.name)
        wanted = sorted(
            {group_prefix(group) + prefix + key for group, key in zip(groups, encoded, strict=True)}
        )
        found = zip(wanted, self._database.get_many(wanted), strict=True)
        rows = [(key, value) for key, value in found if value]
        if rows:
            self._bring_rows(rows)

    def _reserve(self, used: int, end: int) -> None:
        super()._reserve(used, end)
        self._dirty = grown(self._dirty, used, end)
        self._used = grown(self._used, used, end)
        self._stored = grown(self._stored, used, end)
        self._dirty[used:end] = self._stored[used:end] = False
        self._used[used:end] = self._clock

    def _put(self, slots: Ints, values: pa.Array) -> None:
        super()._put(slots, values)
        self._stored[slots] = True

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

    def _mark(self, slots: Ints) -> None:
        self._dirty[slots] = True

    def _touch(self, slots: Ints) -> None:
        self._clock += 1
        self._used[slots] = self._clock
        excess = len(self) - self._capacity
        if excess > 0 and (self._writes.settled or excess > self._capacity):
            self._evict()

    def _evict(self) -> None:
        """Write what is dirty, and keep the half of the keys that were used last."""
        self._writes.write(self.freeze()())
        slots = 1 + np.flatnonzero(~self._removed[1 : self._index.end])
        excess = len(slots) - max(self._capacity // 2, 1)
        if excess > 0:
            self._complete = False
            slots = slots[np.sort(np.argpartition(self._used[slots], excess)[excess:])]
        self._keep(slots)

    def _pack(self) -> None:
        end = self._index.end
        known = self._stored[1:end]
        if self._writes.settled:
            known = known & self._dirty[1:end]
        self._keep(1 + np.flatnonzero(known | ~self._removed[1:end]))

    def _keep(self, slots: Ints) -> None:
        super()._keep(slots)
        for flags in (self._used, self._dirty, self._stored):
            flags[1 : len(slots) + 1] = flags[slots]


def _without_values(rows: StateRows, removed: npt.NDArray[np.bool_]) -> StateRows:
    """Return `rows` with a null for the value of each that was removed."""
    if not removed.any():
        return rows
    none = pa.scalar(None, rows.values.type)
    return replace(rows, values=pc.if_else(pa.array(removed), none, rows.values))
