"""Columns that are selected, renamed and computed, and the functions that queries call."""

from __future__ import annotations

import pickle
from datetime import date, datetime
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.support.counting_source import CountingSource

from onceflow import Checkpointing, LocalProcesses, Pipeline, SqlFunction, Stream
from onceflow.core.errors import ConfigError
from onceflow.core.plan.projection import plan_projection
from onceflow.core.plan.sql_functions import NO_FUNCTIONS, QueryFunction
from onceflow.core.plan.work import MapBatches, SelectSql

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("Name", pa.string()),
        ("a b", pa.int32()),
        ("at", pa.timestamp("ms")),
    ]
)
ROWS: list[dict[str, Any]] = [
    {"id": 1, "Name": "ab", "a b": 3, "at": datetime(2026, 1, 31, 23, 59)},
    {"id": 2, "Name": None, "a b": None, "at": None},
]


def project(*items: str, **functions: QueryFunction) -> list[dict[str, Any]]:
    work, schema = plan_projection(items, SCHEMA, functions, "project()")
    again: MapBatches | SelectSql = pickle.loads(pickle.dumps(work))
    batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA)
    made = (
        again.function(batch)
        if isinstance(again, MapBatches)
        else pa.Table.from_batches(again.sql.apply(batch))
    )
    assert made.schema.names == schema.names
    return made.to_pylist()


def test_columns_are_kept_and_renamed_without_datafusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datafusion", None)
    assert project("Name", '"a b"  as "c ""d"', "id AS x1") == [
        {"Name": "ab", 'c "d': 3, "x1": 1},
        {"Name": None, 'c "d': None, "x1": 2},
    ]
    assert project("*", "id AS again")[1] == ROWS[1] | {"again": 2}
    _, schema = plan_projection(["id AS x"], SCHEMA, NO_FUNCTIONS, "project()")
    assert not schema.field("x").nullable
    with pytest.raises(ConfigError, match=r"onceflow\[sql\]"):
        project("id + 1 AS y")


def test_expressions_are_computed_beside_columns() -> None:
    pytest.importorskip("datafusion")
    assert project("id", "id * 2 AS twice -- a comment", "CAST(at AS DATE) AS day") == [
        {"id": 1, "twice": 2, "day": date(2026, 1, 31)},
        {"id": 2, "twice": 4, "day": None},
    ]


def test_a_column_with_the_name_of_a_sql_function_is_the_column() -> None:
    pytest.importorskip("datafusion")
    schema = pa.schema([("current_date", pa.int64()), ("user", pa.int64())])
    items = ("current_date", "user AS select", "*", "user * 2 AS twice")
    work, made = plan_projection(items[:2] + items[3:], schema, NO_FUNCTIONS, "project()")
    assert made.names == ["current_date", "select", "twice"]
    assert isinstance(work, SelectSql)
    [batch] = work.sql.apply(pa.RecordBatch.from_pylist([{"current_date": 5, "user": 6}], schema))
    assert batch.to_pylist() == [{"current_date": 5, "select": 6, "twice": 12}]
    _, every = plan_projection(items[2:], schema, NO_FUNCTIONS, "project()")
    assert every.names == ["current_date", "user", "twice"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((), "needs at least one column"),
        (("id", "Name AS id"), "two columns get the name 'id'"),
        (("*", "id"), "two columns get the name 'id'"),
        (("name",), "No field named name"),
        (("sum(id) AS s",), "needs a plan with Aggregate"),
        (("DISTINCT id",), "needs a plan with Distinct"),
    ],
)
def test_columns_that_cannot_be_selected_are_refused(items: tuple[str, ...], message: str) -> None:
    pytest.importorskip("datafusion")
    with pytest.raises(ConfigError, match=message):
        project(*items)


def spell(number: int, name: str | None) -> str | None:
    return None if name is None else name * number


def double(numbers: pa.Array) -> pa.Array:
    doubled: pa.Array = pc.multiply(numbers, 2.0)
    return doubled


def test_functions_of_values_and_of_arrays_are_called_by_their_names() -> None:
    pytest.importorskip("datafusion")
    doubled = SqlFunction(double, takes=("BIGINT",), returns="DECIMAL(5, 1)")
    assert project('spell("a b", Name) AS s', "Twice(id) AS d", spell=spell, Twice=doubled) == [
        {"s": "ababab", "d": 2},
        {"s": None, "d": 4},
    ]


def skip_first(numbers: pa.Array) -> pa.Array:
    return numbers.slice(1)


def add_half(numbers: pa.Array) -> pa.Array:
    halves: pa.Array = pc.add(numbers, 0.5)
    return halves


def fail(number: int) -> int:
    raise LookupError(f"no {number}")


def too_large(number: int) -> int:
    return 1 << (62 + number)


no_types: Any = eval("lambda number: number")
"""A function without annotations."""


def no_known_type(number: complex) -> int:
    return 1


def no_argument() -> int:
    return 1


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (fail, LookupError, "no 1"),
        (too_large, ValueError, "returned 9223372036854775808, .* int64"),
        (SqlFunction(skip_first, ("BIGINT",), "BIGINT"), ValueError, "1 values for 2"),
        (SqlFunction(cast("Any", list), ("BIGINT",), "BIGINT"), TypeError, "returned list"),
        (
            SqlFunction(add_half, ("BIGINT",), "BIGINT"),
            ValueError,
            "1.5",
        ),
    ],
)
def test_an_error_of_a_function_is_raised_as_it_is(
    function: QueryFunction, error: type[Exception], message: str
) -> None:
    pytest.importorskip("datafusion")
    work, _ = plan_projection(["f(id) AS x"], SCHEMA, {"f": function}, "project()")
    assert isinstance(work, SelectSql)
    with pytest.raises(error, match=message):
        list(work.sql.apply(pa.RecordBatch.from_pylist(ROWS, SCHEMA)))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"f": no_types}, "argument 'number' needs an annotation"),
    ({"f": no_known_type}, "argument 'number' needs an annotation"),
    ({"f": no_argument}, "takes no argument"),
    ({"f g": fail}, "use letters"),
    ({"f": fail, "F": fail}, "and 'f' differ only in upper and lower case"),
    ({"f": 5}, "takes a function"),
    ({"f": SqlFunction(double, ("BIGNIT",), "DOUBLE")}, "BIGNIT"),
]


@pytest.mark.parametrize(("functions", "message"), MISTAKES)
def test_functions_without_types_are_refused(functions: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_projection(["f(id) AS x"], SCHEMA, functions, "project()")


def begin(directory: Path) -> Stream:
    pipeline = Pipeline(
        LocalProcesses(), name="keys", checkpointing=Checkpointing(storage=str(directory))
    )
    return pipeline.read(CountingSource(1), uid="records")


def test_a_key_may_be_computed_and_becomes_a_column(tmp_path: Path) -> None:
    pytest.importorskip("datafusion")
    keyed = begin(tmp_path).key_by("account", tenth="id / 10", same="account")
    assert keyed.schema.names[-2:] == ["tenth", "same"]
    assert keyed.schema.field("tenth").type == pa.int64()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"id": "account"}, "two columns get the name 'id'"),
        ({"day": "id + 1, amount + 1"}, "give one expression for each name"),
        ({"day": "nothing + 1"}, "nothing"),
        ({"day": "id / 2.0"}, "day.*double"),
        ({}, "needs at least one column"),
    ],
)
def test_a_key_that_cannot_be_computed_is_refused(
    tmp_path: Path, key: dict[str, str], message: str
) -> None:
    pytest.importorskip("datafusion")
    with pytest.raises(ConfigError, match=message):
        begin(tmp_path).key_by(**key)
