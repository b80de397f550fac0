"""Bounded tables in memory over a RocksDB: entries, and map states.

Of every state there are *fresh* entries, which the database does not have yet, and *clean* ones,
which it has or will have once the pending snapshot is written. A working set that fits the cache is
read and written at the speed of dicts; the database sees each changed entry once a snapshot.

A barrier waits for a snapshot, so that takes the dict of fresh entries as it is. Those *taken* join
the clean ones afterwards, some with every batch: to move ten thousand at once takes milliseconds,
and several times as many where the dict of clean ones has to grow.

Invariants:
    an entry of a pending snapshot stays in memory until it is in the database
    fresh entries are newer than those taken, and these than clean ones of the same keys
    fresh entries < capacity / 2;  clean entries <= 2 * capacity
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa

from onceflow.core.state.api.stores import MapState
from onceflow.core.state.heap.entries import (
    ABSENT,
    DELETED,
    Cells,
    CurrentKey,
    EntryTable,
    MapKeys,
    filter_alive,
    map_row_key,
    pack_list,
    split_map_row_key,
    unpack_list,
)
from onceflow.core.state.keys.key_codec import (
    add_length,
    decode_key,
    encode_key,
    encode_python_keys,
    from_stored_map_key,
    hash_python_keys,
    to_stored_map_key,
)
from onceflow.core.state.keys.key_groups import hash_key, key_groups
from onceflow.core.state.rocksdb.database import (
    Database,
    Pair,
    WriteQueue,
    group_prefix,
    next_prefix,
    sort_pairs,
    state_prefix,
)
from onceflow.core.state.types.serializers import ExpiringSerializer

K = TypeVar("K")
V = TypeVar("V")

TAKEN_MAX = 8
"""Snapshots whose entries a look-up goes through; at one more, all join the clean ones at once."""
JOINING_MIN = 2_048
"""Entries that join with each batch at least: about half a millisecond."""
EVICTED_SHARE = 64
"""The share of the capacity that is forgotten at once: one in so many."""
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

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return what of `entry` has not expired: itself, another entry, or ABSENT."""
        return ABSENT if expired(entry) else entry


class ListFormat(RowFormat):
    """Entries of list states: each is a list of stored elements."""

    def pack(self, entry: Any) -> bytes:
        """Return the row's value."""
        return pack_list(entry, self.cells)

    def unpack(self, data: bytes) -> Any:
        """Return the entry of a row's value."""
        return unpack_list(data, self.cells)

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the elements that have not expired."""
        return filter_alive(entry, expired)


class MapFormat(RowFormat):
    """For map states: an entry's key is a pair of key and map key, the latter as it is stored."""

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
        key, map_key = split_map_row_key(data)
        return key, to_stored_map_key(map_key)

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
        self.fresh_max = capacity >> 1
        self._max_parallelism = max_parallelism
        self._complete = complete
        """Whether every entry is in memory, so that one that is not there is nowhere."""
        self._clean: dict[Any, Any] = {}
        self._taken: list[dict[Any, Any]] = []
        """By snapshots, the last one first; uploading threads read them."""
        self._joining: Iterator[tuple[Any, Any]] = iter(())
        """What of the first of them has not joined the clean entries."""
        self.forget: Callable[[Any], None] = self.delete
        """Deletes an entry that has expired."""
        self._clean_at: tuple[int, bytes] = 0, b""
        """How many key groups have been cleaned, and the row key to go on at in the next one."""
        self.spilled: Callable[[], None] = lambda: None
        """Called when all fresh entries have gone to the database between two snapshots."""
        self._asked = 0
        """How many older entries were asked for since `prefetch`."""
        self._offered = 0
        """How many keys that `prefetch` was called for."""
        self._in_vain = 0
        """How many times in a row next to none was asked for."""

    def find_older(self, key: Any) -> Any:
        """Return the entry taken or clean, or the database's, or ABSENT."""
        self._asked += 1
        # Newest first, for an entry may have been taken by several snapshots; clean ones are older
        # than all of these, and the database's are the oldest.
        for taken in self._taken:
            entry = taken.get(key, ABSENT)
            if entry is not ABSENT:
                return ABSENT if entry is DELETED else entry
        entry = self._clean.get(key, ABSENT)
        if entry is ABSENT and not self._complete:
            group = hash_key(self._format.group_key(key)) % self._max_parallelism
            row_key = group_prefix(group) + self._prefix + self._format.row_key(key)
            data = self._database.get(row_key)
            entry = DELETED if data is None else self._format.unpack(data)
            # An absence is remembered, too: the next look-up of the key need not ask the database.
            self._clean[key] = entry
            if len(self._clean) > self._capacity:
                self._evict(0)
        return ABSENT if entry is DELETED else entry

    def prefetch(self, keys: Sequence[Any]) -> None:
        """Bring the database's entries at these distinct keys into memory, as many as fit.

        Not those of a state that is seldom asked for, as timers of which few are changed.
        """
        if self._complete:
            return
        # Judged by the batch before: how many of the keys offered then did anybody ask for?
        in_vain = self._asked * ASKED_OF_OFFERED_MAX < self._offered
        self._in_vain = self._in_vain + 1 if in_vain else 0
        self._asked, self._offered = 0, len(keys)
        if self._in_vain > IN_VAIN_MAX:
            return
        absent: Sequence[Any] = keys
        clean = self._clean
        for there in (self.fresh, *self._taken, clean):
            absent = [key for key in absent if key not in there]
        # Half of the capacity at most: what is fetched must not evict itself before it is used.
        absent = absent[: self._capacity // 2]
        if len(clean) + len(absent) > self._capacity:
            self._evict(len(absent))
        groups = key_groups(hash_python_keys(absent), self._max_parallelism)
        pairs = sort_pairs(groups, self._name, self._format.row_keys(absent), absent)
        values = self._database.get_many([row_key for row_key, _ in pairs])
        for (_, key), data in zip(pairs, values, strict=True):
            clean[key] = DELETED if data is None else self._format.unpack(data)

    def delete(self, key: Any) -> None:
        """Leave no entry at `key`."""
        self.put(key, DELETED)

    def freeze(self) -> Callable[[], list[Pair]]:
        """Take the fresh entries away; return what turns them into sorted pairs, on any thread."""
        frozen, self.fresh = self.fresh, {}
        if frozen:
            if not self._taken:
                # Only the oldest dict joins, so the iterator is begun only where this one is the
                # oldest.
                self._joining = iter(frozen.items())
            self._taken.insert(0, frozen)
        if len(self._taken) > TAKEN_MAX:
            self._move(self._taken_count)
        return lambda: self._pairs(frozen)

    def join(self, count: int) -> None:
        """Let entries that snapshots have taken join the clean ones: `count` and some more."""
        if self._taken:
            self._move(count + JOINING_MIN)
        if len(self._clean) > self._capacity:
            self._evict(0)

    @property
    def _taken_count(self) -> int:
        return sum(map(len, self._taken))

    def _move(self, count: int) -> None:
        while self._taken and count > 0:
            joined = list(islice(self._joining, count))
            self._clean.update(joined)
            count -= len(joined)
            if count > 0:
                self._taken.pop()
                self._joining = iter(self._taken[-1].items() if self._taken else ())

    def _pairs(self, entries: dict[Any, Any]) -> list[Pair]:
        keys = list(entries)
        hashes = hash_python_keys(self._format.group_keys(keys))
        groups = key_groups(hashes, self._max_parallelism)
        pack = self._format.pack
        values = [None if entry is DELETED else pack(entry) for entry in entries.values()]
        return sort_pairs(groups, self._name, self._format.row_keys(keys), values)

    def all(self, key_groups_owned: range) -> Iterator[tuple[Any, Any]]:
        """Yield every key and its value."""
        thaw = self.cells.thaw
        # Oldest first: `update` lets the newer entry win.
        newer = dict(self._clean)
        for entries in (*reversed(self._taken), self.fresh):
            newer.update(entries)
        for group in key_groups_owned:
            prefix = group_prefix(group) + self._prefix
            for row_key, value in self._database.scan(prefix, next_prefix(prefix)):
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
        # One round over all key groups at the most, also where `count` is greater than their rows.
        for _ in key_groups_owned:
            number, start = self._clean_at
            prefix = group_prefix(key_groups_owned[number % len(key_groups_owned)]) + self._prefix
            rows = self._database.scan(start or prefix, next_prefix(prefix))
            for row_key, value in rows:
                if not count:
                    self._clean_at = number, row_key
                    return
                count -= 1
                self._clean_row(row_key[len(prefix) :], value, serializer.is_expired)
            self._clean_at = (number + 1) % len(key_groups_owned), b""

    def _clean_row(self, row_key: bytes, value: bytes, expired: Callable[[Any], bool]) -> None:
        entry = self._format.unpack(value)
        if self._format.filter_alive(entry, expired) is entry:
            return
        key = self._format.key_of(row_key)
        # The database's row may be out of date: what counts is the newest entry in memory, which a
        # snapshot has yet to write.
        entry = self.find(key)
        alive = entry if entry is ABSENT else self._format.filter_alive(entry, expired)
        if alive is ABSENT and entry is not ABSENT:
            self.forget(key)
        elif alive is not entry:
            self.put(key, alive)

    def spill(self) -> None:
        """Write the fresh entries to the database."""
        pairs = self.freeze()
        self._writes.write(pairs())
        self.spilled()
        self._move(self._taken_count)
        self._evict(0)

    def _evict(self, room: int) -> None:
        """Forget the oldest clean entries, once the database has them all, so that `room` more fit.

        And some more; not half of them, for which everything would wait.
        """
        # Clean entries of a pending snapshot are not in the database yet. Waiting for its write is
        # avoided until the table is twice as big as it should be.
        if self._writes.is_empty or len(self._clean) > 2 * self._capacity:
            self._writes.flush()
            self._complete = False
            # A dict keeps the order of insertion, so its first keys are those that came first.
            kept = max(self._capacity - self._capacity // EVICTED_SHARE - room, 0)
            for key in list(islice(self._clean, max(len(self._clean) - kept, 0))):
                del self._clean[key]

    def scan_key(self, key: Any) -> Iterator[tuple[bytes, bytes]]:
        """Yield (rest of the row key, value) of the database's rows of a map state's key."""
        group = hash_key(key) % self._max_parallelism
        start = group_prefix(group) + self._prefix + add_length(encode_key(key))
        for row_key, value in self._database.scan(start, next_prefix(start)):
            yield row_key[len(start) :], value


class RocksMapState(MapState[K, V]):
    """A map state whose entries are rows: `get` and `put` of a large map touch one of them."""

    def __init__(self, table: RocksEntries, keys: MapKeys) -> None:
        self._table = table
        self._keys = keys
        self._touched: dict[Any, dict[Any, None]] = {}
        self._touched_before: dict[Any, dict[Any, None]] = {}
        """Map keys by key, changed since and in the last snapshot: the database may lack them.

        They are as `to_stored_map_key` returns them.
        """
        table.spilled = self._forget_touched
        table.forget = self._forget_pair

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        stored = self._table.find((self._table.current.key, to_stored_map_key(key)))
        return None if stored is ABSENT else self._table.cells.thaw(stored)

    def put(self, key: K, value: V) -> None:
        """Put `value` under `key`."""
        self._change(self._keys.to_put(key), self._table.cells.freeze(value))

    def remove(self, key: K) -> None:
        """Forget `key`."""
        if self.contains(key):
            self._change(to_stored_map_key(key), DELETED)

    def contains(self, key: K) -> bool:
        """Tell whether `key` is there."""
        stored_key = to_stored_map_key(key)
        return self._table.find((self._table.current.key, stored_key)) is not ABSENT

    def keys(self) -> Iterator[K]:
        """Return the keys as of now."""
        return iter(list(map(from_stored_map_key, self._read_all())))

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as of now."""
        thaw = self._table.cells.thaw
        return iter(
            [(from_stored_map_key(key), thaw(stored)) for key, stored in self._read_all().items()]
        )

    def clear(self) -> None:
        """Forget every entry."""
        for key in list(self._read_all()):
            self._change(key, DELETED)

    def note_snapshot(self) -> None:
        """Hear that the fresh entries have been taken away."""
        self._touched_before, self._touched = self._touched, {}

    def _forget_pair(self, pair: tuple[Any, Any]) -> None:
        outer, key = pair
        self._touched.setdefault(outer, {})[key] = None
        self._table.delete(pair)

    def _forget_touched(self) -> None:
        self._touched, self._touched_before = {}, {}

    def _change(self, key: Any, entry: Any) -> None:
        """Make `entry` that of a map key as it is stored."""
        table = self._table
        self._touched.setdefault(table.current.key, {})[key] = None
        table.put((table.current.key, key), entry)

    def _read_all(self) -> dict[Any, Any]:
        """Return every entry by its map key as it is stored."""
        table, outer = self._table, self._table.current.key
        entries = {
            to_stored_map_key(decode_key(data)): table.cells.from_bytes(value)
            for data, value in table.scan_key(outer)
        }
        for touched in (self._touched_before, self._touched):
            for key in touched.get(outer, ()):
                stored = table.find((outer, key))
                if stored is ABSENT:
                    entries.pop(key, None)
                else:
                    entries[key] = stored
        return entries
