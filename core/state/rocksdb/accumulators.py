"""Running aggregates in memory over a RocksDB, which also has the keys that were evicted.

Invariants:
    totals of a dirty entry are newer than the database's
    totals of any other entry equal the database's, once the pending snapshot is written
    entries <= 2 * capacity + the keys of one batch
    a removed key keeps its entry until the database no longer has the key
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
from onceflow.core.state.keys.key_index import decode_keys, encode_keys, enlarge
from onceflow.core.state.rocksdb.database import (
    Database,
    Pair,
    WriteQueue,
    group_prefix,
    next_prefix,
    split_row_key,
    state_prefix,
    to_pairs,
)
from onceflow.core.state.snapshots.canonical import StateRows

PRELOAD_BATCH = 65_536
"""The number of rows read from the database at once; bounds the memory that reading needs."""
ROWS_CLEANED_MAX = 256
"""The number of rows of the database that are checked for expiry after a batch. Each costs some
microseconds."""


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
        """True if the database may have the key, now or once the pending snapshot is written."""
        self._clock = 0
        self._complete = True
        """True if all keys are in memory: then the database need not be read."""
        self._stored_clean_at: tuple[int, bytes] = (0, b"")
        """The position at which `clean` continues: an index into the key groups, and the row key
        there."""

    def preload(self) -> None:
        """Read the database's rows into memory, until the capacity is reached."""
        prefix = state_prefix(self.shape.name)
        for group in self._groups:
            start = group_prefix(group) + prefix
            rows = self._database.scan(start, next_prefix(start))
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
        """Return the sorted distinct namespaces in memory and database, shifted by `bits`."""
        namespaces = set(super().namespaces(bits).tolist())
        if not self._complete:
            prefix = state_prefix(self.shape.name)
            for group in self._groups:
                namespaces.update(self._scan_namespaces(group_prefix(group) + prefix, bits))
        return np.array(sorted(namespaces), np.int64)

    def _scan_namespaces(self, prefix: bytes, bits: int) -> Iterator[int]:
        """Yield the namespaces of the rows with `prefix`. Reads one row of each namespace."""
        start, stop = prefix, next_prefix(prefix)
        # A new scan for each namespace skips all its other rows.
        while row := next(self._database.scan(start, stop), None):
            namespace = int.from_bytes(row[0][len(prefix) :][:8], "big", signed=True)
            yield namespace >> bits
            # Skip to the first row of the next namespace. Rows are sorted by unsigned bytes, so
            # negative namespaces come last, and the successor of -1 would be 0 again.
            following = ((namespace >> bits) + 1) << bits
            if following == 0:
                return
            start = prefix + (following % (1 << 64)).to_bytes(8, "big")

    def split_groups(self, part_count: int) -> list[range | None]:
        """Return parts of the key groups for `select`; [None] if all keys are in memory."""
        if self._complete:
            return [None]
        groups = self._groups
        step = max(1, -(-len(groups) // part_count))
        return [groups[start : start + step] for start in range(0, len(groups), step)]

    def select(self, first: int, stop: int, groups: range | None = None) -> Ints:
        """Read the rows of namespaces `first` to `stop` - 1 into memory. Return the entries."""
        if not self._complete:
            # Rows are sorted by unsigned bytes, so those of each sign are one range of the
            # database.
            for part in (range(max(first, 0), stop), range(first, min(stop, 0))):
                if len(part):
                    self._fetch_namespaces(part, self._groups if groups is None else groups)
        return super().select(first, stop, groups)

    def select_owned(
        self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes
    ) -> tuple[Ints, Ints]:
        """Read the rows of these namespaces and keys into memory. Return the entries as on heap."""
        if not self._complete:
            encoded = encode_keys((FixedKeys((namespaces.view(np.uint64),)), *keys)).to_pylist()
            groups = self.group_of_hashes(hashes).tolist()
            prefix = state_prefix(self.shape.name)
            # The encoded member follows the encoded namespace and key.
            pairs = zip(groups, encoded, strict=True)
            starts = sorted({group_prefix(group) + prefix + key for group, key in pairs})
            rows = chain.from_iterable(
                self._database.scan(start, next_prefix(start)) for start in starts
            )
            while batch := list(islice(rows, PRELOAD_BATCH)):
                self._add_rows(batch)
        return super().select_owned(namespaces, keys, hashes)

    def _fetch_namespaces(self, namespaces: range, groups: range) -> None:
        """Read the rows of these namespaces, all of one sign, and key groups into memory."""
        bounds = [n.to_bytes(8, "big", signed=True) for n in (namespaces.start, namespaces[-1])]
        prefixes = [group_prefix(group) + state_prefix(self.shape.name) for group in groups]
        rows = chain.from_iterable(
            self._database.scan(prefix + bounds[0], next_prefix(prefix + bounds[1]))
            for prefix in prefixes
        )
        while batch := list(islice(rows, PRELOAD_BATCH)):
            self._add_rows(batch)

    def _add_rows(self, batch: list[tuple[bytes, bytes]]) -> Ints:
        """Add the rows of the database that are not in memory. Return their entries."""
        kind = pa.large_binary()
        encoded = pa.array([split_row_key(key)[2] for key, _ in batch], kind)
        columns = decode_keys(encoded, self.shape.empty_keys())
        used = self._index.end
        entries, _ = self._index.resolve(columns, self.shape.hash_entries(columns, None))
        self._reserve(used, self._index.end)
        # Only rows that are not in memory: an entry in memory is as new or newer, and may be dirty.
        new = np.flatnonzero(entries >= used)
        if len(new):
            values = pa.array([batch[row][1] for row in new.tolist()], kind)
            self._put_encoded(entries[new], values)
        return entries[new]

    def clean(self, count: int) -> None:
        """Check some keys in memory and some rows of the database, and remove expired ones."""
        super().clean(count)
        if self.expiry is None or self._complete:
            return
        remaining = min(count, ROWS_CLEANED_MAX)
        for _ in self._groups:
            number, start = self._stored_clean_at
            prefix = group_prefix(self._groups[number]) + state_prefix(self.shape.name)
            # Read one more row than is checked: the next call continues there.
            rows = list(
                islice(self._database.scan(start or prefix, next_prefix(prefix)), remaining + 1)
            )
            if len(rows) > remaining:
                self._stored_clean_at = number, rows[remaining][0]
                self._remove_expired(rows[:remaining], self.expiry)
                return
            remaining -= len(rows)
            self._stored_clean_at = (number + 1) % len(self._groups), b""
            self._remove_expired(rows, self.expiry)

    def _remove_expired(self, rows: list[tuple[bytes, bytes]], expiry: Expiry) -> None:
        """Remove the keys of expired rows, except those in memory, which may be newer."""
        if not rows:
            return
        values = pa.array([value for _, value in rows], pa.large_binary())
        expired = expiry.are_rows_expired(values)
        if expired.any():
            self.remove(self._add_rows([rows[row] for row in np.flatnonzero(expired).tolist()]))

    def freeze(self) -> Callable[[], list[Pair]]:
        """Copy the dirty totals.

        Return a function that encodes them as sorted pairs, on any thread.
        """
        end = self._index.end
        # Skip keys that were added and removed since the last snapshot: the database does not have
        # them.
        entries = np.flatnonzero(self._dirty[:end] & (self._stored | ~self._removed)[:end])
        # Cleared before the pairs are written: until then the view, which the write queue holds,
        # preserves the totals.
        self._dirty[:end] = False
        removed = self._removed[entries]
        self._stored[entries] = True
        view = self.view_of(entries)
        return lambda: to_pairs(
            _without_values(view.rows_of(slice(None)), removed), self.shape.name
        )

    def _resolve(self, columns: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        used = self._index.end
        entries = super()._resolve(columns, hashes)
        if self._index.end > used and not self._complete:
            self._read_totals(used)
        return entries

    def find(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's entry, or 0 if neither memory nor database has its key."""
        self.fetch(namespaces, keys, hashes)
        return super().find(namespaces, keys, hashes)

    def fetch(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> None:
        """Read the totals of these namespaces and keys into memory if they are not there yet."""
        if self._complete or not len(hashes):
            return
        missing = np.flatnonzero(super().find(namespaces, keys, hashes) == 0)
        if len(missing):
            mine = tuple(column.take(missing) for column in keys)
            self._fetch_keys(namespaces[missing], mine, hashes[missing])

    def _fetch_keys(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> None:
        """Read the rows of these keys into memory if the database has them."""
        encoded = encode_keys((FixedKeys((namespaces.view(np.uint64),)), *keys)).to_pylist()
        groups = self.group_of_hashes(hashes).tolist()
        prefix = state_prefix(self.shape.name)
        row_keys = sorted(
            {group_prefix(group) + prefix + key for group, key in zip(groups, encoded, strict=True)}
        )
        values = self._database.get_many(row_keys)
        rows = [(key, value) for key, value in zip(row_keys, values, strict=True) if value]
        if rows:
            self._add_rows(rows)

    def _reserve(self, used: int, end: int) -> None:
        super()._reserve(used, end)
        self._dirty = enlarge(self._dirty, used, end)
        self._used = enlarge(self._used, used, end)
        self._stored = enlarge(self._stored, used, end)
        self._dirty[used:end] = self._stored[used:end] = False
        self._used[used:end] = self._clock

    def _put_encoded(self, entries: Ints, values: pa.Array) -> None:
        super()._put_encoded(entries, values)
        self._stored[entries] = True

    def _read_totals(self, first: int) -> None:
        """Read the totals of the entries from `first` on, as far as the database has them."""
        entries = np.arange(first, self._index.end)
        rows = self.view_of(entries).rows_of(slice(None))
        keys = [
            group_prefix(group) + state_prefix(self.shape.name) + key
            for group, key in zip(rows.groups.tolist(), rows.keys.to_pylist(), strict=True)
        ]
        # Sorted, because neighbouring rows are read from one block of the database.
        order = sorted(range(len(keys)), key=keys.__getitem__)
        values = self._database.get_many([keys[index] for index in order])
        known = [(index, value) for index, value in zip(order, values, strict=True) if value]
        if known:
            chosen = np.fromiter((index for index, _ in known), np.int64, len(known))
            encoded = pa.array([value for _, value in known], pa.large_binary())
            self._put_encoded(entries[chosen], encoded)

    def _mark_changed(self, entries: Ints) -> None:
        self._dirty[entries] = True

    def _mark_used(self, entries: Ints) -> None:
        self._clock += 1
        self._used[entries] = self._clock
        excess = len(self) - self._capacity
        # Until twice the capacity is used, eviction waits for a pending snapshot to be written.
        if excess > 0 and (self._writes.is_empty or excess > self._capacity):
            self._evict()

    def _evict(self) -> None:
        """Write dirty totals to the database. Keep half of the capacity: the entries used last."""
        self._writes.write(self.freeze()())
        entries = 1 + np.flatnonzero(~self._removed[1 : self._index.end])
        excess = len(entries) - max(self._capacity // 2, 1)
        if excess > 0:
            self._complete = False
            # argpartition finds the entries used last without sorting all. `sort` restores the
            # order of the kept ones, so that none overwrites another when they are renumbered.
            entries = entries[np.sort(np.argpartition(self._used[entries], excess)[excess:])]
        self._keep_only(entries)

    def _pack(self) -> None:
        end = self._index.end
        # A removed key that the database may still have keeps its entry until the database has
        # deleted it. Otherwise, the key would be read again.
        known = self._stored[1:end]
        if self._writes.is_empty:
            # If nothing is pending, the database has already deleted a removed key that is clean.
            known = known & self._dirty[1:end]
        self._keep_only(1 + np.flatnonzero(known | ~self._removed[1:end]))

    def _keep_only(self, entries: Ints) -> None:
        super()._keep_only(entries)
        for flags in (self._used, self._dirty, self._stored):
            flags[1 : len(entries) + 1] = flags[entries]


def _without_values(rows: StateRows, removed: npt.NDArray[np.bool_]) -> StateRows:
    """Return `rows` with null as the value of the removed ones."""
    if not removed.any():
        return rows
    none = pa.scalar(None, rows.values.type)
    return replace(rows, values=pc.if_else(pa.array(removed), none, rows.values))
