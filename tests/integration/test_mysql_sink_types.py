"""Values of every type arrive as they were, or are refused by column and value; on both servers.

Each value goes in twice: by LOAD DATA, as inserts do, and in a statement, as changes by key do.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.mysql_sink_kit import FLAVORS, Job, query
from tests.integration.mysql_type_samples import SAMPLES

from onceflow.core.errors import BadRow, ConfigError, SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.integration.servers.mysql_admin import MySQLAdmin
from onceflow.sinks import MySQLSink

UTC = dt.timezone.utc
D = decimal.Decimal
_Mode = Literal["insert", "upsert"]
_MODES: tuple[_Mode, _Mode] = ("insert", "upsert")


@pytest.fixture(scope="module", params=FLAVORS)
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """One database of each server for the module: each test replaces its table."""
    server = request.getfixturevalue(f"onceflow_{request.param}")
    name = "onceflow_types"
    with MySQLAdmin.session(server.url) as admin:
        admin.rows(f"DROP DATABASE IF EXISTS {name}")
        admin.create_database(name)
        url: str = server.database_url(name)
        yield url
        admin.end_sessions_of(name)
        admin.drop_database(name)


def _is_mariadb(url: str) -> bool:
    ((version,),) = query(url, "SELECT VERSION()")
    return "MariaDB" in version


def _create(url: str, shown: str) -> None:
    query(
        url,
        "DROP TABLE IF EXISTS t",
        f"CREATE TABLE t (n INT PRIMARY KEY, v {shown}) CHARACTER SET utf8mb4",
    )


def _write(
    url: str,
    column: pa.Array,
    mode: _Mode = "insert",
    *,
    first: int = 0,
    announced: pa.DataType | None = None,
    overflow: Literal["error", "null"] = "error",
) -> None:
    """Write `column` as column v; at least once, which needs no fence and spells the same."""
    sink = MySQLSink(
        url,
        table="t",
        delivery="at_least_once",
        write_mode=mode,
        primary_key=("n",),
        overflow=overflow,
    )
    schema = pa.schema([("n", pa.int32()), ("v", announced or column.type)])
    with Job(sink, schema=schema) as job:
        writer = job.writer()
        numbers = pa.array(range(first, first + len(column)), pa.int32())
        writer.write(pa.record_batch({"n": numbers, "v": column}))
        writer.pre_commit(CheckpointId(1))


def _read(url: str, expression: str = "v", *, first: int = 0) -> list[Any]:
    where = f"n BETWEEN {first} AND {first + 99}"
    return [row[0] for row in query(url, f"SELECT {expression} FROM t WHERE {where} ORDER BY n")]


@pytest.mark.parametrize(
    ("shown", "kind", "values"), SAMPLES, ids=[f"{one[1]}-{one[0]}" for one in SAMPLES]
)
def test_values_arrive_as_they_were(
    database: str, shown: str, kind: pa.DataType, values: list[Any]
) -> None:
    column = pa.array(values, kind)
    _create(database, shown)
    # FLOAT is shown in six digits, and BIT as bytes.
    expression = {"float": "v + 0e0", "bit(1)": "v + 0", "bit(64)": "v + 0"}.get(shown, "v")
    for number, mode in enumerate(_MODES):
        _write(database, column, mode, first=number * 100)
        got = _read(database, expression, first=number * 100)
        assert list(map(_comparable, got)) == list(map(_comparable, column.to_pylist())), mode


def _comparable(value: Any) -> object:
    """Make what PyMySQL and Arrow return alike, where they differ in form alone."""
    match value:
        case bool():
            return int(value)
        case bytes():
            # BIT comes as the bytes of a number.
            return value.lstrip(b"\0").hex()
        case uuid.UUID():
            return value.bytes.hex()
        case dt.timedelta():
            return (dt.datetime.min + value).time()
        case dt.datetime():
            return value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        case str() if value.startswith(("{", "null")):
            return ("json", json.loads(value))
        case float():
            return decimal.Decimal(repr(value))
        case _:
            return value


def test_bits_and_small_numbers_are_those_numbers(database: str) -> None:
    _create(database, "bit(12)")
    for number, mode in enumerate(_MODES):
        _write(database, pa.array([0, 1, 2049, None], pa.int64()), mode, first=number * 100)
        assert _read(database, "v + 0", first=number * 100) == [0, 1, 2049, None]


def test_zero_is_written_to_an_automatic_column_as_zero(database: str) -> None:
    query(database, "DROP TABLE IF EXISTS t", "CREATE TABLE t (n INT, v INT AUTO_INCREMENT KEY)")
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
    _create(database, "uuid")
    text = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    _write(database, pa.array([text, None]))
    assert [one and str(one) for one in _read(database)] == [text, None]
    with pytest.raises(BadRow, match="no UUID"):
        _write(database, pa.array(["6ba7b810"]), first=10)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a", None]).dictionary_encode(),
        pa.RunEndEncodedArray.from_arrays([1, 2, 3, 4], pa.array(["a", "b", "a", None])),
        pa.array(["x", "a", "b", "a", None, "y"]).slice(1, 4),
        pa.array(["x", "a", "b", "a", None, "y"], pa.string_view()).slice(1, 4),
    ],
    ids=["dictionary", "run-ends", "slice", "view-slice"],
)
def test_encodings_of_text_are_the_same_text(database: str, column: pa.Array) -> None:
    _create(database, "text")
    for number, mode in enumerate(_MODES):
        _write(database, column, mode, first=number * 100)
        assert _read(database, first=number * 100) == ["a", "b", "a", None]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_values_arrive_as_they_were(database: str, data: st.DataObject) -> None:
    """Each of many columns holds anything its type can; what arrives is what was written."""
    length = data.draw(st.integers(1, 20))

    def column(elements: st.SearchStrategy[Any], kind: pa.DataType) -> pa.Array:
        drawn = data.draw(st.lists(st.none() | elements, min_size=length + 2, max_size=length + 2))
        return pa.array(drawn, kind).slice(1, length)

    days = st.dates(dt.date(1, 1, 1))
    finite = st.floats(allow_nan=False, allow_infinity=False).map(lambda one: one + 0.0)
    columns = {
        "i8": column(st.integers(-(2**63), 2**63 - 1), pa.int64()),
        "u8": column(st.integers(0, 2**64 - 1), pa.uint64()),
        "t": column(st.text(st.characters(codec="utf-8")), pa.string()),
        "b": column(st.binary(), pa.binary()),
        "f": column(finite.filter(bool), pa.float64()),
        "d": column(st.decimals(-99999, 99999, places=3), pa.decimal128(20, 3)),
        "day": column(days, pa.date32()),
        "ts": column(st.datetimes(), pa.timestamp("us")),
    }
    query(
        database,
        "DROP TABLE IF EXISTS t",
        "CREATE TABLE t (n INT PRIMARY KEY, i8 BIGINT, u8 BIGINT UNSIGNED, t LONGTEXT, b LONGBLOB, "
        "f DOUBLE, d DECIMAL(20,3), day DATE, ts DATETIME(6)) CHARACTER SET utf8mb4",
    )
    for mode in _MODES:
        numbers = pa.array(range(length), pa.int32())
        batch = pa.record_batch({"n": numbers, **columns})
        query(database, "DELETE FROM t")
        sink = MySQLSink(
            database, table="t", delivery="at_least_once", write_mode=mode, primary_key=("n",)
        )
        with Job(sink, schema=batch.schema) as job:
            writer = job.writer()
            writer.write(batch)
            writer.pre_commit(CheckpointId(1))
        found = query(database, f"SELECT {', '.join(columns)} FROM t ORDER BY n")
        for position, (name, written) in enumerate(columns.items()):
            got = [row[position] for row in found]
            assert list(map(repr, got)) == list(map(repr, written.to_pylist())), (mode, name)


_REFUSED: list[tuple[str, pa.Array, str]] = [
    ("int", pa.array([1, 2**31, 5], pa.int64()), "2147483648"),
    ("tinyint", pa.array([None, -129], pa.int64()), "-129"),
    ("mediumint", pa.array([2**23], pa.int64()), "8388608"),
    ("mediumint unsigned", pa.array([-1], pa.int64()), "-1"),
    ("int unsigned", pa.array([-1], pa.int64()), "-1"),
    ("bigint", pa.array([2**63], pa.uint64()), "9223372036854775808"),
    ("bigint unsigned", pa.array([-1], pa.int64()), "-1"),
    ("bit(3)", pa.array([8], pa.int64()), "8"),
    ("decimal(5,2)", pa.array([D("1.005")], pa.decimal128(10, 3)), "1.005"),
    ("decimal(5,2)", pa.array([D("1000.00")], pa.decimal128(10, 2)), "1000.00"),
    ("decimal(5,2)", pa.array([1, 1000], pa.int64()), "1000"),
    ("decimal(5,2) unsigned", pa.array([D("-0.01")], pa.decimal128(5, 2)), "-0.01"),
    ("float", pa.array([math.inf], pa.float32()), "inf"),
    ("double", pa.array([1.0, math.nan]), "nan"),
    ("double", pa.array([-math.inf]), "-inf"),
    ("double unsigned", pa.array([-0.5]), "-0.5"),
    ("varchar(3)", pa.array(["abc", "abcd"]), "abcd"),
    ("varchar(3)", pa.array(["abc "]), "abc "),
    ("char(3)", pa.array(["a "]), "a "),
    ("tinytext", pa.array(["é" * 128]), "é"),
    ("varchar(9) character set utf8mb3", pa.array(["€", "😀"]), "😀"),
    ("varchar(9) character set ascii", pa.array(["é"]), "é"),
    ("varchar(9) collate utf8mb4_bin not null", pa.array(["a", None]), "null|None"),
    ("enum('good','bad')", pa.array(["good", "Good"]), "Good"),
    ("enum('good','bad')", pa.array([""]), "''"),
    ("binary(3)", pa.array([b"ab"]), "b'ab'"),
    ("varbinary(3)", pa.array([b"abc", b"abcd"]), "b'abcd'"),
    ("date", pa.array([-719_163], pa.int32()).cast(pa.date32()), "0000-12-31|-719163"),
    ("date", pa.array([2_932_897], pa.int32()).cast(pa.date32()), "10000-01-01|2932897"),
    ("datetime(6)", pa.array([-(2**62)], pa.int64()).cast(pa.timestamp("us")), str(-(2**62))),
    ("datetime", pa.array([1], pa.int64()).cast(pa.timestamp("us")), "1970, 1, 1, 0, 0, 0, 1"),
    ("datetime(6)", pa.array([1], pa.int64()).cast(pa.timestamp("ns")), "00:00:00.000000001"),
    ("timestamp null", pa.array([0], pa.int64()).cast(pa.timestamp("us", "UTC")), "1970, 1, 1"),
    (
        "timestamp(6) null",
        pa.array([2_147_483_648], pa.int64()).cast(pa.timestamp("s", "UTC")),
        "2038, 1, 19, 3, 14, 8",
    ),
    ("time", pa.array([dt.time(0, 0, 0, 5)], pa.time64("us")), "5"),
]


@pytest.mark.parametrize(
    ("shown", "column", "value"), _REFUSED, ids=[f"{one[1].type}-{one[0]}" for one in _REFUSED]
)
def test_value_that_does_not_fit_is_refused_by_column_and_value(
    database: str, shown: str, column: pa.Array, value: str
) -> None:
    _create(database, shown)
    for mode in _MODES:
        with pytest.raises(BadRow, match=rf"column 'v'.*({value})"):
            _write(database, column, mode)
    assert _read(database) == []


@pytest.mark.parametrize(
    ("shown", "column", "said"),
    [
        ("json", pa.array(["[1]", "{"]), "JSON|CONSTRAINT `t.v`"),
        ("varchar(9) character set latin1", pa.array(["日"]), "column.*v"),
        ("int check (v > 0)", pa.array([1, -1]), "t_chk_1|CONSTRAINT"),
    ],
    ids=["json", "latin1", "check"],
)
def test_value_that_only_the_server_knows_to_refuse_is_a_bad_row(
    database: str, shown: str, column: pa.Array, said: str
) -> None:
    _create(database, shown)
    for mode in _MODES:
        with pytest.raises(BadRow, match=said):
            _write(database, column, mode)
    assert _read(database) == []


def test_overflow_becomes_null_where_that_is_asked_for(database: str) -> None:
    _create(database, "tinyint")
    for number, mode in enumerate(_MODES):
        column = pa.array([1, 1000, -1000], pa.int64())
        _write(database, column, mode, first=number * 100, overflow="null")
        assert _read(database, first=number * 100) == [1, None, None]


@pytest.mark.parametrize(
    ("shown", "kind"),
    [
        ("int", pa.float64()),
        ("int", pa.string()),
        ("text", pa.int64()),
        ("float", pa.float64()),
        ("float", pa.int32()),
        ("float(7,2)", pa.float32()),
        ("double", pa.int64()),
        ("decimal(10,2)", pa.float64()),
        ("timestamp null", pa.timestamp("us")),
        ("date", pa.timestamp("us")),
        ("time", pa.duration("us")),
        ("year", pa.int16()),
        ("set('a','b')", pa.string()),
        ("blob", pa.string()),
        ("text", pa.binary()),
        ("json", pa.struct([("a", pa.int64())])),
        ("json", pa.map_(pa.string(), pa.string())),
        ("int", pa.list_(pa.int32())),
        ("point", pa.string()),
    ],
    ids=str,
)
def test_types_that_would_change_values_are_refused_with_both_names(
    database: str, shown: str, kind: pa.DataType
) -> None:
    _create(database, shown)
    sink = MySQLSink(database, table="t", delivery="at_least_once")
    with Job(sink, schema=pa.schema([("n", pa.int32()), ("v", kind)])) as job:
        with pytest.raises(ConfigError) as failure:
            job.check()
        with pytest.raises(ConfigError):
            job.writer()
    assert f"Arrow type {kind} " in str(failure.value)
    stored = "longtext" if shown == "json" and _is_mariadb(database) else shown
    assert f"type {stored.split()[0].split('(')[0]}" in str(failure.value)


_CREATED: Sequence[tuple[pa.DataType, str]] = [
    (pa.int8(), "tinyint"),
    (pa.int16(), "smallint"),
    (pa.int32(), "int"),
    (pa.int64(), "bigint"),
    (pa.uint8(), "tinyint unsigned"),
    (pa.uint16(), "smallint unsigned"),
    (pa.uint32(), "int unsigned"),
    (pa.uint64(), "bigint unsigned"),
    (pa.float16(), "float"),
    (pa.float32(), "float"),
    (pa.float64(), "double"),
    (pa.decimal128(12, 3), "decimal(12,3)"),
    (pa.decimal128(5, -2), "decimal(7,0)"),
    (pa.decimal256(65, 30), "decimal(65,30)"),
    (pa.bool_(), "tinyint(1)"),
    (pa.string(), "longtext"),
    (pa.large_string(), "longtext"),
    (pa.string_view(), "longtext"),
    (pa.dictionary(pa.int32(), pa.string()), "longtext"),
    (pa.binary(), "longblob"),
    (pa.binary(16), "binary(16)"),
    (pa.binary(300), "longblob"),
    (pa.uuid(), "binary(16)"),
    (pa.date32(), "date"),
    (pa.date64(), "date"),
    (pa.timestamp("us"), "datetime(6)"),
    (pa.timestamp("ns", "UTC"), "timestamp(6)"),
    (pa.time64("us"), "time(6)"),
]


def test_created_table_takes_what_it_was_created_for(database: str) -> None:
    """Every type is created, then matched and written to as nulls."""
    query(database, "DROP TABLE IF EXISTS created")
    schema = pa.schema([(f"c{number}", kind) for number, (kind, _) in enumerate(_CREATED)])
    sink = MySQLSink(database, table="created", create=True, delivery="at_least_once")
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        nulls = [pa.nulls(2, field.type) for field in schema]
        writer.write(pa.record_batch(nulls, schema=schema))
        writer.pre_commit(CheckpointId(1))
    shown = query(
        database,
        "SELECT column_type, engine FROM information_schema.columns JOIN information_schema.tables "
        "USING (table_schema, table_name) WHERE table_schema = DATABASE() "
        "AND table_name = 'created' ORDER BY ordinal_position",
    )
    # MariaDB shows the width of whole numbers, which means nothing.
    found = [re.sub(r"int\((?!1\))\d+\)", "int", row[0]) for row in shown]
    assert found == [expected for _, expected in _CREATED]
    assert {row[1] for row in shown} == {"InnoDB"}
    assert query(database, "SELECT count(*) FROM created") == [(2,)]


def test_key_columns_are_created_so_that_they_tell_every_byte_apart(database: str) -> None:
    query(database, "DROP TABLE IF EXISTS created")
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
        with pytest.raises(BadRow, match="spaces at its end"):
            writer.write(pa.record_batch({"k": ["a "], "b": [b""], "v": [5]}, schema=schema))
    assert len(query(database, "SELECT * FROM created")) == 4


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.list_(pa.int64()), pa.decimal256(70, 2)])
def test_types_that_no_table_is_created_for_are_named(database: str, kind: pa.DataType) -> None:
    query(database, "DROP TABLE IF EXISTS created")
    sink = MySQLSink(database, table="created", create=True, delivery="at_least_once")
    with Job(sink, schema=pa.schema([("v", kind)])) as job, pytest.raises(ConfigError) as failure:
        job.check()
    assert f"column 'v': no type of MySQL is made from Arrow type {kind}" in str(failure.value)


def test_batch_of_other_columns_or_types_than_announced_is_refused(database: str) -> None:
    _create(database, "int")
    for batch, said in (
        (pa.record_batch({"n": [1], "x": [1]}), "announced"),
        (pa.record_batch({"n": [1]}), "announced"),
        (pa.record_batch({"n": [1], "v": [1.0]}), "Arrow type double.*int"),
    ):
        sink = MySQLSink(database, table="t", delivery="at_least_once")
        announced = pa.schema([("n", pa.int64()), ("v", pa.int64())])
        with Job(sink, schema=announced) as job:
            writer = job.writer()
            with pytest.raises(SinkError, match=said):
                writer.write(batch)
    assert query(database, "SELECT count(*) FROM t") == [(0,)]
