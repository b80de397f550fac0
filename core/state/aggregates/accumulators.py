"""Running aggregates of many keys, updated a whole batch at a time.

Nulls among the values are skipped. A sum starts at 0; a minimum or maximum is null until the first
value that is not. NaN is the largest of floating point numbers, as in Spark and Postgres: it
becomes the maximum, and the minimum only if there is nothing else. The *last* value is what was
written last, or null: a value state that is read and written a batch at a time. It alone may be
text or bytes.

Each key, or namespace and key, has an entry (see `key_index`). A key that was removed keeps its
entry, without any value, until the table is packed. A snapshot does not hold it. `encoded_totals`
has the form in which snapshots hold a key's totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import BadStateValue
from onceflow.core.protocol.invariant import require
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape
from onceflow.core.state.aggregates.byte_values import BytesTotals, totals_of
from onceflow.core.state.aggregates.encoded_totals import decode_totals, encode_totals
from onceflow.core.state.aggregates.expiring_totals import Expiry
from onceflow.core.state.aggregates.running import Grouping, SumOverflow
from onceflow.core.state.aggregates.totals import Results, Totals
from onceflow.core.state.api.descriptors import DIGITS_MAX, StateTtlConfig
from onceflow.core.state.keys.key_arrays import to_key_array
from onceflow.core.state.keys.key_columns import (
    BytesKeys,
    FixedKeys,
    Ints,
    KeyColumn,
    read_key_columns,
)
from onceflow.core.state.keys.key_groups import (
    Hashes,
    hash_key_columns,
    key_groups,
)
from onceflow.core.state.keys.key_index import KeyIndex, decode_keys, encode_keys, enlarge
from onceflow.core.state.snapshots.canonical import Groups, StateRows

CHUNK_ENTRIES = 65_536
"""Keys that a view encodes at a time; bounds the memory that a snapshot needs."""
REMOVED_MIN = 4096
"""A table is packed when more entries than this, and more than half of all, are of removed keys."""


class AccumulatorTable:
    """Running aggregates by key, in numpy arrays; owned by the subtask's thread."""

    def __init__(
        self,
        shape: AccumulatorShape,
        label: str,
        max_parallelism: int,
        ttl: StateTtlConfig | None = None,
    ) -> None:
        """`ttl`: keys expire, and `USED` is the last column of `shape`."""
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
        self._forgets = all(column.op == "last" for column in shape.columns)
        """Whether a key without any value is to be removed."""

    def __len__(self) -> int:
        """The number of keys in memory, including removed ones that still have an entry."""
        return len(self._index)

    def update(
        self,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        values: Mapping[str, pa.Array | npt.NDArray[Any]],
    ) -> dict[str, Results]:
        """Add a batch to the totals; return each aggregate's running value after each row.

        `keys` are the key columns, and `hashes` what `hash_keys` returns for them, if known.
        `values` has a column for each aggregate, by its name; a count without one counts rows.
        Results are in row order; a minimum or maximum that has seen no value yet is masked.

        Raises:
            BadStateValue: A sum left 64 bits, or 38 digits (names table, aggregate and key), a key
                is null, or values cannot be cast to the aggregate's type. No total has changed.
        """
        columns = self._read(keys)
        hashes = self.shape.hash_entries(columns, hashes)
        if not len(hashes):
            return {column.column.name: column.no_results() for column in self._aggregates}
        entries = self._resolve(columns, hashes)
        group = Grouping.of(entries)
        if self.expiry is not None:
            self._reset_expired(group.entries, self.expiry)
        # Computes all columns before it stores any: an error in one must change none.
        results: dict[str, Results] = {}
        changes: list[tuple[Totals, npt.NDArray[Any], npt.NDArray[Any]]] = []
        for column in self._aggregates:
            name = column.column.name
            given = values.get(name)
            require(
                given is not None or column.column.op == "count",
                f"update of {self.shape.name!r} has no values for {name!r}",
            )
            try:
                results[name], totals, seen = column.run(group, given)
            except SumOverflow as overflow:
                raise self._overflow(column, keys, overflow.row) from overflow
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
        """Return the rows of a batch by key. Its entries are valid until `finish` or `remove`."""
        columns = self._read(keys)
        return Grouping.of(self._resolve(columns, self.shape.hash_entries(columns, hashes)))

    def fold(
        self,
        namespaces: Ints,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        values: Mapping[str, pa.Array],
    ) -> Ints:
        """Add each row to the totals of its namespace and key; return the rows' entries.

        `update` without the running values. The entries are valid until `finish` or `remove`, one
        of which must follow.

        Raises:
            BadStateValue: A sum left 64 bits (names table, aggregate and key), a key is null, or
                values cannot be cast to the aggregate's type.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *read_key_columns(keys))
        entries = self._resolve(columns, self.shape.hash_entries(columns, hashes))
        for column in self._columns:
            try:
                column.fold(entries, values.get(column.column.name))
            except SumOverflow as overflow:
                raise self._overflow(column, keys, overflow.row) from overflow
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
        """Merge the totals of `old` entries and a batch's rows into the entries `new`.

        `old_into` and `rows_into` are indices into `new`, whose entries are distinct. What `new`
        held before is replaced. Floats are added in order: the old totals first, then the rows.
        Entries of `old` that are not in `new` keep their totals. `release` must follow.

        Raises:
            BadStateValue: As `fold`; nothing has changed.
        """
        merged_columns: list[Totals] = []
        for column in self._columns:
            name = column.column.name
            try:
                # Into totals of their own, 1 for each of `new`: an overflow leaves the table as it
                # was.
                merged = column.merge(old, old_into + 1, len(new))
            except SumOverflow as overflow:
                raise self._merge_overflow(column, old, overflow.row) from overflow
            try:
                if len(rows_into):
                    merged.fold(rows_into + 1, values.get(name))
            except SumOverflow as overflow:
                raise self._overflow(column, keys, overflow.row) from overflow
            merged_columns.append(merged)
        for column, merged in zip(self._columns, merged_columns, strict=True):
            column.totals[new] = merged.totals[1 : len(new) + 1]
            column.seen[new] = merged.seen[1 : len(new) + 1]
        self._mark_changed(new)

    def find(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's entry, 0 if the table lacks its namespace and key; changes nothing.

        `hashes` are those of the keys. The entries are valid until `finish` or `remove`.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *keys)
        mixed = self.shape.hash_entries(columns, hashes)
        entries = self._index.find(columns, mixed)
        if self._removed_count:
            # A removed key still has its entry until the table is packed, and counts as absent.
            entries[self._removed[entries]] = 0
        return entries

    def fetch(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> None:
        """Read the totals of these namespaces and keys into memory, where they are not yet."""

    def insert(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's entry, a new one for each namespace and key that is not in memory.

        The caller knows that what is not in memory is nowhere, or has called `fetch`. `hashes` are
        those of the keys. The entries are valid until `finish` or `remove`.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *keys)
        # This class's own: a backend on disk would read the database for every new key here.
        return AccumulatorTable._resolve(self, columns, self.shape.hash_entries(columns, hashes))

    def namespaces(self, bits: int = 0) -> Ints:
        """Return the sorted distinct namespaces, shifted right by `bits`."""
        return np.unique(self._namespaces()[1:][~self._removed[1 : self._index.end]] >> bits)

    def split_groups(self, part_count: int) -> list[range | None]:
        """Return parts of the key groups, for `select`; one, None, if every key is in memory."""
        return [None]

    def select(self, first: int, stop: int, groups: range | None = None) -> Ints:
        """Return the entries of namespaces `first` (inclusive) to `stop` (exclusive), sorted.

        `groups`: those of these key groups alone, which limits what is read into memory.
        """
        namespaces = self._namespaces()
        inside = (namespaces >= first) & (namespaces < stop) & ~self._removed[: self._index.end]
        inside[0] = False
        entries = np.flatnonzero(inside)
        if groups is not None:
            of_entries = self.groups_of(entries)
            entries = entries[(of_entries >= groups.start) & (of_entries < groups.stop)]
        return entries[np.argsort(namespaces[entries], kind="stable")]

    def namespaces_of(self, entries: Ints) -> Ints:
        """Return the namespace of each entry."""
        return self._namespaces()[entries]

    def keys_of(self, entries: Ints) -> list[pa.Array]:
        """Return the key columns of these entries, as Arrow arrays."""
        first = 1 if self.shape.namespaced else 0
        return [
            to_key_array(self._index.take_keys(index, entries), kind)
            for index, kind in enumerate(self.shape.key_types, first)
        ]

    def key_columns_of(self, entries: Ints) -> tuple[KeyColumn, ...]:
        """Return the key columns of these entries as words."""
        columns = self.shape.keys_alone(self._index.view_keys())
        return tuple(column.take(entries) for column in columns)

    def groups_of(self, entries: Ints) -> Groups:
        """Return the key group of each entry."""
        columns = tuple(_part(column, entries) for column in self._index.view_keys())
        return self.group_of_hashes(hash_key_columns(self.shape.keys_alone(columns)))

    def group_of_hashes(self, hashes: Hashes) -> Groups:
        """Return the key group of each key, given its hash by `hash_keys`."""
        return key_groups(hashes, self._max_parallelism)

    def merge_by_key(self, entries: Ints) -> tuple[Ints, Ints, list[pa.Array]]:
        """Return the totals of `entries`, merged over the namespaces of each key.

        Returns one entry of each key; for each of `entries` the index of its key among these; and
        the columns of merged totals. Changes nothing.

        Raises:
            BadStateValue: A sum left 64 bits.
        """
        keys = self.shape.keys_alone(self._index.view_keys())
        columns = tuple(_part(column, entries) for column in keys)
        numbers, leaders = KeyIndex(columns).resolve(columns, hash_key_columns(columns))
        every = np.arange(1, len(leaders) + 1)
        merged: list[Totals] = []
        for column in self._columns:
            try:
                merged.append(column.merge(entries, numbers, len(leaders)))
            except SumOverflow as overflow:
                raise self._merge_overflow(column, entries, overflow.row) from overflow
        return entries[leaders], numbers - 1, [one.values(every) for one in merged]

    def _namespaces(self) -> Ints:
        (namespace, *_) = self._index.view_keys()
        assert isinstance(namespace, FixedKeys)
        return namespace.words[0].view(np.int64)

    def values(self, column: int, entries: Ints) -> pa.Array:
        """Return the totals of one column; null where there is none."""
        return self._columns[column].values(entries)

    def numbers(self, column: int, entries: Ints) -> Ints:
        """Return the totals of one column of whole numbers; 0 where there is none."""
        one = self._columns[column]
        return np.where(one.seen[entries] == 0, 0, one.totals[entries])

    def put(self, column: int, entries: Ints, values: pa.Array | npt.NDArray[Any]) -> None:
        """Make `values` the totals of one column in distinct `entries`; `finish` must follow.

        Raises:
            BadStateValue: They cannot be cast to the column's type; nothing has changed.
        """
        self._columns[column].put(entries, values)
        self._mark_changed(entries)

    def finish(self, entries: Ints) -> None:
        """End the use of these entries; remove those whose last values are all null."""
        if self._forgets:
            empty = np.ones(len(entries), np.bool_)
            for column in self._columns:
                empty &= column.seen[entries] == 0
            if empty.any():
                self._forget(entries[empty])
        self._mark_used(entries)
        self._pack_if_sparse()

    def remove(self, entries: Ints) -> None:
        """Remove the keys of these distinct entries, as if they had never been."""
        self.release(entries, entries)

    def release(self, entries: Ints, gone: Ints) -> None:
        """End the use of these entries, and remove the distinct entries `gone`."""
        self._forget(gone)
        self._mark_used(entries)
        self._pack_if_sparse()

    def clean(self, count: int) -> None:
        """Check the next `count` keys in memory, in turn; remove the expired ones."""
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
        """Return the rows of the table that belong into a full snapshot. Any thread."""
        return rows if self.expiry is None else self.expiry.filter_alive(rows)

    def _reset_expired(self, entries: Ints, expiry: Expiry) -> None:
        """Clear the totals of these entries' keys that have expired."""
        expired = expiry.have_expired(entries)
        if expired.any():
            for column in self._aggregates:
                column.clear(entries[expired])

    def _forget(self, entries: Ints) -> None:
        for column in self._columns:
            column.clear(entries)
        # Entries that were removed before are counted already.
        self._removed_count += len(entries) - int(np.count_nonzero(self._removed[entries]))
        self._removed[entries] = True
        self._mark_changed(entries)

    def _pack_if_sparse(self) -> None:
        if self._removed_count > max(REMOVED_MIN, len(self) // 2):
            self._pack()

    def _pack(self) -> None:
        """Drop the entries of removed keys; the others are renumbered."""
        self._keep_only(1 + np.flatnonzero(~self._removed[1 : self._index.end]))

    def _keep_only(self, entries: Ints) -> None:
        """Drop all entries but these, which are renumbered from 1 in the order given."""
        self._index = self._index.copy_some(entries)
        for column in self._columns:
            column.keep(entries)
        removed = self._removed[entries]
        self._removed[1 : len(entries) + 1] = removed
        self._removed_count = int(np.count_nonzero(removed))

    def view(self) -> AccumulatorView:
        """Return a view of the table as of now: a copy of the totals, and the keys themselves."""
        # An arena of keys is only appended to, so the view may share it.
        end = self._index.end
        if self._removed_count:
            return self.view_of(1 + np.flatnonzero(~self._removed[1:end]))
        return self.view_of(slice(1, end))

    def view_of(self, entries: slice | Ints) -> AccumulatorView:
        """Return a view of some of the entries as of now."""
        return AccumulatorView(
            self.shape,
            self._max_parallelism,
            tuple(_part(column, entries) for column in self._index.view_keys()),
            self._index.view_hashes()[entries],
            # A slice is a view on the table's own memory, which the next batch changes.
            tuple(column.totals[entries].copy() for column in self._columns),
            tuple(column.seen[entries].copy() for column in self._columns),
            tuple(c.bytes_at() for c in self._columns if isinstance(c, BytesTotals)),
        )

    def load(self, rows: StateRows) -> None:
        """Add rows of a snapshot, whose keys must not be in the table yet."""
        columns = decode_keys(rows.keys, self.shape.empty_keys())
        entries = self._resolve(columns, self.shape.hash_entries(columns, None))
        self._put_encoded(entries, rows.values.cast(pa.large_binary()))

    def _read(self, keys: Sequence[pa.Array]) -> tuple[KeyColumn, ...]:
        columns = read_key_columns(keys)
        require(
            tuple(type(column) for column in columns) == self._kinds,
            f"{self.shape.name!r} is keyed by {self.shape.key_types}, got {[k.type for k in keys]}",
        )
        return columns

    def _resolve(self, columns: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's entry, a new one for a new key."""
        used = self._index.end
        entries, _ = self._index.resolve(columns, hashes)
        if self._index.end > used:
            self._reserve(used, self._index.end)
        if self._removed_count:
            # A removed key that is back has its old entry, whose totals were cleared.
            # Each entry once: a key may be in several rows of the batch, and is counted once.
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
        """Note that these entries have new totals; a backend on disk must write them."""

    def _mark_used(self, entries: Ints) -> None:
        """Note that these entries were used; called once nobody needs their numbers any more."""

    def _merge_overflow(self, column: Totals, entries: Ints, row: int) -> BadStateValue:
        keys = self.keys_of(entries[row : row + 1])
        return BadStateValue(f"{self._overflow_text(column, keys, 0)}, as windows are merged")

    def _overflow(self, column: Totals, keys: Sequence[pa.Array], row: int) -> BadStateValue:
        return BadStateValue(self._overflow_text(column, keys, row), row=row)

    def _overflow_text(self, column: Totals, keys: Sequence[pa.Array], row: int) -> str:
        one, key = column.column, tuple(array[row].as_py() for array in keys)
        limit, remedy = "64 bits", "the sum of a column of DECIMAL(20, 0) has 38 digits"
        if one.words_of_total > 1:
            limit, remedy = f"{DIGITS_MAX} digits", "sum in larger units"
        what = "sum" if one.op in ("sum", "count") else f"sum of the {one.op}"
        return (
            f"the running {what} {one.name!r} in state {self.shape.name!r} of {self._label}, of"
            f" {one.type}, leaves {limit} at key {key[0] if len(key) == 1 else key!r} ({remedy})"
        )


@dataclass(frozen=True, slots=True)
class AccumulatorView:
    """An `AccumulatorTable` as of one moment; any thread may read it."""

    shape: AccumulatorShape
    max_parallelism: int
    keys: tuple[KeyColumn, ...]
    hashes: Hashes
    totals: tuple[npt.NDArray[Any], ...]
    seen: tuple[npt.NDArray[Any], ...]
    bytes_at: tuple[pa.Array, ...]
    """The values of each column of text or bytes; its totals are indices of these."""

    def rows(self) -> Iterator[StateRows]:
        """Yield all keys with their encoded totals, `CHUNK_ENTRIES` at a time."""
        for start in range(0, len(self.hashes), CHUNK_ENTRIES):
            yield self.rows_of(slice(start, start + CHUNK_ENTRIES))

    def rows_of(self, entries: slice) -> StateRows:
        """Return the rows of some of the keys, by their indices in this view."""
        chosen = tuple(_part(column, entries) for column in self.keys)
        hashes = self.hashes[entries]
        if self.shape.namespaced:
            # The index hashes namespace and key together; the key group follows from the key alone.
            hashes = hash_key_columns(self.shape.keys_alone(chosen))
        records = np.zeros(len(hashes), self.shape.totals_type)
        for index, (totals, seen) in enumerate(zip(self.totals, self.seen, strict=True)):
            records[f"t{index}"] = totals[entries]
            records[f"s{index}"] = seen[entries]
        texts: list[pa.Array] = []
        for index, values in zip(self.shape.of_bytes, self.bytes_at, strict=True):
            texts.append(values.take(pa.array(self.totals[index][entries])))
            # In a row, a text's total is its length, by which `decode_totals` cuts it out again.
            records[f"t{index}"] = pc.binary_length(texts[-1]).to_numpy()
        groups = key_groups(hashes, self.max_parallelism)
        return StateRows(groups, encode_keys(chosen), encode_totals(records, texts))


def _part(column: KeyColumn, entries: slice | Ints) -> KeyColumn:
    if isinstance(column, FixedKeys):
        return FixedKeys(tuple(plane[entries] for plane in column.words), column.hash_factor)
    return BytesKeys(column.data, column.starts[entries], column.lengths[entries])
