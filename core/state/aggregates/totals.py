"""A running aggregate of many keys: its total in each entry of a table."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue
from onceflow.core.state.aggregates.decimal_words import greatest_start, least_start
from onceflow.core.state.aggregates.running import (
    Grouping,
    accumulate,
    accumulate_extreme,
    running_count,
    running_sum,
    surely_fits,
)
from onceflow.core.state.api.descriptors import AccumulatorColumn
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_index import enlarge

Results: TypeAlias = Any
"""The values of an aggregate after each row: a numpy array; for decimals and averages, an Arrow
array."""


def dtype_of(column: AccumulatorColumn) -> np.dtype[Any]:
    """Return the type of a word of an aggregate's total."""
    is_float = pa.types.is_floating(column.type) and not column.has_bytes
    return np.dtype(np.float64 if is_float else np.int64)


def start_of(column: AccumulatorColumn) -> float | int | npt.NDArray[Any]:
    """Return the total of an aggregate that has seen no value: a number, or its words."""
    if column.has_bytes:
        return 0
    if (words := column.words_of_total) > 1:
        start = np.zeros(words, dtype_of(column))
        if column.op in ("min", "max"):
            start[:] = least_start() if column.op == "min" else greatest_start()
        return start
    floating = pa.types.is_floating(column.type)
    limits = np.iinfo(np.int64)
    starts: dict[str, float | int] = {
        "sum": 0,
        "count": 0,
        "count_distinct": 0,
        "min": np.nan if floating else limits.max,
        "max": -np.inf if floating else limits.min,
        "last": 0,
    }
    return starts[column.op]


class Totals:
    """The total of one aggregate in each entry, and a flag whether the entry has seen a value."""

    def __init__(self, column: AccumulatorColumn) -> None:
        self.column = column
        self._counts = column.op in ("count", "count_distinct")
        self._floating = pa.types.is_floating(column.type)
        self._start: Any = start_of(column)
        words = column.words_of_total
        shape = 1024 if words == 1 else (1024, words)
        self.totals = np.full(shape, self._start, dtype_of(column))
        self.seen = np.zeros(1024, np.uint8)

    def reserve(self, used: int, needed: int) -> None:
        """Make room for `needed` entries. Those from `used` on have no value."""
        if needed > len(self.totals):
            self.totals = enlarge(self.totals, used, needed)
            self.seen = enlarge(self.seen, used, needed)
        # Reset them even if there is room: entries that `keep` has freed still hold their old
        # totals.
        self.totals[used:needed] = self._start
        self.seen[used:needed] = 0

    def clear(self, entries: Ints) -> None:
        """Clear the totals of these entries."""
        self.totals[entries] = self._start
        self.seen[entries] = 0

    def keep(self, entries: Ints) -> None:
        """Keep only these entries, renumbered from 1 in the given order."""
        self.totals[1 : len(entries) + 1] = self.totals[entries]
        self.seen[1 : len(entries) + 1] = self.seen[entries]

    def run(
        self, group: Grouping, values: pa.Array | npt.NDArray[Any] | None
    ) -> tuple[Results, npt.NDArray[Any], npt.NDArray[Any]]:
        """Return each row's result, and each segment's new total and flag. Changes nothing.

        Raises:
            SumOverflow: A sum does not fit.
        """
        totals, seen = self.totals[group.entries], self.seen[group.entries]
        if values is None:
            running = running_count(group, totals, None)
            return group.in_row_order(running), group.lasts(running), np.ones_like(seen)
        data, valid = self._to_numbers(values)
        if self._counts:
            running = running_count(group, totals, valid)
        elif self.column.op == "sum" and not self._floating:
            running = running_sum(group, totals, data)
        elif self._has_zeros(data):
            running = accumulate_extreme(self._ufunc(), group, totals, data)
        else:
            running = accumulate(self._ufunc(), group, totals, data)
        out = self._from_numbers(group.in_row_order(running))
        if valid is None:
            return out, group.lasts(running), np.ones_like(seen)
        so_far = accumulate(np.maximum, group, seen, valid.astype(np.uint8))
        if self.column.op in ("min", "max") and not so_far.all():
            out = np.ma.MaskedArray(out, mask=group.in_row_order(so_far) == 0)
        return out, group.lasts(running), group.lasts(so_far)

    def values(self, entries: Ints) -> pa.Array:
        """Return the total of each entry; null if it has seen no value, or 0 for a sum."""
        kind, numbers = self.column.type, self.totals[entries]
        seen = self.seen[entries]
        never_null = self._counts or self.column.op == "sum" or seen.all()
        array = pa.array(numbers, mask=None if never_null else seen == 0)
        return array if array.type == kind else to_typed_array(array, kind)

    def put(self, entries: Ints, values: pa.Array | npt.NDArray[Any]) -> None:
        """Set the totals of distinct entries; a null means no value.

        Raises:
            BadStateValue: `values` cannot be cast to the column's type.
        """
        data, valid = self._to_numbers(values)
        self.totals[entries] = data
        self.seen[entries] = 1 if valid is None else valid

    def fold(self, entries: Ints, values: pa.Array | npt.NDArray[Any] | None) -> None:
        """Add a value to each of `entries`, which may repeat, in row order.

        Raises:
            SumOverflow: A sum does not fit.
        """
        if values is None:
            np.add.at(self.totals, entries, 1)
            self.seen[entries] = 1
            return
        data, valid = self._to_numbers(values)
        if self._counts:
            data = np.ones(len(entries), np.int64) if valid is None else valid.astype(np.int64)
        self._fold(entries, data)
        self.seen[entries if valid is None else entries[valid]] = 1

    def add_totals(
        self, entries: Ints, totals: npt.NDArray[Any], seen: npt.NDArray[np.uint8]
    ) -> None:
        """Add totals of other entries to `entries`, which may repeat, in row order.

        Raises:
            SumOverflow: A sum does not fit.
        """
        self._fold(entries, totals)
        # `at` applies repeated indices one by one; plain indexing keeps only the last.
        np.maximum.at(self.seen, entries, seen)

    def merge(self, entries: Ints, into: Ints, count: int) -> Totals:
        """Return new totals with entries 1 to `count`.

        Each total of `entries` is added to the entry of `into` at the same index.

        Raises:
            SumOverflow: A sum does not fit.
        """
        merged = type(self)(self.column)
        merged.reserve(1, count + 1)
        merged.add_totals(into, self.totals[entries], self.seen[entries])
        return merged

    def take_merged(self, entries: Ints, merged: Totals) -> None:
        """Set the totals of distinct entries to those of the entries 1, 2, … of `merged`."""
        self.totals[entries] = merged.totals[1 : len(entries) + 1]
        self.seen[entries] = merged.seen[1 : len(entries) + 1]

    def _fold(self, entries: Ints, data: npt.NDArray[Any]) -> None:
        if self._counts or self.column.op == "sum":
            if not self._floating and not surely_fits(data, self.totals[entries]):
                # Raises if a running sum overflows; `np.add.at` would wrap silently.
                group = Grouping.of(entries)
                running_sum(group, self.totals[group.entries], data)
            with np.errstate(invalid="ignore", over="ignore"):
                np.add.at(self.totals, entries, data)
        elif self._has_zeros(data):
            group = Grouping.of(entries)
            running = accumulate_extreme(self._ufunc(), group, self.totals[group.entries], data)
            self.totals[group.entries] = group.lasts(running)
        else:
            # numpy warns of a NaN, which is a value like others here.
            with np.errstate(invalid="ignore"):
                self._ufunc().at(self.totals, entries, data)

    def _has_zeros(self, data: npt.NDArray[Any]) -> bool:
        """Return True if a minimum or maximum of floats may have to choose between 0.0 and -0.0.

        Without a zero in `data`, the only zero is the total so far.
        """
        is_extreme = self._floating and self.column.op in ("min", "max")
        return is_extreme and not bool(data.all())

    def _ufunc(self) -> np.ufunc:
        if self.column.op == "sum":
            return np.add
        if self.column.op == "max":
            return np.maximum
        # NaN is the largest of floats: np.maximum returns it, and np.fmin returns the other value.
        return np.fmin if self._floating else np.minimum

    def _to_numbers(
        self, values: pa.Array | npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
        """Return the values as this column's numbers, with a neutral number for each null."""
        if self._counts:
            array = values if isinstance(values, pa.Array) else pa.array(values)
            valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
            return np.zeros(0, np.int64), valid
        array = self._cast(values)
        valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
        # date32 and time32 have 32 bits, and totals have 64. `view` reinterprets the bits without a
        # copy, and the cast widens them.
        if self.column.type.bit_width == 32:
            array = array.view(pa.int32()).cast(pa.int64())
        elif pa.types.is_boolean(self.column.type):
            array = array.cast(pa.int64())
        elif not self._floating:
            array = array.view(pa.int64())
        if valid is not None:
            # -0.0 and not 0.0: a sum that is -0.0 so far must stay -0.0.
            neutral = -0.0 if self._floating and self.column.op == "sum" else self._start
            array = array.fill_null(pa.scalar(neutral, array.type))
        return array.to_numpy(zero_copy_only=False), valid

    def _cast(self, values: pa.Array | npt.NDArray[Any] | None) -> pa.Array:
        """Return the values as an array of this column's type.

        Raises:
            BadStateValue: `values` cannot be cast to the column's type.
        """
        try:
            array = values if isinstance(values, pa.Array) else pa.array(values)
            return cast_rows(array, self.column.type)
        except pa.ArrowException as error:
            raise BadStateValue(
                f"aggregate {self.column.name!r} cannot take its values as {self.column.type}:"
                f" {error}; cast the column first"
            ) from error

    def no_results(self) -> Results:
        """Return the results of a batch without rows."""
        return self._from_numbers(self.totals[:0].copy())

    def _from_numbers(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers as numpy values of the column's type."""
        if pa.types.is_timestamp(self.column.type):
            return numbers.view(f"datetime64[{self.column.type.unit}]")
        if pa.types.is_date32(self.column.type):
            return numbers.astype("datetime64[D]")
        return numbers


def to_typed_array(results: Results, kind: pa.DataType) -> pa.Array:
    """Return the results of an aggregate as an array of its type."""
    array = results if isinstance(results, pa.Array) else pa.array(results)
    if array.type == kind:
        return array
    if pa.types.is_timestamp(array.type):
        array = array.view(pa.int64())
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return cast_rows(array.cast(pa.int32()), kind)
    return cast_rows(array, kind)
