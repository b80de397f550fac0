"""A copy that the source of changes and the sink make equals the original, value by value.

The server itself computes a hash over the text of all rows, of the original and of the copy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_sink_kit import Job

from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import ReaderContext, SourceReader
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sinks import PostgresSink
from onceflow.sources import PostgresChanges

_CONTEXT = ReaderContext("job", "t", 0, 1, AttemptId(1))

_SETUP = """
    CREATE EXTENSION hstore; CREATE EXTENSION ltree; CREATE EXTENSION citext;
    CREATE TYPE mood AS ENUM ('good', 'bad', 'it''s');
    CREATE TYPE pair AS (a int, b text);
    CREATE TYPE nested AS (p pair, m mood[]);
    CREATE TYPE floats AS RANGE (subtype = float8);
    CREATE DOMAIN cents AS int CHECK (VALUE >= 0);
    CREATE DOMAIN cheap AS cents CHECK (VALUE < 100);
    CREATE DOMAIN cents_list AS cents[];
"""

_OWN: dict[str, Sequence[str]] = {
    "smallint": ("-32768", "32767"),
    "integer": ("-2147483648", "2147483647"),
    "bigint": ("-9223372036854775808", "9223372036854775807"),
    "cheap": ("0", "99"),
    "real": ("-0", "NaN", "-Infinity", "1e-45", "3.4028235e38", "0.1"),
    "double precision": ("-0", "NaN", "Infinity", "5e-324", "1.7976931348623157e308", "0.1"),
    "numeric(38,10)": ("-1.5", "9999999999999999999999999999.9999999999", "0"),
    "numeric(3,5)": ("0.00999", "-0.00001"),
    "numeric(3,-2)": ("12300", "-99900"),
    "boolean": ("true", "false"),
    "text": ("", "é€😀", "a\\b\tc\nd\"'", " x ", "NULL"),
    "varchar(5)": ("", "ab   "),
    "char(5)": ("ab", ""),
    "citext": ("Ab", "aB"),
    "mood": ("good", "it's"),
    "json": ('{"a":  1.0, "a": 2}', "null"),
    "jsonb": ('{"a": 1.00, "b": [null, 12345678901234567890.5]}', '"x"'),
    "bytea": ("", "\\x00ff5c"),
    "uuid": ("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "00000000-0000-0000-0000-000000000000"),
    "date": ("4714-11-24 BC", "0001-12-31 BC", "5874897-12-31", "2000-02-29"),
    "timestamp": ("4714-11-24 00:00:00 BC", "9999-12-31 23:59:59.999999", "294246-12-31 00:00:00"),
    "timestamptz": ("0001-01-01 00:00:00+14", "2026-03-29 02:30:00+02"),
    "timestamp(3)": ("2026-11-29 10:00:00.123",),
    "time": ("00:00", "23:59:59.999999"),
    "interval": ("-5 hours", "100:00:00.000001"),
    "integer[]": ("{}", "{1,NULL,-3}"),
    "text[]": ('{"",NULL,"NULL","a\\"b\\\\,{}"}', "{é}"),
    "bytea[]": ('{"\\\\x00ff",NULL}',),
    "double precision[]": ("{NaN,-0,1e100}",),
    "numeric(5,2)[]": ("{1.25,NULL}",),
    "date[]": ("{2026-01-01,NULL}",),
    "timestamp[]": ('{"2026-01-01 00:00:00.000001"}',),
    "timestamptz[]": ('{"2026-01-01 00:00:00+00",NULL}',),
    "time[]": ("{23:59:59.999999}",),
    "uuid[]": ("{6ba7b810-9dad-11d1-80b4-00c04fd430c8}",),
    "varchar(5)[]": ('{"ab ",NULL}',),
    "char(5)[]": ("{ab}",),
    "jsonb[]": ('{"{\\"a\\": 1.0}"}',),
}
"""Types with an Arrow type of their own, and values."""

_TEXTS: dict[str, Sequence[str]] = {
    "numeric": ("NaN", "-Infinity", "-0.00100", "9" * 131_072, "0." + "0" * 16_382 + "1"),
    "numeric(50,2)": ("NaN", "-" + "9" * 48 + ".99"),
    "money": ("-92233720368547758.08", "92233720368547758.07", "1234.5"),
    "bit(3)": ("101", "000"),
    "bit varying": ("", "01101"),
    "timetz": ("24:00:00-15:59", "00:00:00.000001+15:59:59"),
    "inet": ("10.0.0.1", "10.1.2.3/8", "::ffff:1.2.3.4/128"),
    "cidr": ("10.0.0.0/8", "2001:db8::/32"),
    "macaddr": ("08:00:2b:01:02:03",),
    "macaddr8": ("08:00:2b:01:02:03:04:05",),
    '"char"': ("x", "", "\\377"),
    "name": ("n", "x" * 63),
    "oid": ("0", "4294967295"),
    "pg_lsn": ("16/B374D848", "FFFFFFFF/FFFFFFFF"),
    "xid8": ("18446744073709551615",),
    "point": ("(0.1,-0)", "(NaN,Infinity)"),
    "line": ("{1,-1,0}",),
    "lseg": ("[(0,0),(1,1)]",),
    "box": ("(2,2),(0,0)",),
    "path": ("[(0,0),(1,1)]", "((0,0),(1,1))"),
    "polygon": ("((0,0),(1,1),(2,0))",),
    "circle": ("<(0,0),1.5>",),
    "tsvector": ("'a b':1A 'c''d'", ""),
    "tsquery": ("'a' & !'b' <2> 'c'",),
    "jsonpath": ('$."a"[*]?(@ > 1)',),
    "int4range": ("[1,10)", "empty", "(,)"),
    "numrange": ("(0.5,1.50]",),
    "tstzrange": ("[2026-11-29 10:00:00+00,infinity)",),
    "daterange": ("[-infinity,2026-01-01)",),
    "int8multirange": ("{[1,3),[5,)}", "{}"),
    "floats": ("[0.1,1e100]",),
    "pair": ('(,"a,""b\\\\")', "(,)", "(1,)"),
    "nested": ('("(1,x)","{good,NULL}")',),
    "pair[]": ('{"(1,x)",NULL}', "{}"),
    "mood[]": ("{good,NULL}",),
    "inet[]": ("{1.2.3.4,::1}",),
    "numeric[]": ("{NaN,1.50}",),
    "interval[]": ('{"1 mon",-00:00:01}',),
    "cents_list": ("{1,2}",),
    "cents[]": ("[0:1]={1,2}", "{{1,2},{3,4}}"),
    "box[]": ("{(2,2),(0,0);(1,1),(0,0)}",),
    "hstore": ('"a"=>NULL, "b"=>"1"', ""),
    "ltree": ("a.b.c",),
}
"""Types that are read as texts."""

_CHOSEN: dict[str, Sequence[str]] = {
    "date": ("infinity", "-infinity", "0044-03-15 BC"),
    "timestamp": ("infinity", "294276-12-31 23:59:59.999999", "4714-11-24 00:00:00 BC"),
    "timestamptz": ("-infinity", "294276-12-31 23:59:59.999999+00"),
    "time": ("24:00",),
    "interval": (
        "-1 year 2 mons -3 days 04:05:06.7",
        "1 year -2 mons 3 days -04:05:06.7",
        "178000000 years",
        "-00:00:00.000001",
    ),
    "integer[]": ("{{1,2},{3,NULL}}", "[-1:0]={1,2}"),
    "text[]": ('{{a,"b,}"},{NULL,""}}',),
    "timestamptz[]": ('{"2026-01-01 00:00:00+00",infinity}',),
}
"""Types with an Arrow type, and values that it lacks: the user chooses text for the column."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    # Settings on which texts would depend.
    settings = {
        "wal_level": "logical", "datestyle": "German", "intervalstyle": "sql_standard",
        "timezone": "Asia/Kathmandu", "extra_float_digits": "-15", "bytea_output": "escape",
    }  # fmt: skip
    with EmbeddedPostgres(settings) as running:
        with psycopg.connect(running.url, autocommit=True) as connection:
            connection.execute(_SETUP.encode())
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("SET datestyle = ISO; SET intervalstyle = postgres; SET timezone = UTC")
        connection.execute("SET extra_float_digits = 3")
        yield connection
        deadline = time.monotonic() + 60
        while connection.execute("SELECT FROM pg_replication_slots WHERE active").fetchall():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        connection.execute("DROP TABLE t, copy; DROP PUBLICATION onceflow_job_t")


def _read(reader: SourceReader, count: int) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    deadline = time.monotonic() + 60
    while sum(batch.num_rows for batch in batches) < count:
        assert time.monotonic() < deadline
        batch = reader.poll(0.05)
        if isinstance(batch, pa.RecordBatch):
            batches.append(batch)
    return batches


def _hash(connection: psycopg.Connection[TupleRow], table: str) -> tuple[Any, ...]:
    statement = f"SELECT count(*), md5(string_agg(r::text, ';' ORDER BY r::text)) FROM {table} r"
    (row,) = connection.execute(statement.encode()).fetchall()
    return row


@pytest.mark.parametrize(
    ("kinds", "mode"),
    [
        pytest.param(_OWN | _TEXTS, "upsert", id="texts-upsert", marks=pytest.mark.only_proof),
        pytest.param(_CHOSEN, "insert", id="chosen-insert"),
        pytest.param(_OWN, "insert", id="own-insert", marks=pytest.mark.servers),
        pytest.param(_OWN, "upsert", id="own-upsert", marks=pytest.mark.servers),
        pytest.param(_OWN | _TEXTS, "insert", id="texts-insert", marks=pytest.mark.servers),
        pytest.param(_CHOSEN, "upsert", id="chosen-upsert", marks=pytest.mark.servers),
    ],
)
def test_a_copy_equals_the_original(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    kinds: Mapping[str, Sequence[str]],
    mode: Any,
) -> None:
    columns = ", ".join(f"c{at} {kind}" for at, kind in enumerate(kinds))
    database.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})".encode())
    database.execute("CREATE TABLE copy (LIKE t INCLUDING ALL)")
    rows = max(map(len, kinds.values()))
    insert = f"INSERT INTO t VALUES (%s{', %s' * len(kinds)})".encode()

    def fill(first: int) -> None:
        for at in range(rows):
            values = [texts[at] if at < len(texts) else None for texts in kinds.values()]
            database.execute(insert, [first + at, *values])

    fill(0)
    source = PostgresChanges(server.url, table="t").bind("job", "t")
    if kinds is _CHOSEN:
        chosen = pa.schema(
            [("id", pa.int32()), *((f"c{at}", pa.string()) for at in range(len(kinds)))]
        )
        source = PostgresChanges(server.url, table="t", schema=chosen).bind("job", "t")
    with contextlib.closing(source.reader(source.splits(), _CONTEXT)) as reader:
        batches = _read(reader, rows)
        fill(100)
        count = rows
        if mode == "upsert":
            database.execute("UPDATE t SET id = id + 1000 WHERE id < 2")
            database.execute("DELETE FROM t WHERE id = 101")
            count += 5
        batches += _read(reader, count)
    upsert: dict[str, Any] = {"primary_key": ("id",), "operation_column": "_op"}
    sink = PostgresSink(
        server.url, table="copy", write_mode=mode, delivery="at_least_once",
        **(upsert if mode == "upsert" else {}),
    )  # fmt: skip
    names = [name for name in source.schema.names if mode == "upsert" or name != "_op"]
    with Job(sink, schema=batches[0].select(names).schema) as job:
        writer = job.check().writer()
        for batch in batches:
            writer.write(batch.select(names))
        writer.pre_commit(CheckpointId(1))
    assert _hash(database, "t") == _hash(database, "copy")
    assert _hash(database, "t")[0] == 2 * rows - (mode == "upsert")
