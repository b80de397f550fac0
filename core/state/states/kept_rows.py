"""The rows of a stream that are kept by key until a moment, processed in whole batches.

A moment is a point of event time, rounded up to a step. When it is reached, all rows with that
moment are removed together.

The rows are in a table of last values. Its columns are the row's columns that are no key, the row's
time, for outer joins whether the row is alone (without a partner so far), and for joins in which
rows have limits of their own the limit. The namespace of a row holds its moment, and its number
among the rows of its key and moment.

A filter in memory holds for each key the moments of which it may have rows, to save lookups without
a result. It may hold moments of which a key has no row.

Invariants:
    namespace = moment << number_bits | number
    the rows of one key and moment have the numbers 0 to count - 1, without gaps, as the rows of a
        moment are removed together; row 0 has the count in the column `COUNT`
    a key has a row of a moment  =>  the key's word of the filter has the moment's bit
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.arrow.exact_arrays import array_of
from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue, ConfigError, require
from onceflow.core.state.aggregates.running import Grouping
from onceflow.core.state.api.descriptors import ALONE, AccumulatorColumn
from onceflow.core.state.keys.key_columns import Ints, KeyColumn
from onceflow.core.state.keys.key_groups import Hashes
from onceflow.core.state.snapshots.canonical import Groups
from onceflow.core.state.stores.keyed_store import KeyedStateStore
from onceflow.core.state.types.record_types import explain_not_kept, value_type
from onceflow.core.state.types.serializers import serializer_of

TIME, COUNT, LIMIT = "onceflow.time", "onceflow.count", "onceflow.limit"
NUMBER_BITS = 24
"""The bits of a row's number, unless there are more moments: 16 million rows of a key and moment.
"""
TIME_MAX = 1 << 60
"""The largest distance from 1970 in ms: a time plus a join's bounds stays within 64 bits."""
ROWS_A_CHUNK = 32_768
"""The number of rows that are read and paired at once."""
FILTER_WORDS_MIN, FILTER_WORDS_MAX = 1 << 12, 1 << 22
"""The number of words of 8 bytes: 32 KB to 32 MB a stream. Keys with equal last hash bits share a
word."""
_MOMENT_BITS = 64
"""The bits of a word of the filter. Moments share bits; see `_bit_of`."""
_COARSE_BITS_MAX = 22
"""The largest step between moments of rows with limits, as a power of two: 48 days of seconds."""
_NONE: Ints = np.zeros(0, np.int64)
_SIGNS = re.compile(r"[%=,()\[\]]")


@dataclass(frozen=True, slots=True)
class KeptColumn:
    """The conversion of a column of the rows to a column of the table, and back."""

    name: str
    type: pa.DataType
    of_table: AccumulatorColumn
    to_table: Callable[[pa.Array], pa.Array]
    from_table: Callable[[pa.Array], pa.Array]


def plan_column(field: pa.Field) -> KeptColumn:
    """Return the stored form of the column of `field`.

    Numbers, booleans, dates, instants, text and bytes are stored as they are. Durations and times
    of day are stored as numbers, values of all other types as bytes in MessagePack; for both, the
    name of the table's column includes the type.

    Raises:
        ConfigError: Values of the type cannot be stored.
    """
    kind, types = field.type, pa.types
    name = _escape(field.name)
    if types.is_dictionary(kind):
        inner = plan_column(field.with_type(kind.value_type))
        return KeptColumn(
            field.name,
            kind,
            inner.of_table,
            lambda array: inner.to_table(cast_rows(array, kind.value_type)),
            lambda array: cast_rows(inner.from_table(array).dictionary_encode(), kind),
        )
    if types.is_duration(kind) or types.is_time(kind) or types.is_date64(kind):
        return _plan_number_column(field.name, kind)
    stored = _find_stored_type(kind)
    if stored is not None:
        column = AccumulatorColumn(name, "last", stored)
        return KeptColumn(
            field.name,
            kind,
            column,
            lambda array: cast_rows(array, stored),
            lambda array: cast_rows(array, kind),
        )
    serializer = serializer_of(value_type(kind))
    column = AccumulatorColumn(f"{name}: {_escape(str(kind))}", "last", pa.binary())

    def to_table(array: pa.Array) -> pa.Array:
        values = array.to_pylist()
        encode = serializer.encode
        return pa.array([None if value is None else encode(value) for value in values], pa.binary())

    def from_table(array: pa.Array) -> pa.Array:
        decode = serializer.decode
        values = [None if value is None else decode(value) for value in array.to_pylist()]
        return array_of(values, kind)

    return KeptColumn(field.name, kind, column, to_table, from_table)


def check_rows_can_be_kept(schema: pa.Schema, whose: str) -> None:
    """Raise ConfigError unless rows of `schema` can be kept.

    `whose` names their owner in the error.
    """
    for field in schema:
        try:
            plan_column(field)
        except ConfigError as error:
            raise explain_not_kept(field, whose, error) from error


def _plan_number_column(name: str, kind: pa.DataType) -> KeptColumn:
    """Return the plan for a column that Arrow stores as integers of a unit: store the integers."""
    number = pa.int32() if pa.types.is_time32(kind) else pa.int64()
    column = AccumulatorColumn(f"{_escape(name)}: {_escape(str(kind))}", "last", pa.int64())
    return KeptColumn(
        name,
        kind,
        column,
        lambda array: array.view(number).cast(pa.int64()),
        lambda array: cast_rows(array, number).view(kind),
    )


def _find_stored_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the table's type that can hold each value of `kind`, or None if there is none."""
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


def _escape(name: str) -> str:
    """Return a name with the signs that have a meaning in a table's signature escaped."""
    return _SIGNS.sub(lambda sign: f"%{ord(sign[0]):02X}", name)


class KeptRows:
    """The rows of one stream that are kept. Used by the subtask's thread.

    The entries that its methods return are valid until `finish` or `remove`.
    """

    def __init__(
        self,
        store: KeyedStateStore,
        name: str,
        schema: pa.Schema,
        key: Sequence[str],
        *,
        outer: bool,
        limited: bool = False,
        number_bits: int = NUMBER_BITS,
    ) -> None:
        """Open the table.

        If `outer`, the table has a column that is true for rows without a partner so far. If
        `limited`, it has a column with the limit of each row.
        """
        self._number_bits = number_bits
        self._schema = schema
        self._key = tuple(key)
        self.outer = outer
        self._columns = [plan_column(field) for field in schema if field.name not in key]
        columns = [
            AccumulatorColumn(column_name, "last", pa.int64()) for column_name in (TIME, COUNT)
        ]
        if outer:
            columns.append(AccumulatorColumn(ALONE, "last", pa.bool_()))
        self._limit_column = len(columns) if limited else None
        if limited:
            columns.append(AccumulatorColumn(LIMIT, "last", pa.int64()))
        self._first_column = len(columns)
        columns += [column.of_table for column in self._columns]
        key_types = [schema.field(column_name).type for column_name in key]
        self._table = store.accumulators(name, key_types, columns, namespaced=True)
        self._moments = set(self._table.namespaces(number_bits).tolist())
        # Any restored key may have rows of any restored moment.
        # A set: the sum of distinct powers of two is their union.
        bits = np.uint64(sum({1 << _bit_of(moment) for moment in self._moments}))
        self._filter = np.full(FILTER_WORDS_MIN, bits, np.uint64)

    @property
    def next_moment(self) -> int | None:
        """The earliest moment of any row, or None if there are no rows."""
        return min(self._moments, default=None)

    @property
    def last_moment(self) -> int | None:
        """The latest moment of any row, or None if there are no rows."""
        return max(self._moments, default=None)

    def find_near(
        self, keys: tuple[KeyColumn, ...], hashes: Hashes, firsts: Ints, lasts: Ints
    ) -> Iterator[tuple[Ints, Ints]]:
        """Yield pairs of rows of a batch and kept rows of the same key, chunk by chunk.

        `keys` and `hashes` are the batch's. Row i is paired with the kept rows whose moments are
        `firsts[i]` to `lasts[i]` (inclusive). A chunk has two arrays: indices of rows of the batch,
        and entries of kept rows. All pairs of a row are in one chunk. Kept rows with one time are
        in the order in which they were added.
        """
        rows, moments, heads = self._find_heads(keys, hashes, firsts, lasts)
        counts = self._table.numbers(1, heads)
        for part in _split_rows(rows, counts):
            mine, more = rows[part], counts[part] - 1
            if not more.any():
                yield mine, heads[part]
                continue
            # For each head with `more` further rows: the numbers 1 to `more`.
            index = np.repeat(np.arange(len(mine)), more)
            numbers = 1 + np.arange(len(index)) - np.repeat(np.cumsum(more) - more, more)
            others = mine[index]
            namespaces = (moments[part][index] << self._number_bits) | numbers
            entries = self._table.find(
                namespaces, tuple(column.take(others) for column in keys), hashes[others]
            )
            require(
                bool(entries.all()),
                "a kept row is missing: the stored count is higher than the number of rows",
            )
            yield np.concatenate([mine, others]), np.concatenate([heads[part], entries])

    def _find_heads(
        self, keys: tuple[KeyColumn, ...], hashes: Hashes, firsts: Ints, lasts: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Return for each row the moments, of `firsts` to `lasts`, of which its key has rows.

        Returns three arrays of one length, sorted by row: row, moment, and the entry of the head,
        the kept row that has number 0.
        """
        bits = self._filter[self._filter_words(hashes)]
        earliest, latest = int(firsts.min()), int(lasts.max())
        rows: list[Ints] = [_NONE]
        moments: list[Ints] = [_NONE]
        # Loop over moments and not over rows: there are few moments, and each needs a few numpy
        # calls for all rows.
        for moment in sorted(
            candidate for candidate in self._moments if earliest <= candidate <= latest
        ):
            bit = np.uint64(_bit_of(moment))
            may = ((bits >> bit) & np.uint64(1)).astype(np.bool_)
            mine = np.flatnonzero(may & (firsts <= moment) & (lasts >= moment))
            rows.append(mine)
            moments.append(np.full(len(mine), moment))
        of_rows, of_moments = np.concatenate(rows), np.concatenate(moments)
        heads = self._table.find(
            of_moments << self._number_bits,
            tuple(column.take(of_rows) for column in keys),
            hashes[of_rows],
        )
        present = np.flatnonzero(heads)
        # Stable: within a row, moments stay in the order in which they were looked up.
        present = present[np.argsort(of_rows[present], kind="stable")]
        return of_rows[present], of_moments[present], heads[present]

    def add(
        self,
        keys: tuple[KeyColumn, ...],
        hashes: Hashes,
        rows: pa.RecordBatch,
        times: Ints,
        moments: Ints,
        alone: npt.NDArray[np.bool_],
        limits: Ints | None = None,
    ) -> Ints:
        """Keep rows until their moments; return their entries.

        `limits` are stored if the table has limits.

        Raises:
            BadStateValue: One key has too many rows of one moment; names the row.
        """
        table, namespaces = self._table, moments << self._number_bits
        self._grow_filter()
        words = self._filter_words(hashes)
        bits = (self._filter[words] >> _bits_of(moments)) & np.uint64(1)
        # The filter saves reads of the database: keys without the bit have no row there.
        known = np.flatnonzero(bits)
        table.fetch(namespaces[known], tuple(column.take(known) for column in keys), hashes[known])
        entries = table.insert(namespaces, keys, hashes)
        # A row's number is the count of its key and moment so far, plus how many rows of the batch
        # with the same key and moment are before it.
        group = Grouping.of(entries)
        before = table.numbers(1, group.entries)
        every = np.arange(len(entries))
        numbers = group.in_row_order(every + group.spread(before - group.firsts))
        limit = 1 << self._number_bits
        if int(numbers.max()) >= limit:
            row = int(numbers.argmax())
            raise BadStateValue(
                f"a join can keep at most {limit:,} rows of one key with the same removal time;"
                " the key of this record has more",
                row=row,
            )
        # Only after the numbers are checked, so that a refused batch leaves the counts unchanged.
        table.put(1, group.entries, before + group.counts)
        others = np.flatnonzero(numbers)
        if len(others):
            mine = tuple(column.take(others) for column in keys)
            entries[others] = table.insert(
                namespaces[others] | numbers[others], mine, hashes[others]
            )
        table.put(0, entries, times)
        if self.outer:
            table.put(2, entries, alone)
        if self._limit_column is not None:
            assert limits is not None
            table.put(self._limit_column, entries, limits)
        for index, column in enumerate(self._columns, self._first_column):
            table.put(index, entries, column.to_table(rows.column(column.name)))
        self._add_to_filter(words, moments)
        return entries

    def times(self, entries: Ints) -> Ints:
        """Return the times of the rows."""
        return self._table.numbers(0, entries)

    def limits(self, entries: Ints) -> Ints:
        """Return the limits of the rows."""
        assert self._limit_column is not None
        return self._table.numbers(self._limit_column, entries)

    def numbers(self, entries: Ints) -> Ints:
        """Return numbers that sort rows of one key and one time in the order of their addition."""
        return self._table.namespaces_of(entries)

    def mark_paired(self, entries: Ints) -> None:
        """Record that these rows, which may repeat, have a partner and are not alone."""
        if self.outer:
            alone = np.unique(entries)
            # Skip rows that are paired already: they would count as changed and be written again.
            alone = alone[self._table.numbers(2, alone) != 0]
            self._table.put(2, alone, np.zeros(len(alone), np.bool_))

    def rows(self, entries: Ints, keys: Sequence[pa.Array] | None = None) -> pa.RecordBatch:
        """Return the rows; `keys` holds their key columns if they are known."""
        by_name = dict(zip(self._key, keys or self._table.keys_of(entries), strict=True))
        for index, column in enumerate(self._columns, self._first_column):
            by_name[column.name] = column.from_table(self._table.values(index, entries))
        arrays = [by_name[field.name] for field in self._schema]
        return pa.record_batch(arrays, schema=self._schema)

    def split_groups(self, part_count: int) -> list[range | None]:
        """Return parts of the key groups for `find_due`; [None] if all rows are in memory."""
        return self._table.split_groups(part_count)

    def find_due(self, until: int, after: int | None = None, groups: range | None = None) -> Ints:
        """Return the entries of the rows whose moment is in (`after`, `until`].

        They are sorted by moment; those of one key and moment keep the order of addition. If
        `groups` is given, only rows of these key groups are returned, which limits the rows read
        into memory.
        """
        due = [
            moment
            for moment in self._moments
            if moment <= until and (after is None or moment > after)
        ]
        if not due:
            return _NONE
        bits = self._number_bits
        return self._table.select(min(due) << bits, (max(due) + 1) << bits, groups)

    def moments(self, entries: Ints) -> Ints:
        """Return the moments of the rows."""
        moments: Ints = self._table.namespaces_of(entries) >> self._number_bits
        return moments

    def keys(self, entries: Ints) -> tuple[KeyColumn, ...]:
        """Return the key columns of the rows."""
        return self._table.key_columns_of(entries)

    def key_groups(self, entries: Ints) -> Groups:
        """Return the key group of each row."""
        return self._table.groups_of(entries)

    def find_alone(self, entries: Ints) -> Ints:
        """Return the entries of the rows that are alone, sorted by time."""
        if not self.outer:
            return _NONE
        alone = entries[self._table.numbers(2, entries) != 0]
        ordered: Ints = alone[np.argsort(self.times(alone), kind="stable")]
        return ordered

    def remove(self, entries: Ints, until: int) -> None:
        """Remove the rows whose moment is `until` or before; `entries` are from `find_due`."""
        self._table.remove(entries)
        self.forget_moments(until)

    def remove_some(self, entries: Ints) -> None:
        """Remove these entries, which must be all rows of their keys and moments.

        `forget_moments` must be called afterwards.
        """
        self._table.remove(entries)

    def forget_moments(self, until: int) -> None:
        """Record that no row has a moment up to `until` any more."""
        gone = {moment for moment in self._moments if moment <= until}
        self._moments -= gone
        # A bit is cleared only when no moment that shares it is left.
        used = {_bit_of(moment) for moment in self._moments}
        bits = sum({1 << bit for bit in set(map(_bit_of, gone)) - used})
        if bits:
            self._filter &= ~np.uint64(bits)

    def finish(self, entries: Ints) -> None:
        """Release the entries, which were used, and all other entries."""
        self._table.release(entries, _NONE)

    def _filter_words(self, hashes: Hashes) -> Ints:
        """Return the index of each key's word in the filter: the last bits of its hash."""
        return (hashes & np.uint64(len(self._filter) - 1)).view(np.int64)

    def _grow_filter(self) -> None:
        if len(self._table) > len(self._filter) < FILTER_WORDS_MAX:
            # The index has one bit more now: the keys of one word are divided between two words. A
            # copy of the word is valid for both.
            self._filter = np.tile(self._filter, 2)

    def _add_to_filter(self, words: Ints, moments: Ints) -> None:
        for moment in np.unique(moments).tolist():
            self._moments.add(moment)
            mine = words[moments == moment]
            self._filter[mine] |= np.uint64(1 << _bit_of(moment))


def _split_rows(rows: Ints, counts: Ints) -> Iterator[slice]:
    """Yield slices of sorted `rows` whose `counts` add up to about `ROWS_A_CHUNK`.

    Equal rows are in one slice.
    """
    if not len(rows):
        return
    total = np.cumsum(counts)
    # The last position of each row's pairs: a slice ends only at one of these.
    lasts = np.flatnonzero(np.append(rows[1:] != rows[:-1], True))
    start = 0
    while start < len(rows):
        until = (total[start - 1] if start else 0) + ROWS_A_CHUNK
        stop = lasts[min(int(np.searchsorted(total[lasts], until)), len(lasts) - 1)] + 1
        yield slice(start, int(stop))
        start = int(stop)


def moments_of(times: Ints, step_ms: int) -> Ints:
    """Return the moment of each time: the time in steps, rounded up."""
    # Negating twice turns numpy's rounding down into rounding up.
    moments: Ints = -(-times // step_ms)
    return moments


def coarse_moments_of(times: Ints, limits: Ints, step_ms: int) -> Ints:
    """Return moments at or after `limits`, in steps, for rows that have their own limits.

    A row is kept too long by at most one step or an eighth of the time to its limit. Coarser
    moments for distant limits keep the number of different moments small.
    """
    steps = np.maximum((limits - times) // (8 * step_ms), 1)
    coarse = np.left_shift(1, np.minimum(np.log2(steps).astype(np.int64), _COARSE_BITS_MAX))
    moments: Ints = -(moments_of(limits, step_ms) // -coarse) * coarse
    return moments


def _bit_of(moment: int) -> int:
    """Return the moment's bit in a word of the filter."""
    # Coarse moments are multiples of powers of two, so their last bits alone are zero.
    return (moment ^ (moment >> 6) ^ (moment >> 12) ^ (moment >> 18)) % _MOMENT_BITS


def _bits_of(moments: Ints) -> Hashes:
    """Return the bit of each moment, as `_bit_of`."""
    bits = (moments ^ (moments >> 6) ^ (moments >> 12) ^ (moments >> 18)) % _MOMENT_BITS
    return bits.astype(np.uint64)


def check_moments(moments: Ints, times: Ints, column: str, number_bits: int = NUMBER_BITS) -> None:
    """Raise BadStateValue unless rows of these times can be kept until these moments."""
    # A namespace has 63 bits and a sign: half of the moments are before 1970.
    limit = (1 << (62 - number_bits)) - 1
    far = np.flatnonzero((np.abs(moments) >= limit) | (times > TIME_MAX) | (times < -TIME_MAX))
    if len(far):
        row = int(far[0])
        raise BadStateValue(
            f"{column!r} is {int(times[row])} ms since 1970, which is too far from now for a join"
            " to keep the record",
            row=row,
        )
