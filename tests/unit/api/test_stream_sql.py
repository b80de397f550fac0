"""SQL over a stream: what it makes of rows, and what needs several at a time and is refused."""

from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.errors import ConfigError
from onceflow.core.plan.stream_sql import StreamSql

pytest.importorskip("datafusion")

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("account", pa.string()),
        ("amountCents", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("at", pa.timestamp("us", "UTC")),
        ("origin", pa.struct([("country", pa.string())])),
    ]
)
ROWS: list[dict[str, Any]] = [
    {"id": 1, "account": "a", "amountCents": 250, "tags": ["x", "y"], "origin": {"country": "de"}},
    {"id": 2, "account": None, "amountCents": 50, "tags": [], "origin": None},
    {"id": 3, "account": "c", "amountCents": 900, "tags": ["z"], "origin": {"country": "fr"}},
]


def made(query: str) -> list[dict[str, Any]]:
    sql = StreamSql(query, SCHEMA)
    schema = sql.resolve_schema()
    again: StreamSql = pickle.loads(pickle.dumps(sql))
    rows: list[dict[str, Any]] = []
    for first in (0, 2):  # two batches
        batch = pa.RecordBatch.from_pylist(ROWS[first : first + 2], SCHEMA)
        for one in again.apply(batch):
            rows += one.select(schema.names).cast(schema).to_pylist()
    return rows


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            "SELECT id, upper(account) AS name, amountCents / 100.0 AS e FROM stream WHERE id <> 2",
            [{"id": 1, "name": "A", "e": 2.5}, {"id": 3, "name": "C", "e": 9.0}],
        ),
        (
            "SELECT id, unnest(tags) AS tag FROM stream",
            [{"id": 1, "tag": "x"}, {"id": 1, "tag": "y"}, {"id": 3, "tag": "z"}],
        ),
        (
            "WITH k AS (SELECT * FROM stream WHERE id <> 2) SELECT id, origin['country'] c FROM k",
            [{"id": 1, "c": "de"}, {"id": 3, "c": "fr"}],
        ),
        ("SELECT CASE WHEN id = 2 THEN 'two' END AS t FROM stream WHERE id < 3",
            [{"t": None}, {"t": "two"}]),
        ("SELECT id FROM stream WHERE false", []),
    ],
)  # fmt: skip
def test_rows_are_selected_filtered_and_unnested_in_their_order(
    query: str, expected: list[dict[str, Any]]
) -> None:
    assert made(query) == expected


@pytest.mark.parametrize(
    ("expression", "kind", "expected"),
    [
        ("CASE WHEN id = 1 THEN amountCents ELSE 0.5 END", pa.float64(), [250.0, 0.5, 0.5]),
        ("CASE WHEN id = 1 THEN CAST(7 AS TINYINT) ELSE id END", pa.int64(), [7, 2, 3]),
        ("id / CAST(4 AS BIGINT UNSIGNED)", pa.decimal128(24, 4), ["0.2500", "0.5000", "0.7500"]),
        ("CAST('2024-03-0' || id AS DATE) - DATE '2024-02-28'", pa.int64(), [2, 3, 4]),
    ],
)
def test_a_column_has_the_type_that_the_engine_computes(
    expression: str, kind: pa.DataType, expected: list[Any]
) -> None:
    sql = StreamSql(f"SELECT {expression} AS v FROM stream", SCHEMA)
    assert sql.resolve_schema().field("v").type == kind
    (rows,) = sql.apply(pa.RecordBatch.from_pylist(ROWS, SCHEMA))
    assert rows.column("v") == pa.array(expected).cast(kind)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("SELECT account, sum(id) FROM stream GROUP BY account", "Aggregate.*running"),
        ("SELECT count(*) FROM stream", "Aggregate"),
        ("SELECT DISTINCT id FROM stream", "Distinct"),
        ("SELECT id FROM stream ORDER BY id", "Sort"),
        ("SELECT id FROM stream LIMIT 3", "Limit"),
        ("SELECT id, row_number() OVER () AS n FROM stream", "Window"),
        ("SELECT a.id FROM stream a JOIN stream b ON a.id = b.id", "Join.*stream.join"),
        ("SELECT id FROM stream UNION ALL SELECT id FROM stream", "Union"),
        ("SELECT id FROM stream WHERE id IN (SELECT id FROM stream WHERE id > 3)", "Join"),
        ("SELECT id FROM stream WHERE id > (SELECT avg(id) FROM stream)", "(ScalarSubquery|Join)"),
        ("SELECT id, (SELECT max(id) FROM stream) AS m FROM stream", "(ScalarSubquery|Join)"),
    ],
)
def test_what_needs_several_rows_is_refused_by_the_name_of_its_plan(query: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"needs a plan with {named}"):
        StreamSql(query, SCHEMA).resolve_schema()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("upper(account) filter (WHERE id > 1)", "FILTER"),
        ("upper(account) OVER ()", "OVER"),
        ("upper(account) OVER w", "OVER"),
        ("upper( DISTINCT account)", "DISTINCT"),
        ("upper(account ORDER  BY id)", "ORDER BY"),
        ("upper(account) IGNORE NULLS", "IGNORE NULLS"),
        ("upper(account) respect nulls", "RESPECT NULLS"),
        ("coalesce(account, 'x') WITHIN GROUP (ORDER BY id)", "WITHIN GROUP"),
    ],
)
def test_a_clause_that_a_call_would_ignore_is_refused(call: str, named: str) -> None:
    window = " WINDOW w AS (ORDER BY id)" if call.endswith(" w") else ""
    with pytest.raises(ConfigError, match=rf"{named} has no effect"):
        StreamSql(f"SELECT {call} AS name FROM stream{window}", SCHEMA).resolve_schema()


def test_texts_names_and_comments_with_such_words_are_accepted() -> None:
    query = """SELECT id, 'a) FILTER (b) ORDER BY c' AS "f(DISTINCT", (id) AS over  -- ORDER BY
        /* IGNORE NULLS */ FROM stream WHERE id = 1"""
    assert made(query) == [{"id": 1, "f(DISTINCT": "a) FILTER (b) ORDER BY c", "over": 1}]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT EXISTS (SELECT 1 FROM stream) AS e FROM stream", "not support"),
        ("SELEC id FROM stream", "SELEC"),
        ("SELECT amountcents FROM stream", "amountcents"),
        ("SELECT id FROM other", "'.*other' not found"),
        ("SELECT 1 AS one", "must read from 'stream', once"),
        ("SELECT id FROM stream; SELECT 2", "single SQL statement"),
        ("COPY stream TO '/nowhere/x.csv'", "not supported"),
        ("CREATE TABLE x AS SELECT * FROM stream", "not supported"),
        ("SET datafusion.execution.batch_size = 1", "not supported"),
        ("SELECT value FROM generate_series(1, 3)", "must read from|needs a plan"),
    ],
)
def test_what_is_no_query_over_the_stream_is_refused_with_its_reason(
    query: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamSql(query, SCHEMA).resolve_schema()


_LARGE = 2**62
"""Four times it leaves 64 bits, and DataFusion alone makes 0 of that."""


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT amount * 4 AS x FROM stream", f"amount . Int64.4. leaves int64: {_LARGE} . 4"),
        ("SELECT amount + amount AS x FROM stream", "leaves int64"),
        ("SELECT -amount - amount AS x FROM stream", None),
        ("SELECT -1 - amount - amount AS x FROM stream", "leaves int64"),
        ("SELECT -(-amount - amount) AS x FROM stream", "leaves int64: 0 - -92233"),
        ("SELECT small + small AS x FROM stream", f"leaves int32: {2**30} . {2**30}"),
        ("SELECT small + amount AS x FROM stream", None),
        ("WITH k AS (SELECT amount * 4 AS y FROM stream) SELECT y / 2 AS x FROM k", "leaves int64"),
        ("SELECT unnest(list) * 4 AS x FROM stream", "leaves int64"),
        ("SELECT id AS x FROM stream WHERE amount * 4 > 1", "leaves int64"),
        ("SELECT upper(text || cast(amount * 4 AS STRING)) AS x FROM stream", "leaves int64"),
        ("SELECT cast(amount AS DECIMAL(38, 0)) * 4 AS x FROM stream", None),
        ("SELECT amount * 4.0 AS x FROM stream", None),
        ("SELECT amount * 4 AS x FROM stream WHERE id > 1", None),
        ("SELECT id AS x FROM stream WHERE amount < 9 AND amount * 4 > 1", None),
        ("SELECT amount > 9 OR amount * 4 > 1 AS x FROM stream", None),
        ("SELECT CASE WHEN amount < 9 THEN amount * 4 ELSE 0 END AS x FROM stream", None),
        ("SELECT CASE WHEN amount > 9 THEN 0 ELSE amount * 4 END AS x FROM stream", None),
        ("SELECT CASE id WHEN 1 THEN 0 ELSE amount * 4 END AS x FROM stream", None),
        ("SELECT CASE WHEN id = 1 THEN amount * 4 ELSE 0 END AS x FROM stream", "leaves int64"),
        ("SELECT CASE WHEN zero <> 0 THEN (id / zero) * 4 END AS x FROM stream", None),
    ],
)
def test_an_integer_that_leaves_its_type_is_an_error_for_the_rows_for_which_it_counts(
    query: str, expected: str | None
) -> None:
    schema = pa.schema([("id", pa.int64()), ("amount", pa.int64()), ("small", pa.int32())])
    for field in (("list", pa.list_(pa.int64())), ("text", pa.string()), ("zero", pa.int64())):
        schema = schema.append(pa.field(*field))
    large = {"id": 1, "amount": _LARGE, "small": 2**30, "list": [_LARGE], "text": "a", "zero": 0}
    rows: list[dict[str, Any]] = [
        large,
        {"id": 2, "amount": 5, "small": 1, "list": [1]},
        {"id": 3},
    ]
    sql = StreamSql(query, schema)
    sql.resolve_schema()
    batch = pa.RecordBatch.from_pylist(rows, schema)
    if expected is None:
        assert sum(one.num_rows for one in sql.apply(batch)) > 0
        return
    with pytest.raises(OverflowError, match=expected):
        list(sql.apply(batch))


@pytest.mark.parametrize(
    "expression", ["a + a", "-a - a", "a * 2", "CASE WHEN a > 0 THEN a + a END"]
)
def test_a_decimal_with_more_digits_than_its_type_is_an_error(expression: str) -> None:
    """DataFusion makes 39 digits of two of 38, in a column that says 38."""
    schema = pa.schema([("a", pa.decimal128(38, 0))])
    sql = StreamSql(f"SELECT {expression} AS x FROM stream", schema)
    rows = pa.RecordBatch.from_pylist([{"a": Decimal("6" + "0" * 37)}], schema)
    with pytest.raises(OverflowError, match="column 'x' of the query's result leaves decimal128"):
        list(sql.apply(rows))


def test_a_record_for_which_a_query_fails_is_told_though_python_has_not_its_date() -> None:
    day = pa.array([6_000_000], pa.int32()).cast(pa.date32())
    rows = pa.record_batch([pa.array([0]), day], names=["id", "day"])
    with pytest.raises(ValueError, match="zero.*at record {'id': 0, 'day': 18397-06-11}"):
        list(StreamSql("SELECT 10 / id AS share FROM stream", rows.schema).apply(rows))


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.int32(), pa.uint64(), pa.float64(), pa.decimal128(10, 2)], ids=str
)
@pytest.mark.parametrize(
    "cast",
    [
        "CAST(n AS TIMESTAMP)",
        "TRY_CAST(n AS TIMESTAMP WITH TIME ZONE) IS NULL",
        "CASE WHEN n > 1 THEN n::timestamp END",
        "CAST(make_array(n) AS TIMESTAMP[])",
    ],
)
def test_a_cast_that_takes_a_number_as_nanoseconds_is_refused(kind: pa.DataType, cast: str) -> None:
    sql = StreamSql(f"SELECT {cast} AS t FROM stream", pa.schema([("n", kind)]))
    with pytest.raises(ConfigError, match=r"as nanoseconds.*BIGINT as seconds.*to_timestamp_sec"):
        sql.resolve_schema()


@pytest.mark.parametrize(
    ("kind", "cast"),
    [
        (pa.int64(), "CAST(n AS TIMESTAMP)"),
        (pa.int32(), "to_timestamp_seconds(n)"),
        (pa.float64(), "to_timestamp_millis(n * 1000)"),
        (pa.int32(), "CAST(n AS TIMESTAMP(0))"),
        (pa.timestamp("s"), "CAST(n AS TIMESTAMP)"),
    ],
)
def test_seconds_become_times_by_the_advised_calls(kind: pa.DataType, cast: str) -> None:
    schema = pa.schema([("n", kind)])
    sql = StreamSql(f"SELECT {cast} AS t FROM stream", schema)
    assert sql.resolve_schema().names == ["t"]
    rows = pa.record_batch([pa.array([90]).cast(kind)], schema=schema)
    (found,) = sql.apply(rows)
    assert found["t"].cast(pa.timestamp("s")).cast(pa.int64()).to_pylist() == [90]
