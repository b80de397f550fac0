"""Queries that Arrow computes in place of DataFusion: which they are, and that no row differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import date, datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.errors import ConfigError
from onceflow.core.plan.stream_sql import StreamSql

datafusion: Any = pytest.importorskip("datafusion")

_VALUES: dict[tuple[str, pa.DataType], tuple[Any, ...]] = {
    ("id", pa.int64()): tuple(range(-3, 4)),
    ("small", pa.int32()): (-1, 0, 2, None),
    ("large", pa.uint64()): (0, 3, 2**64 - 1, None),
    ("text", pa.string()): ("", "x", "X", "é", "zz", None),
    ("long", pa.large_string()): ("x", "y", None),
    ("flag", pa.bool_()): (True, False, None),
    ("at", pa.timestamp("us")): (datetime(2026, 1, 1), datetime(2026, 1, 3), None),
    ("zoned", pa.timestamp("ms", "UTC")): (datetime(2026, 1, 2, tzinfo=timezone.utc), None),
    ("day", pa.date32()): (date(2026, 1, 1), date(2026, 1, 2), None),
    ("real", pa.float64()): (0.0, -0.0, float("nan"), 1.5, None),
    ("list", pa.list_(pa.int64())): ([1, None], [], None),
    ("millis", pa.int64()): (0, -1, 1_700_000_000, None),
}
SCHEMA = pa.schema([pa.field(*column, column[0] != "id") for column in _VALUES])
_COLUMNS = (
    *(column for column, _ in _VALUES),
    *("*", 'small AS "a b"', "small AS large, large AS small", "(id > 0) AS is_greater"),
    *(
        f"arrow_cast(millis, 'Timestamp({unit}, None)') AS time"
        for unit in ("Second", "Millisecond")
    ),
)
_TESTS = (
    *("text = '{text}'", "text {op} '{text}'", "text IN ('x', 'é')", "text NOT IN ('x', 'zz')"),
    *("text IN ('x', 'a', 'b', 'c')", "text IS NULL", "long = 'x'", "text = long", "flag"),
    *("flag {op} true", "id {op} {n}", "{n} {op} small", "small IS NOT NULL", "large {op} {n}"),
    *("small NOT IN (1, NULL)", "small = 4000000000", "small = 1.5", "id BETWEEN -1 AND {n}"),
    *("at {op} '2026-01-03'", "at {op} TIMESTAMP '2026-01-01'", "day {op} DATE '2026-01-02'"),
    *("zoned {op} '2026-01-02T00:00:00Z'", "real {op} 0.0", "real IS NULL", "list IS NOT NULL"),
    *("flag IS TRUE", "true", "NULL", "id = small", "small + 1 {op} {n}"),
)  # fmt: skip


def make_condition(chance: random.Random, depth: int = 0) -> str:
    """Return a random condition."""
    form = chance.random()
    if depth < 3 and form < 0.5:
        left, right = (make_condition(chance, depth + 1) for _ in range(2))
        return f"({left} {chance.choice(['AND', 'OR'])} {right})"
    if depth < 3 and form < 0.6:
        return f"NOT ({make_condition(chance, depth + 1)})"
    op = chance.choice(["=", "<>", "<", "<=", ">", ">="])
    text = chance.choice(["", "x", "é", "zz"])
    return chance.choice(_TESTS).format(op=op, n=chance.randint(-3, 3), text=text)


def make_query(chance: random.Random) -> str:
    """Return a random query."""
    columns = ", ".join(chance.choices(_COLUMNS, k=chance.randint(1, 3)))
    where = f" WHERE {make_condition(chance)}" if chance.random() < 0.8 else ""
    return f"SELECT {columns} FROM stream{where}"


def make_rows(chance: random.Random) -> pa.RecordBatch:
    """Return random rows, at an offset of their buffers."""
    values = {name: chance.choices(some, k=30) for (name, _), some in _VALUES.items()}
    return pa.RecordBatch.from_pydict(values, SCHEMA).slice(chance.randint(0, 3))


def ask_datafusion(query: str, rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return what DataFusion alone makes of a query."""
    settings = datafusion.SessionConfig().with_target_partitions(1)
    settings = settings.set("datafusion.sql_parser.enable_ident_normalization", "false")
    context = datafusion.SessionContext(settings)
    context.register_record_batches("stream", [[rows]])
    made: list[dict[str, Any]] = context.sql(query).to_arrow_table().to_pylist()
    return made


@pytest.mark.parametrize("seed", range(4))
def test_a_query_gives_the_rows_of_datafusion(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        query, rows = make_query(chance), make_rows(chance)
        sql = StreamSql(query, SCHEMA)
        try:
            schema = sql.resolve_schema()
        except ConfigError:  # such as two columns of one name
            continue
        made = [batch.cast(schema) for batch in sql.apply(rows)]
        for batch in made:
            batch.validate(full=True)
        # NaN differs from itself, but its text does not.
        assert repr([row for batch in made for row in batch.to_pylist()]) == repr(
            ask_datafusion(query, rows)
        ), query


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Return a function that runs a query, and returns its plans after the first batch."""

    def count_plans(query: str) -> int:
        planned: list[str] = []
        plan = datafusion.SessionContext.sql_with_options

        def plan_and_count(context: Any, query: str, options: Any) -> Any:
            planned.append(query)
            return plan(context, query, options)

        monkeypatch.setattr(datafusion.SessionContext, "sql_with_options", plan_and_count)
        sql, rows = StreamSql(query, SCHEMA), make_rows(random.Random(0))
        list(sql.apply(rows))
        before = len(planned)
        for _ in range(3):
            list(sql.apply(rows))
        return len(planned) - before

    return count_plans


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM stream WHERE text IN ('x', 'é', 'zz')",
        "SELECT arrow_cast(millis, 'Timestamp(Second, None)') AS time FROM stream WHERE id = 1",
        "SELECT (id >= 2 AND id < 3) AS c0, (NOT flag) AS c1 FROM stream",
        "SELECT text FROM stream WHERE at >= '2026-01-02' AND (flag OR small IS NULL)",
    ],
)
def test_a_query_of_comparisons_is_planned_once(query: str, plans: Callable[[str], int]) -> None:
    assert plans(query) == 0


@pytest.mark.parametrize(
    "query",
    [
        "SELECT id FROM stream WHERE at < now()",
        "SELECT id FROM stream WHERE day < current_date",
        "SELECT id, random() AS chance FROM stream",
        "SELECT id FROM stream WHERE real = 0.0",
        "SELECT id * 4 > 1 OR true AS x FROM stream",
        "SELECT id FROM stream WHERE 10 / (id + 100) > 1",
    ],
)
def test_any_other_query_is_left_to_datafusion(query: str, plans: Callable[[str], int]) -> None:
    assert plans(query) == 3


def test_a_null_in_a_column_without_nulls_is_an_error() -> None:
    rows = pa.RecordBatch.from_pydict({"id": [1, None]}, pa.schema([("id", pa.int64())]))
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    wrong = pa.RecordBatch.from_arrays(rows.columns, schema=schema)
    with pytest.raises(ValueError, match="non-nullable"):
        list(StreamSql("SELECT id, id AS again FROM stream", schema).apply(wrong))
