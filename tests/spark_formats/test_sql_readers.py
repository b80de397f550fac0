"""Tables read into DataFrames: what sinks wrote comes back, in tasks, filtered by the database."""

from __future__ import annotations

import datetime as dt
import pickle
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pymysql
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    Not,
    StringContains,
    StringStartsWith,
)
from pyspark.sql.types import StructType
from tests.integration.sink_kit import Job
from tests.spark_formats.source_formats import PostgresFormat
from typing_extensions import Self

from onceflow.clients.mysql.endpoint import endpoint_of as mysql_endpoint_of
from onceflow.clients.postgres.connection import endpoint_of as postgres_endpoint_of
from onceflow.clients.sql.session import DatabaseAccess
from onceflow.clients.sql.tables import TableName
from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.readers.mysql_rows import MySQLRows
from onceflow.connectors.spark.readers.postgres_rows import PostgresRows, release_sessions
from onceflow.connectors.spark.readers.sql import Bounds, FilteringSqlReader, RowSource, sql_schema
from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import MySQLSink, PostgresSink
from onceflow.sinks.sql.sink import SqlSink

pytestmark = pytest.mark.integration

_UTC = dt.timezone.utc
_DAY, _TIME = dt.date(2024, 2, 29), dt.datetime(2024, 2, 29, 23, 59, 59, 123456)
_SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "small": pa.int16(),
        "flag": pa.bool_(),
        "real4": pa.float32(),
        "real8": pa.float64(),
        "amount": pa.decimal128(12, 2),
        "word": pa.string(),
        "octets": pa.binary(),
        "day": pa.date32(),
        "local": pa.timestamp("us"),
        "instant": pa.timestamp("us", "UTC"),
    }
)
_FULL: dict[str, Any] = {
    "id": 1,
    "small": -5,
    "flag": True,
    "real4": 0.10000000149011612,
    "real8": 0.1 + 0.2,
    "amount": Decimal("-1234567890.12"),
    "word": 'a "quoted", text\nwith \\ and \r and ü and \U0001f600',
    "octets": b"\x00\xff,\"'\n",
    "day": _DAY,
    "local": _TIME,
    "instant": _TIME.replace(tzinfo=_UTC),
}
_EMPTY = {**_FULL, "id": 2, "word": "", "octets": b"", "flag": False}
_NULLS = {**dict.fromkeys(_FULL), "id": 3}


def _written(sink: SqlSink, batch: pa.RecordBatch) -> None:
    """Return when the sink has committed `batch`."""
    with Job(sink, schema=batch.schema) as job:
        writer = job.check().writer()
        writer.write(batch)
        (prepared,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(prepared)


class Read:
    """A read as Spark does it: planned here, and in tasks from copies that were pickled."""

    def __init__(self, source: RowSource, schema: StructType | None = None, **given: Any) -> None:
        self.schema = sql_schema(source) if schema is None else schema
        self.reader = FilteringSqlReader(source, self.schema, **given)
        self.left: list[Filter] = []
        self.tasks: list[InputPartition] = []

    def where(self, *filters: Filter) -> Self:
        self.left = list(self.reader.pushFilters(list(filters)))
        return self

    def planned(self) -> Self:
        self.tasks = list(self.reader.partitions())
        return self

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for task in self.tasks or self.planned().tasks:
            reader, copied = pickle.loads(pickle.dumps((self.reader, task)))
            for batch in reader.read(copied):
                assert batch.schema == arrow_schema(self.schema)
                found += batch.to_pylist()
        return sorted(found, key=lambda row: (row["id"] is None, row["id"]))

    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows()]


@dataclass(frozen=True)
class Database:
    """One of the servers, with a table to write and to read."""

    name: str
    url: str

    def sink(self, table: str) -> SqlSink:
        if self.name == "postgres":
            return PostgresSink(self.url, table=table, create=True)
        return MySQLSink(self.url, table=table, create=True)

    def source(self, table: str) -> RowSource:
        name = TableName.parse(table)
        if self.name == "postgres":
            return PostgresRows(
                postgres_endpoint_of(DatabaseAccess(self.url), lock_timeout_s=10.0), name
            )
        return MySQLRows(mysql_endpoint_of(DatabaseAccess(self.url), lock_timeout_s=10.0), name)

    def query(self, text: str) -> RowSource:
        if self.name == "postgres":
            return PostgresRows(
                postgres_endpoint_of(DatabaseAccess(self.url), lock_timeout_s=10.0),
                query=text,
            )
        return MySQLRows(
            mysql_endpoint_of(DatabaseAccess(self.url), lock_timeout_s=10.0), query=text
        )

    def execute(self, *statements: str) -> None:
        if self.name == "postgres":
            with psycopg.connect(self.url, autocommit=True) as connection:
                for statement in statements:
                    connection.execute(statement.encode())
        else:
            _my_execute(self.url, *statements)


# MariaDB describes a query's columns in its own way.
@pytest.fixture(params=["postgres", "mysql", "mariadb"])
def database(request: pytest.FixtureRequest) -> Database:
    return Database(request.param, request.getfixturevalue(f"{request.param}_database"))


@pytest.fixture
def postgres(postgres_database: str) -> Database:
    return Database("postgres", postgres_database)


def _my_execute(url: str, *statements: str) -> None:
    at = urlsplit(url)
    connection = pymysql.connect(
        host=at.hostname or "",
        port=at.port or 0,
        user=at.username,
        password=at.password or "",
        database=at.path[1:],
        autocommit=True,
    )
    with connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def test_what_a_sink_wrote_is_read_back_value_by_value(database: Database) -> None:
    rows = [_FULL, _EMPTY, _NULLS]
    _written(database.sink("types"), pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
    read = Read(database.source("types"))
    assert read.rows() == rows
    kinds = {field.name: field.dataType.simpleString() for field in read.schema}
    assert kinds == {
        "id": "bigint",
        "small": "smallint",
        "flag": "boolean",
        "real4": "float",
        "real8": "double",
        "amount": "decimal(12,2)",
        "word": "string",
        "octets": "binary",
        "day": "date",
        "local": "timestamp_ntz",
        "instant": "timestamp",
    }


def test_a_query_of_all_columns_has_the_types_and_values_of_its_table(database: Database) -> None:
    rows = [_FULL, _EMPTY, _NULLS]
    _written(database.sink("types"), pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
    read = Read(database.query("SELECT * FROM types WHERE id > 0"))
    assert read.schema == Read(database.source("types")).schema
    assert read.rows() == rows
    ids = Read(database.query("SELECT id, word FROM types")).where(GreaterThan(_column("id"), 1))
    assert ids.ids() == [2, 3]


_OWN = """
    CREATE TYPE mood AS ENUM ('glad', 'sad');
    CREATE DOMAIN positive AS int CHECK (value > 0);
    CREATE TABLE own (
        id int, who uuid, j json, b jsonb, m mood, p positive, n numeric, t time,
        span interval, ints int[], texts text[], sums numeric[], days date[], net inet);
    INSERT INTO own VALUES
    (1, '11111111-2222-3333-4444-555555555555', '{"a": 1}', '{"b": [1, 2]}', 'sad', 7,
     12345.678, '01:02:03.5', '1 mon 2 days', '{1,NULL,3}', '{a,NULL,"b c"}',
     '{1.5,NULL,-2}', '{2024-02-29}', '10.0.0.0/8'),
    (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)
"""


def test_types_of_postgres_alone_are_read_by_their_own_or_as_text(postgres: Database) -> None:
    postgres.execute(_OWN)
    full, nulls = Read(postgres.source("own")).rows()
    assert set(nulls.values()) == {2, None}
    assert full == {
        "id": 1,
        "who": "11111111-2222-3333-4444-555555555555",
        "j": '{"a": 1}',
        "b": '{"b": [1, 2]}',
        "m": "sad",
        "p": 7,
        "n": Decimal("12345.678"),
        "t": "01:02:03.5",
        "span": "1 mon 2 days",
        "ints": [1, None, 3],
        "texts": ["a", None, "b c"],
        "sums": [Decimal("1.5"), None, Decimal(-2)],
        "days": [_DAY],
        "net": "10.0.0.0/8",
    }


_STYLED: dict[str, tuple[str, str]] = {
    "span": ("interval", "-1 years +2 days -03:04:05"),
    "spot": ("point", "(0.30000000000000004,1e-17)"),
    "stay": ("tstzrange", '["2026-03-08 06:30:00+00","2026-03-08 07:30:00+00")'),
    "days": ("daterange", "[2026-01-02,2026-02-01)"),
    "pair": ("pair", '(0.30000000000000004,"2026-01-02 03:04:05")'),
    "blob": ("blob", r'("\\x00ff")'),
}
"""Types whose texts depend on settings of the session, and values as Postgres writes them."""


def test_texts_of_postgres_do_not_depend_on_the_settings_of_the_database(
    postgres: Database,
) -> None:
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in _STYLED.items())
    values = ", ".join(f"'{value}'" for _, value in _STYLED.values())
    database = urlsplit(postgres.url).path[1:]
    postgres.execute(
        "CREATE TYPE pair AS (x float8, at timestamp)",
        "CREATE TYPE blob AS (content bytea)",
        f"CREATE TABLE styled (id int, {columns})",
        f"INSERT INTO styled VALUES (1, {values})",
        f"ALTER DATABASE \"{database}\" SET datestyle = 'SQL, DMY'",
        f'ALTER DATABASE "{database}" SET intervalstyle = sql_standard',
        f'ALTER DATABASE "{database}" SET extra_float_digits = -10',
        f'ALTER DATABASE "{database}" SET bytea_output = escape',
    )
    expected = {name: value for name, (_, value) in _STYLED.items()}
    for source in (postgres.source("styled"), postgres.query("SELECT * FROM styled")):
        assert Read(source).rows() == [{"id": 1, **expected}]
    # The order of days and months in the text of a query stays that of the database.
    read = Read(postgres.query("SELECT 1 AS id, '01/02/2026'::date AS day"))
    assert read.rows() == [{"id": 1, "day": dt.date(2026, 2, 1)}]


_OWN_OF_MYSQL: dict[str, tuple[str, str, object]] = {
    "i8": ("tinyint unsigned", "255", 255),
    "i64": ("bigint unsigned", "18446744073709551615", Decimal(2**64 - 1)),
    "filled": ("int(6) unsigned zerofill", "42", 42),
    "bits": ("bit(64)", "18446744073709551615", Decimal(2**64 - 1)),
    "born": ("year", "2155", 2155),
    "beyond": ("time(6)", "'838:59:58.999999'", "838:59:58.999999"),
    "negative": ("time", "'-25:00:00'", "-25:00:00"),
    "large": ("decimal(38,10)", f"'{'9' * 28}.{'9' * 10}'", Decimal(f"{'9' * 28}.{'9' * 10}")),
    "value": ("json", """'{"a": "x,y"}'""", '{"a": "x,y"}'),
    "member": ("""enum('a','b,"c')""", """'b,"c'""", 'b,"c'),
    "members": ("set('x','y','z')", "'z,x'", "x,z"),
    "zeros": ("binary(4)", "x'6100'", b"a\0\0\0"),
    "char_": ("char(5)", "'a  '", "a"),
    "varchar_": ("varchar(5)", "'a  '", "a  "),
    "west": ("varchar(9) character set latin1", "'é€'", "é€"),
    "east": ("varchar(9) character set latin2", "'ł'", "ł"),
    "wide": ("varchar(9) character set utf16", "'\U0001f600'", "\U0001f600"),
    "rounded": ("float(7,3)", "1234.567", 1234.5670166015625),
    "at": (
        "timestamp null",
        "'2024-03-31 02:30:00'",
        dt.datetime(2024, 3, 30, 21, 30, tzinfo=_UTC),
    ),
}
"""Type, SQL of a value, which a session in +05:00 inserts, and what Spark is to have."""


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
def test_types_of_mysql_alone_are_read_by_their_own_or_as_text(
    request: pytest.FixtureRequest, name: str
) -> None:
    own = Database(name, request.getfixturevalue(f"{name}_database"))
    columns = ", ".join(f"{one} {kind}" for one, (kind, _, _) in _OWN_OF_MYSQL.items())
    values = ", ".join(value for _, value, _ in _OWN_OF_MYSQL.values())
    own.execute(
        f"CREATE TABLE own (id int PRIMARY KEY, {columns}) CHARACTER SET utf8mb4",
        "SET time_zone = '+05:00'",
        f"INSERT INTO own VALUES (1, {values})",
    )
    expected = {one: value for one, (_, _, value) in _OWN_OF_MYSQL.items()}
    for source in (own.source("own"), own.query("SELECT * FROM own")):
        assert Read(source).rows() == [{"id": 1, **expected}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("date", "0000-00-00"),
        ("date", "2024-02-31"),
        ("datetime", "2024-00-10 00:00:00"),
        ("timestamp", "0000-00-00 00:00:00"),
        ("tinyint(1)", "2"),
        ("decimal(65,0)", "9" * 40),
    ],
)
def test_a_value_of_mysql_that_spark_does_not_have_is_refused_and_never_another_one(
    mariadb_database: str, kind: str, value: str
) -> None:
    own = Database("mariadb", mariadb_database)
    own.execute(
        f"CREATE TABLE own (id int PRIMARY KEY, v {kind})",
        "SET sql_mode = 'ALLOW_INVALID_DATES'",
        f"INSERT INTO own VALUES (1, '{value}')",
    )
    with pytest.raises(ConfigError, match="does not fit the type as which its column is read"):
        Read(own.source("own")).rows()


def test_tasks_of_one_read_see_one_state_of_the_table(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE moving (id int, padding text)",
        "INSERT INTO moving SELECT i, repeat('x', 500) FROM generate_series(1, 2000) AS i",
    )
    read = Read(postgres.source("moving"), tasks=3).planned()
    assert len(read.tasks) == 3
    postgres.execute(
        # Every row goes to another page.
        "UPDATE moving SET padding = repeat('y', 500)",
        "DELETE FROM moving WHERE id <= 100",
    )
    found = [(row["id"], row["padding"][0]) for row in read.rows()]
    assert found == [(number, "x") for number in range(1, 2001)]


def test_a_task_that_comes_after_the_snapshot_is_let_go_fails_and_reads_nothing(
    postgres: Database,
) -> None:
    postgres.execute("CREATE TABLE late AS SELECT i AS id FROM generate_series(1, 9000) AS i")
    read = Read(postgres.source("late"), tasks=2).planned()
    release_sessions()
    with pytest.raises(SinkError, match="this task began too late"):
        read.rows()


def test_strides_cover_every_row_once(database: Database) -> None:
    database.execute(
        "CREATE TABLE cut (id int PRIMARY KEY, day date)",
        "INSERT INTO cut VALUES (-7, '2024-01-01'), (0, NULL), (1, '2024-01-05'),"
        " (5, '2024-03-01'), (9, '2023-01-01'), (10, '2024-02-01'), (99, '2025-01-01')",
    )
    numbers = [-7, 0, 1, 5, 9, 10, 99]
    source = database.source("cut")
    by_id = Read(source, bounds=Bounds("id", "0", "10"), tasks=4).planned()
    assert (len(by_id.tasks), by_id.ids()) == (4, numbers)
    by_day = Read(source, bounds=Bounds("day", "2024-01-01", "2024-03-01"), tasks=3).planned()
    assert (len(by_day.tasks), by_day.ids()) == (3, numbers)
    assert Read(source, tasks=2).ids() == numbers
    with pytest.raises(ConfigError, match="partitionColumn='nothing' is not among id, day"):
        Read(source, bounds=Bounds("nothing", "0", "1"), tasks=2).planned()
    with pytest.raises(ConfigError, match="bound 'x' does not fit partitionColumn='id'"):
        Read(source, bounds=Bounds("id", "x", "1"), tasks=2).planned()


def _column(name: str) -> tuple[str, ...]:
    return (name,)


_CASES: list[tuple[Filter, list[int], bool]] = [
    # The filter, whom the database leaves, and whether Spark need not look again.
    (GreaterThan(_column("id"), 2), [3, 4], True),
    (In(_column("id"), (1, 4)), [1, 4], True),
    (LessThan(_column("amount"), Decimal("2.00")), [1, 4], True),
    (Not(EqualTo(_column("amount"), Decimal("2.50"))), [1, 4], True),
    (IsNull(_column("word")), [4], True),
    (IsNotNull(_column("at")), [1, 3], True),
    (LessThan(_column("at"), dt.datetime(2021, 1, 1, tzinfo=_UTC)), [3], True),
    (GreaterThan(_column("word"), "A"), [1, 2, 3, 4], False),
    (Not(EqualTo(_column("word"), "x")), [1, 2, 3, 4], False),
    (EqualTo(_column("word"), "a'b\\c%"), [3], False),
    (StringStartsWith(_column("word"), "a'b\\c%"), [3], False),
    (StringContains(_column("word"), "_"), [1, 2], False),
    (EqualTo(_column("id"), "2"), [1, 2, 3, 4], False),
]


@pytest.mark.servers
def test_filters_are_decided_by_the_database_as_spark_would_or_left_to_it(
    database: Database,
) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "word": "Ab_c", "amount": Decimal("1.50"), "at": _TIME.replace(tzinfo=_UTC)},
        {"id": 2, "word": "ab_c", "amount": Decimal("2.50"), "at": None},
        {"id": 3, "word": "a'b\\c%", "amount": None, "at": dt.datetime(2020, 1, 1, tzinfo=_UTC)},
        {"id": 4, "word": None, "amount": Decimal("-1.00"), "at": None},
    ]
    schema = pa.schema(
        {
            "id": pa.int64(),
            "word": pa.string(),
            "amount": pa.decimal128(10, 2),
            "at": pa.timestamp("us", "UTC"),
        }
    )
    _written(database.sink("sought"), pa.RecordBatch.from_pylist(rows, schema=schema))
    source = database.source("sought")
    for one, expected, exact in _CASES:
        read = Read(source).where(one)
        assert read.ids() == expected, one
        assert read.left == ([] if exact else [one]), one


def test_a_query_is_read_and_only_the_columns_asked_for(postgres: Database) -> None:
    postgres.execute("CREATE TABLE wide AS SELECT i AS id, 2 * i AS d FROM generate_series(1, 9) i")
    endpoint = postgres_endpoint_of(DatabaseAccess(postgres.url), lock_timeout_s=10.0)
    query = PostgresRows(endpoint, query="SELECT id, d, 'x' AS word FROM wide WHERE id < 3")
    assert Read(query).rows() == [{"id": 1, "d": 2, "word": "x"}, {"id": 2, "d": 4, "word": "x"}]
    narrow = Read(postgres.source("wide"), StructType().add("id", "long"))
    assert narrow.rows() == [{"id": number} for number in range(1, 10)]
    with pytest.raises(ConfigError, match="needs partitionColumn"):
        Read(query, tasks=2).planned()
    with pytest.raises(ConfigError, match="has no column 'nothing'"):
        Read(query, StructType().add("nothing", "long")).planned()


def test_a_table_that_is_not_there_is_named(database: Database) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Read(database.source("nowhere"))


def test_an_infinite_timestamp_is_refused_by_its_column(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE endless (id int, until timestamptz)",
        "INSERT INTO endless VALUES (1, 'infinity')",
    )
    with pytest.raises(ConfigError, match="column 'until' has a time that is infinite"):
        Read(postgres.source("endless")).rows()


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["timestamp[]", "timestamptz[]", "date[]"])
def test_an_infinite_time_in_an_array_is_refused_by_its_column(
    postgres: Database, kind: str
) -> None:
    postgres.execute(
        f"CREATE TABLE until (id int, ends {kind})", "INSERT INTO until VALUES (1, '{infinity}')"
    )
    with pytest.raises(ConfigError, match="column 'ends' has a time that is infinite"):
        Read(postgres.source("until")).rows()


@pytest.mark.parametrize("array", ["{{a,b},{c,d}}", "[0:1]={a,b}", "[2:2]={a}", "{{a}}"])
def test_an_array_whose_shape_a_list_would_lose_is_refused_by_its_column(
    postgres: Database, array: str
) -> None:
    postgres.execute(
        'CREATE TABLE arrays (id int, "it\'s" text[])',
        "INSERT INTO arrays VALUES (1, '{}'), (2, NULL), (3, '{a,NULL}')",
    )
    read = Read(postgres.source("arrays"))
    assert [row["it's"] for row in read.rows()] == [[], None, ["a", None]]
    postgres.execute(f"INSERT INTO arrays VALUES (4, '{array}')")
    with pytest.raises(ConfigError, match="it's.* has an array of several dimensions") as failure:
        Read(postgres.source("arrays")).rows()
    assert array in str(failure.value)


def test_spark_reads_and_filters_a_table(spark: SparkSession, postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE few AS SELECT i AS id, 'w' || i AS w FROM generate_series(1, 9) i"
    )
    spark.dataSource.register(PostgresFormat)
    setting = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(setting)
    try:
        for pushes in ("false", "true"):
            spark.conf.set(setting, pushes)
            frame = spark.read.format("test-postgres").options(url=postgres.url, table="few").load()
            found = frame.where("id > 6 and w <> 'w8'").collect()
            assert sorted((row.id, row.w) for row in found) == [(7, "w7"), (9, "w9")]
    finally:
        spark.conf.set(setting, str(before))
