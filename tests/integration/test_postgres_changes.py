"""A source of changes on a real Postgres: values, what the slot keeps, and refusals by name."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import (
    CONTEXT,
    CREATE_TABLE,
    open_database,
    source_of,
)

from onceflow.clients.postgres.replication import ReplicationStream, StreamRefused
from onceflow.core.errors import (
    BadRecord,
    ConfigError,
    OffsetOutOfRange,
    SettingsRefused,
    SourceUnavailable,
    StateIncompatible,
)
from onceflow.core.spi import SourceReader, Split
from onceflow.integration.conformance.processes import eventually
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges
from onceflow.sources.postgres import copying
from onceflow.sources.postgres import reader as postgres_reader
from onceflow.sources.postgres.first_copy import Key
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.table import SourceTable


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical", "max_replication_slots": "2"}) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with open_database(server, CREATE_TABLE) as connection:
        yield connection


def _read(
    reader: SourceReader, count: int, until: Callable[[], bool] | None = None
) -> list[dict[str, Any]]:
    """Return rows until there are `count`, or `until` holds."""
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + 60
    while len(rows) < count and not (until is not None and until()):
        assert time.monotonic() < deadline, rows
        batch = reader.poll(0.05)
        if isinstance(batch, pa.RecordBatch):
            rows += batch.to_pylist()
    return rows


def _is_copied(reader: SourceReader) -> bool:
    return not SlotPosition.from_split(reader.snapshot()[0]).is_copying


def _confirmed(connection: psycopg.Connection[TupleRow]) -> str:
    rows = connection.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"
    ).fetchall()
    return str(rows[0][0])


def test_a_table_is_copied_and_followed_and_its_slot_moves_after_the_decision(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("INSERT INTO t SELECT i, 'old' FROM generate_series(1, 25) i")
    source = source_of(server, chunk_rows=10, batch_rows=4)
    source.validate()
    splits = source.splits()
    start = _confirmed(database)
    database.execute("UPDATE t SET v = 'new' WHERE id = 3")
    reader = source.reader(splits, CONTEXT)
    # Two ranges of the key are copied side by side.
    copied = sorted(_read(reader, 25), key=lambda row: int(row["id"]))
    assert [row["id"] for row in copied] == list(range(1, 26))
    assert {row["_op"] for row in copied} == {"r"}
    assert copied[2]["v"] == "new"
    database.execute("UPDATE t SET id = 30 WHERE id = 3; DELETE FROM t WHERE id = 4")
    database.execute("INSERT INTO t VALUES (31, NULL)")
    assert _read(reader, 4) == [
        {"id": 3, "v": None, "_op": "d"},
        {"id": 30, "v": "new", "_op": "u"},
        {"id": 4, "v": None, "_op": "d"},
        {"id": 31, "v": None, "_op": "c"},
    ]
    assert _confirmed(database) == start
    decided = reader.snapshot()
    reader.commit(decided)
    _read(reader, 1, until=lambda: _confirmed(database) != start)
    reader.close()
    database.execute("INSERT INTO t VALUES (32, 'later')")
    assert source.discover(decided) == decided
    again = source.reader(decided, CONTEXT)
    assert _read(again, 1) == [{"id": 32, "v": "later", "_op": "c"}]
    again.close()
    with pytest.raises(OffsetOutOfRange, match="past the checkpoint's position"):
        source.discover(splits)


def test_an_idle_table_does_not_keep_the_wal_of_others(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    reader = source.reader(source.splits(), CONTEXT)
    start = _confirmed(database)
    database.execute("CREATE TABLE busy AS SELECT generate_series(1, 1000)")
    database.execute("DROP TABLE busy")

    def move() -> bool:
        reader.commit(reader.snapshot())
        return _confirmed(database) != start

    assert _read(reader, 1, until=move) == []
    reader.close()


@pytest.mark.parametrize("has_texts", [False, True])
def test_every_type_is_read_alike_in_the_copy_and_in_the_stream(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], has_texts: bool
) -> None:
    """The server sends all columns as texts if one of them is read as its text."""
    database.execute("DROP TABLE t")
    database.execute("DROP TYPE IF EXISTS mood; CREATE TYPE mood AS ENUM ('good', 'bad')")
    database.execute("DROP DOMAIN IF EXISTS cents; CREATE DOMAIN cents AS int")
    values = {
        "smallint": "-32768", "integer": "2147483647", "bigint": "-9223372036854775808",
        "cents": "5", "real": "'-0'", "double precision": "1e308", "numeric(38,10)": "-1.5",
        "numeric(3,-2)": "12300", "numeric(3,5)": "0.00123", "text": "'é€😀'",
        "varchar(5)": "'abc'", "char(5)": "'abc'", "mood": "'bad'", "bytea": r"'\x00ff'",
        "uuid": "'6BA7B810-9dad-11d1-80b4-00c04fd430c8'", "boolean": "true",
        "date": "'4714-11-24 BC'", "timestamp": "'9999-12-31 23:59:59.999999'",
        "timestamptz": "'0001-01-01 00:00:00+14'", "time": "'23:59:59.999999'",
        "interval": "'-5 hours'", "json": """'{"a":  1.0}'""", "jsonb": """'{"a": 1.0}'""",
        "integer[]": "'{1,NULL}'", "text[]": "'{}'", "date[]": "'{2026-01-01}'",
        "numeric(5,2)[]": "'{1.25}'",
    }  # fmt: skip
    if has_texts:
        database.execute(_OTHER_TYPES.encode())
        values |= {kind: "'" + text.replace("'", "''") + "'" for kind, text in _TEXTS.items()}
    columns = ", ".join(f'"c{at}" {kind}' for at, kind in enumerate(values))
    database.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})".encode())
    insert = f"INSERT INTO t VALUES (%s, {', '.join(values.values())})".encode()
    database.execute(insert, [1])
    database.execute("INSERT INTO t (id) VALUES (2)")
    source = source_of(server)
    reader = source.reader(source.splits(), CONTEXT)
    copied = _read_batches(reader, 2)
    database.execute(insert, [3])
    database.execute("INSERT INTO t (id) VALUES (4)")
    streamed = _read_batches(reader, 2)
    reader.close()
    for name in copied.column_names[1:-1]:
        # Python's dates cannot hold all of Postgres'.
        assert copied[name].equals(streamed[name]), name
        assert copied[name].null_count == 1, name
    assert copied["c20"].to_pylist()[0].total_seconds() == -5 * 3600
    assert copied["c14"].to_pylist()[0] == "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    if has_texts:
        texts = {f"c{at}": _TEXTS.get(kind) for at, kind in enumerate(values)}
        for name, text in texts.items():
            assert text is None or copied[name].to_pylist() == [text, None], name
        database.execute(_DROP_OTHER_TYPES.encode())
    database.execute("DROP TABLE IF EXISTS t")


_OTHER_TYPES = """
    CREATE EXTENSION hstore; CREATE EXTENSION ltree;
    CREATE TYPE pair AS (a int, b text);
    CREATE DOMAIN cents_list AS cents[];
    CREATE TYPE floats AS RANGE (subtype = float8)
"""
_DROP_OTHER_TYPES = """
    DROP TABLE t; DROP TYPE pair; DROP DOMAIN cents_list; DROP TYPE floats;
    DROP EXTENSION hstore; DROP EXTENSION ltree
"""
_TEXTS = {
    "numeric": "-0.00100", "numeric(50,2)": "NaN", "numeric(1000,1000)": "0." + "1" * 1000,
    "money": "-$1,234.50", "bit(3)": "101", "bit varying": "", "timetz": "24:00:00-15:59:59",
    "inet": "10.0.0.1", "cidr": "10.0.0.0/8", "macaddr": "08:00:2b:01:02:03",
    "macaddr8": "08:00:2b:01:02:03:04:05", '"char"': "x", "name": "n", "oid": "4294967295",
    "pg_lsn": "16/B374D848", "xid8": "18446744073709551615", "point": "(0.1,-0)",
    "box": "(2,2),(0,0)", "tsvector": "'a b':1A 'c'",
    "jsonpath": '$."a"', "int4range": "[1,10)", "tstzrange": '["2026-11-29 10:00:00+00",)',
    "int8multirange": "{[1,3),[5,)}", "floats": "[0.1,1e+100]", "pair": '(,"a,""b")',
    "pair[]": '{"(1,x)",NULL}', "mood[]": "{good,NULL}", "inet[]": "{1.2.3.4,::1}",
    "numeric[]": "{NaN,1.50}", "cents_list": "{1,2}", "cents[]": "[0:1]={1,2}",
    "box[]": "{(2,2),(0,0);(1,1),(0,0)}", "hstore": '"a"=>NULL, "b"=>"1"', "ltree": "a.b",
}  # fmt: skip


def _read_batches(reader: SourceReader, count: int) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    deadline = time.monotonic() + 60
    while sum(batch.num_rows for batch in batches) < count:
        assert time.monotonic() < deadline
        batch = reader.poll(0.05)
        if isinstance(batch, pa.RecordBatch):
            batches.append(batch)
    return pa.Table.from_batches(batches)


@pytest.mark.parametrize(
    ("kind", "value", "match"),
    [
        ("numeric(5,2)", "'NaN'", "column 'w' of table public.t: the value NaN"),
        ("date", "'infinity'", "the value infinity"),
        ("time", "'24:00'", "the value 24:00:00"),
        ("interval", "'1 day'", "the value 0 months 1 days"),
        ("integer[]", "'{{1}}'", "an array of 2 dimensions"),
    ],
)
def test_a_value_without_an_arrow_value_is_refused_by_name(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    kind: str,
    value: str,
    match: str,
) -> None:
    database.execute(f"ALTER TABLE t ADD COLUMN w {kind}".encode())
    source = source_of(server, first_copy="none")
    reader = source.reader(source.splits(), CONTEXT)
    database.execute(f"INSERT INTO t VALUES (1, 'x', {value})".encode())
    before = reader.snapshot()
    with pytest.raises(BadRecord, match=match):
        _read(reader, 1)
    assert reader.snapshot() == before
    reader.close()


def test_a_large_value_that_was_not_sent_is_refused_unless_the_identity_is_full(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("ALTER TABLE t ADD COLUMN n int; ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    database.execute("INSERT INTO t VALUES (1, repeat('x', 10000), 1)")
    source = source_of(server, first_copy="none")
    reader = source.reader(source.splits(), CONTEXT)
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("UPDATE t SET n = 2")
    (row,) = _read(reader, 1)
    assert row == {"id": 1, "v": "x" * 10000, "n": 2, "_op": "u"}
    database.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT")
    database.execute("UPDATE t SET n = 3")
    with pytest.raises(BadRecord, match="REPLICA IDENTITY FULL"):
        _read(reader, 1)
    reader.close()


def test_a_new_column_stops_the_job_after_the_last_change_without_it(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    reader = source.reader(source.splits(), CONTEXT)
    database.execute("INSERT INTO t VALUES (1, 'x')")
    database.execute("ALTER TABLE t ADD COLUMN w int DEFAULT 5")
    database.execute("INSERT INTO t VALUES (2, 'y', 6)")
    assert _read(reader, 1) == [{"id": 1, "v": "x", "_op": "c"}]
    until = time.monotonic() + 1
    while time.monotonic() < until:
        # No checkpoint has the position yet.
        assert reader.poll(0.05) is None
    decided = reader.snapshot()
    reader.commit(decided)
    with pytest.raises(BadRecord, match="has a new column 'w'"):
        _read(reader, 1)
    reader.close()
    later = source_of(server, first_copy="none")
    assert later.discover(decided) == decided
    again = later.reader(decided, CONTEXT)
    assert _read(again, 1) == [{"id": 2, "v": "y", "w": 6, "_op": "c"}]
    again.close()


def test_a_transaction_that_runs_since_before_the_slot_delays_the_copy_and_is_read_once(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(copying, "REPORTED_AFTER_S", 0.2)
    database.execute("INSERT INTO t VALUES (1, 'old')")
    source = source_of(server)
    splits = source.splits()
    with psycopg.connect(server.url) as other:
        other.execute("INSERT INTO t VALUES (2, 'open')")
        reader = source.reader(splits, CONTEXT)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert reader.poll(0.05) is None
        waits_for = f"session {other.info.backend_pid} of"
        assert eventually(lambda: waits_for in caplog.text, 60)
        other.commit()
    rows = _read(reader, 2)
    reader.close()
    assert [(row["id"], row["_op"]) for row in rows] == [(1, "r"), (2, "r")]


def test_a_prepared_transaction_is_read_when_it_is_committed(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server)
    reader = source.reader(source.splits(), CONTEXT)
    assert _read(reader, 1, until=lambda: _is_copied(reader)) == []
    with psycopg.connect(server.url, autocommit=True) as other:
        other.execute("BEGIN; INSERT INTO t VALUES (1, 'prepared'); PREPARE TRANSACTION 'p'")
    database.execute("INSERT INTO t VALUES (2, 'plain')")
    assert [row["id"] for row in _read(reader, 1)] == [2]
    database.execute("COMMIT PREPARED 'p'")
    assert [row["id"] for row in _read(reader, 1)] == [1]
    reader.close()


_UNIDENTIFIED = (
    "DROP TABLE t; CREATE TABLE t (id int, v text) PARTITION BY RANGE (id);"
    "CREATE TABLE t_all PARTITION OF t DEFAULT; ALTER TABLE t REPLICA IDENTITY FULL"
)
_DEFERRABLE = "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, v text)"


@pytest.mark.parametrize(
    ("statements", "options", "match"),
    [
        ("", {"table": "absent"}, "there is no table absent"),
        ("DROP TABLE t; CREATE TABLE t (v text)", {}, "has no primary key.*IDENTITY FULL"),
        ("ALTER TABLE t REPLICA IDENTITY NOTHING", {}, "REPLICA IDENTITY NOTHING"),
        (_DEFERRABLE, {}, "is DEFERRABLE.*USING INDEX"),
        (f"{_DEFERRABLE}; ALTER TABLE t REPLICA IDENTITY FULL", {}, "is DEFERRABLE.*USING INDEX"),
        (_UNIDENTIFIED, {}, "partition t_all of table public.t has neither.*REPLICA IDENTITY FULL"),
        ("ALTER TABLE t ADD w regclass", {}, "'w'.*regclass.*give schema= with the other columns"),
        ("", {"schema": "id INT, w INT"}, "no column 'w' that can be read"),
        ("", {"schema": "id BIGINT"}, "'id'.*not read as int64: give int32, or string"),
        ("", {"schema": "v STRING"}, "schema= lacks id"),
        ("CREATE PUBLICATION p", {"publication": "p"}, 'ALTER PUBLICATION "p" ADD TABLE'),
        (
            "CREATE PUBLICATION p FOR TABLE t (id)",
            {"publication": "p"},
            "limits the rows or columns",
        ),
        (
            "CREATE PUBLICATION p FOR TABLE t WHERE (id > 5)",
            {"publication": "p"},
            "limits the rows or columns",
        ),
        (
            "CREATE PUBLICATION p FOR TABLE t WITH (publish = 'insert')",
            {"publication": "p"},
            "does not send every kind of change",
        ),
        (
            "SELECT pg_create_logical_replication_slot('onceflow_job_t', 'pgoutput')",
            {},
            "exists, and publication onceflow_job_t does not",
        ),
        (
            "SELECT pg_create_physical_replication_slot('onceflow_job_t')",
            {},
            "not one that this source reads",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_at_the_start_and_leaves_nothing(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    statements: str,
    options: dict[str, Any],
    match: str,
) -> None:
    if statements:
        database.execute(statements.encode())
    before = _list_left(database)
    with pytest.raises(ConfigError, match=match):
        source_of(server, **options).splits()
    assert _list_left(database) == before


def test_a_server_without_a_free_slot_keeps_no_publication(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    for name in ("a", "b"):
        database.execute("SELECT pg_create_physical_replication_slot(%s)", [name])
    with pytest.raises(ConfigError, match="raise max_replication_slots"):
        source_of(server).splits()
    assert _list_left(database) == (["a", "b"], [])


def _list_left(connection: psycopg.Connection[TupleRow]) -> tuple[list[str], list[str]]:
    slots = connection.execute("SELECT slot_name FROM pg_replication_slots ORDER BY 1").fetchall()
    publications = connection.execute("SELECT pubname FROM pg_publication ORDER BY 1").fetchall()
    return [str(row[0]) for row in slots], [str(row[0]) for row in publications]


def test_a_user_without_the_right_to_replicate_is_refused_by_name(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("CREATE ROLE reader LOGIN; GRANT SELECT ON t TO reader")
    try:
        with pytest.raises(ConfigError, match="ALTER ROLE reader REPLICATION"):
            source_of(server, user="reader").validate()
    finally:
        database.execute("DROP OWNED BY reader; DROP ROLE reader")


def test_a_server_without_logical_wal_is_refused_by_name() -> None:
    with EmbeddedPostgres() as server, psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        with pytest.raises(ConfigError, match="wal_level = replica; needed: logical"):
            source_of(server).validate()


def test_a_job_continues_under_another_name_with_its_old_slot(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    splits = source_of(server).splits()
    database.execute("INSERT INTO t VALUES (1, 'x')")
    renamed = PostgresChanges(server.url, table="t").bind("renamed", "t")
    reader = renamed.reader(renamed.discover(splits), CONTEXT)
    assert [row["id"] for row in _read(reader, 1)] == [1]
    database.execute("INSERT INTO t VALUES (2, 'x')")
    assert [row["id"] for row in _read(reader, 1)] == [2]
    reader.close()
    with pytest.raises(StateIncompatible, match="slot= is 'other': give slot='onceflow_job_t'"):
        source_of(server, slot="other").discover(splits)
    assert source_of(server, slot="onceflow_job_t").discover(splits) == splits


def test_a_slot_that_is_gone_or_new_or_in_use_is_told_apart(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none", connect_timeout_s=2.0)
    splits = source.splits()
    reader = source.reader(splits, CONTEXT)
    database.execute("INSERT INTO t VALUES (1, 'x')")
    _read(reader, 1)
    with pytest.raises(ConfigError, match="in use by another reader.*give first_copy='all'"):
        source.splits()
    other = source.reader(splits, CONTEXT)
    with pytest.raises(SourceUnavailable, match="in use by another reader"):
        _read(other, 1)
    other.close()
    reader.close()
    _await_free(database)
    database.execute("SELECT pg_drop_replication_slot('onceflow_job_t')")
    with pytest.raises(OffsetOutOfRange, match="does not exist any more"):
        source.discover(splits)
    database.execute("SELECT pg_create_logical_replication_slot('onceflow_job_t', 'pgoutput')")
    with pytest.raises(OffsetOutOfRange, match="past the checkpoint's position"):
        source.discover(splits)
    database.execute("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v text)")
    with pytest.raises(OffsetOutOfRange, match="dropped and created again"):
        source.discover(splits)


def _await_free(connection: psycopg.Connection[TupleRow]) -> None:
    deadline = time.monotonic() + 30
    while connection.execute("SELECT FROM pg_replication_slots WHERE active").fetchall():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_another_cluster_is_refused_by_name(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server)
    (split,) = source.splits()
    other = Split(split.id, split.position.replace(b'"system":"', b'"system":"9'))
    with pytest.raises(OffsetOutOfRange, match="leads to the cluster"):
        source.discover([other])


def test_the_copy_of_a_table_without_a_key_is_not_continued(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("DROP TABLE t; CREATE TABLE t (v text)")
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("INSERT INTO t SELECT 'x' FROM generate_series(1, 100)")
    source = source_of(server, batch_rows=10)
    reader = source.reader(source.splits(), CONTEXT)
    _read(reader, 10)
    half = reader.snapshot()
    others = _read(reader, 91, until=lambda: _is_copied(reader))
    assert len(others) == 90
    whole = reader.snapshot()
    reader.close()
    again = source.reader(half, CONTEXT)
    with pytest.raises(OffsetOutOfRange, match="was interrupted, and it cannot continue"):
        _read(again, 1)
    again.close()
    database.execute("INSERT INTO t VALUES ('later')")
    followed = source.reader(whole, CONTEXT)
    assert _read(followed, 1) == [{"v": "later", "_op": "c"}]
    followed.close()


def test_an_update_of_a_table_without_a_key_deletes_the_old_row(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """Any column may be the key of the target, which would keep the row with the old value."""
    database.execute("DROP TABLE t; CREATE TABLE t (id int, v text)")
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a'); UPDATE t SET id = 2; UPDATE t SET id = 2")
        rows = [(row["_op"], row["id"], row["v"]) for row in _read(reader, 4)]
    assert rows == [("c", 1, "a"), ("d", 1, "a"), ("u", 2, "a"), ("u", 2, "a")]


def test_the_repr_of_a_source_has_no_password() -> None:
    source = PostgresChanges("postgresql://me:secret@nowhere/db", table="t", password="hidden")
    assert "secret" not in repr(source)
    assert "hidden" not in repr(source)
    with pytest.raises(ConfigError, match="give slot="):
        cast("Any", source).slot_name  # noqa: B018


def test_columns_that_are_changed_between_two_chunks_end_the_copy(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """A later chunk has the update of the new column, which its rows lack, so it would be lost."""
    database.execute("INSERT INTO t SELECT n, 'x' FROM generate_series(1, 40) AS n")
    source = source_of(server, chunk_rows=2, batch_rows=2)
    reader = source.reader(source.splits(), CONTEXT)
    with (
        contextlib.closing(reader),
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(server.url, autocommit=True) as other,
    ):
        assert len(_read(reader, 2)) == 2
        # It waits for a chunk that was read ahead and has no room for its rows yet.
        change = "ALTER TABLE t ADD w int; UPDATE t SET w = 7 WHERE id = 40"
        changed = pool.submit(database.execute, change)
        waits = "SELECT FROM pg_locks WHERE NOT granted"
        assert eventually(lambda: changed.done() or bool(other.execute(waits).fetchall()), 60)
        with pytest.raises(BadRecord, match="during its first copy.*pg_drop_replication_slot"):
            _read(reader, 41)
        changed.result(60)


def test_a_table_is_not_rewritten_between_the_snapshot_of_a_chunk_and_its_rows(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rewritten table is empty for an older snapshot: the copy would end without the rows."""
    database.execute("INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    select_chunk = copying.select_chunk

    def rewrite_first(table: SourceTable, lower: Key | None, upper: Key | None, rows: int) -> str:
        with psycopg.connect(server.url, autocommit=True) as other:
            other.execute("SET lock_timeout = '300ms'")
            with contextlib.suppress(psycopg.errors.LockNotAvailable):
                other.execute("ALTER TABLE t ALTER v TYPE bytea USING v::bytea")
        return select_chunk(table, lower, upper, rows)

    monkeypatch.setattr(copying, "select_chunk", rewrite_first)
    source = source_of(server)
    reader = source.reader(source.splits(), CONTEXT)
    with contextlib.closing(reader):
        assert [row["id"] for row in _read(reader, 2, until=lambda: _is_copied(reader))] == [1, 2]


def test_a_fault_in_the_copy_is_not_retried_as_an_outage(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(copying, "select_chunk", fail)
    source = source_of(server)
    reader = source.reader(source.splits(), CONTEXT)
    with contextlib.closing(reader), pytest.raises(ZeroDivisionError):
        _read(reader, 1)


@pytest.mark.parametrize(
    "statement",
    [
        "DROP PUBLICATION onceflow_job_t",
        "ALTER PUBLICATION onceflow_job_t DROP TABLE t",
        "ALTER PUBLICATION onceflow_job_t SET (publish = 'insert')",
    ],
)
def test_a_job_does_not_go_on_if_its_publication_no_longer_sends_every_change(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], statement: str
) -> None:
    source = source_of(server, first_copy="none")
    splits = source.splits()
    database.execute(statement.encode())
    with pytest.raises(OffsetOutOfRange, match=r"leaves out changes\. Drop the slot"):
        source.discover(splits)
    reader = source.reader(splits, CONTEXT)
    with contextlib.closing(reader), pytest.raises(OffsetOutOfRange, match="leaves out changes"):
        _read(reader, 1)


def test_a_right_that_was_revoked_is_refused_by_name(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("CREATE ROLE reader LOGIN REPLICATION; GRANT SELECT ON t TO reader")
    try:
        splits = source_of(server, first_copy="none").splits()
        source = source_of(server, first_copy="none", user="reader")
        reader = source.reader(splits, CONTEXT)
        database.execute("ALTER ROLE reader NOREPLICATION")
        with contextlib.closing(reader), pytest.raises(ConfigError, match="REPLICATION"):
            _read(reader, 1)
    finally:
        database.execute("DROP OWNED BY reader; DROP ROLE reader")


def test_a_slot_that_another_session_creates_is_not_called_invalidated(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server)
    with psycopg.connect(server.url) as other:
        other.execute("INSERT INTO t VALUES (1, 'open')")
        creation = threading.Thread(target=source.splits)
        creation.start()
        waits = "SELECT FROM pg_replication_slots WHERE active AND confirmed_flush_lsn IS NULL"
        try:
            assert eventually(lambda: bool(database.execute(waits).fetchall()), 60)
            with pytest.raises(SourceUnavailable, match="is being created by another session"):
                source.splits()
        finally:
            other.commit()
            creation.join()


def test_a_publication_that_the_wal_does_not_know_is_not_asked_for_again(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers before 18 refuse the stream for ever then, also after it is created again."""

    def refuse(*_: object) -> None:
        raise StreamRefused('publication "p" does not exist', "42704")

    monkeypatch.setattr(ReplicationStream, "receive", refuse)
    source = source_of(server, first_copy="none")
    reader = source.reader(source.splits(), CONTEXT)
    with contextlib.closing(reader), pytest.raises(OffsetOutOfRange, match="pg_drop_replication"):
        _read(reader, 1)


def test_a_publication_that_is_dropped_while_the_job_runs_ends_it(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server goes on without the changes, and reports nothing to the reader."""
    monkeypatch.setattr(postgres_reader, "PUBLICATION_CHECK_S", 0.2)
    source = source_of(server, first_copy="none")
    reader = source.reader(source.splits(), CONTEXT)
    with contextlib.closing(reader):
        database.execute("INSERT INTO t VALUES (1, 'x')")
        assert len(_read(reader, 1)) == 1
        database.execute("DROP PUBLICATION onceflow_job_t; INSERT INTO t VALUES (2, 'y')")
        with pytest.raises(OffsetOutOfRange, match="does not exist any more.*leaves out changes"):
            _read(reader, 1)


def test_a_missing_secret_is_not_called_a_setting_of_a_sink(server: EmbeddedPostgres) -> None:
    source = source_of(server, password="${env:ONCEFLOW_TEST_ABSENT}")
    with pytest.raises(SettingsRefused, match="password of database.*ONCEFLOW_TEST_ABSENT") as end:
        source.validate()
    assert "sink" not in str(end.value)
