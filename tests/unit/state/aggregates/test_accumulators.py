"""Tables of running aggregates: nulls, types, and what is refused."""

from __future__ import annotations

import math
import random
from datetime import date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from onceflow.core.errors import ConfigError, InvariantViolation, StateError
from onceflow.core.state import AccumulatorColumn, AccumulatorTable
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape
from onceflow.core.state.aggregates.kinds_of_totals import totals_of
from onceflow.core.state.aggregates.totals import Totals


def table(*columns: AccumulatorColumn, key: Any = None) -> AccumulatorTable:
    shape = AccumulatorShape("t", (key or pa.string(),), columns)
    return AccumulatorTable(shape, "op[0]", 128)


def run(made: AccumulatorTable, keys: list[str], values: Any) -> list[Any]:
    name = made.shape.columns[0].name
    found = made.update([pa.array(keys, pa.string())], None, {name: values})
    listed: list[Any] = pa.array(found[name]).to_pylist()
    return listed


def test_nulls_are_skipped_and_leave_the_running_value_as_it_was() -> None:
    values = pa.array([None, 2, None, 3, None], pa.int64())
    keys = ["a", "a", "b", "a", "a"]
    int64 = pa.int64()
    assert run(table(AccumulatorColumn("v", "sum", int64)), keys, values) == [0, 2, 0, 5, 5]
    assert run(table(AccumulatorColumn("v", "count", int64)), keys, values) == [0, 1, 0, 2, 2]
    assert run(table(AccumulatorColumn("v", "min", int64)), keys, values) == [None, 2, None, 2, 2]
    assert run(table(AccumulatorColumn("v", "max", int64)), keys, values) == [None, 2, None, 3, 3]


def test_a_minimum_stays_null_over_batches_until_its_first_value() -> None:
    made = table(AccumulatorColumn("v", "min", pa.float64()))
    none = pa.array([None], pa.float64())
    assert run(made, ["a"], none) == [None]
    assert run(made, ["a"], none) == [None]
    assert run(made, ["a"], pa.array([math.inf])) == [math.inf]
    assert run(made, ["a"], none) == [math.inf]


def test_a_count_without_values_counts_rows() -> None:
    made = table(AccumulatorColumn("n", "count", pa.int64()))
    assert made.update([pa.array(["a", "b", "a"])], None, {})["n"].tolist() == [1, 1, 2]


def test_negative_zero_is_not_lost_by_a_null_behind_it() -> None:
    made = table(AccumulatorColumn("v", "max", pa.float64()))
    assert math.copysign(1, run(made, ["a", "a"], pa.array([-0.0, None]))[1]) == -1


def _in_order(value: float) -> tuple[bool, float, float]:
    """Return a key that sorts -0.0 before 0.0, and NaN behind all others."""
    return math.isnan(value), 0.0 if math.isnan(value) else value, math.copysign(1, value)


_ZEROS = [0.0, -0.0, 0.0, -1.0, -0.0, math.nan, 0.0, math.inf, -0.0, 1.0, -math.inf, 0.0, -0.0]


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 65, 200])
@pytest.mark.parametrize("seed", range(3))
def test_negative_zero_is_less_than_zero_whatever_the_length_of_a_batch(
    op: Any, step: int, seed: int
) -> None:
    """Of rows that are accumulated together, and of a long segment, which is accumulated alone."""
    drawn = random.Random(seed)
    chosen = _ZEROS if seed else [0.0, -0.0]
    values = [drawn.choice(chosen) for _ in range(200)]
    keys = [drawn.choice("aab") for _ in values]
    best = min if op == "min" else max
    so_far: dict[str, float] = {}
    expected: list[float] = []
    for key, value in zip(keys, values, strict=True):
        so_far[key] = best(so_far.get(key, value), value, key=_in_order)
        expected.append(so_far[key])
    made = table(AccumulatorColumn("v", op, pa.float64()))
    rows: list[float] = []
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        rows += run(made, keys[part], pa.array(values[part]))
    assert list(map(repr, rows)) == list(map(repr, expected))


@pytest.mark.parametrize(("op", "expected"), [("min", [-0.0, -0.0]), ("max", [0.0, -0.0])])
def test_negative_zero_is_less_than_zero_where_windows_are_folded_and_merged(
    op: Any, expected: list[float]
) -> None:
    column = AccumulatorColumn("v", op, pa.float64())
    for values in ([-0.0, 0.0, -0.0], [0.0, -0.0, -0.0]):
        folded = Totals(column)
        folded.reserve(1, 3)
        folded.fold(np.array([1, 1, 2]), pa.array(values))
        assert repr(folded.values(np.array([1, 2])).to_pylist()) == repr(expected)
        apart = Totals(column)
        apart.reserve(1, 4)
        apart.fold(np.array([1, 2, 3]), pa.array(values))
        merged = apart.merge(np.array([1, 2, 3]), np.array([1, 1, 2]), 2)
        assert repr(merged.values(np.array([1, 2])).to_pylist()) == repr(expected)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_infinities_of_both_signs_and_sums_beyond_floats_are_summed_without_a_warning(
    op: Any,
) -> None:
    """Warnings are errors in tests."""
    made = table(AccumulatorColumn("v", op, pa.float64()))
    rows = run(made, ["a", "a", "b", "b"], pa.array([math.inf, -math.inf, 1.7e308, 1.7e308]))
    assert math.isnan(rows[1])
    assert rows[3] == math.inf
    folded = totals_of(AccumulatorColumn("v", op, pa.float64()))
    folded.reserve(1, 3)
    folded.fold(np.array([1, 1, 2, 2]), pa.array([math.inf, -math.inf, 1.7e308, 1.7e308]))
    assert math.isnan(folded.values(np.array([1])).to_pylist()[0])


INTEGERS = [pa.int8(), pa.int32(), pa.uint8(), pa.uint32(), pa.uint64()]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_narrower_and_unsigned_integers_are_summed_in_64_bits(kind: Any) -> None:
    made = table(AccumulatorColumn("v", "sum", pa.int64()))
    assert run(made, ["a"] * 3, pa.array([100, 100, 100], kind)) == [100, 200, 300]


def test_numpy_values_are_taken_as_well_as_arrow_ones() -> None:
    made = table(AccumulatorColumn("v", "sum", pa.float64()))
    assert run(made, ["a", "a"], np.array([1, 2], np.int32)) == [1.0, 3.0]


def test_dates_and_timestamps_have_minima_and_maxima() -> None:
    day = table(AccumulatorColumn("v", "min", pa.date32()))
    days = [date(2024, 1, 2), None, date(1960, 1, 1)]
    assert run(day, ["a"] * 3, pa.array(days)) == [days[0], days[0], days[2]]
    instant = table(AccumulatorColumn("v", "max", pa.timestamp("ms")))
    moments = [datetime(2024, 1, 2), datetime(1960, 1, 1)]
    assert run(instant, ["a"] * 2, pa.array(moments, pa.timestamp("us"))) == [moments[0]] * 2


def test_values_that_do_not_fit_are_refused_by_name() -> None:
    made = table(AccumulatorColumn("v", "sum", pa.int64()))
    with pytest.raises(StateError, match="'v' cannot take its values as int64"):
        run(made, ["a"], pa.array([2**63], pa.uint64()))
    with pytest.raises(StateError, match="'v'"):
        run(made, ["a"], pa.array([1.5]))
    assert run(made, ["a"], pa.array([1])) == [1]


def test_null_keys_and_other_key_columns_are_refused() -> None:
    made = table(AccumulatorColumn("n", "count", pa.int64()))
    with pytest.raises(StateError, match="null"):
        made.update([pa.array(["a", None])], None, {})
    with pytest.raises(InvariantViolation, match="keyed by"):
        made.update([pa.array([1])], None, {})
    with pytest.raises(InvariantViolation, match="no values for 'v'"):
        table(AccumulatorColumn("v", "sum", pa.int64())).update([pa.array(["a"])], None, {})


def test_an_empty_batch_gives_empty_results_of_the_right_type() -> None:
    made = table(AccumulatorColumn("v", "max", pa.timestamp("us")))
    found = made.update([pa.array([], pa.string())], None, {"v": pa.array([], pa.timestamp("us"))})
    assert pa.array(found["v"]).type == pa.timestamp("us")
    assert len(found["v"]) == 0


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ([], pa.string()),
        ([AccumulatorColumn("v", "sum", pa.int64())] * 2, pa.string()),
        ([AccumulatorColumn("v", "sum", pa.int32())], pa.string()),
        ([AccumulatorColumn("v", "sum", pa.timestamp("us"))], pa.string()),
        ([AccumulatorColumn("v", "count", pa.float64())], pa.string()),
        ([AccumulatorColumn("v", "mean", pa.float64())], pa.string()),  # type: ignore[arg-type]
        ([AccumulatorColumn("v", "sum", pa.int64())], pa.float64()),
    ],
)
def test_what_cannot_be_aggregated_is_refused_before_anything_runs(
    columns: list[AccumulatorColumn], key: Any
) -> None:
    with pytest.raises(ConfigError):
        table(*columns, key=key)
