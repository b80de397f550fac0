"""Arithmetic of decimals in words, against Python's integers and decimals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext

import numpy as np
import pytest

from onceflow.core.state.aggregates import decimal_words
from onceflow.core.state.aggregates.running import Grouping, SumOverflow

LIMIT = 10**38
EDGES = [
    *(0, 1, -1, LIMIT - 1, 1 - LIMIT, 2**32, -(2**32)),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, -(2**64), -(2**64) - 1),
]


@pytest.fixture(autouse=True)
def exactly() -> Iterator[None]:
    """Have Python's own decimals round nothing: they have 28 digits otherwise."""
    with localcontext(Context(prec=150)):
        yield


def words_of(numbers: Sequence[int]) -> decimal_words.Words:
    data = b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
    return np.frombuffer(data, np.int64).reshape(-1, 2)


def numbers_of(words: decimal_words.Words) -> list[int]:
    return [(high << 64) | (low & 2**64 - 1) for low, high in words.tolist()]


def random_numbers(rng: random.Random, count: int) -> list[int]:
    scale = rng.choice([10, 2**40, 2**62, 2**64, 2**70, 10**36, LIMIT - 1])
    return [
        rng.choice(EDGES) if rng.random() < 0.1 else rng.randint(-scale, scale)
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(80))
def test_decimal_sums_are_exact_or_refused_at_the_first_row_of_39_digits(seed: int) -> None:
    rng = random.Random(seed)
    entries = rng.choices(range(1, 6), k=rng.choice([1, 3, 40, 300]))
    values, totals = random_numbers(rng, len(entries)), random_numbers(rng, 6)
    group = Grouping.of(np.array(entries))
    in_order: list[int] = group.entries.tolist()
    start = words_of([totals[entry] for entry in in_order])
    expected: list[int] = []
    for entry, value in zip(entries, values, strict=True):
        totals[entry] += value
        expected.append(totals[entry])
    bad = [row for row, total in enumerate(expected) if abs(total) >= LIMIT]
    if bad:
        with pytest.raises(SumOverflow) as caught:
            decimal_words.running_word_sum(group, start, words_of(values))
        assert caught.value.row == bad[0]
    else:
        found = group.in_row_order(decimal_words.running_word_sum(group, start, words_of(values)))
        assert numbers_of(found) == expected


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("ufunc", "fold", "none"),
    [
        (np.minimum, min, decimal_words.least_start()),
        (np.maximum, max, decimal_words.greatest_start()),
    ],
    ids=["min", "max"],
)
def test_decimal_extremes_equal_those_of_one_row_after_another(
    seed: int, ufunc: np.ufunc, fold: Callable[[int, int], int], none: decimal_words.Words
) -> None:
    rng = random.Random(seed)
    entries = rng.choices(range(1, 6), k=rng.choice([1, 40, 300]))
    no_value = numbers_of(none.reshape(1, 2))[0]
    values = [
        rng.choice([number, number, no_value]) for number in random_numbers(rng, len(entries))
    ]
    totals = [rng.choice([number, no_value]) for number in random_numbers(rng, 6)]
    group = Grouping.of(np.array(entries))
    in_order: list[int] = group.entries.tolist()
    start = words_of([totals[entry] for entry in in_order])
    expected: list[int] = []
    for entry, value in zip(entries, values, strict=True):
        totals[entry] = fold(totals[entry], value)
        expected.append(totals[entry])
    found = group.in_row_order(
        decimal_words.running_word_extreme(group, start, words_of(values), ufunc)
    )
    assert numbers_of(found) == expected


@pytest.mark.parametrize("seed", range(40))
def test_decimal_averages_are_rounded_half_away_from_zero(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.choice([1, 2, 3, 4, 1000, 2**31 - 1, 2**31, 2**40]) for _ in range(20)]
    counts = counts if seed % 2 else [min(count, 2**31 - 1) for count in counts]
    digits = rng.randrange(5)
    largest = LIMIT // 10**digits - 1
    sums = [max(-largest, min(largest, number)) for number in random_numbers(rng, 20)]
    found = numbers_of(decimal_words.word_averages(words_of(sums), np.array(counts), digits))
    assert found == [
        int((Decimal(total) * 10**digits / count).quantize(Decimal(1), ROUND_HALF_UP))
        for total, count in zip(sums, counts, strict=True)
    ]
    floats = decimal_words.float_averages(words_of(sums), np.array(counts)).tolist()
    exact = [total / count for total, count in zip(sums, counts, strict=True)]
    assert floats == pytest.approx(exact, rel=1e-15)
