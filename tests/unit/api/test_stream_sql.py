"""SQL over a stream: what it makes of rows, and what needs several at a time and is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.api.stream_sql import StreamSql
from onceflow.core.errors import ConfigError

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
        ("SELECT id FROM stream WHERE id > (SELECT avg(id) FROM stream)", "ScalarSubquery"),
        ("SELECT id, (SELECT max(id) FROM stream) AS m FROM stream", "ScalarSubquery"),
    ],
)
def test_what_needs_several_rows_is_refused_by_the_name_of_its_plan(query: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"needs a plan with {named}"):
        StreamSql(query, SCHEMA).resolve_schema()


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
