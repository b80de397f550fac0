"""Values of types that MySQL and MariaDB alone have, or treat in a way of their own."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
import pytest
from tests.integration.mysql_sink_kit import FLAVORS, Job, query

from onceflow.core.errors import BadRow
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import MySQLSink

_Mode = Literal["insert", "upsert", "update"]
# By LOAD DATA, and in a statement.
_MODES: tuple[_Mode, _Mode] = ("insert", "upsert")


@pytest.fixture(params=FLAVORS)
def database(request: pytest.FixtureRequest) -> str:
    """URL of a new database, of both servers in turn."""
    found: str = request.getfixturevalue(f"{request.param}_database")
    return found


def _write(url: str, column: pa.Array, mode: _Mode = "insert", *, first: int = 0) -> None:
    """Write `column` as column v; at least once, which needs no fence and spells the same."""
    sink = MySQLSink(url, table="t", delivery="at_least_once", write_mode=mode, primary_key=("n",))
    schema = pa.schema([("n", pa.int32()), ("v", column.type)])
    with Job(sink, schema=schema) as job:
        writer = job.writer()
        numbers = pa.array(range(first, first + len(column)), pa.int32())
        writer.write(pa.record_batch({"n": numbers, "v": column}))
        writer.pre_commit(CheckpointId(1))


def _read(url: str, expression: str = "v", *, first: int = 0) -> list[Any]:
    where = f"n BETWEEN {first} AND {first + 99}"
    return [row[0] for row in query(url, f"SELECT {expression} FROM t WHERE {where} ORDER BY n")]


def test_bits_and_small_numbers_are_those_numbers(database: str) -> None:
    query(database, "CREATE TABLE t (n INT PRIMARY KEY, v bit(12))")
    for number, mode in enumerate(_MODES):
        _write(database, pa.array([0, 1, 2049, None], pa.int64()), mode, first=number * 100)
        assert _read(database, "v + 0", first=number * 100) == [0, 1, 2049, None]


@pytest.mark.parametrize("mode", ["update", "upsert"])
def test_bytes_of_over_64_kib_arrive_whole_where_rows_are_found_by_key(
    database: str, mode: Literal["update", "upsert"]
) -> None:
    # With a second unique index, an upsert finds rows by a join, too.
    query(database, "CREATE TABLE t (n INT PRIMARY KEY, v longblob, other INT UNIQUE)")
    query(database, "INSERT INTO t VALUES (0, NULL, 0), (1, NULL, 1)")
    values = [b"b" * 65_539, b"c" * 65_536]
    _write(database, pa.array(values), mode)
    assert _read(database) == values


def test_zero_is_written_to_an_automatic_column_as_zero(database: str) -> None:
    query(database, "CREATE TABLE t (n INT, v INT AUTO_INCREMENT KEY)")
    sink = MySQLSink(database, table="t", delivery="at_least_once")
    schema = pa.schema([("n", pa.int32()), ("v", pa.int32())])
    with Job(sink, schema=schema) as job:
        writer = job.writer()
        writer.write(pa.record_batch({"n": [1], "v": [0]}))
        with pytest.raises(BadRow, match="NOT NULL"):
            writer.write(pa.record_batch({"n": [2], "v": pa.nulls(1, pa.int32())}))
        writer = job.writer()
        writer.write(pa.record_batch({"n": [1], "v": [0]}))
        writer.pre_commit(CheckpointId(1))
    assert query(database, "SELECT n, v FROM t") == [(1, 0)]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_uuid_of_mariadb_takes_text(database: str) -> None:
    query(database, "CREATE TABLE t (n INT PRIMARY KEY, v uuid)")
    text = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    _write(database, pa.array([text, None]))
    assert [one and str(one) for one in _read(database)] == [text, None]
    with pytest.raises(BadRow, match="not a UUID"):
        _write(database, pa.array(["6ba7b810"]), first=10)


def test_key_columns_are_created_so_that_they_tell_every_byte_apart(database: str) -> None:
    schema = pa.schema([("k", pa.string()), ("b", pa.binary()), ("v", pa.int64())])
    sink = MySQLSink(
        database,
        table="created",
        create=True,
        delivery="at_least_once",
        write_mode="upsert",
        primary_key=("k", "b"),
    )
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        keys = ["a", "A", "ä", "a"]
        batch = {"k": keys, "b": [b"", b"", b"", b" "], "v": [1, 2, 3, 4]}
        writer.write(pa.record_batch(batch, schema=schema))
        writer.pre_commit(CheckpointId(1))
        with pytest.raises(BadRow, match="trailing spaces"):
            writer.write(pa.record_batch({"k": ["a "], "b": [b""], "v": [5]}, schema=schema))
    assert len(query(database, "SELECT * FROM created")) == 4
    engine = "SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE()"
    assert query(database, engine) == [("InnoDB",)]
