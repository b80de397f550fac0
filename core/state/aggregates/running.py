"""Running aggregates within a batch: the value of each key's aggregate after each of its rows.

Rows are sorted by entry once. Every aggregate is then computed over the sorted rows, in row order
within an entry, starting from the entry's total. Results are those of adding one row after another.
So a floating point sum does not depend on how rows were cut into batches, and a replay gives equal
bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onceflow.core.state.keys.key_columns import Ints

SEGMENT_ROUNDS_MAX = 64
"""Rows of a segment that all segments are accumulated over together, one row a round. Longer
segments are accumulated one by one: at most rows / 64 calls of some 3 µs in a batch."""
_LIMIT = 1 << 63
"""The first sum that 64 bits with sign do not hold."""
_MAGNITUDE = (1 << 63) - 1
"""The bits of a float without its sign."""


class SumOverflow(Exception):
    """Raised when a running sum leaves 64 bits; `row` is where."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row}")
        self.row = row


@dataclass(frozen=True, slots=True)
class Grouping:
    """The rows of a batch, sorted by entry and then by row.

    `order[i]` is the row at sorted position i. Segment s has the rows of `entries[s]`: the
    positions `firsts[s]` to `firsts[s] + counts[s] - 1`.
    """

    order: Ints
    entries: Ints
    firsts: Ints
    counts: Ints

    @classmethod
    def of(cls, entries: Ints) -> Grouping:
        """Return the grouping of rows whose entries these are."""
        rows = len(entries)
        bits = max(rows - 1, 1).bit_length()
        # Entry above and row below in one integer. Sorting these distinct integers sorts rows by
        # entry, keeps their order within one, and is faster than a stable argsort.
        packed = (entries << bits) | np.arange(rows)
        packed.sort()
        order = packed & ((1 << bits) - 1)
        packed >>= bits
        is_first = np.ones(rows, np.bool_)
        is_first[1:] = packed[1:] != packed[:-1]
        firsts = np.flatnonzero(is_first)
        counts = np.diff(np.append(firsts, rows))
        return cls(order, packed[firsts], firsts, counts)

    def spread(self, per_segment: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return each position's value of its segment."""
        return np.repeat(per_segment, self.counts)

    def lasts(self, per_position: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return each segment's value at its last position."""
        chosen: npt.NDArray[Any] = per_position[self.firsts + self.counts - 1]
        return chosen

    def in_row_order(self, per_position: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values at the rows that they belong to."""
        rows = np.empty_like(per_position)
        rows[self.order] = per_position
        return rows


def running_count(group: Grouping, totals: Ints, valid: npt.NDArray[np.bool_] | None) -> Ints:
    """Return the count at each position, `totals` being each segment's so far."""
    if valid is not None:
        return running_sum(group, totals, valid.astype(np.int64))
    # Position p of a segment that begins at f has the count total - f + p + 1.
    counts: Ints = group.spread(totals - group.firsts)
    counts += np.arange(1, len(group.order) + 1)
    return counts


def running_sum(group: Grouping, totals: Ints, values: Ints) -> Ints:
    """Return the integer sum at each position; `values` are in row order.

    Raises:
        SumOverflow: It does not fit 64 bits at some position.
    """
    ordered = values[group.order]
    if not surely_fits(ordered, totals):
        _check_fits(group, totals, ordered)
    # One sum over all segments, from which what came before each segment is taken off. The sum may
    # wrap modulo 2**64, and the subtraction wraps it back: each position's own result fits.
    sums = np.cumsum(ordered)
    before = sums[group.firsts] - ordered[group.firsts]
    sums += group.spread(totals - before)
    return sums


def surely_fits(values: Ints, totals: Ints) -> bool:
    """Tell whether no sum of `totals` and any of `values` can leave 64 bits."""
    if not len(values):
        return True
    step = max(int(values.max()), -int(values.min()))
    start = max(int(totals.max()), -int(totals.min()))
    return start + step * len(values) < _LIMIT


def _check_fits(group: Grouping, totals: Ints, ordered: Ints) -> None:
    """Raise SumOverflow unless the sum at each position fits 64 bits.

    Adds up high and low halves of 32 bits apart: neither overflows in fewer than 2**31 rows.
    """
    low_total, high_total = totals & 0xFFFFFFFF, totals >> 32
    low, high = np.cumsum(ordered & 0xFFFFFFFF), np.cumsum(ordered >> 32)
    firsts = group.firsts
    low += group.spread(low_total - (low[firsts] - (ordered[firsts] & 0xFFFFFFFF)))
    high += group.spread(high_total - (high[firsts] - (ordered[firsts] >> 32)))
    high += low >> 32
    bad = np.flatnonzero((high < -(1 << 31)) | (high >= 1 << 31))
    if len(bad):
        raise SumOverflow(int(group.order[bad].min()))


def accumulate(
    ufunc: np.ufunc, group: Grouping, totals: npt.NDArray[Any], values: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return `ufunc` folded over each segment, from left to right, at each position."""
    # A sum of floats may be infinite or NaN, as in any database: that is no reason to warn.
    with np.errstate(invalid="ignore", over="ignore"):
        return _accumulate(ufunc, group, totals, values)


def accumulate_extreme(
    ufunc: np.ufunc, group: Grouping, totals: npt.NDArray[Any], values: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the least or greatest of floats over each segment, at each position.

    `ufunc` runs over integers that sort as floats: np.fmin, np.minimum or np.maximum. -0.0 is less
    than 0.0, and NaN is the greatest.
    """
    words = accumulate(ufunc, group, to_ordered_words(totals), to_ordered_words(values))
    return from_ordered_words(words)


def to_ordered_words(floats: npt.NDArray[np.float64]) -> Ints:
    """Return integers that sort as the floats do, with -0.0 before 0.0 and NaN as the greatest.

    numpy's own minimum takes either of -0.0 and 0.0, by the length of its input.
    """
    # `nan` alone, for its bits may have a sign, with which it would be the least.
    words: Ints = np.where(np.isnan(floats), np.nan, floats).view(np.int64)
    # Magnitudes of negative floats grow downwards: all bits but the sign are inverted.
    return words ^ ((words >> 63) & _MAGNITUDE)


def from_ordered_words(words: Ints) -> npt.NDArray[np.float64]:
    """Return the floats of `to_ordered_words`."""
    return (words ^ ((words >> 63) & _MAGNITUDE)).view(np.float64)


def _accumulate(
    ufunc: np.ufunc, group: Grouping, totals: npt.NDArray[Any], values: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = values[group.order]
    firsts, counts = group.firsts, group.counts
    # The total so far goes into each segment's first value; the rounds carry it on.
    out[firsts] = ufunc(totals, out[firsts])
    # Round n adds the value at position n of all short segments at once: as many rounds as the
    # longest of them has rows, and in each segment strictly from left to right.
    short = np.flatnonzero((counts > 1) & (counts <= SEGMENT_ROUNDS_MAX))
    positions, remaining = firsts[short], counts[short] - 1
    while len(positions):
        out[positions + 1] = ufunc(out[positions], out[positions + 1])
        remaining = remaining - 1
        unfinished = remaining > 0
        positions, remaining = positions[unfinished] + 1, remaining[unfinished]
    for segment in np.flatnonzero(counts > SEGMENT_ROUNDS_MAX).tolist():
        part = out[int(firsts[segment]) : int(firsts[segment] + counts[segment])]
        part[:] = ufunc.accumulate(part)
    return out
