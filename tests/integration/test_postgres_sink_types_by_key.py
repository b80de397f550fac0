"""Values that are put by key arrive as those that are copied do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import Job, query
from tests.integration.postgres_type_samples import SAMPLES, TYPES, comparable, read

from onceflow.core.errors import BadRow
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import PostgresSink

_Mode = Literal["upsert", "ignore", "update"]
_MODES: list[_Mode] = ["upsert", "ignore", "update"]


@pytest.fixture(scope="module")
def database(onceflow_postgres: Any) -> Iterator[str]:
    """One database for the module: each test replaces its table."""
    name = "onceflow_types_by_key"
    query(onceflow_postgres.url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    query(onceflow_postgres.url, f"CREATE DATABASE {name}")
    url: str = onceflow_postgres.database_url(name)
    query(url, TYPES)
    yield url
    query(onceflow_postgres.url, f"DROP DATABASE {name} WITH (FORCE)")


def _write(url: str, column: pa.Array, mode: _Mode) -> None:
    schema = pa.schema([("n", pa.int32()), ("v", column.type)])
    # At least once, because it needs no fence: what is tested is the same in both.
    sink = PostgresSink(
        url, table="t", write_mode=mode, primary_key=("n",), delivery="at_least_once"
    )
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        keys = pa.array(range(len(column)), pa.int32())
        writer.write(pa.record_batch([keys, column], schema=schema))
        writer.pre_commit(CheckpointId(1))


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize(
    ("shown", "arrow_type", "values"), SAMPLES, ids=[f"{one[1]}-{one[0]}" for one in SAMPLES]
)
def test_values_arrive_as_they_were(
    database: str, shown: str, arrow_type: pa.DataType, values: list[Any], mode: _Mode
) -> None:
    column = pa.array(values, arrow_type)
    query(database, f"DROP TABLE IF EXISTS t; CREATE TABLE t (n int PRIMARY KEY, v {shown})")
    if mode == "update":
        query(database, f"INSERT INTO t (n) SELECT generate_series(0, {len(values) - 1})")
    _write(database, column, mode)
    assert [comparable(one) for one in read(database)] == [
        comparable(one) for one in column.to_pylist()
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
@pytest.mark.parametrize("shown", ["jsonb", "json"])
def test_json_text_arrives_as_json(database: str, kind: pa.DataType, shown: str) -> None:
    query(database, f"DROP TABLE IF EXISTS t; CREATE TABLE t (n int PRIMARY KEY, v {shown})")
    _write(database, pa.array(['{"a": [1, "é"]}', None, "null"], kind), "upsert")
    assert read(database) == [{"a": [1, "é"]}, None, None]


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
    query(database, f"DROP TABLE IF EXISTS t; CREATE TABLE t (n int PRIMARY KEY, v {shown})")
    _write(database, values, "upsert")
    assert read(database) == values.to_pylist()


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize(
    ("shown", "bad"),
    [
        ("varchar(3)", pa.array(["abcd"])),
        ("char(3)", pa.array(["abcd"])),
        ("mood", pa.array(["ugly"])),
        ("jsonb", pa.array(["{"])),
        ("cents", pa.array([-1])),
    ],
    ids=str,
)
def test_value_over_a_limit_is_refused_and_never_cut(
    database: str, shown: str, bad: pa.Array, mode: _Mode
) -> None:
    query(database, f"DROP TABLE IF EXISTS t; CREATE TABLE t (n int PRIMARY KEY, v {shown})")
    query(database, "INSERT INTO t (n) VALUES (0)" if mode == "update" else "SELECT 1")
    with pytest.raises(BadRow):
        _write(database, bad, mode)
    assert read(database) == ([None] if mode == "update" else [])


@pytest.mark.parametrize(
    ("shown", "keys"),
    [
        ("smallint", pa.array([2, 1, 2], pa.int64())),
        ("text", pa.array(["é", "", "é"])),
        ("varchar(5)", pa.array(["b", "a", "b"], pa.string_view())),
        ("char(5)", pa.array(["b", "a", "b"])),
        ("mood", pa.array(["good", "bad", "good"], pa.dictionary(pa.int8(), pa.string()))),
        ("uuid", pa.array(["6ba7b810-9dad-11d1-80b4-00c04fd430c8"] * 3)),
        ("bytea", pa.array([b"b", b"a", b"b"])),
        ("numeric(9,3)", pa.array(["2.5", "1", "2.5"]).cast(pa.decimal128(9, 2))),
        ("date", pa.array([2, 1, 2], pa.date32())),
        ("timestamptz", pa.array([2, 1, 2], pa.timestamp("s", "UTC"))),
        ("boolean", pa.array([True, False, True])),
        ("time", pa.array([2, 1, 2], pa.time64("us"))),
        ("cents", pa.array([2, 1, 2], pa.uint8())),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("delete", [False, True])
def test_keys_of_every_type_find_their_row(
    database: str, shown: str, keys: pa.Array, delete: bool
) -> None:
    query(database, f"DROP TABLE IF EXISTS t; CREATE TABLE t (n {shown} PRIMARY KEY, v int)")
    sink = PostgresSink(
        database, table="t", write_mode="upsert", primary_key=("n",), tombstones=True,
        delivery="at_least_once",
    )  # fmt: skip
    distinct = len(set(keys.to_pylist()))
    schema = pa.schema([("n", keys.type), ("v", pa.int32())])
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        for checkpoint in (1, 2):
            values = pa.array(range(checkpoint, checkpoint + 3), pa.int32())
            writer.write(pa.record_batch([keys, values], schema=schema))
            writer.pre_commit(CheckpointId(checkpoint))
        assert query(database, "SELECT count(*), max(v) FROM t") == [(distinct, 4)]
        if delete:
            writer.write(pa.record_batch([keys, pa.nulls(3, pa.int32())], schema=schema))
            writer.pre_commit(CheckpointId(3))
            assert query(database, "SELECT count(*) FROM t") == [(0,)]
