"""Arithmetic of decimals as pairs of 64-bit words, in Arrow's little-endian order.

Words are arrays of shape (n, 2): the low word, whose bits are unsigned, and the high word, which is
signed. Together they are the unscaled value, in two's complement. numpy has no 128-bit integers, so
larger values are computed in limbs: four int64 columns that hold 32 bits each, so that sums and
products of limbs fit into 64 bits.

Invariant:
    -10**38 < every sum < 10**38; otherwise `SumOverflow` names the first row that violates it
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.state.aggregates import running
from onceflow.core.state.api.descriptors import DIGITS_MAX
from onceflow.core.state.keys.key_columns import Ints

Words = Ints
Mask = npt.NDArray[np.bool_]

_LIMIT = 10**DIGITS_MAX
_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1
_INT64 = np.iinfo(np.int64)
_COUNT_END = 1 << 31
"""Counts below this are used as divisors limb by limb: a remainder, which is below the count, and a
further limb of 32 bits are a dividend of at most 63 bits."""


def decimal_words(array: pa.Array) -> Words:
    """Return the words of a decimal128 array. Those of nulls are undefined.

    Must not be written to.
    """
    buffer = array.buffers()[1]
    if not len(array) or buffer is None:
        return np.zeros((0, 2), np.int64)
    every: Ints = np.frombuffer(cast("Any", buffer), np.int64)
    # Arrow's own memory, two words a row: a slice of an array begins at its offset.
    return every[2 * array.offset : 2 * (array.offset + len(array))].reshape(-1, 2)


def decimal_array(words: Words, kind: pa.DataType, unseen: Mask | None) -> pa.Array:
    """Return words as an array of decimal type `kind`; null where `unseen`."""
    data = pa.py_buffer(np.ascontiguousarray(words))
    valid = None if unseen is None else pa.array(~unseen).buffers()[1]
    return pa.Array.from_buffers(kind, len(words), [valid, data])


def least_start() -> Words:
    """Return the minimum of no values: greater than any decimal."""
    return np.array([_INT64.max, _INT64.max])


def greatest_start() -> Words:
    """Return the maximum of no values: less than any decimal."""
    return np.array([_INT64.min, _INT64.min])


def words_of_ints(numbers: Ints) -> Words:
    """Return 64-bit integers as words."""
    # An arithmetic shift by 63 gives 0 or -1: the high word of a number that fits the low one.
    return np.column_stack([numbers, numbers >> 63])


def running_word_sum(group: running.Grouping, totals: Words, values: Words) -> Words:
    """Return the sum at each position; `values` are in row order, as in `running_sum`.

    Raises:
        SumOverflow: A sum has more than 38 digits.
    """
    lows, starts = values[:, 0], totals[:, 0]
    if _is_narrow(values).all() and _is_narrow(totals).all() and running.surely_fits(lows, starts):
        return words_of_ints(running.running_sum(group, starts, lows))
    ordered, firsts = values[group.order], group.firsts
    limbs: list[Ints] = []
    carry: Ints = np.zeros(1, np.int64)
    for start, limb in zip(_limbs(totals), _limbs(ordered), strict=True):
        # Fewer than 2**31 rows of 32 bits fit 63 bits: no limb's sum wraps.
        sums = np.cumsum(limb)
        # One running sum over all segments: add each segment's total, and subtract the sum before
        # it.
        sums += group.spread(start - (sums[firsts] - limb[firsts]))
        sums += carry
        # The bits of a limb above 32 are carried into the next limb. The shift keeps a negative
        # sign.
        carry = sums >> 32
        limbs.append(sums & _HALF)
    high = (carry << 32) + limbs[3]
    # With its carry, the highest limb must equal the upper half of the high word. Otherwise the sum
    # exceeds 128 bits.
    words = _join_limbs(limbs)
    bad = np.flatnonzero((high != words[:, 1] >> 32) | ~_fits(words))
    if len(bad):
        raise running.SumOverflow(int(group.order[bad].min()))
    return words


def running_word_extreme(
    group: running.Grouping, totals: Words, values: Words, ufunc: np.ufunc
) -> Words:
    """Return the extreme at each position; `ufunc` is np.minimum or np.maximum.

    Missing totals and values are `least_start` or `greatest_start`.
    """
    # The low word of a missing value. A narrow number that equals it is not treated as narrow.
    edge = _INT64.max if ufunc is np.minimum else _INT64.min
    narrow = _narrow(totals, edge), _narrow(values, edge)
    if narrow[0] is not None and narrow[1] is not None:
        extremes: Ints = running.accumulate(ufunc, group, narrow[0], narrow[1])
        return np.column_stack([extremes, np.where(extremes == edge, edge, extremes >> 63)])
    # A ufunc cannot compare pairs of words, but it can compare their ranks.
    every = np.concatenate([totals, values])
    order = np.lexsort((np.ascontiguousarray(every[:, 0]).view(np.uint64), every[:, 1]))
    ranks = np.empty_like(order)
    # The inverse of the permutation: the rank of each number.
    ranks[order] = np.arange(len(order))
    chosen: Ints = running.accumulate(ufunc, group, ranks[: len(totals)], ranks[len(totals) :])
    return every[order[chosen]]


def word_averages(sums: Words, counts: Ints, digits: int) -> Words:
    """Return sums / counts * 10**digits, with halves rounded away from zero.

    `digits` is at most 4; a count of 0 counts as 1.
    """
    factor = 10**digits
    # A sum with a count of 0 is 0, and its result is null anyway.
    counts = np.maximum(counts, 1)
    # Without signs, rounding halves up rounds them away from zero.
    magnitudes, negative = _magnitudes(sums)
    lows = magnitudes[:, 0]
    narrow = not magnitudes[:, 1].any() and bool((lows >= 0).all())
    if not len(sums):
        return sums
    if narrow and 2 * factor * int(lows.max()) + int(counts.max()) < 1 << 63:
        # round(x / y) of integers, with halves up, is (2 * x + y) // (2 * y).
        averages = words_of_ints((2 * factor * lows + counts) // (2 * counts))
    elif int(counts.max()) < _COUNT_END:
        averages = _divide(magnitudes, counts, factor)
    else:
        averages = _divide_by_python(magnitudes, counts, factor)
    return np.where(negative[:, None], _negate(averages), averages)


def float_averages(sums: Words, counts: Ints) -> npt.NDArray[np.float64]:
    """Return sums / counts of integers; a count of 0 counts as 1."""
    magnitudes, negative = _magnitudes(sums)
    lows = np.ascontiguousarray(magnitudes[:, 0]).view(np.uint64).astype(np.float64)
    averages = (magnitudes[:, 1].astype(np.float64) * 2.0**64 + lows) / np.maximum(counts, 1)
    return np.where(negative, -averages, averages)


def _is_narrow(words: Words) -> Mask:
    """Return True for each number that fits into 64 bits."""
    narrow: Mask = words[:, 1] == words[:, 0] >> 63
    return narrow


def _narrow(words: Words, edge: int) -> Ints | None:
    """Return words as 64-bit integers, with `edge` for no value; None unless all of them fit."""
    lows, none = words[:, 0], words[:, 1] == edge
    if not ((_is_narrow(words) & (lows != edge)) | none).all():
        return None
    return np.where(none, edge, lows)


def _limbs(words: Words) -> list[Ints]:
    """Return four limbs of 32 bits each, the lowest first. The highest is signed."""
    low, high = words[:, 0], words[:, 1]
    return [low & _HALF, (low >> 32) & _HALF, high & _HALF, high >> 32]


def _join_limbs(limbs: list[Ints]) -> Words:
    """Return the words of four limbs, none of which is negative."""
    return np.column_stack([limbs[0] | (limbs[1] << 32), limbs[2] | (limbs[3] << 32)])


def _fits(words: Words) -> Mask:
    """Return True for each number that has at most 38 digits."""
    low, high = np.ascontiguousarray(words[:, 0]).view(np.uint64), words[:, 1]
    # Compare the high words, which are signed, and if they are equal, the low words.
    end, least = _LIMIT, 1 - _LIMIT
    below = (high < end >> 64) | ((high == end >> 64) & (low < np.uint64(end & _WORD)))
    above = (high > least >> 64) | ((high == least >> 64) & (low >= np.uint64(least & _WORD)))
    fits: Mask = below & above
    return fits


def _negate(words: Words) -> Words:
    low, high = words[:, 0], words[:, 1]
    # Two's complement: all bits inverted, plus 1, which carries into the high word if low is 0.
    return np.column_stack([-low, ~high + (low == 0)])


def _magnitudes(words: Words) -> tuple[Words, Mask]:
    """Return the numbers without their signs, and a mask of the negative ones."""
    negative = words[:, 1] < 0
    if not negative.any():
        return words, negative
    return np.where(negative[:, None], _negate(words), words), negative


def _divide(magnitudes: Words, counts: Ints, factor: int) -> Words:
    """Return magnitudes / counts * factor, rounded; counts are below 2**31."""
    # Long division, with a limb as a digit, from the highest on.
    remainder: Ints = np.zeros(len(counts), np.int64)
    quotients: list[Ints] = []
    for limb in reversed(_limbs(magnitudes)):
        dividend = (remainder << 32) | limb
        quotient = dividend // counts
        remainder = dividend - quotient * counts
        quotients.append(quotient)
    # Multiplied after the division, so that no limb overflows. The multiplication starts with the
    # remainder, times the factor and rounded.
    carry = (2 * factor * remainder + counts) // (2 * counts)
    limbs: list[Ints] = []
    for quotient in reversed(quotients):
        product = quotient * factor + carry
        carry = product >> 32
        limbs.append(product & _HALF)
    return _join_limbs(limbs)


def _divide_by_python(magnitudes: Words, counts: Ints, factor: int) -> Words:
    """Return the result of `_divide`, computed one by one: few keys have 2**31 records."""
    averages = np.empty_like(magnitudes)
    pairs = zip(magnitudes.tolist(), counts.tolist(), strict=True)
    for row, ((low, high), count) in enumerate(pairs):
        # Masked, because `tolist` returns the low word with a sign.
        number = (high << 64) | (low & _WORD)
        average = (2 * factor * number + count) // (2 * count)
        words = average.to_bytes(16, "little")
        averages[row] = np.frombuffer(words, np.int64)
    return averages
