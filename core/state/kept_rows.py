"""Rows of a stream that are kept by key until a moment comes, whole batches at a time.

A row is a row of a table of last values: a column for each of its own that is no key, its time, and
on some sides of a join whether it is alone. Its namespace says at which moment it is let go, in
steps, and how many rows of its key and moment were before it.

Which keys may have rows of which moment is also in a filter in memory, so that few are looked for
in vain. It may say yes of a key that has none.

Invariants:
    namespace = moment << NUMBER_BITS | number
    the rows of one key and moment have the numbers 0 to count - 1, and row 0 has `COUNT`: the rows
        of a moment are let go together, so there are no gaps
    a key has a row of a moment  =>  its place in the filter has the moment's bit
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.protocol.invariant import require
from onceflow.core.state.aggregates.running import Grouping
from onceflow.core.state.api.descriptors import AccumulatorColumn
from onceflow.core.state.api.stores import KeyedStateStore
from onceflow.core.state.keys.key_columns import Ints, KeyColumn
from onceflow.core.state.keys.key_groups import Hashes
from onceflow.core.state.types.record_types import not_kept, value_type
from onceflow.core.state.types.serializers import serializer_of

TIME, COUNT, ALONE = "onceflow.time", "onceflow.count", "onceflow.alone"
NUMBER_BITS = 24
"""Rows of one key and moment: 16 million."""
MOMENTS = 1 << (63 - NUMBER_BITS)
"""So many moments there are, half of them before 1970."""
TIME_MAX = 1 << 60
ROWS_A_CHUNK = 32_768
FILTER_PLACES_MIN, FILTER_PLACES_MAX = 1 << 12, 1 << 22
_MOMENT_BITS = 64
_NONE: Ints = np.zeros(0, np.int64)
_SIGNS = re.compile(r"[%=,()\[\]]")


@dataclass(frozen=True, slots=True)
class KeptColumn:
    """How a column of rows is kept as one of a table."""

    name: str
    type: pa.DataType
    of_table: AccumulatorColumn
    to_table: Callable[[pa.Array], pa.Array]
    from_table: Callable[[pa.Array], pa.Array]


def kept_column(field: pa.Field) -> KeptColumn:
    """Return how the column of `field` is kept.

    Numbers, booleans, dates, instants, text and bytes are what they are in the table; any other
    type is in the column's name there. Durations and times of day are kept as numbers, values of
    all other types as bytes: MessagePack.
    """
    kind, types = field.type, pa.types
    name = _escaped(field.name)
    if types.is_dictionary(kind):
        inner = kept_column(field.with_type(kind.value_type))
        return KeptColumn(
            field.name,
            kind,
            inner.of_table,
            lambda array: inner.to_table(array.cast(kind.value_type)),
            lambda array: inner.from_table(array).dictionary_encode().cast(kind),
        )
    if types.is_duration(kind) or types.is_time(kind) or types.is_date64(kind):
        return _counted_column(field.name, kind)
    stored = _stored_type(kind)
    if stored is not None:
        column = AccumulatorColumn(name, "last", stored)
        return KeptColumn(
            field.name,
            kind,
            column,
            lambda array: array if array.type == stored else array.cast(stored),
            lambda array: array if array.type == kind else array.cast(kind),
        )
    serializer = serializer_of(value_type(kind))
    column = AccumulatorColumn(f"{name}: {_escaped(str(kind))}", "last", pa.binary())

    def to_table(array: pa.Array) -> pa.Array:
        values = array.to_pylist()
        encode = serializer.encode
        return pa.array([None if one is None else encode(one) for one in values], pa.binary())

    def from_table(array: pa.Array) -> pa.Array:
        decode = serializer.decode
        values = [None if one is None else decode(one) for one in array.to_pylist()]
        return pa.array(values, kind)

    return KeptColumn(field.name, kind, column, to_table, from_table)


def check_rows_can_be_kept(schema: pa.Schema, whose: str) -> None:
    """Raise ConfigError unless rows of `schema` can be kept; `whose` they are is for the error."""
    for field in schema:
        try:
            kept_column(field)
        except ConfigError as error:
            raise not_kept(field, whose, error) from error


def _counted_column(name: str, kind: pa.DataType) -> KeptColumn:
    """Return how values that are a count of a unit are kept: as the count."""
    count = pa.int32() if pa.types.is_time32(kind) else pa.int64()
    column = AccumulatorColumn(f"{_escaped(name)}: {_escaped(str(kind))}", "last", pa.int64())
    return KeptColumn(
        name,
        kind,
        column,
        lambda array: array.view(count).cast(pa.int64()),
        lambda array: array.cast(count).view(kind),
    )


def _stored_type(kind: pa.DataType) -> pa.DataType | None:
    types = pa.types
    if types.is_integer(kind) and kind != pa.uint64():
        return pa.int64()
    if types.is_floating(kind):
        return pa.float64()
    if types.is_boolean(kind) or types.is_date32(kind) or types.is_timestamp(kind):
        return kind
    if types.is_string(kind) or types.is_large_string(kind):
        return pa.string()
    bytes_types = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return pa.binary() if any(matches(kind) for matches in bytes_types) else None


def _escaped(name: str) -> str:
    """Return a name without the signs that a table's signature is made of."""
    return _SIGNS.sub(lambda sign: f"%{ord(sign[0]):02X}", name)


class KeptRows:
    """The rows of one stream that are kept. Used by the subtask's thread.

    Slots that it hands out hold until `done` or `let_go`.
    """

    def __init__(
        self,
        store: KeyedStateStore,
        name: str,
        schema: pa.Schema,
        key: Sequence[str],
        *,
        outer: bool,
    ) -> None:
        """`outer`: of each row is kept whether it is alone."""
        self._schema = schema
        self._key = tuple(key)
        self.outer = outer
        self._columns = [kept_column(field) for field in schema if field.name not in key]
        columns = [AccumulatorColumn(one, "last", pa.int64()) for one in (TIME, COUNT)]
        if outer:
            columns.append(AccumulatorColumn(ALONE, "last", pa.bool_()))
        self._first_column = len(columns)
        columns += [one.of_table for one in self._columns]
        key_types = [schema.field(one).type for one in key]
        self._table = store.accumulators(name, key_types, columns, namespaced=True)
        self._moments = set(self._table.namespaces(NUMBER_BITS).tolist())
        # What is restored may have any of the moments.
        bits = np.uint64(sum({1 << (one % _MOMENT_BITS) for one in self._moments}))
        self._filter = np.full(FILTER_PLACES_MIN, bits, np.uint64)

    @property
    def next_moment(self) -> int | None:
        """The earliest moment of any row."""
        return min(self._moments, default=None)

    def near(
        self, keys: tuple[KeyColumn, ...], hashes: Hashes, firsts: Ints, lasts: Ints
    ) -> Iterator[tuple[Ints, Ints]]:
        """Yield, for rows with these keys, what is kept of their keys from a moment to a moment.

        That is, chunk by chunk, rows and the slots of what is kept; a row is in one chunk alone.
        Those of one row and one time are in the order in which they came.
        """
        rows, moments, heads = self._heads(keys, hashes, firsts, lasts)
        counts = self._table.numbers(1, heads)
        for part in _parts(rows, counts):
            mine, more = rows[part], counts[part] - 1
            if not more.any():
                yield mine, heads[part]
                continue
            index = np.repeat(np.arange(len(mine)), more)
            numbers = 1 + np.arange(len(index)) - np.repeat(np.cumsum(more) - more, more)
            others = mine[index]
            namespaces = (moments[part][index] << NUMBER_BITS) | numbers
            slots = self._table.find(
                namespaces, tuple(column.take(others) for column in keys), hashes[others]
            )
            require(bool(slots.all()), "a row before the last one of its key and moment is gone")
            yield np.concatenate([mine, others]), np.concatenate([heads[part], slots])

    def _heads(
        self, keys: tuple[KeyColumn, ...], hashes: Hashes, firsts: Ints, lasts: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Return rows, in order, with each moment between two of which their key has rows.

        And the slot of the first of these.
        """
        places = self._places(hashes)
        bits = self._filter[places]
        earliest, latest = int(firsts.min()), int(lasts.max())
        rows: list[Ints] = [_NONE]
        moments: list[Ints] = [_NONE]
        for moment in sorted(one for one in self._moments if earliest <= one <= latest):
            bit = np.uint64(moment % _MOMENT_BITS)
            may = ((bits >> bit) & np.uint64(1)).astype(np.bool_)
            mine = np.flatnonzero(may & (firsts <= moment) & (lasts >= moment))
            rows.append(mine)
            moments.append(np.full(len(mine), moment))
        found, at = np.concatenate(rows), np.concatenate(moments)
        heads = self._table.find(
            at << NUMBER_BITS, tuple(column.take(found) for column in keys), hashes[found]
        )
        there = np.flatnonzero(heads)
        there = there[np.argsort(found[there], kind="stable")]
        return found[there], at[there], heads[there]

    def add(
        self,
        keys: tuple[KeyColumn, ...],
        hashes: Hashes,
        rows: pa.RecordBatch,
        times: Ints,
        moments: Ints,
        alone: npt.NDArray[np.bool_],
    ) -> Ints:
        """Keep rows until their moments; return their slots."""
        table, namespaces = self._table, moments << NUMBER_BITS
        places = self._places(hashes)
        bits = (self._filter[places] >> (moments % _MOMENT_BITS).astype(np.uint64)) & np.uint64(1)
        known = np.flatnonzero(bits)
        table.bring(namespaces[known], tuple(column.take(known) for column in keys), hashes[known])
        slots = table.insert(namespaces, keys, hashes)
        group = Grouping.of(slots)
        before = table.numbers(1, group.slots)
        every = np.arange(len(slots))
        numbers = group.in_row_order(every + group.spread(before - group.firsts))
        if int(numbers.max()) >= 1 << NUMBER_BITS:
            row = int(numbers.argmax())
            raise BadStateValue(
                f"a join cannot keep {1 << NUMBER_BITS:,} rows of one key that are let go together;"
                " one such key is that of this record",
                row=row,
            )
        table.put(1, group.slots, before + group.counts)
        others = np.flatnonzero(numbers)
        if len(others):
            mine = tuple(column.take(others) for column in keys)
            slots[others] = table.insert(namespaces[others] | numbers[others], mine, hashes[others])
        table.put(0, slots, times)
        if self.outer:
            table.put(2, slots, alone)
        for place, column in enumerate(self._columns, self._first_column):
            table.put(place, slots, column.to_table(rows.column(column.name)))
        self._note(places, moments)
        return slots

    def times(self, slots: Ints) -> Ints:
        """Return the rows' times."""
        return self._table.numbers(0, slots)

    def numbers(self, slots: Ints) -> Ints:
        """Return what sorts rows of one key and one time as they came."""
        return self._table.namespaces_of(slots)

    def pair(self, slots: Ints) -> None:
        """Take the rows, which may repeat, as alone no more."""
        if self.outer:
            alone = np.unique(slots)
            alone = alone[self._table.numbers(2, alone) != 0]
            self._table.put(2, alone, np.zeros(len(alone), np.bool_))

    def rows(self, slots: Ints, keys: Sequence[pa.Array] | None = None) -> pa.RecordBatch:
        """Return the rows; `keys` are their key columns if known."""
        by_name = dict(zip(self._key, keys or self._table.keys_of(slots), strict=True))
        for place, column in enumerate(self._columns, self._first_column):
            by_name[column.name] = column.from_table(self._table.values(place, slots))
        arrays = [by_name[field.name] for field in self._schema]
        return pa.record_batch(arrays, schema=self._schema)

    def over(self, until: int) -> Ints:
        """Return the slots of the rows whose moment is `until` or before, by moment."""
        gone = [one for one in self._moments if one <= until]
        if not gone:
            return _NONE
        return self._table.select(min(gone) << NUMBER_BITS, (max(gone) + 1) << NUMBER_BITS)

    def alone(self, slots: Ints) -> Ints:
        """Return the slots of those rows that are alone, by time."""
        if not self.outer:
            return _NONE
        found = slots[self._table.numbers(2, slots) != 0]
        ordered: Ints = found[np.argsort(self.times(found), kind="stable")]
        return ordered

    def let_go(self, slots: Ints, until: int) -> None:
        """Keep no rows any more whose moment is `until` or before: those of `over`."""
        self._table.remove(slots)
        gone = {one for one in self._moments if one <= until}
        self._moments -= gone
        left = {one % _MOMENT_BITS for one in self._moments}
        bits = sum({1 << (one % _MOMENT_BITS) for one in gone if one % _MOMENT_BITS not in left})
        if bits:
            self._filter &= ~np.uint64(bits)

    def done(self, slots: Ints) -> None:
        """Hear that slots were used, once nobody needs any slot any more."""
        self._table.release(slots, _NONE)

    def _places(self, hashes: Hashes) -> Ints:
        if len(self._table) > len(self._filter) < FILTER_PLACES_MAX:
            # A key's place is the end of its hash: either half is right for the keys of both.
            self._filter = np.tile(self._filter, 2)
        return (hashes & np.uint64(len(self._filter) - 1)).view(np.int64)

    def _note(self, places: Ints, moments: Ints) -> None:
        for moment in np.unique(moments).tolist():
            self._moments.add(moment)
            mine = places[moments == moment]
            self._filter[mine] |= np.uint64(1 << (moment % _MOMENT_BITS))


def _parts(rows: Ints, counts: Ints) -> Iterator[slice]:
    """Yield slices of `rows`, sorted, of some ten thousand in all `counts`; no row is in two."""
    if not len(rows):
        return
    total = np.cumsum(counts)
    lasts = np.flatnonzero(np.append(rows[1:] != rows[:-1], True))
    start = 0
    while start < len(rows):
        until = (total[start - 1] if start else 0) + ROWS_A_CHUNK
        stop = lasts[min(int(np.searchsorted(total[lasts], until)), len(lasts) - 1)] + 1
        yield slice(start, int(stop))
        start = int(stop)


def moments_of(times: Ints, step_ms: int) -> Ints:
    """Return the moments, in steps, that are at these times or next after them."""
    moments: Ints = -(-times // step_ms)
    return moments


def check_moments(moments: Ints, times: Ints, column: str) -> None:
    """Return when rows of these times can be kept until these moments.

    Raises:
        BadStateValue: One is too far from 1970; says in which row.
    """
    limit = MOMENTS // 2 - 1
    far = np.flatnonzero((np.abs(moments) >= limit) | (times > TIME_MAX) | (times < -TIME_MAX))
    if len(far):
        row = int(far[0])
        raise BadStateValue(
            f"{column!r} is {int(times[row])} ms since 1970, thousands of years from now: a join"
            " cannot keep such a record",
            row=row,
        )
