"""Values of every type arrive as they were, or are refused by column and value."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.postgres_sink_kit import Job, query
from tests.integration.postgres_type_samples import SAMPLES, TYPES, comparable, read

from onceflow.core.errors import BadRow, ConfigError, SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import PostgresSink

UTC = dt.timezone.utc
D = decimal.Decimal


@pytest.fixture(scope="module")
def database(onceflow_postgres: Any) -> Iterator[str]:
    """One database for the module: each test replaces its table."""
    name = "onceflow_types"
    query(onceflow_postgres.url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    query(onceflow_postgres.url, f"CREATE DATABASE {name}")
    url: str = onceflow_postgres.database_url(name)
    query(url, TYPES)
    yield url
    query(onceflow_postgres.url, f"DROP DATABASE {name} WITH (FORCE)")


def _write(url: str, column: pa.Array, shown: str, *, announced: pa.DataType | None = None) -> None:
    """Write `column` as column v of a table in which v is of type `shown`; commit."""
    query(url, f"DROP TABLE IF EXISTS t; CREATE TABLE t (n serial, v {shown})")
    _append(url, column, announced or column.type)


def _append(url: str, column: pa.Array, announced: pa.DataType) -> None:
    # At least once, because it needs no fence: what is tested is the same in both.
    sink = PostgresSink(url, table="t", delivery="at_least_once")
    with Job(sink, schema=pa.schema([("v", announced)])) as job:
        writer = job.writer()
        writer.write(pa.record_batch({"v": column}))
        writer.pre_commit(CheckpointId(1))


@pytest.mark.parametrize(
    ("shown", "arrow_type", "values"),
    [sample for sample in SAMPLES if sample[2]],
    ids=[f"{one[1]}-{one[0]}" for one in SAMPLES if one[2]],
)
def test_values_arrive_as_they_were(
    database: str, shown: str, arrow_type: pa.DataType, values: list[Any]
) -> None:
    column = pa.array(values, arrow_type)
    _write(database, column, shown)
    got = read(database)
    assert [comparable(one) for one in got] == [comparable(one) for one in column.to_pylist()]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_json_text_arrives_as_jsonb(database: str, kind: pa.DataType) -> None:
    texts = ['{"a": [1, null]}', None, "3", '"x"', "null", "[true]"]
    _write(database, pa.array(texts, kind), "jsonb")
    assert query(database, "SELECT v::text FROM t ORDER BY n") == [(text,) for text in texts]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a", None]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None], pa.int8()), ["a", "b"]),
        pa.RunEndEncodedArray.from_arrays([1, 2, 3, 4], pa.array(["a", "b", "a", None])),
        pa.array(["a", "b", "a", None], pa.large_string()),
        pa.array(["x", "a", "b", "a", None, "y"]).slice(1, 4),
        pa.array(["x", "a", "b", "a", None, "y"], pa.string_view()).slice(1, 4),
    ],
    ids=["dictionary", "small-index", "run-ends", "large", "slice", "view-slice"],
)
def test_encodings_of_text_are_the_same_text(database: str, column: pa.Array) -> None:
    for announced in (column.type, pa.string()):
        _write(database, column, "text", announced=announced)
        assert read(database) == ["a", "b", "a", None]


_MICROS = st.integers(-(2**63), 2**63 - 1)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_values_arrive_or_are_refused(database: str, data: st.DataObject) -> None:
    """Each of many columns holds anything its type can; what arrives is what was written."""
    length = data.draw(st.integers(1, 20))

    def column(elements: st.SearchStrategy[Any], kind: pa.DataType) -> pa.Array:
        drawn = data.draw(st.lists(st.none() | elements, min_size=length + 2, max_size=length + 2))
        return pa.array(drawn, kind).slice(1, length)

    text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
    columns = {
        "i8": column(st.integers(-(2**63), 2**63 - 1), pa.int64()),
        "i2": column(st.integers(-(2**15), 2**15 - 1), pa.int32()),
        "t": column(text, pa.string()),
        "b": column(st.binary(), pa.binary()),
        "f": column(st.floats(), pa.float64()),
        "n": column(st.decimals(-99999, 99999, places=3), pa.decimal128(20, 3)),
        "d": column(st.dates(), pa.date32()),
        "ts": column(st.datetimes(), pa.timestamp("us")),
        "a": column(st.lists(st.none() | st.integers(0, 9)), pa.list_(pa.int64())),
        "tz": pa.array([None] * length, pa.timestamp("us", "UTC")),
    }
    query(
        database,
        "DROP TABLE IF EXISTS t; CREATE TABLE t (n_ serial, i8 bigint, i2 smallint, t text, "
        "b bytea, f double precision, n numeric, d date, ts timestamp, a int[], tz timestamptz)",
    )
    batch = pa.record_batch(columns)
    sink = PostgresSink(database, table="t", delivery="at_least_once")
    with Job(sink, schema=batch.schema) as job:
        writer = job.writer()
        writer.write(batch)
        writer.pre_commit(CheckpointId(1))
    with psycopg.connect(database) as connection:
        found = connection.execute(
            "SELECT i8, i2, t, b, f, n, d, ts, a, tz FROM t ORDER BY n_"
        ).fetchall()
    got = {name: [row[index] for row in found] for index, name in enumerate(columns)}
    for name, written in columns.items():
        assert list(map(repr, got[name])) == list(map(repr, written.to_pylist())), name


@pytest.mark.parametrize(
    ("shown", "column", "value"),
    [
        ("integer", pa.array([1, 2**31, 5], pa.int64()), "2147483648"),
        ("smallint", pa.array([None, -40_000], pa.int64()), "-40000"),
        ("bigint", pa.array([2**63], pa.uint64()), "9223372036854775808"),
        ("numeric(5,2)", pa.array([D("1.005")], pa.decimal128(10, 3)), "1.005"),
        ("numeric(5,2)", pa.array([D("1000.00")], pa.decimal128(10, 2)), "1000.00"),
        ("numeric(5,2)", pa.array([1, 1000], pa.int64()), "1000"),
        ("price", pa.array([D("10000.00")], pa.decimal128(10, 2)), "10000.00"),
        ("text", pa.array(["ok", "a\0b"]), r"a\\x00b"),
        ("text", pa.array(["ok", "a\0b"], pa.string_view()), r"a\\x00b"),
        ("json", pa.array(['{"a": "\0"}'], pa.large_string()), r"\\x00"),
        ("text", pa.array(["ok", "a\0b", "c"]).dictionary_encode(), r"a\\x00b"),
        ("text[]", pa.array([["ok"], ["a\0b"]]), r"a\\x00b"),
        ("uuid", pa.array(["6ba7b810-9dad-11d1-80b4-00c04fd430c8", "no-uuid"]), "no-uuid"),
        ("uuid", pa.array(["6ba7b810 9dad 11d1 80b4 00c04fd430c"]), "6ba7b810 9dad"),
        ("date", pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32()), "2147483647"),
        ("date", pa.array([-(2**31)], pa.int32()).cast(pa.date32()), "-2147483648"),
        ("timestamp", pa.array([-(2**63)], pa.int64()).cast(pa.timestamp("us")), str(-(2**63))),
        (
            "timestamptz",
            # Would be the bits of -infinity.
            pa.array([-(2**63) + 946_684_800_000_000]).cast(pa.timestamp("us", "UTC")),
            "-9222425352054775808",
        ),
        ("timestamp", pa.array([1], pa.int64()).cast(pa.timestamp("ns")), "00:00:00.000000001"),
        ("timestamp", pa.array([2**62], pa.int64()).cast(pa.timestamp("s")), "4611686018427387904"),
        ("timestamp[]", pa.array([[-(2**63)]], pa.list_(pa.timestamp("us"))), str(-(2**63))),
        ("integer[]", pa.array([[1], [2**40]]), str(2**40)),
    ],
    ids=lambda one: one if isinstance(one, str) else str(one.type),
)
def test_value_that_does_not_fit_is_refused_by_column_and_value(
    database: str, shown: str, column: pa.Array, value: str
) -> None:
    with pytest.raises(BadRow, match=rf"column 'v'.*({value})"):
        _write(database, column, shown)
    assert read(database) == []


@pytest.mark.parametrize(
    ("shown", "column", "said"),
    [
        ("varchar(3)", pa.array(["abcd"]), r"character varying\(3\).*column v"),
        ("mood", pa.array(["angry"]), "enum mood.*angry.*column v"),
        ("jsonb", pa.array(["{"]), "json.*column v"),
        ("cents", pa.array([-1]), "domain cents.*column v|cents_check"),
        ("text NOT NULL", pa.array([None], pa.string()), 'null value in column "v"'),
    ],
)
def test_value_that_the_server_refuses_is_a_bad_row_of_that_column(
    database: str, shown: str, column: pa.Array, said: str
) -> None:
    with pytest.raises(BadRow, match=said):
        _write(database, column, shown)
    assert read(database) == []


@pytest.mark.parametrize(
    ("shown", "kind"),
    [
        ("integer", pa.float64()),
        ("integer", pa.string()),
        ("text", pa.int64()),
        ("real", pa.float64()),
        ("real", pa.int32()),
        ("double precision", pa.int64()),
        ("numeric", pa.float64()),
        ("numeric", pa.decimal256(50, 5)),
        ("boolean", pa.int8()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestamptz", pa.timestamp("us")),
        ("date", pa.timestamp("us")),
        ("timetz", pa.time64("us")),
        ("uuid", pa.binary()),
        ("bytea", pa.string()),
        ("jsonb", pa.struct([("a", pa.int64())])),
        ("jsonb", pa.map_(pa.string(), pa.string())),
        ("varchar[]", pa.list_(pa.string())),
        ("timestamptz[]", pa.list_(pa.timestamp("us", "UTC"))),
        ("integer[]", pa.int32()),
        ("integer", pa.list_(pa.int32())),
        ("point", pa.string()),
        ("inet", pa.string()),
        ("xml", pa.string()),
    ],
    ids=str,
)
def test_types_that_would_change_values_are_refused_with_both_names(
    database: str, shown: str, kind: pa.DataType
) -> None:
    query(database, f"DROP TABLE IF EXISTS t; CREATE TABLE t (v {shown})")
    sink = PostgresSink(database, table="t", delivery="at_least_once")
    with Job(sink, schema=pa.schema([("v", kind)])) as job:
        with pytest.raises(ConfigError) as failure:
            job.check()
        with pytest.raises(ConfigError):
            job.writer()
    (stored,) = query(
        database,
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 't'::regclass AND attname = 'v'",
    )
    assert f"Arrow type {kind} " in str(failure.value)
    assert f"Postgres type {stored[0]} " in str(failure.value)


_CREATED: Sequence[tuple[pa.DataType, str]] = [
    (pa.int8(), "smallint"),
    (pa.int16(), "smallint"),
    (pa.int32(), "integer"),
    (pa.int64(), "bigint"),
    (pa.uint8(), "smallint"),
    (pa.uint16(), "integer"),
    (pa.uint32(), "bigint"),
    (pa.uint64(), "numeric(20,0)"),
    (pa.float16(), "real"),
    (pa.float32(), "real"),
    (pa.float64(), "double precision"),
    (pa.decimal128(12, 3), "numeric(12,3)"),
    (pa.decimal128(5, -2), "numeric(7,0)"),
    (pa.bool_(), "boolean"),
    (pa.string(), "text"),
    (pa.large_string(), "text"),
    (pa.string_view(), "text"),
    (pa.dictionary(pa.int32(), pa.string()), "text"),
    (pa.binary(), "bytea"),
    (pa.binary(16), "bytea"),
    (pa.uuid(), "uuid"),
    (pa.date32(), "date"),
    (pa.timestamp("us"), "timestamp without time zone"),
    (pa.timestamp("ns", "UTC"), "timestamp with time zone"),
    (pa.time64("us"), "time without time zone"),
    (pa.duration("us"), "interval"),
    (pa.list_(pa.int32()), "integer[]"),
    (pa.list_(pa.string()), "text[]"),
]


def test_created_table_takes_what_it_was_created_for(database: str) -> None:
    """Every type is created, then matched and written to as nulls."""
    query(database, "DROP TABLE IF EXISTS created")
    schema = pa.schema([(f"c{number}", kind) for number, (kind, _) in enumerate(_CREATED)])
    sink = PostgresSink(database, table="created", create=True, delivery="at_least_once")
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        nulls = [pa.nulls(2, field.type) for field in schema]
        writer.write(pa.record_batch(nulls, schema=schema))
        writer.pre_commit(CheckpointId(1))
    shown = query(
        database,
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'created'::regclass AND attnum > 0 ORDER BY attnum",
    )
    assert [row[0] for row in shown] == [expected for _, expected in _CREATED]
    assert query(database, "SELECT count(*) FROM created") == [(2,)]


def test_batch_of_other_columns_or_types_than_announced_is_refused(database: str) -> None:
    query(database, "DROP TABLE IF EXISTS t; CREATE TABLE t (v int, w int)")
    for batch, said in (
        (pa.record_batch({"v": [1], "x": [1]}), "announced"),
        (pa.record_batch({"v": [1]}), "announced"),
        (pa.record_batch({"v": [1], "w": [1.0]}), "Arrow type double.*integer"),
    ):
        sink = PostgresSink(database, table="t", delivery="at_least_once")
        announced = pa.schema([("v", pa.int64()), ("w", pa.int64())])
        with Job(sink, schema=announced) as job:
            writer = job.writer()
            with pytest.raises(SinkError, match=said):
                writer.write(batch)
    assert query(database, "SELECT count(*) FROM t") == [(0,)]


def test_columns_may_come_in_another_order(database: str) -> None:
    query(database, "DROP TABLE IF EXISTS t; CREATE TABLE t (v int, w text)")
    announced = pa.schema([("v", pa.int64()), ("w", pa.string())])
    sink = PostgresSink(database, table="t", delivery="at_least_once")
    with Job(sink, schema=announced) as job:
        writer = job.writer()
        writer.write(pa.record_batch({"w": ["a"], "v": [1]}))
        writer.write(pa.record_batch({"v": [2], "w": ["b"]}))
        writer.pre_commit(CheckpointId(1))
    assert query(database, "SELECT v, w FROM t ORDER BY v") == [(1, "a"), (2, "b")]


def test_database_of_another_encoding_gets_the_same_text(onceflow_postgres: Any) -> None:
    name = "onceflow_latin"
    query(onceflow_postgres.url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    query(
        onceflow_postgres.url,
        f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0",
    )
    url: str = onceflow_postgres.database_url(name)
    try:
        _write(url, pa.array(["é"]), "text")
        assert query(url, "SELECT encode(convert_to(v, 'LATIN1'), 'hex') FROM t") == [("e9",)]
        with pytest.raises(BadRow, match="no equivalent"):
            _write(url, pa.array(["€"]), "text")
    finally:
        query(onceflow_postgres.url, f"DROP DATABASE {name} WITH (FORCE)")
