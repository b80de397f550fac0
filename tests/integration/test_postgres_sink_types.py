"""Values of types that Postgres alone has: JSON in two types, arrays, databases of any encoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import Job, query

from onceflow.core.errors import BadRow, ConfigError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import PostgresSink

_Mode = Literal["insert", "upsert"]


@pytest.fixture(scope="module")
def database(onceflow_postgres: Any) -> Iterator[str]:
    """One database for the module: each test replaces its table."""
    name = "onceflow_types"
    query(onceflow_postgres.url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    query(onceflow_postgres.url, f"CREATE DATABASE {name}")
    url: str = onceflow_postgres.database_url(name)
    yield url
    query(onceflow_postgres.url, f"DROP DATABASE {name} WITH (FORCE)")


def _write(url: str, column: pa.Array, shown: str, mode: _Mode = "insert") -> None:
    """Write `column` as column v of a table in which v is of type `shown`; commit."""
    query(url, f"DROP TABLE IF EXISTS t; CREATE TABLE t (n int PRIMARY KEY, v {shown})")
    # At least once, because it needs no fence: what is tested is the same in both.
    key = () if mode == "insert" else ("n",)
    sink = PostgresSink(url, table="t", write_mode=mode, primary_key=key, delivery="at_least_once")
    schema = pa.schema([("n", pa.int32()), ("v", column.type)])
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        numbers = pa.array(range(len(column)), pa.int32())
        writer.write(pa.record_batch([numbers, column], schema=schema))
        writer.pre_commit(CheckpointId(1))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_json_text_arrives_as_jsonb(database: str, kind: pa.DataType) -> None:
    texts = ['{"a": [1, null]}', None, "3", '"x"', "null", "[true]"]
    _write(database, pa.array(texts, kind), "jsonb")
    assert query(database, "SELECT v::text FROM t ORDER BY n") == [(text,) for text in texts]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
@pytest.mark.parametrize("shown", ["jsonb", "json"])
def test_json_text_arrives_as_json(database: str, kind: pa.DataType, shown: str) -> None:
    _write(database, pa.array(['{"a": [1, "é"]}', None, "null"], kind), shown, "upsert")
    assert query(database, "SELECT v FROM t ORDER BY n") == [({"a": [1, "é"]},), (None,), (None,)]


@pytest.mark.parametrize(
    ("shown", "values"),
    [
        ("text[]", pa.array([['a"b\\c', "{x,y}", "", "NULL", None, " s "], []])),
        ("bytea[]", pa.array([[b"\x00\\", None], None], pa.list_(pa.binary()))),
        ("numeric[]", pa.array([["1.50", None]]).cast(pa.list_(pa.decimal128(9, 2)))),
        ("boolean[]", pa.array([[True, None, False]])),
        ("timestamp[]", pa.array([[0, 1]], pa.list_(pa.timestamp("us")))),
        ("double precision[]", pa.array([[1e300, float("inf"), -0.1, None]])),
    ],
    ids=str,
)
def test_arrays_arrive_element_by_element(database: str, shown: str, values: pa.Array) -> None:
    _write(database, values, shown, "upsert")
    found = query(database, "SELECT v FROM t ORDER BY n")
    assert [row[0] for row in found] == values.to_pylist()


@pytest.fixture
def latin1_database(onceflow_postgres: Any) -> Iterator[str]:
    name = "onceflow_latin"
    query(onceflow_postgres.url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    query(
        onceflow_postgres.url,
        f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0",
    )
    yield onceflow_postgres.database_url(name)
    query(onceflow_postgres.url, f"DROP DATABASE {name} WITH (FORCE)")


def test_database_of_another_encoding_gets_the_same_text(latin1_database: str) -> None:
    _write(latin1_database, pa.array(["é"]), "text")
    shown = query(latin1_database, "SELECT encode(convert_to(v, 'LATIN1'), 'hex') FROM t")
    assert shown == [("e9",)]
    with pytest.raises(BadRow, match="no equivalent"):
        _write(latin1_database, pa.array(["€"]), "text")


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("text", ["é", "€"]),
        ("varchar(9)", ["é", "€"]),
        ("jsonb", ['"é"', '"€"']),
        ("text[]", [["é"], ["a", "€"]]),
    ],
)
def test_a_character_outside_the_encoding_makes_a_bad_row_before_its_decision(
    latin1_database: str, tmp_path: Path, kind: str, texts: list[Any]
) -> None:
    query(latin1_database, f"CREATE TABLE t (id bigint, v {kind})")
    rows = pa.record_batch({"id": pa.array([1, 2]), "v": pa.array(texts)})
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    sink = PostgresSink(latin1_database, table="t", commit_mode="ledger")
    with Job(sink, schema=rows.schema, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        writer.write(rows)
        (committable,) = writer.pre_commit(CheckpointId(1))
        (rejected,) = writer.take_rejected()
        assert "no equivalent" in rejected.reasons[0]
        assert job.committer().commit(committable) == Committed()
    assert query(latin1_database, "SELECT id FROM t") == [(1,)]


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ("price[]", "{1.005}"),
        ("priced", "(1.005,1)"),
        ("priced[]", '{"(1.005,1)"}'),
        ("prices", "[1.005,2)"),
        ("holder", '("(1.005,1)")'),
    ],
)
def test_text_of_a_type_whose_parts_are_rounded_is_refused_at_the_start(
    database: str, shown: str, text: str
) -> None:
    query(
        database,
        "DROP SCHEMA public CASCADE; CREATE SCHEMA public",
        "CREATE DOMAIN price AS numeric(5,2)",
        "CREATE TYPE priced AS (price price, n int)",
        "CREATE TYPE prices AS RANGE (subtype = price)",
        "CREATE TYPE holder AS (p priced)",
    )
    with pytest.raises(ConfigError, match="does not take it unchanged"):
        _write(database, pa.array([text]), shown)


def test_text_of_a_type_whose_parts_have_no_limits_arrives(database: str) -> None:
    query(
        database,
        "DROP SCHEMA public CASCADE; CREATE SCHEMA public",
        "CREATE TYPE tree AS (n numeric, name text)",
        "CREATE DOMAIN wood AS tree[]",
    )
    _write(database, pa.array(['{"(1.005,x)"}', "{}"]), "wood")
    shown = [row[0] for row in query(database, "SELECT v::text FROM t ORDER BY n")]
    assert shown == ['{"(1.005,x)"}', "{}"]


def test_lists_of_bytes_of_one_size_arrive_as_these_bytes_in_an_upsert(database: str) -> None:
    values = [[b"\\x41", b"\xff\x00ab"], None, []]
    _write(database, pa.array(values, pa.list_(pa.binary(4))), "bytea[]", "upsert")
    assert [row[0] for row in query(database, "SELECT v FROM t ORDER BY n")] == values
