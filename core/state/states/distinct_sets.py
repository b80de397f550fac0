"""The distinct values that the records of each key have had: sets in state, for `count_distinct`.

All distinct counts of one column share a table of state. It has a row for each namespace, key and
value, with a mark for each count that has counted the value. So a batch writes only the values that
it adds, however large the set is.

Values are equal as in SQL: NaN equals NaN, and 0.0 equals -0.0. A null is no value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.state.aggregates.accumulator_shape import key_kind
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.api.descriptors import DIGITS_MAX, AccumulatorColumn
from onceflow.core.state.keys.key_columns import (
    FixedKeys,
    Ints,
    KeyColumn,
    check_key_type,
    read_key_columns,
)
from onceflow.core.state.keys.key_groups import Hashes, hash_key_columns
from onceflow.core.state.keys.key_index import KeyIndex
from onceflow.core.state.stores.keyed_store import KeyedStateStore

_PREFIX = "onceflow.distinct-"
PARTS_ON_DISK = 64
"""The number of parts in which rows on disk are read to be removed."""


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """The conversion of a column's values to members, which are equal if the values are."""

    type: pa.DataType
    label: str
    """The text that distinguishes converted values in the name of the state. It has no ':'."""
    convert: Callable[[pa.Array], pa.Array]


def plan_members(kind: pa.DataType) -> MemberPlan:
    """Return the conversion of values of `kind` to members of the set.

    Raises:
        ConfigError: Values of `kind` cannot be compared.
    """
    types = pa.types
    if types.is_dictionary(kind):
        inner = plan_members(kind.value_type)
        return MemberPlan(
            inner.type, inner.label, lambda array: inner.convert(array.dictionary_decode())
        )
    if types.is_floating(kind):
        return MemberPlan(pa.int64(), "float", _to_float_words)
    if types.is_time(kind) or types.is_duration(kind):
        number = pa.int32() if types.is_time32(kind) else pa.int64()
        return MemberPlan(
            pa.int64(), str(kind), lambda array: cast_rows(array.view(number), pa.int64())
        )
    if types.is_decimal(kind) and kind.precision <= DIGITS_MAX:
        wide = pa.decimal128(DIGITS_MAX, kind.scale)
        return MemberPlan(wide, "value", lambda array: cast_rows(array, wide))
    check_key_type(kind, "count_distinct")
    return MemberPlan(kind, "value", lambda array: array)


def name_set(column: str, kind: pa.DataType) -> str:
    """Return the name of the state with the distinct values of a column of type `kind`.

    The label is last: a column with any name has its own state.

    Raises:
        ConfigError: Values of `kind` cannot be compared.
    """
    return f"{_PREFIX}{column}:{plan_members(kind).label}"


def describe_set(column: str, kind: pa.DataType) -> str:
    """Return a text that differs for sets whose members are stored in different types.

    Raises:
        ConfigError: Values of `kind` cannot be compared.
    """
    return f"{name_set(column, kind)}:{key_kind(plan_members(kind).type)}"


def _to_float_words(array: pa.Array) -> pa.Array:
    numbers: npt.NDArray[np.float64] = cast_rows(array, pa.float64()).to_numpy(zero_copy_only=False)
    # Adding 0.0 makes 0.0 of -0.0. NaNs have many bit patterns, of which one is kept.
    words = np.where(np.isnan(numbers), np.nan, numbers + 0.0).view(np.int64)
    return pa.array(words)


class DistinctSets:
    """The sets of distinct values of one operator. Used by the subtask's thread."""

    def __init__(
        self,
        store: KeyedStateStore,
        key_types: Sequence[pa.DataType],
        counts: Mapping[str, str],
        schema: pa.Schema,
    ) -> None:
        """Open the sets. `counts` has the column of each distinct count, by the count's name."""
        by_column: dict[str, list[str]] = {}
        for name, column in counts.items():
            by_column.setdefault(column, []).append(name)
        self._sets = [
            _ColumnSet(store, key_types, schema.field(column), names)
            for column, names in by_column.items()
        ]

    def __bool__(self) -> bool:
        """Return True if there is a distinct count."""
        return bool(self._sets)

    def add(
        self,
        rows: pa.RecordBatch,
        namespaces: Ints,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        values: dict[str, Any],
    ) -> None:
        """Add the values of a batch to the sets of their namespaces and keys.

        `values` has, for each count, a null for each row to skip. They are replaced by a mark for
        each row whose value was not in the set before, and a null for each other row.

        Raises:
            BadStateValue: A key is null.
        """
        if not self._sets:
            return
        columns = read_key_columns(keys)
        known = hash_key_columns(columns) if hashes is None else hashes
        for column_set in self._sets:
            column_set.add(rows, namespaces, columns, known, values)

    def remove(self, first: int, stop: int) -> None:
        """Remove the sets of the namespaces `first` (inclusive) to `stop` (exclusive)."""
        for column_set in self._sets:
            column_set.remove(first, stop)

    def count_union(self, first: int, stop: int, keys: Sequence[pa.Array]) -> dict[str, Ints]:
        """Return the counts of distinct values of `keys` over the namespaces `first` to `stop` - 1.

        The keys must be distinct.
        """
        columns = read_key_columns(keys)
        owners = KeyIndex(columns, bits=_bits_for(len(keys[0])))
        # The index numbers keys in the order of their hashes.
        numbers, _ = owners.resolve(columns, hash_key_columns(columns))
        counts: dict[str, Ints] = {}
        for column_set in self._sets:
            counts.update(column_set.count_union(first, stop, owners))
        return {name: counted[numbers - 1] for name, counted in counts.items()}

    def count_keys(self, namespaces: Ints, keys: Sequence[pa.Array]) -> dict[str, Ints]:
        """Return the counts like `count_union`, but read only the sets of `keys`."""
        count = len(keys[0])
        groups = np.repeat(np.arange(count), len(namespaces))
        columns = tuple(column.take(groups) for column in read_key_columns(keys))
        return self.count_owned(OwnedSets(np.tile(namespaces, count), columns, groups), count)

    def count_owned(self, owned: OwnedSets, group_count: int) -> dict[str, Ints]:
        """Return the counts of distinct values over the sets of each group."""
        counts: dict[str, Ints] = {}
        for column_set in self._sets:
            counts.update(column_set.count_owned(owned, group_count))
        return counts

    def remove_owned(self, owned: OwnedSets) -> None:
        """Remove these sets."""
        for column_set in self._sets:
            column_set.remove_owned(owned)

    def move_owned(self, owned: OwnedSets, namespace: int) -> None:
        """Move these sets, of different keys, to `namespace`, where their keys have no set."""
        for column_set in self._sets:
            column_set.move_owned(owned, namespace)


@dataclass(frozen=True, slots=True)
class OwnedSets:
    """The sets of some namespaces and keys, which must be distinct."""

    namespaces: Ints
    keys: tuple[KeyColumn, ...]
    groups: Ints
    """The number of each set's group, from 0."""

    @classmethod
    def of(cls, namespaces: Ints, keys: tuple[KeyColumn, ...]) -> OwnedSets:
        """Return the sets, each in a group of its own."""
        return cls(namespaces, keys, np.arange(len(namespaces)))

    @classmethod
    def of_ranges(cls, firsts: Ints, lasts: Ints, keys: tuple[KeyColumn, ...]) -> OwnedSets:
        """Return a group for each key: its sets of namespaces `firsts` to `lasts`, inclusive."""
        counts = lasts - firsts + 1
        groups = np.repeat(np.arange(len(firsts)), counts)
        numbers = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(firsts[groups] + numbers, tuple(key.take(groups) for key in keys), groups)


class _ColumnSet:
    """The distinct values of one column, for each namespace and key."""

    def __init__(
        self,
        store: KeyedStateStore,
        key_types: Sequence[pa.DataType],
        column: pa.Field,
        names: Sequence[str],
    ) -> None:
        plan = plan_members(column.type)
        self._column = column.name
        self._names = names
        self._convert = plan.convert
        self._table: AccumulatorTable = store.accumulators(
            name_set(column.name, column.type),
            key_types,
            [AccumulatorColumn(name, "last", pa.bool_()) for name in names],
            namespaced=True,
            member_type=plan.type,
        )

    def add(
        self,
        rows: pa.RecordBatch,
        namespaces: Ints,
        keys: tuple[KeyColumn, ...],
        hashes: Hashes,
        values: dict[str, Any],
    ) -> None:
        """Add the column's values of a batch; see `DistinctSets.add`."""
        counted = [values[name].is_valid().to_numpy(zero_copy_only=False) for name in self._names]
        chosen = np.flatnonzero(np.logical_or.reduce(counted))
        members = self._convert(rows.column(self._column).take(pa.array(chosen)))
        taken = (*(key.take(chosen) for key in keys), *read_key_columns([members]))
        namespaces, hashes = namespaces[chosen], hashes[chosen]
        self._table.fetch(namespaces, taken, hashes)
        entries = self._table.insert(namespaces, taken, hashes)
        for index, (name, mask) in enumerate(zip(self._names, counted, strict=True)):
            is_new = mask[chosen] & ~self._table.has_values(index, entries)
            firsts = _find_firsts(entries, np.flatnonzero(is_new))
            self._table.put(index, entries[firsts], pa.array(np.ones(len(firsts), np.bool_)))
            marks = np.zeros(rows.num_rows, np.bool_)
            marks[chosen[firsts]] = True
            values[name] = pa.array(marks, mask=~marks)
        self._table.finish(entries)

    def remove(self, first: int, stop: int) -> None:
        """Remove the sets of a range of namespaces."""
        # A part at a time bounds the memory that rows on disk need.
        for groups in self._table.split_groups(PARTS_ON_DISK):
            self._table.remove(self._table.select(first, stop, groups))

    def count_union(self, first: int, stop: int, owners: KeyIndex) -> dict[str, Ints]:
        """Return the counts of the keys in `owners`, in the order of their numbers there."""
        entries = self._table.select(first, stop)
        keys = self._table.key_columns_of(entries)
        groups = owners.find(keys, hash_key_columns(keys)) - 1
        is_asked = groups >= 0
        counts = self._count(entries[is_asked], groups[is_asked], len(owners))
        self._table.finish(entries)
        return counts

    def count_owned(self, owned: OwnedSets, group_count: int) -> dict[str, Ints]:
        """Return the counts of each group; see `DistinctSets.count_owned`."""
        entries, indices = self._select_owned(owned)
        counts = self._count(entries, owned.groups[indices], group_count)
        self._table.finish(entries)
        return counts

    def _select_owned(self, owned: OwnedSets) -> tuple[Ints, Ints]:
        hashes = hash_key_columns(owned.keys)
        return self._table.select_owned(owned.namespaces, owned.keys, hashes)

    def _count(self, entries: Ints, groups: Ints, group_count: int) -> dict[str, Ints]:
        """Return the counts of distinct members of each group; `groups` has that of each entry."""
        members = self._table.members_of(entries)
        columns = (FixedKeys((groups.view(np.uint64),)), members)
        index = KeyIndex(columns, bits=_bits_for(len(entries)))
        distinct, _ = index.resolve(columns, hash_key_columns(columns))
        counts: dict[str, Ints] = {}
        for number, name in enumerate(self._names):
            counted = np.flatnonzero(self._table.has_values(number, entries))
            firsts = _find_firsts(distinct, counted)
            counts[name] = np.bincount(groups[firsts], minlength=group_count)
        return counts

    def remove_owned(self, owned: OwnedSets) -> None:
        """Remove these sets."""
        if len(owned.namespaces):
            entries, _ = self._select_owned(owned)
            self._table.remove(entries)

    def move_owned(self, owned: OwnedSets, namespace: int) -> None:
        """Move these sets to `namespace`."""
        if not len(owned.namespaces):
            return
        table = self._table
        entries, _ = self._select_owned(owned)
        keys = table.key_columns_of(entries)
        columns = (*keys, table.members_of(entries))
        namespaces = np.full(len(entries), namespace)
        moved = table.insert(namespaces, columns, hash_key_columns(keys))
        for index in range(len(self._names)):
            table.put(index, moved, table.values(index, entries))
        table.release(np.concatenate([entries, moved]), entries)


def _bits_for(count: int) -> int:
    """Return the bits with which an index holds `count` keys without growing."""
    return max(12, (2 * count + 2).bit_length())


def _find_firsts(numbers: Ints, rows: Ints) -> Ints:
    """Return, for each distinct number among `rows`, the first row that has it."""
    if not len(rows):
        return rows
    mine = numbers[rows]
    first = np.empty(int(mine.max()) + 1, np.int64)
    # Of repeated indices, numpy keeps the value that is assigned last: the first row, in reverse.
    first[mine[::-1]] = rows[::-1]
    firsts: Ints = rows[first[mine] == rows]
    return firsts
