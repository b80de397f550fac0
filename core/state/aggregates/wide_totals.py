"""Running aggregates whose totals are several words an entry: decimals and averages.

The words of an entry:

    sum, min, max of decimals               the two words of a decimal (see `decimal_words`)
    average of decimals and integers        the two words of the sum, and the number of values
    average of floats                       the sum, and the number of values, as float64
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.state.aggregates.decimal_words import (
    Mask,
    decimal_array,
    decimal_words,
    float_averages,
    running_word_extreme,
    running_word_sum,
    word_averages,
    words_of_ints,
)
from onceflow.core.state.aggregates.running import Grouping, accumulate, running_sum, surely_fits
from onceflow.core.state.aggregates.totals import Results, Totals
from onceflow.core.state.api.descriptors import AccumulatorColumn
from onceflow.core.state.keys.key_columns import Ints

Planes = npt.NDArray[Any]
"""Totals as an array of shape (n, words of a total)."""


class WideTotals(Totals):
    """The words of one aggregate in each entry, and a flag whether the entry has seen a value."""

    def run(
        self, group: Grouping, values: pa.Array | npt.NDArray[Any] | None
    ) -> tuple[Results, Planes, npt.NDArray[Any]]:
        """Return each row's result, and each segment's new total and flag. Changes nothing.

        Raises:
            SumOverflow: A sum does not fit.
        """
        totals, seen = self.totals[group.entries], self.seen[group.entries]
        data, valid = self._to_numbers(values)
        running = self._run_totals(group, totals, data)
        rows = group.in_row_order(running)
        if valid is None:
            return self._results(rows, None), group.lasts(running), np.ones_like(seen)
        so_far = accumulate(np.maximum, group, seen, valid.astype(np.uint8))
        unseen = group.in_row_order(so_far) == 0
        return self._results(rows, self._nulls(unseen)), group.lasts(running), group.lasts(so_far)

    def values(self, entries: Ints) -> pa.Array:
        """Return the result of each entry; null if it has seen no value, or 0 for a sum."""
        return self._results(self.totals[entries], self._nulls(self.seen[entries] == 0))

    def fold(self, entries: Ints, values: pa.Array | npt.NDArray[Any] | None) -> None:
        """Add a value to each of `entries`, which may repeat, in row order.

        Raises:
            SumOverflow: A sum does not fit.
        """
        if self.column.op == "sum" and self._fold_integers(entries, values):
            return
        data, valid = self._to_numbers(values)
        self._fold(entries, data)
        self.seen[entries if valid is None else entries[valid]] = 1

    def _fold_integers(self, entries: Ints, values: pa.Array | npt.NDArray[Any] | None) -> bool:
        """Sum `values` of type int64 in 64 bits, which is faster, and add the sums to the totals.

        Return False, and add nothing, if the sum of the batch may need more than 64 bits.
        """
        if not isinstance(values, pa.Array) or values.type != pa.int64() or not len(entries):
            return False
        numbers = values.fill_null(0).to_numpy(zero_copy_only=False)
        if not surely_fits(numbers, np.zeros(1, np.int64)):
            return False
        distinct, positions = np.unique(entries, return_inverse=True)
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, positions, numbers)
        self._fold(distinct, words_of_ints(sums))
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        self.seen[entries[valid]] = 1
        return True

    def add_totals(
        self, entries: Ints, totals: npt.NDArray[Any], seen: npt.NDArray[np.uint8]
    ) -> None:
        """Add totals of other entries, like `Totals.add_totals`. They may also be sums of integers.

        Raises:
            SumOverflow: A sum does not fit.
        """
        super().add_totals(entries, words_of_ints(totals) if totals.ndim == 1 else totals, seen)

    def no_results(self) -> Results:
        """Return the results of a batch without rows."""
        return self._results(self.totals[:0], None)

    def _fold(self, entries: Ints, data: Planes) -> None:
        if len(entries):
            group = Grouping.of(entries)
            running = self._run_totals(group, self.totals[group.entries], data)
            # Each entry is one segment of `group`, so none is assigned twice.
            self.totals[group.entries] = group.lasts(running)

    def _nulls(self, unseen: Mask) -> Mask | None:
        """Return a mask of the results that are null, or None if no result is null."""
        return None if self.column.op == "sum" or not unseen.any() else unseen

    def _to_numbers(
        self, values: pa.Array | npt.NDArray[Any] | None
    ) -> tuple[Planes, npt.NDArray[np.bool_] | None]:
        """Return the words of the values, with neutral words for nulls."""
        array = self._cast(values)
        words = self._words(array)
        if not array.null_count:
            return words, None
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        return np.where(valid[:, None], words, self._neutral), valid

    @property
    def _neutral(self) -> Planes:
        """The words of a value that changes no total."""
        start: Planes = self._start
        return start

    def _words(self, array: pa.Array) -> Planes:
        return decimal_words(array)

    def _run_totals(self, group: Grouping, totals: Planes, data: Planes) -> Planes:
        """Return the total at each position of `group`."""
        if self.column.op == "sum":
            return running_word_sum(group, totals, data)
        ufunc = np.minimum if self.column.op == "min" else np.maximum
        return running_word_extreme(group, totals, data, ufunc)

    def _results(self, words: Planes, unseen: Mask | None) -> pa.Array:
        if self.column.op != "sum" and unseen is not None:
            # The start words of min, max and average are no decimals: replace those under a null.
            words = np.where(unseen[:, None], 0, words)
        return decimal_array(words, self.column.type, unseen)


class ExactAverages(WideTotals):
    """Averages of decimals, rounded half away from zero, and of integers, as float64."""

    def _words(self, array: pa.Array) -> Planes:
        if pa.types.is_decimal(self.column.type):
            words = decimal_words(array)
        else:
            words = words_of_ints(array.fill_null(0).to_numpy(zero_copy_only=False))
        return np.column_stack([words, np.ones(len(words), np.int64)])

    def _run_totals(self, group: Grouping, totals: Planes, data: Planes) -> Planes:
        sums = running_word_sum(group, totals[:, :2], data[:, :2])
        return np.column_stack([sums, running_sum(group, totals[:, 2], data[:, 2])])

    def _results(self, words: Planes, unseen: Mask | None) -> pa.Array:
        sums, counts = words[:, :2], words[:, 2]
        kind, result = self.column.type, self.column.result_type
        if pa.types.is_decimal(result):
            averages = word_averages(sums, counts, result.scale - kind.scale)
            return decimal_array(averages, result, unseen)
        return pa.array(float_averages(sums, counts), mask=unseen)


class FloatAverages(WideTotals):
    """Averages of floating point numbers."""

    @property
    def _neutral(self) -> Planes:
        return np.array([-0.0, 0.0])

    def _words(self, array: pa.Array) -> Planes:
        numbers = array.to_numpy(zero_copy_only=False)
        return np.column_stack([numbers, np.ones(len(numbers))])

    def _run_totals(self, group: Grouping, totals: Planes, data: Planes) -> Planes:
        planes = [accumulate(np.add, group, totals[:, n], data[:, n]) for n in range(2)]
        return np.column_stack(planes)

    def _results(self, words: Planes, unseen: Mask | None) -> pa.Array:
        return pa.array(words[:, 0] / np.maximum(words[:, 1], 1), mask=unseen)


def wide_totals_of(column: AccumulatorColumn) -> Totals | None:
    """Return empty totals for a column, or None if a total of it is one word."""
    if column.op == "avg":
        return FloatAverages(column) if pa.types.is_floating(column.type) else ExactAverages(column)
    return WideTotals(column) if pa.types.is_decimal(column.type) else None
