"""Running aggregates within a batch, against one row after another."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onceflow.core.state.aggregates.running import Grouping, SumOverflow, accumulate, running_sum

LIMIT = 2**63


def one_by_one(
    entries: list[int], values: list[Any], totals: dict[int, Any], fold: Callable[[Any, Any], Any]
) -> list[Any]:
    state = dict(totals)
    out: list[Any] = []
    for entry, value in zip(entries, values, strict=True):
        state[entry] = fold(state[entry], value)
        out.append(state[entry])
    return out


def random_entries(rng: random.Random, rows: int) -> list[int]:
    weights = [rng.random() ** 6 for _ in range(20)]
    return [entry + 1 for entry in rng.choices(range(20), weights, k=rows)]


@pytest.mark.parametrize("seed", range(10))
def test_float_sums_have_the_bits_of_adding_one_row_after_another(seed: int) -> None:
    rng = random.Random(seed)
    entries = random_entries(rng, rng.choice([1, 2, 500, 3000]))
    values = [rng.uniform(-1, 1) * 10 ** rng.randrange(-8, 17) for _ in entries]
    totals = {entry: rng.uniform(-5, 5) for entry in range(1, 21)}
    group = Grouping.of(np.array(entries))
    start = np.array([totals[entry] for entry in group.entries.tolist()])
    found = group.in_row_order(accumulate(np.add, group, start, np.array(values)))
    assert found.tolist() == one_by_one(entries, values, totals, lambda a, b: a + b)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("ufunc", "fold"), [(np.minimum, min), (np.maximum, max)])
def test_minima_and_maxima_equal_those_of_one_row_after_another(
    seed: int, ufunc: np.ufunc, fold: Callable[[Any, Any], Any]
) -> None:
    rng = random.Random(seed)
    entries = random_entries(rng, 700)
    values = [rng.randrange(-LIMIT, LIMIT) for _ in entries]
    totals = {entry: rng.randrange(-LIMIT, LIMIT) for entry in range(1, 21)}
    group = Grouping.of(np.array(entries))
    start = np.array([totals[entry] for entry in group.entries.tolist()])
    found = group.in_row_order(accumulate(ufunc, group, start, np.array(values)))
    assert found.tolist() == one_by_one(entries, values, totals, fold)


@pytest.mark.parametrize("seed", range(60))
def test_integer_sums_are_exact_or_refused_at_the_first_row_that_overflows(seed: int) -> None:
    rng = random.Random(seed)
    entries = random_entries(rng, rng.choice([1, 3, 40]))
    scale = rng.choice([100, 2**40, 2**61, 2**63 - 1])
    edges = [0, -1, 1, LIMIT - 1, -LIMIT]
    values = [
        rng.choice(edges) if rng.random() < 0.1 else rng.randint(-scale, scale) for _ in entries
    ]
    totals = {entry: rng.choice([*edges, rng.randint(-scale, scale)]) for entry in range(1, 21)}
    expected = one_by_one(entries, values, totals, lambda a, b: a + b)
    group = Grouping.of(np.array(entries))
    start = np.array([totals[entry] for entry in group.entries.tolist()])
    bad = [row for row, total in enumerate(expected) if not -LIMIT <= total < LIMIT]
    if bad:
        with pytest.raises(SumOverflow) as caught:
            running_sum(group, start, np.array(values))
        assert caught.value.row == bad[0]
    else:
        found = group.in_row_order(running_sum(group, start, np.array(values)))
        assert found.tolist() == expected


def test_a_sum_that_touches_both_limits_is_exact() -> None:
    group = Grouping.of(np.array([1, 1, 1, 2]))
    start = np.array([LIMIT - 2, -LIMIT + 1])
    found = running_sum(group, start, np.array([1, -1, 1, -1]))
    assert group.in_row_order(found).tolist() == [LIMIT - 1, LIMIT - 2, LIMIT - 1, -LIMIT]


def test_nan_is_the_largest_number() -> None:
    group = Grouping.of(np.array([1, 1, 1]))
    values = np.array([math.nan, 3.0, 5.0])
    low = accumulate(np.fmin, group, np.array([math.nan]), values)
    high = accumulate(np.maximum, group, np.array([-math.inf]), values)
    assert math.isnan(low[0])
    assert low[1:].tolist() == [3.0, 3.0]
    assert all(math.isnan(number) for number in high)
