"""Sums of integers that are kept as decimals: exact, whether a batch is added as words or not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from tests.support.drawn_seeds import draw_random

from onceflow.core.state import AccumulatorColumn
from onceflow.core.state.aggregates.wide_totals import WideTotals

LEAST, MOST = -(1 << 63), (1 << 63) - 1
CHOICES: list[list[int | None]] = [[None, 3, -4], [None, MOST, LEAST, 1], [None]]


def test_wide_sums_of_integers_equal_those_of_python() -> None:
    rng = draw_random()
    for _ in range(100):
        totals = WideTotals(AccumulatorColumn("total", "sum", pa.decimal128(38, 0)))
        totals.reserve(1, 9)
        sums, seen = [0] * 9, [False] * 9
        for _ in range(5):
            choices = rng.choice(CHOICES)
            entries = [rng.randrange(1, 9) for _ in range(rng.randrange(30))]
            values = [rng.choice(choices) for _ in entries]
            totals.fold(np.array(entries, np.int64), pa.array(values, pa.int64()))
            for entry, value in zip(entries, values, strict=True):
                sums[entry] += value or 0
                seen[entry] |= value is not None
        assert totals.values(np.arange(1, 9)).to_pylist() == sums[1:]
        assert (totals.seen[1:9] != 0).tolist() == seen[1:]
