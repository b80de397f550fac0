"""Aggregates of the records for which a SQL condition is true, and conditions that are refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from onceflow import avg, count, max_, min_, sum_
from onceflow.core.errors import ConfigError
from onceflow.core.plan.aggregates import Aggregate, AggregateInputs

pytest.importorskip("datafusion")

SCHEMA = pa.schema([("Account", pa.string()), ("cents", pa.int64()), ("price", pa.float64())])


def values(rows: list[dict[str, Any]], **aggregates: Aggregate) -> dict[str, list[Any]]:
    for aggregate in aggregates.values():
        aggregate.result_type(SCHEMA)
    inputs = AggregateInputs(aggregates, SCHEMA)
    read = inputs.read(pa.RecordBatch.from_pylist(rows, SCHEMA))
    return {name: array.to_pylist() for name, array in read.items()}


ROWS: list[dict[str, Any]] = [
    {"Account": "a", "cents": 5, "price": 1.5},
    {"Account": "b", "cents": 50, "price": float("nan")},
    {"Account": None, "cents": 500, "price": -0.0},
    {"Account": "b", "cents": None, "price": None},
]


def test_a_record_counts_if_the_condition_is_true_not_if_it_is_null() -> None:
    assert values(
        ROWS, all=count(), large=count(where="cents >= 50"), b=count(where="Account = 'b'")
    ) == {
        "large": [None, True, True, None],
        "b": [None, True, None, True],
    }


def test_values_of_other_records_are_skipped() -> None:
    read = values(
        ROWS,
        total=sum_("cents", where="Account = 'b'"),
        low=min_("cents", where="cents > 5 -- cents"),
        high=max_("price", where="price <= 0"),
        mean=avg("cents", where="true"),
    )
    assert read["total"] == [None, 50, None, None]
    assert read["low"] == [None, 50, 500, None]
    assert str(read["high"]) == "[None, None, -0.0, None]"
    assert read["mean"] == [5, 50, 500, None]


def test_a_batch_without_rows_has_no_values() -> None:
    assert values([], n=count(where="cents > 1"), s=sum_("cents", where="cents > 1")) == {
        "n": [],
        "s": [],
    }


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("cents", "of type int64, not a condition"),
        ("cent > 1", "No field named cent"),
        ("account = 'a'", "No field named account"),
        ("cents > 1) AS a, (cents > 2", "not a SQL condition"),
        ("1 = 1) FROM stream WHERE (cents > 1", "not a SQL condition"),
        ("cents > 1; DROP TABLE stream", "not a SQL condition"),
        ("count(*) > 1", "several rows"),
        ("row_number() OVER () > 1", "several rows"),
        ("cents > (SELECT max(cents) FROM stream)", "not a SQL condition"),
        ("", "not a SQL condition"),
    ],
)
def test_what_is_no_condition_over_one_record_is_refused(condition: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        count(where=condition).result_type(SCHEMA)
    assert f"count(where={condition!r})" in str(refused.value)


def test_an_integer_that_overflows_in_a_condition_is_an_error() -> None:
    rows = [{"Account": "a", "cents": 2**62, "price": 0.0}]
    with pytest.raises(OverflowError, match="cents"):
        values(rows, n=count(where="cents * 4 > 1"))
