"""Running aggregates within a batch: the value of each key's aggregate after each of its rows.

Rows are sorted by entry once. Each aggregate is then computed over the sorted rows, in row order
within an entry, starting from the entry's total. The results equal those of adding one row after
another. So a floating point sum does not depend on how rows are split into batches, and a replay
gives equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onceflow.core.state.keys.key_columns import Ints

SEGMENT_ROUNDS_MAX = 64
"""The maximum length of segments that are accumulated together, one row of each segment in each
round. Longer segments are accumulated one by one: at most rows / 64 calls of about 3 µs in a batch.
"""
_LIMIT = 1 << 63
"""The smallest sum that does not fit into 64 bits with sign."""
_MAGNITUDE = (1 << 63) - 1
"""The bits of a float without its sign."""


class SumOverflow(Exception):
    """Raised if a running sum exceeds 64 bits; `row` is the first such row."""

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
        """Return the grouping of rows with these entries."""
        rows = len(entries)
        bits = max(rows - 1, 1).bit_length()
        # The entry in the high bits and the row in the low bits of one integer. Sorting these
        # distinct integers sorts rows by entry, keeps their order within one, and is faster than a
        # stable argsort.
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
        """Return the value of the position's segment, for each position."""
        return np.repeat(per_segment, self.counts)

    def lasts(self, per_position: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value at the last position of each segment."""
        chosen: npt.NDArray[Any] = per_position[self.firsts + self.counts - 1]
        return chosen

    def in_row_order(self, per_position: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values given by position in the order of the rows."""
        rows = np.empty_like(per_position)
        rows[self.order] = per_position
        return rows


def running_count(group: Grouping, totals: Ints, valid: npt.NDArray[np.bool_] | None) -> Ints:
    """Return the count at each position. `totals` are the segments' counts before this batch."""
    if valid is not None:
        return running_sum(group, totals, valid.astype(np.int64))
    # Position p of a segment that begins at f has the count total - f + p + 1.
    counts: Ints = group.spread(totals - group.firsts)
    counts += np.arange(1, len(group.order) + 1)
    return counts


def running_sum(group: Grouping, totals: Ints, values: Ints) -> Ints:
    """Return the integer sum at each position; `values` are in row order.

    Raises:
        SumOverflow: A sum does not fit into 64 bits.
    """
    ordered = values[group.order]
    if not surely_fits(ordered, totals):
        _check_fits(group, totals, ordered)
    # One sum over all segments, from which the sum before each segment is subtracted. It may wrap
    # modulo 2**64, and the subtraction wraps it back: the result at each position fits.
    sums = np.cumsum(ordered)
    before = sums[group.firsts] - ordered[group.firsts]
    sums += group.spread(totals - before)
    return sums


def surely_fits(values: Ints, totals: Ints) -> bool:
    """Return True if no sum of `totals` and any of `values` can exceed 64 bits."""
    if not len(values):
        return True
    step = max(int(values.max()), -int(values.min()))
    start = max(int(totals.max()), -int(totals.min()))
    return start + step * len(values) < _LIMIT


def _check_fits(group: Grouping, totals: Ints, ordered: Ints) -> None:
    """Raise SumOverflow unless the sum at each position fits into 64 bits.

    Adds the high and low halves of 32 bits separately: neither overflows in fewer than 2**31 rows.
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
    """Return `ufunc` accumulated over each segment, from left to right, at each position."""
    # A sum of floats may be infinite or NaN, as in any database: no warning is needed.
    with np.errstate(invalid="ignore", over="ignore"):
        return _accumulate(ufunc, group, totals, values)


def accumulate_extreme(
    ufunc: np.ufunc, group: Grouping, totals: npt.NDArray[Any], values: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the least or greatest of floats over each segment, at each position.

    `ufunc` (np.fmin, np.minimum or np.maximum) is applied to integers that sort like the floats.
    -0.0 is less than 0.0, and NaN is the greatest.
    """
    words = accumulate(ufunc, group, to_ordered_words(totals), to_ordered_words(values))
    return from_ordered_words(words)


def to_ordered_words(floats: npt.NDArray[np.float64]) -> Ints:
    """Return integers that sort like the floats, with -0.0 before 0.0 and NaN as the greatest.

    numpy's own minimum returns either of -0.0 and 0.0, depending on the length of its input.
    """
    # Replace each NaN by one without a sign: with a sign it would be the least.
    words: Ints = np.where(np.isnan(floats), np.nan, floats).view(np.int64)
    # Magnitudes of negative floats grow downwards, so all bits but the sign are inverted.
    return words ^ ((words >> 63) & _MAGNITUDE)


def from_ordered_words(words: Ints) -> npt.NDArray[np.float64]:
    """Return the floats that `to_ordered_words` converted."""
    return (words ^ ((words >> 63) & _MAGNITUDE)).view(np.float64)


def _accumulate(
    ufunc: np.ufunc, group: Grouping, totals: npt.NDArray[Any], values: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = values[group.order]
    firsts, counts = group.firsts, group.counts
    # The total so far is combined with each segment's first value; the rounds continue from there.
    out[firsts] = ufunc(totals, out[firsts])
    # Round n adds the value at position n of all short segments at once. There are as many rounds
    # as the longest of them has rows, and each segment is added strictly from left to right.
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
