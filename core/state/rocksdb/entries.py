"""Bounded tables in memory over a RocksDB: entries, and map states.

Each state has *fresh* entries, which the database does not have yet, and *clean* ones, which it has
or will have once the pending snapshot is written. A working set that fits into the cache is read
and written at the speed of dicts; the database gets each changed entry once a snapshot.

A barrier waits for a snapshot, so the snapshot takes the dict of fresh entries as it is. These
*taken* entries join the clean ones afterwards, some with each batch: moving ten thousand at once
takes milliseconds, and several times as long if the dict of clean ones has to grow.

Invariants:
    an entry of a pending snapshot stays in memory until it is in the database
    for the same key, fresh entries are newer than taken ones, and these newer than clean ones
    fresh entries < capacity / 2;  clean entries <= 2 * capacity
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa

from onceflow.core.state.keys import key_codec
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
from onceflow.core.state.stores.entries import (
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
from onceflow.core.state.stores.keyed_store import MapState
from onceflow.core.state.types.serializers import ExpiringSerializer

K = TypeVar("K")
V = TypeVar("V")

TAKEN_MAX = 8
"""The number of snapshots whose entries a look-up searches. Above it, all join the clean ones at
once."""
JOINING_MIN = 2_048
"""The minimum number of entries that join with each batch: about half a millisecond."""
EVICTED_SHARE = 64
"""The fraction of the capacity that is evicted at once: 1 / EVICTED_SHARE."""
ASKED_OF_OFFERED_MAX = 64
IN_VAIN_MAX = 3
"""The number of batches after which prefetching stops, if in each of them less than one entry was
read for 64 keys."""


class RowFormat:
    """The conversion of a Python key and an entry to a row, for value states."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    def group_key(self, key: Any) -> Any:
        """Return the part of an entry's key that determines its key group."""
        return key

    def group_keys(self, keys: Sequence[Any]) -> Sequence[Any]:
        """Return `group_key` of each key."""
        return keys

    def row_key(self, key: Any) -> bytes:
        """Return the row's key, without key group and state."""
        return key_codec.encode_key(key)

    def row_keys(self, keys: Sequence[Any]) -> pa.Array:
        """Return `row_key` of each key."""
        return key_codec.encode_python_keys(keys)

    def pack(self, entry: Any) -> bytes:
        """Return the row's value for an entry."""
        return self.cells.to_bytes(entry)

    def unpack(self, data: bytes) -> Any:
        """Return the entry of a row's value."""
        return self.cells.from_bytes(data)

    def key_of(self, data: bytes) -> Any:
        """Return the entry's key that `row_key` encoded as `data`."""
        return key_codec.decode_key(data)

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the part of `entry` that has not expired: itself, another entry, or ABSENT."""
        return ABSENT if expired(entry) else entry


class ListFormat(RowFormat):
    """The format of list states, whose entries are lists of stored elements."""

    def pack(self, entry: Any) -> bytes:
        """Return the row's value for a list."""
        return pack_list(entry, self.cells)

    def unpack(self, data: bytes) -> Any:
        """Return the entry of a row's value."""
        return unpack_list(data, self.cells)

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the elements that have not expired."""
        return filter_alive(entry, expired)


class MapFormat(RowFormat):
    """The format of map states: an entry's key is a pair of the key and the stored map key."""

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
        """Return the pair that `row_key` encoded as `data`."""
        key, map_key = split_map_row_key(data)
        return key, key_codec.to_stored_map_key(map_key)

    def row_keys(self, keys: Sequence[Any]) -> pa.Array:
        """Return the row's key for each pair."""
        return pa.array([map_row_key(*key) for key in keys], pa.large_binary())


class RocksEntries(EntryTable):
    """The entries of one state: fresh ones over clean ones over the database."""

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
        """True if all entries are in memory: then an entry that is not in memory does not exist."""
        self._clean: dict[Any, Any] = {}
        self._taken: list[dict[Any, Any]] = []
        """The entries taken by each snapshot, the last snapshot first. Uploading threads read them.
        """
        self._joining: Iterator[tuple[Any, Any]] = iter(())
        """The entries of the oldest of these dicts that have not joined the clean entries yet."""
        self.forget: Callable[[Any], None] = self.delete
        """A function that deletes an expired entry."""
        self._clean_at: tuple[int, bytes] = 0, b""
        """The number of key groups that have been cleaned, and the row key to continue at in the
        next one."""
        self.spilled: Callable[[], None] = lambda: None
        """A callback for when all fresh entries were written to the database between two snapshots.
        """
        self._asked = 0
        """The number of older entries that were read since `prefetch`."""
        self._offered = 0
        """The number of keys that were passed to `prefetch`."""
        self._in_vain = 0
        """The number of successive batches of which almost no entry was read."""

    def find_older(self, key: Any) -> Any:
        """Return the taken or clean entry, or the database's, or ABSENT."""
        self._asked += 1
        # Newest first: several snapshots may have taken an entry. Clean entries are older than
        # taken ones, and the database's are the oldest.
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
            # A missing entry is cached, too, so that the next look-up need not read the database.
            self._clean[key] = entry
            if len(self._clean) > self._capacity:
                self._evict(0)
        return ABSENT if entry is DELETED else entry

    def prefetch(self, keys: Sequence[Any]) -> None:
        """Read the database's entries at these distinct keys into memory, as many as fit.

        Reads nothing for a state whose entries are seldom used, such as timers that seldom change.
        """
        if self._complete:
            return
        # Decided by the previous batch: how many of its prefetched entries were used?
        in_vain = self._asked * ASKED_OF_OFFERED_MAX < self._offered
        self._in_vain = self._in_vain + 1 if in_vain else 0
        self._asked, self._offered = 0, len(keys)
        if self._in_vain > IN_VAIN_MAX:
            return
        absent: Sequence[Any] = keys
        clean = self._clean
        for there in (self.fresh, *self._taken, clean):
            absent = [key for key in absent if key not in there]
        # At most half of the capacity, so that fetched entries are not evicted before they are
        # used.
        absent = absent[: self._capacity // 2]
        if len(clean) + len(absent) > self._capacity:
            self._evict(len(absent))
        groups = key_groups(key_codec.hash_python_keys(absent), self._max_parallelism)
        pairs = sort_pairs(groups, self._name, self._format.row_keys(absent), absent)
        values = self._database.get_many([row_key for row_key, _ in pairs])
        for (_, key), data in zip(pairs, values, strict=True):
            clean[key] = DELETED if data is None else self._format.unpack(data)

    def delete(self, key: Any) -> None:
        """Delete the entry at `key`."""
        self.put(key, DELETED)

    def freeze(self) -> Callable[[], list[Pair]]:
        """Take the fresh entries.

        Return a function that encodes them as sorted pairs, on any thread.
        """
        frozen, self.fresh = self.fresh, {}
        if frozen:
            if not self._taken:
                # Only the oldest dict joins, so the iterator starts only if this dict is the
                # oldest.
                self._joining = iter(frozen.items())
            self._taken.insert(0, frozen)
        if len(self._taken) > TAKEN_MAX:
            self._move(self._taken_count)
        return lambda: self._pairs(frozen)

    def join(self, count: int) -> None:
        """Move up to `count` + JOINING_MIN taken entries to the clean ones."""
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
        hashes = key_codec.hash_python_keys(self._format.group_keys(keys))
        groups = key_groups(hashes, self._max_parallelism)
        pack = self._format.pack
        values = [None if entry is DELETED else pack(entry) for entry in entries.values()]
        return sort_pairs(groups, self._name, self._format.row_keys(keys), values)

    def all(self, key_groups_owned: range) -> Iterator[tuple[Any, Any]]:
        """Yield each key and its value."""
        thaw = self.cells.thaw
        # Oldest first, so that `update` lets the newer entry win.
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
        """Check `count` further rows, and delete expired entries.

        rocksdict offers no compaction filters, which could do this during compaction. The next
        compaction removes the deleted rows.
        """
        serializer = self.cells.serializer
        if not isinstance(serializer, ExpiringSerializer):
            return
        # At most one round over all key groups, even if `count` is greater than the number of rows.
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
        # The database's row may be outdated: the newest entry is the one in memory, if there is one
        # that a snapshot has yet to write.
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
        """Evict the oldest clean entries so that `room` more fit, after writing pending pairs.

        Also evicts a small share of the capacity. Evicting half of it at once would stop
        processing.
        """
        # Clean entries of a pending snapshot are not in the database yet. Do not wait for its write
        # until the table is twice as large as it should be.
        if self._writes.is_empty or len(self._clean) > 2 * self._capacity:
            self._writes.flush()
            self._complete = False
            # A dict keeps the order of insertion, so its first keys are the oldest.
            kept = max(self._capacity - self._capacity // EVICTED_SHARE - room, 0)
            for key in list(islice(self._clean, max(len(self._clean) - kept, 0))):
                del self._clean[key]

    def scan_key(self, key: Any) -> Iterator[tuple[bytes, bytes]]:
        """Yield (rest of the row key, value) of the database's rows of a map state's key."""
        group = hash_key(key) % self._max_parallelism
        start = group_prefix(group) + self._prefix + key_codec.add_length(key_codec.encode_key(key))
        for row_key, value in self._database.scan(start, next_prefix(start)):
            yield row_key[len(start) :], value


class RocksMapState(MapState[K, V]):
    """A map state whose entries are rows: `get` and `put` of a large map access one row."""

    def __init__(self, table: RocksEntries, keys: MapKeys) -> None:
        self._table = table
        self._keys = keys
        self._touched: dict[Any, dict[Any, None]] = {}
        self._touched_before: dict[Any, dict[Any, None]] = {}
        """The map keys changed since the last snapshot, and in it, by key. The database may lack
        them.

        They are results of `to_stored_map_key`.
        """
        table.spilled = self._forget_touched
        table.forget = self._forget_pair

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        stored = self._table.find((self._table.current.key, key_codec.to_stored_map_key(key)))
        return None if stored is ABSENT else self._table.cells.thaw(stored)

    def put(self, key: K, value: V) -> None:
        """Set the value under `key`."""
        self._change(self._keys.to_put(key), self._table.cells.freeze(value))

    def remove(self, key: K) -> None:
        """Remove `key`."""
        if self.contains(key):
            self._change(key_codec.to_stored_map_key(key), DELETED)

    def contains(self, key: K) -> bool:
        """Return True if `key` exists."""
        stored_key = key_codec.to_stored_map_key(key)
        return self._table.find((self._table.current.key, stored_key)) is not ABSENT

    def keys(self) -> Iterator[K]:
        """Return the keys at the time of the call."""
        return iter(list(map(key_codec.from_stored_map_key, self._read_all())))

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries at the time of the call."""
        thaw = self._table.cells.thaw
        return iter(
            [
                (key_codec.from_stored_map_key(key), thaw(stored))
                for key, stored in self._read_all().items()
            ]
        )

    def clear(self) -> None:
        """Remove all entries."""
        for key in list(self._read_all()):
            self._change(key, DELETED)

    def note_snapshot(self) -> None:
        """Record that a snapshot has taken the fresh entries."""
        self._touched_before, self._touched = self._touched, {}

    def _forget_pair(self, pair: tuple[Any, Any]) -> None:
        outer, key = pair
        self._touched.setdefault(outer, {})[key] = None
        self._table.delete(pair)

    def _forget_touched(self) -> None:
        self._touched, self._touched_before = {}, {}

    def _change(self, key: Any, entry: Any) -> None:
        """Set the entry of a map key, which is in its stored form."""
        table = self._table
        self._touched.setdefault(table.current.key, {})[key] = None
        table.put((table.current.key, key), entry)

    def _read_all(self) -> dict[Any, Any]:
        """Return all entries, by their map keys in stored form."""
        table, outer = self._table, self._table.current.key
        entries = {
            key_codec.to_stored_map_key(key_codec.decode_key(data)): table.cells.from_bytes(value)
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
