"""Running aggregates within a batch: the value of each key's aggregate after each of its rows.

Rows are sorted by slot once; every aggregate is then computed over the sorted rows, in row order
within a slot, starting from the slot's total. Results are those of adding one row after another:
floating point sums do not depend on how rows were cut into batches, so a replay gives equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onceflow.core.state.keys.key_columns import Ints

SEGMENT_ROUNDS_MAX = 64
"""Longer segments are accumulated one by one: at most rows / 64 calls of some 3 µs in a batch."""
_LIMIT = 1 << 63


class SumOverflow(Exception):
    """Raised when a running sum leaves 64 bits; `row` is where."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row}")
        self.row = row


@dataclass(frozen=True, slots=True)
class Grouping:
    """The rows of a batch, sorted by slot and then by row.

    `order[i]` is the row at sorted place i; segment s, of `slots[s]`, holds the places `firsts[s]`
    to `firsts[s] + counts[s] - 1`.
    """

    order: Ints
    slots: Ints
    firsts: Ints
    counts: Ints

    @classmethod
    def of(cls, slots: Ints) -> Grouping:
        """Return the grouping of rows whose slots these are."""
        rows = len(slots)
        bits = max(rows - 1, 1).bit_length()
        # Slot and row in one integer: any sort of distinct numbers is a stable sort of the slots.
        packed = (slots << bits) | np.arange(rows)
        packed.sort()
        order = packed & ((1 << bits) - 1)
        packed >>= bits
        new = np.ones(rows, np.bool_)
        new[1:] = packed[1:] != packed[:-1]
        firsts = np.flatnonzero(new)
        counts = np.diff(np.append(firsts, rows))
        return cls(order, packed[firsts], firsts, counts)

    def spread(self, per_segment: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return each place's value of its segment."""
        return np.repeat(per_segment, self.counts)

    def lasts(self, per_place: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return each segment's value at its last place."""
        chosen: npt.NDArray[Any] = per_place[self.firsts + self.counts - 1]
        return chosen

    def in_row_order(self, per_place: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values at the rows that they belong to."""
        rows = np.empty_like(per_place)
        rows[self.order] = per_place
        return rows


def running_count(group: Grouping, totals: Ints, valid: npt.NDArray[np.bool_] | None) -> Ints:
    """Return the count at each place, `totals` being each segment's so far."""
    if valid is not None:
        return running_sum(group, totals, valid.astype(np.int64))
    counts: Ints = group.spread(totals - group.firsts)
    counts += np.arange(1, len(group.order) + 1)
    return counts


def running_sum(group: Grouping, totals: Ints, values: Ints) -> Ints:
    """Return the integer sum at each place; `values` are in row order.

    Raises:
        SumOverflow: It does not fit 64 bits at some place.
    """
    ordered = values[group.order]
    if not surely_fits(ordered, totals):
        _check_fits(group, totals, ordered)
    # Wraps modulo 2**64 along the batch, and wraps back: each place's own result fits.
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
    """Add up high and low halves apart; neither can overflow in fewer than 2**31 rows."""
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
    """Return `ufunc` folded over each segment, from left to right, at each place."""
    out: npt.NDArray[Any] = values[group.order]
    firsts, counts = group.firsts, group.counts
    out[firsts] = ufunc(totals, out[firsts])
    short = np.flatnonzero((counts > 1) & (counts <= SEGMENT_ROUNDS_MAX))
    places, left = firsts[short], counts[short] - 1
    while len(places):
        out[places + 1] = ufunc(out[places], out[places + 1])
        left = left - 1
        go_on = left > 0
        places, left = places[go_on] + 1, left[go_on]
    for segment in np.flatnonzero(counts > SEGMENT_ROUNDS_MAX).tolist():
        part = out[int(firsts[segment]) : int(firsts[segment] + counts[segment])]
        part[:] = ufunc.accumulate(part)
    return out
