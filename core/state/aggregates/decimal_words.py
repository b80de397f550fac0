"""Arithmetic of decimals as pairs of 64-bit words: as Arrow has them, in little-endian order.

Words are arrays of shape (n, 2): the low word, whose bits are unsigned, and the high word, which is
signed. Together they are the unscaled value, in two's complement.

Invariant:
    -10**38 < every sum < 10**38: one that is not is refused, where it comes first
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.state.aggregates.running import (
    Grouping,
    SumOverflow,
    accumulate,
    running_sum,
    surely_fits,
)
from onceflow.core.state.api.descriptors import DIGITS_MAX
from onceflow.core.state.keys.key_columns import Ints

Words = Ints
Mask = npt.NDArray[np.bool_]

_LIMIT = 10**DIGITS_MAX
_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1
_INT64 = np.iinfo(np.int64)
_COUNT_END = 1 << 31
"""Below this a remainder and 32 further bits are in 63."""


def decimal_words(array: pa.Array) -> Words:
    """Return the words of a decimal128 array; those of nulls are anything. Not to be written to."""
    buffer = array.buffers()[1]
    if not len(array) or buffer is None:
        return np.zeros((0, 2), np.int64)
    every: Ints = np.frombuffer(cast("Any", buffer), np.int64)
    return every[2 * array.offset : 2 * (array.offset + len(array))].reshape(-1, 2)


def decimal_array(words: Words, kind: pa.DataType, unseen: Mask | None) -> pa.Array:
    """Return words as an array of a decimal type that holds them; null where `unseen`."""
    data = pa.py_buffer(np.ascontiguousarray(words))
    valid = None if unseen is None else pa.array(~unseen).buffers()[1]
    return pa.Array.from_buffers(kind, len(words), [valid, data])


def least_start() -> Words:
    """Return the minimum of no values: more than any decimal."""
    return np.array([_INT64.max, _INT64.max])


def greatest_start() -> Words:
    """Return the maximum of no values: less than any decimal."""
    return np.array([_INT64.min, _INT64.min])


def words_of_ints(numbers: Ints) -> Words:
    """Return 64-bit integers as words."""
    return np.column_stack([numbers, numbers >> 63])


def running_word_sum(group: Grouping, totals: Words, values: Words) -> Words:
    """Return the sum at each place; `values` are in row order, as in `running_sum`.

    Raises:
        SumOverflow: It has more than 38 digits at some place.
    """
    lows, starts = values[:, 0], totals[:, 0]
    if _is_narrow(values).all() and _is_narrow(totals).all() and surely_fits(lows, starts):
        return words_of_ints(running_sum(group, starts, lows))
    ordered, firsts = values[group.order], group.firsts
    limbs: list[Ints] = []
    carry: Ints = np.zeros(1, np.int64)
    for start, limb in zip(_limbs(totals), _limbs(ordered), strict=True):
        # 2**31 rows of 32 bits are in 63: no limb's sum wraps.
        sums = np.cumsum(limb)
        sums += group.spread(start - (sums[firsts] - limb[firsts]))
        sums += carry
        carry = sums >> 32
        limbs.append(sums & _HALF)
    high = (carry << 32) + limbs[3]
    # What is left of the highest limb is its sign, unless the sum is beyond 128 bits.
    words = _joined(limbs)
    bad = np.flatnonzero((high != words[:, 1] >> 32) | ~_fits(words))
    if len(bad):
        raise SumOverflow(int(group.order[bad].min()))
    return words


def running_word_extreme(group: Grouping, totals: Words, values: Words, ufunc: np.ufunc) -> Words:
    """Return the extreme at each place: `ufunc` is np.minimum or np.maximum.

    What has no value is `least_start` or `greatest_start`, among totals and values.
    """
    edge = _INT64.max if ufunc is np.minimum else _INT64.min
    narrow = _narrow(totals, edge), _narrow(values, edge)
    if narrow[0] is not None and narrow[1] is not None:
        found: Ints = accumulate(ufunc, group, narrow[0], narrow[1])
        return np.column_stack([found, np.where(found == edge, edge, found >> 63)])
    every = np.concatenate([totals, values])
    order = np.lexsort((np.ascontiguousarray(every[:, 0]).view(np.uint64), every[:, 1]))
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    chosen: Ints = accumulate(ufunc, group, ranks[: len(totals)], ranks[len(totals) :])
    return every[order[chosen]]


def word_averages(sums: Words, counts: Ints, digits: int) -> Words:
    """Return sums by counts times 10**digits, at most 10**4; a half is rounded away from zero."""
    factor = 10**digits
    counts = np.maximum(counts, 1)
    magnitudes, negative = _magnitudes(sums)
    lows = magnitudes[:, 0]
    narrow = not magnitudes[:, 1].any() and bool((lows >= 0).all())
    if not len(sums):
        return sums
    if narrow and 2 * factor * int(lows.max()) + int(counts.max()) < 1 << 63:
        found = words_of_ints((2 * factor * lows + counts) // (2 * counts))
    elif int(counts.max()) < _COUNT_END:
        found = _divided(magnitudes, counts, factor)
    else:
        found = _divided_by_python(magnitudes, counts, factor)
    return np.where(negative[:, None], _negated(found), found)


def float_averages(sums: Words, counts: Ints) -> npt.NDArray[np.float64]:
    """Return sums of whole numbers by counts."""
    magnitudes, negative = _magnitudes(sums)
    lows = np.ascontiguousarray(magnitudes[:, 0]).view(np.uint64).astype(np.float64)
    found = (magnitudes[:, 1].astype(np.float64) * 2.0**64 + lows) / np.maximum(counts, 1)
    return np.where(negative, -found, found)


def _is_narrow(words: Words) -> Mask:
    """Tell which numbers are in 64 bits."""
    narrow: Mask = words[:, 1] == words[:, 0] >> 63
    return narrow


def _narrow(words: Words, edge: int) -> Ints | None:
    """Return words as 64-bit integers, `edge` for no value; None unless all can be."""
    lows, none = words[:, 0], words[:, 1] == edge
    if not ((_is_narrow(words) & (lows != edge)) | none).all():
        return None
    return np.where(none, edge, lows)


def _limbs(words: Words) -> list[Ints]:
    """Return 32 bits each, the lowest first; the highest is signed."""
    low, high = words[:, 0], words[:, 1]
    return [low & _HALF, (low >> 32) & _HALF, high & _HALF, high >> 32]


def _joined(limbs: list[Ints]) -> Words:
    """Return the words of four limbs without a sign of their own."""
    return np.column_stack([limbs[0] | (limbs[1] << 32), limbs[2] | (limbs[3] << 32)])


def _fits(words: Words) -> Mask:
    """Tell which numbers have at most 38 digits."""
    low, high = np.ascontiguousarray(words[:, 0]).view(np.uint64), words[:, 1]
    end, least = _LIMIT, 1 - _LIMIT
    below = (high < end >> 64) | ((high == end >> 64) & (low < np.uint64(end & _WORD)))
    above = (high > least >> 64) | ((high == least >> 64) & (low >= np.uint64(least & _WORD)))
    fits: Mask = below & above
    return fits


def _negated(words: Words) -> Words:
    low, high = words[:, 0], words[:, 1]
    return np.column_stack([-low, ~high + (low == 0)])


def _magnitudes(words: Words) -> tuple[Words, Mask]:
    """Return the numbers without their signs, and which were negative."""
    negative = words[:, 1] < 0
    if not negative.any():
        return words, negative
    return np.where(negative[:, None], _negated(words), words), negative


def _divided(magnitudes: Words, counts: Ints, factor: int) -> Words:
    """Divide by counts below 2**31: limb by limb, as on paper."""
    rest: Ints = np.zeros(len(counts), np.int64)
    quotients: list[Ints] = []
    for limb in reversed(_limbs(magnitudes)):
        dividend = (rest << 32) | limb
        quotient = dividend // counts
        rest = dividend - quotient * counts
        quotients.append(quotient)
    carry = (2 * factor * rest + counts) // (2 * counts)
    limbs: list[Ints] = []
    for quotient in reversed(quotients):
        product = quotient * factor + carry
        carry = product >> 32
        limbs.append(product & _HALF)
    return _joined(limbs)


def _divided_by_python(magnitudes: Words, counts: Ints, factor: int) -> Words:
    """Divide one by one: there are only so many keys with 2**31 records."""
    found = np.empty_like(magnitudes)
    pairs = zip(magnitudes.tolist(), counts.tolist(), strict=True)
    for row, ((low, high), count) in enumerate(pairs):
        number = (high << 64) | (low & _WORD)
        average = (2 * factor * number + count) // (2 * count)
        words = average.to_bytes(16, "little")
        found[row] = np.frombuffer(words, np.int64)
    return found
