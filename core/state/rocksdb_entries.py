"""Bounded tables in memory over a RocksDB: entries, map states and running aggregates.

Of every state there are *fresh* entries, which the database does not have yet, and *clean* ones,
which it has or will have once the pending snapshot is written. A working set that fits the cache is
read and written at the speed of dicts; the database sees each changed entry once a snapshot.

Invariants:
    an entry of a pending snapshot stays in memory until it is in the database
    fresh entries < capacity / 2;  clean entries <= 2 * capacity
    RocksAccumulators: totals of a dirty slot are newer than the database's; those of any other are,
        or will be once the pending snapshot is written, what the database has
    slots <= 2 * capacity + the keys of one batch
    RocksAccumulators: the slot of a removed key stays until the database will not bring it back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.state.accumulators import AccumulatorShape, AccumulatorTable
from onceflow.core.state.api import MapState
from onceflow.core.state.canonical import StateRows
from onceflow.core.state.descriptors import StateTtlConfig
from onceflow.core.state.entries import (
    ABSENT,
    DELETED,
    Cells,
    CurrentKey,
    EntryTable,
    MapKeys,
    alive_elements,
    map_row_key,
    pack_list,
    split_map_row_key,
    unpack_list,
)
from onceflow.core.state.expiring_totals import Expiry
from onceflow.core.state.key_codec import (
    decode_key,
    encode_key,
    encode_python_keys,
    hash_python_keys,
    prefixed,
)
from onceflow.core.state.key_columns import Ints, KeyColumn
from onceflow.core.state.key_groups import Hashes, hash_key, key_groups
from onceflow.core.state.rocksdb_database import (
    Database,
    Pair,
    WriteQueue,
    after,
    group_prefix,
    pairs_of,
    sorted_pairs,
    split_row_key,
    state_prefix,
)
from onceflow.core.state.serializers import ExpiringSerializer
from onceflow.core.state.slot_index import decode_keys, grown

K = TypeVar("K")
V = TypeVar("V")

ASKED_OF_OFFERED_MAX = 64
IN_VAIN_MAX = 3
"""After so many batches with an entry asked for at less than one key in 64, none is prefetched."""


class RowFormat:
    """How a Python key and an entry become a row: for value states."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    def group_key(self, key: Any) -> Any:
        """Return the part of an entry's key that decides its key group."""
        return key

    def group_keys(self, keys: Sequence[Any]) -> Sequence[Any]:
        """Return `group_key` of each."""
        return keys

    def row_key(self, key: Any) -> bytes:
        """Return the row's key, without key group and state."""
        return encode_key(key)

    def row_keys(self, keys: Sequence[Any]) -> pa.Array:
        """Return `row_key` of each."""
        return encode_python_keys(keys)

    def pack(self, entry: Any) -> bytes:
        """Return the row's value."""
        return self.cells.to_bytes(entry)

    def unpack(self, data: bytes) -> Any:
        """Return the entry of a row's value."""
        return self.cells.from_bytes(data)

    def key_of(self, data: bytes) -> Any:
        """Return the entry's key that `row_key` made `data` of."""
        return decode_key(data)

    def alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return what of `entry` has not expired: itself, another entry, or ABSENT."""
        return ABSENT if expired(entry) else entry


class ListFormat(RowFormat):
    """For list states: an entry is a list of stored elements."""

    def pack(self, entry: Any) -> bytes:
        """Return the row's value."""
        return pack_list(entry, self.cells)

    def unpack(self, data: bytes) -> Any:
        """Return the entry of a row's value."""
        return unpack_list(data, self.cells)

    def alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the elements that have not expired."""
        return alive_elements(entry, expired)


class MapFormat(RowFormat):
    """For map states: an entry's key is a pair of key and map key."""

    def group_key(self, key: Any) -> Any:
        """Return the key of the pair."""
        return key[0]

    def group_keys(self, keys: Sequence[Any]) -> Sequence[Any]:
        """Return the key of each pair."""
        return [key for key, _ in keys]

    def row_key(self, key: Any) -> bytes:
        """Return the row's key."""
        return map_row_key(*key)

    def key_of(self, data: bytes) -> Any:
        """Return the pair."""
        return split_map_row_key(data)

    def row_keys(self, keys: Sequence[Any]) -> pa.Array:
        """Return the row's key of each pair."""
        return pa.array([map_row_key(*key) for key in keys], pa.large_binary())


class RocksEntries(EntryTable):
    """Entries of one state: fresh ones over clean ones over the database."""

    def __init__(
        self,
        current: CurrentKey,
        name: str,
        row_format: RowFormat,
        writes: WriteQueue,
        database: Database,
        capacity: int,
        max_parallelism: int,
        complete: bool,
    ) -> None:
        super().__init__(current, row_format.cells)
        self._name = name
        self._prefix = state_prefix(name)
        self._format = row_format
        self._writes = writes
        self._database = database
        self._capacity = capacity
        self._max_parallelism = max_parallelism
        self._complete = complete
        """Whether every entry is in memory, so that one that is not there is nowhere."""
        self._clean: dict[Any, Any] = {}
        self.forget: Callable[[Any], None] = self.delete
        """Deletes an entry that has expired."""
        self._clean_at: tuple[int, bytes] = 0, b""
        """How many key groups have been cleaned, and the row key to go on at in the next one."""
        self.spilled: Callable[[], None] = lambda: None
        """Called when all fresh entries have gone to the database between two snapshots."""
        self._asked = 0
        """How many older entries were asked for since `prefetch`."""
        self._offered = 0
        """For how many keys that was."""
        self._in_vain = 0
        """How many times in a row next to none was asked for."""

    def older(self, key: Any) -> Any:
        """Return the clean entry, or the database's, or ABSENT."""
        self._asked += 1
        entry = self._clean.get(key, ABSENT)
        if entry is ABSENT and not self._complete:
            group = hash_key(self._format.group_key(key)) % self._max_parallelism
            row_key = group_prefix(group) + self._prefix + self._format.row_key(key)
            data = self._database.get(row_key)
            entry = DELETED if data is None else self._format.unpack(data)
            self._clean[key] = entry
            if len(self._clean) > self._capacity:
                self._evict()
        return ABSENT if entry is DELETED else entry

    def prefetch(self, keys: Sequence[Any]) -> None:
        """Bring the database's entries at these distinct keys into memory, as many as fit.

        Not those of a state that is seldom asked for, as timers of which few are changed.
        """
        if self._complete:
            return
        in_vain = self._asked * ASKED_OF_OFFERED_MAX < self._offered
        self._in_vain = self._in_vain + 1 if in_vain else 0
        self._asked, self._offered = 0, len(keys)
        if self._in_vain > IN_VAIN_MAX:
            return
        fresh, clean = self.fresh, self._clean
        absent = [key for key in keys if key not in fresh and key not in clean]
        absent = absent[: self._capacity // 2]
        if len(clean) + len(absent) > self._capacity:
            self._evict()
        groups = key_groups(hash_python_keys(absent), self._max_parallelism)
        pairs = sorted_pairs(groups, self._name, self._format.row_keys(absent), absent)
        found = self._database.get_many([row_key for row_key, _ in pairs])
        for (_, key), data in zip(pairs, found, strict=True):
            clean[key] = DELETED if data is None else self._format.unpack(data)

    def put(self, key: Any, entry: Any) -> None:
        """Make `entry` the entry at `key`."""
        fresh = self.fresh
        fresh[key] = entry
        if len(fresh) > self._capacity >> 1:
            self._spill()

    def delete(self, key: Any) -> None:
        """Leave no entry at `key`."""
        self.put(key, DELETED)

    def freeze(self) -> Callable[[], list[Pair]]:
        """Take the fresh entries away; return what turns them into sorted pairs, on any thread."""
        frozen, self.fresh = self.fresh, {}
        self._clean.update(frozen)
        return lambda: self._pairs(frozen)

    def _pairs(self, entries: dict[Any, Any]) -> list[Pair]:
        keys = list(entries)
        hashes = hash_python_keys(self._format.group_keys(keys))
        groups = key_groups(hashes, self._max_parallelism)
        pack = self._format.pack
        values = [None if entry is DELETED else pack(entry) for entry in entries.values()]
        return sorted_pairs(groups, self._name, self._format.row_keys(keys), values)

    def all(self, key_groups_owned: range) -> Iterator[tuple[Any, Any]]:
        """Yield every key and its value."""
        thaw = self.cells.thaw
        newer = {**self._clean, **self.fresh}
        for group in key_groups_owned:
            prefix = group_prefix(group) + self._prefix
            for row_key, value in self._database.scan(prefix, after(prefix)):
                key = self._format.key_of(row_key[len(prefix) :])
                if key not in newer:
                    yield key, thaw(self._format.unpack(value))
        for key, entry in newer.items():
            if entry is not DELETED:
                yield key, thaw(entry)

    def clean(self, count: int, key_groups_owned: range) -> None:
        """Look at `count` further rows; delete what of them has expired.

        rocksdict offers no filter for compactions, which would do it on the way. Deleted rows go
        with the next one.
        """
        serializer = self.cells.serializer
        if not isinstance(serializer, ExpiringSerializer):
            return
        for _ in key_groups_owned:
            number, start = self._clean_at
            prefix = group_prefix(key_groups_owned[number % len(key_groups_owned)]) + self._prefix
            rows = self._database.scan(start or prefix, after(prefix))
            for row_key, value in rows:
                if not count:
                    self._clean_at = number, row_key
                    return
                count -= 1
                self._clean_row(row_key[len(prefix) :], value, serializer.expired)
            self._clean_at = (number + 1) % len(key_groups_owned), b""

    def _clean_row(self, row_key: bytes, value: bytes, expired: Callable[[Any], bool]) -> None:
        entry = self._format.unpack(value)
        if self._format.alive(entry, expired) is entry:
            return
        key = self._format.key_of(row_key)
        entry = self.find(key)
        alive = entry if entry is ABSENT else self._format.alive(entry, expired)
        if alive is ABSENT and entry is not ABSENT:
            self.forget(key)
        elif alive is not entry:
            self.put(key, alive)

    def _spill(self) -> None:
        pairs = self.freeze()
        self._writes.write(pairs())
        self.spilled()
        self._evict()

    def _evict(self) -> None:
        """Forget the older half of the clean entries, once the database has them all."""
        if self._writes.settled or len(self._clean) > 2 * self._capacity:
            self._writes.settle()
            self._complete = False
            for key in list(islice(self._clean, len(self._clean) - self._capacity // 2)):
                del self._clean[key]

    def scan_key(self, key: Any) -> Iterator[tuple[bytes, bytes]]:
        """Yield (rest of the row key, value) of the database's rows of a map state's key."""
        group = hash_key(key) % self._max_parallelism
        start = group_prefix(group) + self._prefix + prefixed(encode_key(key))
        for row_key, value in self._database.scan(start, after(start)):
            yield row_key[len(start) :], value


class RocksMapState(MapState[K, V]):
    """A map state whose entries are rows: `get` and `put` of a large map touch one of them."""

    def __init__(self, table: RocksEntries, keys: MapKeys) -> None:
        self._table = table
        self._keys = keys
        self._touched: dict[Any, dict[Any, None]] = {}
        self._touched_before: dict[Any, dict[Any, None]] = {}
        """By key, map keys changed since and in the last snapshot: the database may lack them."""
        table.spilled = self._forget_touched
        table.forget = self._forget_pair

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        stored = self._table.find((self._table.current.key, key))
        return None if stored is ABSENT else self._table.cells.thaw(stored)

    def put(self, key: K, value: V) -> None:
        """Put `value` under `key`."""
        self._keys.check(key)
        self._change(key, self._table.cells.freeze(value))

    def remove(self, key: K) -> None:
        """Forget `key`."""
        if self.contains(key):
            self._change(key, DELETED)

    def contains(self, key: K) -> bool:
        """Tell whether `key` is there."""
        return self._table.find((self._table.current.key, key)) is not ABSENT

    def keys(self) -> Iterator[K]:
        """Return the keys as of now."""
        return iter(list(self._stored()))

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as of now."""
        thaw = self._table.cells.thaw
        return iter([(key, thaw(stored)) for key, stored in self._stored().items()])

    def clear(self) -> None:
        """Forget every entry."""
        for key in list(self._stored()):
            self._change(key, DELETED)

    def snapshot_taken(self) -> None:
        """Hear that the fresh entries have been taken away."""
        self._touched_before, self._touched = self._touched, {}

    def _forget_pair(self, pair: tuple[Any, K]) -> None:
        outer, key = pair
        self._touched.setdefault(outer, {})[key] = None
        self._table.delete(pair)

    def _forget_touched(self) -> None:
        self._touched, self._touched_before = {}, {}

    def _change(self, key: K, entry: Any) -> None:
        table = self._table
        self._touched.setdefault(table.current.key, {})[key] = None
        table.put((table.current.key, key), entry)

    def _stored(self) -> dict[K, Any]:
        table, outer = self._table, self._table.current.key
        found = {
            decode_key(data): table.cells.from_bytes(value) for data, value in table.scan_key(outer)
        }
        for touched in (self._touched_before, self._touched):
            for key in touched.get(outer, ()):
                stored = table.find((outer, key))
                if stored is ABSENT:
                    found.pop(key, None)
                else:
                    found[key] = stored
        return found


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

    def namespaces(self) -> Ints:
        """Return those in memory and those of the database."""
        found = set(super().namespaces().tolist())
        if not self._complete:
            prefix = state_prefix(self.shape.name)
            for group in self._groups:
                found.update(self._namespaces_below(group_prefix(group) + prefix))
        return np.array(sorted(found), np.int64)

    def _namespaces_below(self, prefix: bytes) -> Iterator[int]:
        """Yield the namespaces of the rows below `prefix`, reading one row of each."""
        start, stop = prefix, after(prefix)
        while row := next(self._database.scan(start, stop), None):
            namespace = int.from_bytes(row[0][len(prefix) :][:8], "big", signed=True)
            yield namespace
            if namespace == -1:
                return
            start = prefix + (namespace + 1).to_bytes(8, "big", signed=True)

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
        for group in self._groups:
            prefix = group_prefix(group) + state_prefix(self.shape.name)
            rows = self._database.scan(prefix + bounds[0], after(prefix + bounds[1]))
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
