"""Running aggregates of many keys, updated a whole batch at a time.

Nulls among the values are skipped. A sum starts at 0. A minimum or maximum is null until the first
value that is not null. NaN is the largest floating point number, as in Spark and Postgres: it
becomes the maximum, and the minimum only if there are no other values. The *last* value is the
value that was written last, or null: a value state that is read and written a batch at a time.

Each key, or namespace and key, has an entry (see `key_index`). A removed key keeps its entry,
without a value, until the table is packed. A snapshot does not contain it. `encoded_totals`
describes the form of a key's totals in snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import BadStateValue, require
from onceflow.core.state.aggregates.accumulator_shape import (
    AccumulatorShape,
    decode_totals,
    encode_totals,
)
from onceflow.core.state.aggregates.byte_values import BytesTotals
from onceflow.core.state.aggregates.expiring_totals import Expiry
from onceflow.core.state.aggregates.kinds_of_totals import totals_of
from onceflow.core.state.aggregates.owner_index import OwnerIndex
from onceflow.core.state.aggregates.running import Grouping, SumOverflow
from onceflow.core.state.aggregates.totals import Results, Totals
from onceflow.core.state.api.descriptors import DIGITS_MAX, StateTtlConfig
from onceflow.core.state.keys.key_columns import (
    BytesKeys,
    FixedKeys,
    Ints,
    KeyColumn,
    equal_keys,
    read_key_columns,
)
from onceflow.core.state.keys.key_groups import (
    Hashes,
    combine_hashes,
    hash_key_columns,
    key_groups,
)
from onceflow.core.state.keys.key_index import (
    KeyIndex,
    decode_keys,
    encode_keys,
    enlarge,
    to_key_array,
)
from onceflow.core.state.snapshots.canonical import Groups, StateRows

CHUNK_ENTRIES = 65_536
"""The number of keys that a view encodes at once; bounds the memory that a snapshot needs."""
REMOVED_MIN = 4096
"""The number of entries of removed keys above which a table is packed, if they also are more than
half of all entries."""


class AccumulatorTable:
    """Running aggregates by key, in numpy arrays; owned by the subtask's thread.

    An entry is the number of a key's row in these arrays. Entry 0 is no key. An operator handles
    entries in three steps:

        1. Get entries      `group`, `fold`, `find`, `insert` and `select` return them.
        2. Use entries      `values`, `numbers`, `put`, `keys_of`, `regroup` and others take them.
        3. Release entries  by exactly one of `finish`, `remove` and `release`.

    Step 3 may evict keys to disk, or pack the table: it then gives other numbers to the keys that
    are left. So after step 3 no entry that was got before may be used, whichever call returned it.
    Nothing checks that: an old entry silently reads or changes the totals of another key. Without
    step 3 the table of a backend on disk keeps all keys in memory. `update` does all three steps.
    """

    def __init__(
        self,
        shape: AccumulatorShape,
        label: str,
        max_parallelism: int,
        ttl: StateTtlConfig | None = None,
    ) -> None:
        """Create an empty table.

        If `ttl` is given, keys expire, and `USED` is the last column of `shape`.
        """
        self.shape = shape
        self._label = label
        self._max_parallelism = max_parallelism
        self._index = KeyIndex(shape.empty_keys())
        self._kinds = tuple(type(column) for column in shape.empty_keys())
        self._columns = tuple(totals_of(column) for column in shape.columns)
        self._aggregates = self._columns
        self.expiry: Expiry | None = None
        if ttl is not None:
            *aggregates, used = self._columns
            self._aggregates = tuple(aggregates)
            self.expiry = Expiry(ttl, used, shape.totals_type, len(aggregates))
        self._clean_at = 1
        self._removed = np.zeros(1024, np.bool_)
        self._removed_count = 0
        self._owners = OwnerIndex()
        self.on_forget: Callable[[Ints], None] | None = None
        """Called with the entries of expired or removed keys, before their totals are cleared."""
        self._forgets = all(column.op == "last" for column in shape.columns)
        """True if a key whose values are all null is removed."""

    def __len__(self) -> int:
        """Return the number of keys in memory, including removed ones that still have an entry."""
        return len(self._index)

    def update(
        self,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        values: Mapping[str, pa.Array | npt.NDArray[Any]],
    ) -> dict[str, Results]:
        """Add a batch to the totals. Return each aggregate's running value after each row.

        `keys` are the key columns, and `hashes` the result of `hash_keys` for them, if known.
        `values` has a column for each aggregate, by its name; a count without a column counts rows.
        Results are in row order. A minimum or maximum that has seen no value yet is masked.

        Raises:
            BadStateValue: A sum exceeds 64 bits, or 38 digits (names table, aggregate and key), a
                key is null, or values cannot be cast to the aggregate's type. No total has changed.
        """
        columns = self._read(keys)
        hashes = self.shape.hash_entries(columns, hashes)
        group = Grouping.of(self._resolve(columns, hashes))
        if self.expiry is not None:
            self._reset_expired(group.entries, self.expiry)
        return self.update_group(group, keys, values)

    def update_group(
        self,
        group: Grouping,
        keys: Sequence[pa.Array],
        values: Mapping[str, pa.Array | npt.NDArray[Any]],
    ) -> dict[str, Results]:
        """Add a batch to the totals, like `update`, and release `group`, the grouping of the batch.

        Columns of last values stay as they are.

        Raises:
            BadStateValue: As `update`.
        """
        aggregates = [column for column in self._aggregates if column.column.op != "last"]
        if not len(group.order):
            return {column.column.name: column.no_results() for column in aggregates}
        # Compute all columns before storing any: an error in one must change none.
        results: dict[str, Results] = {}
        changes: list[tuple[Totals, npt.NDArray[Any], npt.NDArray[Any]]] = []
        for column in aggregates:
            name = column.column.name
            given = values.get(name)
            require(
                given is not None or column.column.op == "count",
                f"update of {self.shape.name!r} has no values for {name!r}",
            )
            try:
                results[name], totals, seen = column.run(group, given)
            except SumOverflow as overflow:
                raise self.explain_overflow(column, keys, overflow.row) from overflow
            changes.append((column, totals, seen))
        for column, totals, seen in changes:
            column.totals[group.entries] = totals
            column.seen[group.entries] = seen
        if self.expiry is not None:
            self.expiry.mark_used(group.entries)
        self._mark_changed(group.entries)
        self._mark_used(group.entries)
        return results

    def group(self, keys: Sequence[pa.Array], hashes: Hashes | None) -> Grouping:
        """Group the rows of a batch by key, and return the entries of the keys.

        The entries are valid until `finish` or `remove`. The time to live of each key starts again;
        the totals of an expired key are cleared first.
        """
        columns = self._read(keys)
        group = Grouping.of(self._resolve(columns, self.shape.hash_entries(columns, hashes)))
        if self.expiry is not None:
            self._reset_expired(group.entries, self.expiry)
            self.expiry.mark_used(group.entries)
            self._mark_changed(group.entries)
        return group

    def fold(
        self,
        namespaces: Ints,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        values: Mapping[str, pa.Array],
    ) -> Ints:
        """Add each row to the totals of its namespace and key. Return the rows' entries.

        Like `update`, but without the running values. The entries are valid until `finish` or
        `remove`, one of which must follow.

        Raises:
            BadStateValue: A sum exceeds 64 bits (names table, aggregate and key), a key is null, or
                values
                cannot be cast to the aggregate's type.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *read_key_columns(keys))
        entries = self._resolve(columns, self.shape.hash_entries(columns, hashes))
        for column in self._columns:
            try:
                column.fold(entries, values.get(column.column.name))
            except SumOverflow as overflow:
                raise self.explain_overflow(column, keys, overflow.row) from overflow
        self._mark_changed(entries)
        return entries

    def encode(self, entries: Ints) -> pa.Array:
        """Return the totals of these entries as binary values, for `merge_encoded`.

        They have the form of snapshots.
        """
        return self.view_of(entries).rows_of(slice(None)).values

    def merge_encoded(
        self,
        namespaces: Ints,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        encoded: pa.Array,
        shape: AccumulatorShape,
    ) -> Ints:
        """Add totals from `encode` of a table of `shape`. Return the rows' entries.

        Like `fold`, with totals instead of values. `shape` has the same columns as this table, but
        its sums may be of integers where those of this table are of decimals. No column may be of
        text or bytes.

        Raises:
            BadStateValue: As `fold`.
            StateCorrupt: The bytes are no totals.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *read_key_columns(keys))
        entries = self._resolve(columns, self.shape.hash_entries(columns, hashes))
        decoded, _ = decode_totals(encoded, shape.totals_type, shape.of_bytes)
        for index, column in enumerate(self._columns):
            totals = np.ascontiguousarray(decoded[f"t{index}"])
            try:
                column.add_totals(entries, totals, decoded[f"s{index}"])
            except SumOverflow as overflow:
                raise self.explain_overflow(column, keys, overflow.row) from overflow
        self._mark_changed(entries)
        return entries

    def regroup(
        self,
        old: Ints,
        old_into: Ints,
        rows_into: Ints,
        keys: Sequence[pa.Array],
        values: Mapping[str, pa.Array | npt.NDArray[Any]],
        new: Ints,
    ) -> None:
        """Merge the totals of the entries `old` and a batch's rows into the entries `new`.

        `old_into` and `rows_into` are indices into `new`, whose entries are distinct. Earlier
        totals of `new` are replaced. Floats are added in order: the old totals first, then the
        rows. Entries of `old` that are not in `new` keep their totals. `release` must follow.

        Raises:
            BadStateValue: As `fold`; nothing has changed.
        """
        merged_columns: list[Totals] = []
        for column in self._columns:
            name = column.column.name
            try:
                # Into separate totals, entry 1 for the first of `new`: an overflow leaves the table
                # unchanged.
                merged = column.merge(old, old_into + 1, len(new))
            except SumOverflow as overflow:
                raise self._merge_overflow(column, old, overflow.row) from overflow
            try:
                if len(rows_into):
                    merged.fold(rows_into + 1, values.get(name))
            except SumOverflow as overflow:
                raise self.explain_overflow(column, keys, overflow.row) from overflow
            merged_columns.append(merged)
        for column, merged in zip(self._columns, merged_columns, strict=True):
            column.take_merged(new, merged)
        self._mark_changed(new)

    def find(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's entry, or 0 if the table lacks its namespace and key. Changes nothing.

        `hashes` are the keys' hashes. The entries are valid until `finish` or `remove`.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *keys)
        mixed = self.shape.hash_entries(columns, hashes)
        entries = self._index.find(columns, mixed)
        if self._removed_count:
            # A removed key still has its entry until the table is packed, and counts as absent.
            entries[self._removed[entries]] = 0
        return entries

    def fetch(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> None:
        """Read the totals of these namespaces and keys into memory if they are not there yet."""

    def insert(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's entry, a new one for each namespace and key that is not in memory.

        The caller must have called `fetch`, unless keys that are not in memory do not exist.
        `hashes` are the keys' hashes. The entries are valid until `finish` or `remove`.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *keys)
        # Not the subclass's method: a backend on disk would read the database for each new key.
        return AccumulatorTable._resolve(self, columns, self.shape.hash_entries(columns, hashes))

    def namespaces(self, bits: int = 0) -> Ints:
        """Return the sorted distinct namespaces, shifted right by `bits`."""
        return np.unique(self._namespaces()[1:][~self._removed[1 : self._index.end]] >> bits)

    def split_groups(self, part_count: int) -> list[range | None]:
        """Return parts of the key groups for `select`; [None] if all keys are in memory."""
        return [None]

    def select(self, first: int, stop: int, groups: range | None = None) -> Ints:
        """Return the entries of namespaces `first` (inclusive) to `stop` (exclusive), sorted.

        If `groups` is given, only those of these key groups, which limits the rows read into
        memory.
        """
        namespaces = self._namespaces()
        inside = (namespaces >= first) & (namespaces < stop) & ~self._removed[: self._index.end]
        inside[0] = False
        entries = np.flatnonzero(inside)
        if groups is not None:
            of_entries = self.groups_of(entries)
            entries = entries[(of_entries >= groups.start) & (of_entries < groups.stop)]
        return entries[np.argsort(namespaces[entries], kind="stable")]

    def select_owned(
        self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes
    ) -> tuple[Ints, Ints]:
        """Return the entries of all members of these namespaces and keys.

        Also return, for each entry, the index of its namespace and key. `hashes` has the hash of
        each key.
        """
        every = self._index.view_keys()[:-1]
        first, end = self._owners.end, self._index.end
        if first < end:
            self._owners.add(self._hash_owners(tuple(_part(c, slice(first, end)) for c in every)))
        asked = (FixedKeys((namespaces.view(np.uint64),)), *keys)
        entries, indices = self._owners.find(self._hash_owners(asked, hashes))
        there = equal_keys(
            [column.take(entries) for column in every], [column.take(indices) for column in asked]
        )
        there &= ~self._removed[entries]
        return entries[there], indices[there]

    def _hash_owners(self, columns: tuple[KeyColumn, ...], hashes: Hashes | None = None) -> Hashes:
        """Return the hash of each row's namespace and key, without the member."""
        mixed = hash_key_columns(columns[1:]) if hashes is None else hashes.copy()
        namespace = columns[0]
        assert isinstance(namespace, FixedKeys)
        combine_hashes(mixed, namespace.words[0])
        return mixed

    def namespaces_of(self, entries: Ints) -> Ints:
        """Return the namespace of each entry."""
        return self._namespaces()[entries]

    def keys_of(self, entries: Ints) -> list[pa.Array]:
        """Return the key columns of these entries, as Arrow arrays."""
        first = int(self.shape.namespaced)
        return [
            to_key_array(self._index.take_keys(index, entries), kind)
            for index, kind in enumerate(self.shape.key_types, first)
        ]

    def key_columns_of(self, entries: Ints) -> tuple[KeyColumn, ...]:
        """Return the key columns of these entries as words."""
        columns = self.shape.keys_alone(self._index.view_keys())
        return tuple(column.take(entries) for column in columns)

    def members_of(self, entries: Ints) -> KeyColumn:
        """Return the members of these entries as words."""
        return self._index.view_keys()[-1].take(entries)

    def groups_of(self, entries: Ints) -> Groups:
        """Return the key group of each entry."""
        columns = tuple(_part(column, entries) for column in self._index.view_keys())
        return self.group_of_hashes(hash_key_columns(self.shape.keys_alone(columns)))

    def group_of_hashes(self, hashes: Hashes) -> Groups:
        """Return the key group of each key, given its hash by `hash_keys`."""
        return key_groups(hashes, self._max_parallelism)

    def merge_by_key(self, entries: Ints, parts: Ints) -> tuple[Ints, Ints, list[pa.Array]]:
        """Return totals of `entries`, merged over the namespaces of each part and key.

        Changes nothing. `parts` are the parts of the entries, which may repeat. Returns the index
        of one entry of each part and key; for each of `entries`, the index of its part and key
        among these; and the columns of merged totals.

        Raises:
            BadStateValue: A sum exceeds 64 bits.
        """
        keys = self.shape.keys_alone(self._index.view_keys())
        part = FixedKeys((parts.view(np.uint64),))
        columns = (part, *(_part(column, entries) for column in keys))
        hashes = self.shape.hash_entries(columns, None)
        numbers, leaders = KeyIndex(columns).resolve(columns, hashes)
        every = np.arange(1, len(leaders) + 1)
        merged: list[Totals] = []
        for column in self._columns:
            try:
                merged.append(column.merge(entries, numbers, len(leaders)))
            except SumOverflow as overflow:
                raise self._merge_overflow(column, entries, overflow.row) from overflow
        return leaders, numbers - 1, [totals.values(every) for totals in merged]

    def _namespaces(self) -> Ints:
        (namespace, *_) = self._index.view_keys()
        assert isinstance(namespace, FixedKeys)
        return namespace.words[0].view(np.int64)

    def values(self, column: int, entries: Ints) -> pa.Array:
        """Return the totals of one column; null if an entry has none."""
        return self._columns[column].values(entries)

    def has_values(self, column: int, entries: Ints) -> npt.NDArray[np.bool_]:
        """Return True for each entry that has a total of one column."""
        has_value: npt.NDArray[np.bool_] = self._columns[column].seen[entries] != 0
        return has_value

    def numbers(self, column: int, entries: Ints) -> Ints:
        """Return the totals of one column of integers; 0 if an entry has none."""
        totals = self._columns[column]
        return np.where(totals.seen[entries] == 0, 0, totals.totals[entries])

    def put(self, column: int, entries: Ints, values: pa.Array | npt.NDArray[Any]) -> None:
        """Set the totals of one column in distinct `entries`. `finish` must follow.

        Raises:
            BadStateValue: `values` cannot be cast to the column's type; nothing has changed.
        """
        self._columns[column].put(entries, values)
        self._mark_changed(entries)

    def finish(self, entries: Ints) -> None:
        """Release these entries, and remove those whose last values are all null."""
        if self._forgets:
            empty = np.ones(len(entries), np.bool_)
            for column in self._columns:
                empty &= column.seen[entries] == 0
            if empty.any():
                self._forget(entries[empty])
        self._mark_used(entries)
        self._pack_if_sparse()

    def remove(self, entries: Ints) -> None:
        """Remove the keys of these entries, which must be distinct."""
        self.release(entries, entries)

    def release(self, entries: Ints, gone: Ints) -> None:
        """Release these entries, and remove the entries `gone`, which must be distinct."""
        self._forget(gone)
        self._mark_used(entries)
        self._pack_if_sparse()

    def clean(self, count: int) -> None:
        """Check the next `count` keys in memory, in turn, and remove expired ones."""
        if self.expiry is None:
            return
        first = self._clean_at if self._clean_at < self._index.end else 1
        self._clean_at = stop = min(first + count, self._index.end)
        expired = self.expiry.have_expired(slice(first, stop))
        if expired.any():
            gone = first + np.flatnonzero(expired & ~self._removed[first:stop])
            if len(gone):
                self.remove(gone)

    def filter_alive(self, rows: Iterable[StateRows]) -> Iterable[StateRows]:
        """Return the rows of the table that belong to a full snapshot. Any thread."""
        if self.expiry is None or self.on_forget is not None:
            # The owner of `on_forget` has state of these keys, which must not outlive them.
            return rows
        return self.expiry.filter_alive(rows)

    def _reset_expired(self, entries: Ints, expiry: Expiry) -> None:
        """Clear the totals of the expired keys among these entries."""
        expired = expiry.have_expired(entries)
        if expired.any():
            if self.on_forget is not None:
                self.on_forget(entries[expired])
            for column in self._aggregates:
                column.clear(entries[expired])

    def _forget(self, entries: Ints) -> None:
        if self.on_forget is not None:
            self.on_forget(entries)
        for column in self._columns:
            column.clear(entries)
        # Entries that were removed earlier are counted already.
        self._removed_count += len(entries) - int(np.count_nonzero(self._removed[entries]))
        self._removed[entries] = True
        self._mark_changed(entries)

    def _pack_if_sparse(self) -> None:
        if self._removed_count > max(REMOVED_MIN, len(self) // 2):
            self._pack()

    def _pack(self) -> None:
        """Drop the entries of removed keys, and renumber the others."""
        self._keep_only(1 + np.flatnonzero(~self._removed[1 : self._index.end]))

    def _keep_only(self, entries: Ints) -> None:
        """Drop all entries but these, and renumber these from 1 in the given order."""
        self._index = self._index.copy_some(entries)
        self._owners = OwnerIndex()
        for column in self._columns:
            column.keep(entries)
        removed = self._removed[entries]
        self._removed[1 : len(entries) + 1] = removed
        self._removed_count = int(np.count_nonzero(removed))

    def view(self) -> AccumulatorView:
        """Return a snapshot of the table: the totals are copied, the keys are shared."""
        # The arena of keys only grows, so the view may share it.
        end = self._index.end
        if self._removed_count:
            return self.view_of(1 + np.flatnonzero(~self._removed[1:end]))
        return self.view_of(slice(1, end))

    def view_of(self, entries: slice | Ints) -> AccumulatorView:
        """Return a snapshot of some of the entries."""
        return AccumulatorView(
            self.shape,
            self._max_parallelism,
            tuple(_part(column, entries) for column in self._index.view_keys()),
            self._index.view_hashes()[entries],
            # A slice is a view of the table's own memory, which the next batch changes.
            tuple(column.totals[entries].copy() for column in self._columns),
            tuple(column.seen[entries].copy() for column in self._columns),
            tuple(c.bytes_at() for c in self._columns if isinstance(c, BytesTotals)),
        )

    def load(self, rows: StateRows) -> None:
        """Add the rows of a snapshot. Their keys must not be in the table yet."""
        columns = decode_keys(rows.keys, self.shape.empty_keys())
        entries = self._resolve(columns, self.shape.hash_entries(columns, None))
        self._put_encoded(entries, rows.values.cast(pa.large_binary()))

    def _read(self, keys: Sequence[pa.Array]) -> tuple[KeyColumn, ...]:
        columns = read_key_columns(keys)
        require(
            tuple(type(column) for column in columns) == self._kinds,
            f"{self.shape.name!r} is keyed by {self.shape.key_types}, but was given keys of"
            f" {[k.type for k in keys]}",
        )
        return columns

    def _resolve(self, columns: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's entry, a new one for a new key."""
        used = self._index.end
        entries, _ = self._index.resolve(columns, hashes)
        if self._index.end > used:
            self._reserve(used, self._index.end)
        if self._removed_count:
            # A removed key that returns has its old entry, whose totals were cleared. `unique`,
            # because a key may be in several rows of the batch, and is counted once.
            back = np.unique(entries[self._removed[entries]])
            self._removed[back] = False
            self._removed_count -= len(back)
        return entries

    def _reserve(self, used: int, end: int) -> None:
        """Make room for the new entries `used` to `end` - 1."""
        for column in self._columns:
            column.reserve(used, end)
        self._removed = enlarge(self._removed, used, end)
        self._removed[used:end] = False

    def _put_encoded(self, entries: Ints, values: pa.Array) -> None:
        """Set the totals of `entries` to `values`, encoded by `encode_totals`."""
        decoded, texts = decode_totals(values, self.shape.totals_type, self.shape.of_bytes)
        next_text = iter(texts)
        for index, column in enumerate(self._columns):
            column.seen[entries] = decoded[f"s{index}"]
            if isinstance(column, BytesTotals):
                column.put_bytes(entries, next(next_text))
            else:
                column.totals[entries] = decoded[f"t{index}"]

    def _mark_changed(self, entries: Ints) -> None:
        """Record that these entries have new totals. A backend on disk must write them."""

    def _mark_used(self, entries: Ints) -> None:
        """Record that these entries were used. The caller must not use their numbers afterwards."""

    def _merge_overflow(self, column: Totals, entries: Ints, row: int) -> BadStateValue:
        keys = self.keys_of(entries[row : row + 1])
        return BadStateValue(f"{self._overflow_text(column, keys, 0)}, as windows are merged")

    def explain_overflow(self, column: Totals, keys: Sequence[pa.Array], row: int) -> BadStateValue:
        """Return the error for a sum of `column` that does not fit, at the key of `row`."""
        return BadStateValue(self._overflow_text(column, keys, row), row=row)

    def _overflow_text(self, column: Totals, keys: Sequence[pa.Array], row: int) -> str:
        accumulator, key = column.column, tuple(array[row].as_py() for array in keys)
        limit, remedy = "64 bits", "the sum of a column of DECIMAL(20, 0) has 38 digits"
        if accumulator.words_of_total > 1:
            limit, remedy = f"{DIGITS_MAX} digits", "sum in larger units"
        what = "sum" if accumulator.op in ("sum", "count") else f"sum of the {accumulator.op}"
        return (
            f"the running {what} {accumulator.name!r} in state {self.shape.name!r} of"
            f" {self._label}, of {accumulator.type}, leaves {limit} at key"
            f" {key[0] if len(key) == 1 else key!r} ({remedy})"
        )


@dataclass(frozen=True, slots=True)
class AccumulatorView:
    """A snapshot of an `AccumulatorTable`; any thread may read it."""

    shape: AccumulatorShape
    max_parallelism: int
    keys: tuple[KeyColumn, ...]
    hashes: Hashes
    totals: tuple[npt.NDArray[Any], ...]
    seen: tuple[npt.NDArray[Any], ...]
    bytes_at: tuple[pa.Array, ...]
    """The values of each column of text or bytes. The column's totals are indices into them."""

    def rows(self) -> Iterator[StateRows]:
        """Yield all keys with their encoded totals, `CHUNK_ENTRIES` at a time."""
        for start in range(0, len(self.hashes), CHUNK_ENTRIES):
            yield self.rows_of(slice(start, start + CHUNK_ENTRIES))

    def rows_of(self, entries: slice) -> StateRows:
        """Return the rows of some of the keys, by their indices in this view."""
        chosen = tuple(_part(column, entries) for column in self.keys)
        hashes = self.hashes[entries]
        if self.shape.namespaced:
            # The index hashes namespace and key together, but the key group depends only on the
            # key.
            hashes = hash_key_columns(self.shape.keys_alone(chosen))
        records = np.zeros(len(hashes), self.shape.totals_type)
        for index, (totals, seen) in enumerate(zip(self.totals, self.seen, strict=True)):
            records[f"t{index}"] = totals[entries]
            records[f"s{index}"] = seen[entries]
        texts: list[pa.Array] = []
        for index, values in zip(self.shape.of_bytes, self.bytes_at, strict=True):
            texts.append(values.take(pa.array(self.totals[index][entries])))
            # In a row, a text's total is its length, which `decode_totals` needs to extract the
            # text.
            records[f"t{index}"] = pc.binary_length(texts[-1]).to_numpy()
        groups = key_groups(hashes, self.max_parallelism)
        return StateRows(groups, encode_keys(chosen), encode_totals(records, texts))


def _part(column: KeyColumn, entries: slice | Ints) -> KeyColumn:
    if isinstance(column, FixedKeys):
        return FixedKeys(tuple(plane[entries] for plane in column.words), column.hash_factor)
    return BytesKeys(column.data, column.starts[entries], column.lengths[entries])
