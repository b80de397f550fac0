"""A source of changes of several tables on a real Postgres: one slot, whole transactions."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow

from onceflow.clients.postgres.connection import PostgresEndpoint
from onceflow.clients.postgres.replication import parse_lsn
from onceflow.core.errors import ConfigError, OffsetOutOfRange, SourceUnavailable, StateIncompatible
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import EndOfInput, OutputBatch, ReaderContext, SourceReader
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges
from onceflow.sources.postgres import copying
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.slot import connect

_COPYING = "SELECT FROM pg_stat_activity WHERE query LIKE 'COPY %TO STDOUT%'"
_CONTEXT = ReaderContext("job", "shop", 0, 1, AttemptId(1))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(
        # Without autovacuum no transaction comes in between that a test has not begun.
        {"wal_level": "logical", "max_replication_slots": "2", "autovacuum": "off"}
    ) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY, v text)")
        connection.execute("CREATE TABLE b (id int PRIMARY KEY, w int)")
        yield connection
        deadline = time.monotonic() + 60
        while connection.execute("SELECT FROM pg_replication_slots WHERE active").fetchall():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        connection.execute(
            "DO $$ DECLARE p text; BEGIN FOR p IN SELECT pubname FROM pg_publication LOOP"
            " EXECUTE format('DROP PUBLICATION %I', p); END LOOP; END $$"
        )
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        connection.execute('DROP SCHEMA IF EXISTS "Sh.op" CASCADE')


def _source(server: EmbeddedPostgres, **options: Any) -> PostgresChanges:
    return PostgresChanges(server.url, **options).bind("job", "shop")


def _read(
    reader: SourceReader, count: int, until: Callable[[], bool] | None = None
) -> list[list[tuple[str, dict[str, Any]]]]:
    """Return polls with rows until they have `count` rows, or `until` holds."""
    polls: list[list[tuple[str, dict[str, Any]]]] = []
    deadline = time.monotonic() + 60
    while sum(map(len, polls)) < count and not (until is not None and until()):
        assert time.monotonic() < deadline, polls
        polled = reader.poll(0.05)
        if isinstance(polled, tuple):
            assert all(isinstance(batch, OutputBatch) for batch in polled)
            polls.append([(b.output, row) for b in polled for row in b.rows.to_pylist()])
    return polls


def _rows(
    reader: SourceReader, count: int, until: Callable[[], bool] | None = None
) -> list[tuple[str, str, Any]]:
    """Return (output, operation, key) of the next rows."""
    polls = _read(reader, count, until)
    return [(output, row["_op"], row["id"]) for poll in polls for output, row in poll]


def _position(reader: SourceReader) -> SlotPosition:
    return SlotPosition.from_split(reader.snapshot()[0])


def test_all_rows_of_a_transaction_come_in_one_poll(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("INSERT INTO a VALUES (1, 'x'); INSERT INTO b VALUES (1, 7)")
    names = ["_xid", "_lsn", "_table", "_committed_at"]
    source = _source(server, tables=["a", "public.b"], batch_rows=1, metadata=names)
    assert list(source.outputs) == ["a", "public.b"]
    assert source.outputs["public.b"].names == ["id", "w", "_op", *names]
    source.validate()
    reader = source.reader(source.splits(), _CONTEXT)
    with contextlib.closing(reader):
        copied = {output: row for poll in _read(reader, 2) for output, row in poll}
        assert {(name, row["_op"], row["id"]) for name, row in copied.items()} == {
            *[("a", "r", 1), ("public.b", "r", 1)]
        }
        nothing = dict.fromkeys(names)
        assert copied["a"].items() >= (nothing | {"_table": "public.a"}).items()
        with database.transaction():
            for key in range(2, 5):
                database.execute("INSERT INTO a VALUES (%s, 'y')", [key])
                database.execute("INSERT INTO b VALUES (%s, 8)", [key])
            database.execute("UPDATE a SET v = 'z' WHERE id = 2")
            database.execute("DELETE FROM b WHERE id = 1")
        before = _position(reader)
        (poll,) = _read(reader, 8)
        assert [(output, row["_op"], row["id"]) for output, row in poll] == [
            *[("a", "c", 2), ("a", "c", 3), ("a", "c", 4), ("a", "u", 2)],
            *[("public.b", "c", 2), ("public.b", "c", 3), ("public.b", "c", 4)],
            ("public.b", "d", 1),
        ]
        after = _position(reader)
        ((xid, now),) = database.execute(
            "SELECT xmin::text::bigint, clock_timestamp() FROM a WHERE id = 3"
        ).fetchall()
        assert {row["_xid"] for _, row in poll} == {xid}
        ((lsn, committed_at),) = {(row["_lsn"], row["_committed_at"]) for _, row in poll}
        assert before.lsn < parse_lsn(lsn) < after.lsn
        assert timedelta() < now - committed_at < timedelta(minutes=5)
        assert {(name, row["_table"]) for name, row in poll} == {
            *[("a", "public.a"), ("public.b", "public.b")]
        }
        assert before.lsn < after.lsn
        assert after.cut is None


def test_a_transaction_over_the_limit_is_cut_by_its_rows_in_all_tables(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = _source(server, tables=["a", "b"], batch_rows=4, transaction_rows_max=9)
    splits = source.splits()
    reader = source.reader(splits, _CONTEXT)
    assert _rows(reader, 1, until=lambda: not _position(reader).is_copying) == []
    with database.transaction():
        database.execute("INSERT INTO a SELECT i, 'x' FROM generate_series(1, 10) i")
        database.execute("INSERT INTO b SELECT i, 0 FROM generate_series(1, 10) i")
    seen: list[tuple[str, str, Any]] = []
    while not seen:
        seen += _rows(reader, 1)
    cut = reader.snapshot()
    assert SlotPosition.from_split(cut[0]).cut is not None
    reader.close()
    again = source.reader(cut, _CONTEXT)
    with contextlib.closing(again):
        seen += _rows(again, 20 - len(seen))
    assert seen == [(name, "c", key) for name in ("a", "b") for key in range(1, 11)]


def test_tables_of_one_name_and_names_with_dots_and_quotes_are_told_apart(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute('CREATE SCHEMA "Sh.op"')
    database.execute('CREATE TABLE "Sh.op".a (id int PRIMARY KEY)')
    database.execute('CREATE TABLE "Sh.op"."A ""q"".x" (id int PRIMARY KEY)')
    names = ["a", '"Sh.op".a', '"Sh.op"."A ""q"".x"']
    # Commands of replication have other rules for backslashes than SQL.
    source = _source(server, tables=names, publication='it\'s \\ "one"')
    reader = source.reader(source.splits(), _CONTEXT)
    with contextlib.closing(reader):
        assert _rows(reader, 1, until=lambda: not _position(reader).is_copying) == []
        database.execute('INSERT INTO "Sh.op"."A ""q"".x" VALUES (3)')
        database.execute('INSERT INTO "Sh.op".a VALUES (2)')
        database.execute("INSERT INTO a VALUES (1)")
        expected = [(name, "c", at + 1) for at, name in enumerate(names)]
        assert sorted(_rows(reader, 3), key=lambda row: int(row[2])) == expected
    with pytest.raises(ConfigError, match="names table public.a twice: 'a' and 'public.a'"):
        _ = _source(server, tables=["a", "public.a"]).outputs


def test_a_publication_names_the_tables_if_no_table_is_named(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    with pytest.raises(ConfigError, match="publication p does not exist"):
        _source(server, publication="p").splits()
    database.execute("CREATE PUBLICATION p FOR TABLE b, a")
    source = _source(server, publication="p", schemas={"public.a": "id INT"})
    assert {name: schema.names for name, schema in source.outputs.items()} == {
        "public.a": ["id", "_op"],
        "public.b": ["id", "w", "_op"],
    }
    reader = source.reader(source.splits(), _CONTEXT)
    with contextlib.closing(reader):
        assert _rows(reader, 1, until=lambda: not _position(reader).is_copying) == []
        database.execute("INSERT INTO b VALUES (1, 2)")
        assert _rows(reader, 1) == [("public.b", "c", 1)]


def test_ranges_of_a_key_are_copied_side_by_side_and_each_goes_on_after_a_crash(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("INSERT INTO a SELECT i, 'x' FROM generate_series(1, 5000) i; ANALYZE a")
    options: dict[str, Any] = {"tables": ["a", "b"], "chunk_rows": 400, "batch_rows": 100}
    source = _source(server, copy_parallelism=3, **options)
    reader = source.reader(source.splits(), _CONTEXT)
    rows = _rows(reader, 1500)
    half = reader.snapshot()
    (table, _) = SlotPosition.from_split(half[0]).tables
    assert table.copied is not None
    assert len(table.copied.ranges) == 3
    reader.close()
    database.execute("INSERT INTO a SELECT i, 'y' FROM generate_series(5001, 5100) i")
    again = source.reader(half, _CONTEXT)
    with contextlib.closing(again):
        rows += _rows(again, 5100 - len(rows))
        assert sorted(key for _, _, key in rows) == list(range(1, 5101))
        rows = _rows(again, 1, until=lambda: not _position(again).is_copying)
        assert rows == []


def test_a_later_table_is_copied_while_the_others_are_followed(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = _source(server, tables=["a"])
    reader = source.reader(source.splits(), _CONTEXT)
    database.execute("INSERT INTO a VALUES (1, 'x')")
    assert _rows(reader, 1) in ([("a", "c", 1)], [("a", "r", 1)])
    before = reader.snapshot()
    reader.close()
    database.execute("INSERT INTO b SELECT i, 0 FROM generate_series(1, 30) i")
    source = _source(server, tables=["a", "b"], chunk_rows=10, batch_rows=10)
    found = source.discover(before)
    assert found == source.discover(before)
    reader = source.reader(found, _CONTEXT)
    with psycopg.connect(server.url) as other:
        # The copy waits for this transaction, and the other table goes on.
        other.execute("INSERT INTO b VALUES (100, 1)")
        database.execute("INSERT INTO a VALUES (2, 'y')")
        assert _rows(reader, 1) == [("a", "c", 2)]
        assert [count for _, count in reader.take_record_times()] == [1]
        # Polls that return copied rows follow, and their times are asked for, too.
        assert not reader.take_record_times()
        held = _position(reader)
        assert held.lsn == SlotPosition.from_split(before[0]).lsn
        other.commit()
    seen = _rows(reader, 15)
    half = reader.snapshot()
    reader.close()
    with database.transaction():
        database.execute("UPDATE a SET v = 'z' WHERE id = 2; DELETE FROM b WHERE id = 3")
        database.execute("INSERT INTO b VALUES (101, 1)")
    reader = source.reader(source.discover(half), _CONTEXT)
    with contextlib.closing(reader):
        seen += _rows(reader, 1_000, until=lambda: ("a", "u", 2) in seen or _is_joined(reader))
        seen += _rows(reader, 1_000, until=lambda: _is_joined(reader))
        database.execute("INSERT INTO a VALUES (3, ''); INSERT INTO b VALUES (200, 0)")
        seen += _rows(reader, 2)
    assert [row for row in seen if row[0] == "a"] == [("a", "u", 2), ("a", "c", 3)]
    puts = [key for name, operation, key in seen if name == "b" and operation != "d"]
    assert len(puts) == len(set(puts))
    deleted = {key for name, operation, key in seen if name == "b" and operation == "d"}
    assert set(puts) - deleted == {*range(1, 31), 100, 101, 200} - {3}


def test_a_copy_that_ends_without_a_row_has_ended(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    splits = _source(server, tables=["a"]).splits()
    reader = _source(server, tables=["a"]).reader(splits, _CONTEXT)
    assert _rows(reader, 1, until=lambda: not _position(reader).is_copying) == []
    known = reader.snapshot()
    reader.close()
    # The order of this key is unknown here, so a copy of the table cannot continue. The first part
    # of the copy is a whole batch, and its last part has no row.
    database.execute("CREATE TABLE n (id float8 PRIMARY KEY)")
    database.execute("INSERT INTO n SELECT i FROM generate_series(1, 10) i")
    source = _source(server, tables=["a", "n"], batch_rows=10)
    reader = source.reader(source.discover(known), _CONTEXT)
    with contextlib.closing(reader):
        assert len(_rows(reader, 10)) == 10
        deadline = time.monotonic() + 60
        while database.execute(_COPYING).fetchall():
            assert time.monotonic() < deadline
        assert _rows(reader, 1, until=lambda: not _position(reader).is_copying) == []
        assert not _position(reader).is_copying
        assert _rows(reader, 1, until=lambda: _is_joined(reader)) == []
        database.execute("INSERT INTO n VALUES (11)")
        assert [str(key) for _, _, key in _rows(reader, 1)] == ["11.0"]


def test_a_later_table_without_a_copy_is_read_from_its_next_change_on(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    splits = _source(server, tables=["a"], first_copy="none").splits()
    source = _source(server, tables=["a", "b"], first_copy="none")
    with psycopg.connect(server.url) as other:
        other.execute("INSERT INTO b VALUES (1, 0)")
        reader = source.reader(source.discover(splits), _CONTEXT)
        # A part of this transaction is before the publication has the table: all of it is left out.
        other.execute("INSERT INTO b VALUES (2, 0)")
        database.execute("INSERT INTO a VALUES (1, '')")
        assert _rows(reader, 1) == [("a", "c", 1)]
        other.commit()
    with contextlib.closing(reader):
        assert _rows(reader, 1, until=lambda: _is_joined(reader)) == []
        database.execute("INSERT INTO b VALUES (3, 0)")
        assert _rows(reader, 1) == [("b", "c", 3)]


def _is_joined(reader: SourceReader) -> bool:
    position = _position(reader)
    return not position.is_copying and all(table.ahead is None for table in position.tables)


def test_a_table_that_is_not_named_any_more_leaves_the_publication_after_its_position(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    caplog: pytest.LogCaptureFixture,
) -> None:
    splits = _source(server, tables=["a", "b"], first_copy="none").splits()
    source = _source(server, tables=["a"], first_copy="none")
    kept = source.discover(splits)
    assert re.search("public.b is not read any more.*its changes in between are not", caplog.text)
    assert [table.name.name for table in SlotPosition.from_split(kept[0]).tables] == ["a"]
    # A checkpoint may still have the table: a start from it must lose nothing.
    assert _list_publication_tables(database) == ["a", "b"]
    assert _source(server, tables=["a", "b"], first_copy="none").discover(splits) == splits
    source.discover(kept)
    assert _list_publication_tables(database) == ["a"]
    with pytest.raises(OffsetOutOfRange, match=r"no longer sends every change of table public\.b"):
        _source(server, tables=["a", "b"], first_copy="none").discover(splits)


def _list_publication_tables(connection: psycopg.Connection[TupleRow]) -> list[str]:
    rows = connection.execute("SELECT tablename FROM pg_publication_tables ORDER BY 1").fetchall()
    return [str(name) for (name,) in rows]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "no table is named: give table="),
        ({"table": "a", "tables": ["b"]}, "both given"),
        ({"tables": []}, "tables= is empty"),
        ({"tables": ["a", "a"]}, "names 'a' twice"),
        ({"tables": ["a"], "schema": "id INT"}, "give schemas= instead"),
        ({"tables": ["a"], "schemas": {"b": "id INT"}}, "names 'b', which is not in tables="),
        ({"table": "a", "schemas": {"a": "id INT"}}, "for table=, give schema="),
        ({"tables": ['"a"']}, "is in quotes"),
        ({"tables": ["a"], "copy_parallelism": 0}, "copy_parallelism=0 is not 1 or more"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        PostgresChanges("postgresql://nowhere/db", **options)


def _read_to_end(reader: SourceReader) -> list[tuple[str, Any]]:
    """Return (output, key) of all rows until the reader has ended."""
    rows: list[tuple[str, Any]] = []
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, rows
        polled = reader.poll(0.05)
        if isinstance(polled, EndOfInput):
            return rows
        if isinstance(polled, tuple):
            rows += [(b.output, row["id"]) for b in polled for row in b.rows.to_pylist()]


def test_a_copy_alone_is_of_one_moment_and_leaves_nothing_on_the_server(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database.execute("INSERT INTO a SELECT i, 'x' FROM generate_series(1, 200) i")
    database.execute("CREATE TABLE c (id int); INSERT INTO c VALUES (1), (1)")
    database.execute("DROP ROLE IF EXISTS copier; CREATE ROLE copier LOGIN")
    database.execute("GRANT USAGE ON SCHEMA public TO copier; GRANT SELECT ON a, c TO copier")
    source = _source(
        server, tables=["a", "c"], user="copier", first_copy="only", chunk_rows=20, batch_rows=7
    )
    assert source.bounded
    source.validate()
    connected: list[str] = []

    def change_and_connect(endpoint: PostgresEndpoint, name: str) -> Any:
        # The first session is the coordinator's. When the others begin, it has the snapshot.
        if connected:
            database.execute("DELETE FROM a WHERE id > 90; DELETE FROM c")
        connected.append(name)
        return connect(endpoint, name)

    monkeypatch.setattr(copying, "connect", change_and_connect)
    reader = source.reader(source.splits(), _CONTEXT)
    with contextlib.closing(reader):
        rows = _read_to_end(reader)
        assert sorted(rows) == [*(("a", key) for key in range(1, 201)), ("c", 1), ("c", 1)]
        assert isinstance(reader.poll(0), EndOfInput)
    assert len(connected) == 3
    idle = ReaderContext("job", "shop", 1, 2, AttemptId(1))
    assert isinstance(source.reader([], idle).poll(0), EndOfInput)
    assert not database.execute("SELECT FROM pg_replication_slots").fetchall()
    assert not database.execute("SELECT FROM pg_publication").fetchall()
    database.execute("DROP OWNED BY copier; DROP ROLE copier")


def test_a_copy_alone_continues_only_in_an_equal_snapshot(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("INSERT INTO a SELECT i, 'x' FROM generate_series(1, 50) i")
    source = _source(server, tables=["a", "b"], first_copy="only", chunk_rows=9, batch_rows=4)
    reader = source.reader(source.splits(), _CONTEXT)
    with contextlib.closing(reader):
        before = _rows(reader, 20)
        position = reader.snapshot()
    again = source.reader(source.discover(position), _CONTEXT)
    with contextlib.closing(again):
        rows = [("a", key) for _, _, key in before] + _read_to_end(again)
        assert sorted(rows) == [("a", key) for key in range(1, 51)]
    database.execute("INSERT INTO b VALUES (1, 1)")
    late = source.reader(source.discover(position), _CONTEXT)
    with contextlib.closing(late), pytest.raises(OffsetOutOfRange, match="of another moment"):
        _read_to_end(late)
    other = _source(server, tables=["a", "b"])
    with pytest.raises(StateIncompatible, match="has first_copy='only', and now first_copy= is"):
        other.discover(position)
    database.execute("DROP TABLE b; CREATE TABLE b (id int PRIMARY KEY, w int)")
    with pytest.raises(OffsetOutOfRange, match="Name the same tables"):
        _source(server, tables=["a", "b"], first_copy="only").discover(position)


@pytest.mark.servers
def test_a_copy_alone_does_not_wait_for_ever_behind_a_lock_that_waits_for_the_copy(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = _source(server, tables=["a"], first_copy="only", statement_timeout_s=2.0)
    reader = source.reader(source.splits(), _CONTEXT)
    lockers: list[threading.Thread] = []
    waiting = "SELECT FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"

    def lock() -> None:
        with psycopg.connect(server.url) as connection:
            connection.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")

    def lock_and_connect(endpoint: PostgresEndpoint, name: str) -> Any:
        # The first session is the coordinator's, which has locked the table before the others.
        if lockers:
            lockers[0].start()
            deadline = time.monotonic() + 60
            while not database.execute(waiting).fetchall():
                assert time.monotonic() < deadline
        else:
            lockers.append(threading.Thread(target=lock))
        return connect(endpoint, name)

    monkeypatch.setattr(copying, "connect", lock_and_connect)
    with contextlib.closing(reader), pytest.raises(SourceUnavailable, match="lock timeout"):
        _read_to_end(reader)
    lockers[0].join(60)
    assert not lockers[0].is_alive()
