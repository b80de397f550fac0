"""A table of a real Postgres that is altered, partitioned or emptied while it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import (
    CONTEXT,
    drop_slots,
    read_rows,
    read_to_error,
    source_of,
)

from onceflow.core.errors import BadRecord, ConfigError, OffsetOutOfRange
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources.postgres import reader as postgres_reader


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical"}) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        yield connection
        drop_slots(connection)
        connection.execute("DROP TABLE IF EXISTS child, u, t CASCADE")


_CHANGES = """
    INSERT INTO t (id, v) VALUES (1, 'a'), (2, 'b');
    UPDATE t SET v = 'c' WHERE id = 1;
    UPDATE t SET id = 3 WHERE id = 2;
    DELETE FROM t WHERE id = 1
"""
_EXPECTED = [("c", 1, "a"), ("c", 2, "b"), ("u", 1, "c"), ("d", 2), ("u", 3, "b"), ("d", 1)]


def _shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return each operation with its row; a delete with its key alone."""
    return [
        (row["_op"], row["id"]) if row["_op"] == "d" else (row["_op"], row["id"], row["v"])
        for row in rows
    ]


@pytest.mark.parametrize(
    "identity",
    ["DEFAULT", "FULL", "USING INDEX by_id"],
)
def test_every_replica_identity_gives_the_same_changes(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], identity: str
) -> None:
    database.execute("CREATE UNIQUE INDEX by_id ON t (id)")
    database.execute(f"ALTER TABLE t REPLICA IDENTITY {identity}".encode())
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute(_CHANGES)
        assert _shown(read_rows(reader, len(_EXPECTED))) == _EXPECTED


def test_another_replica_identity_stops_the_job_before_a_key_is_missing(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """The old key would be missing: the target would keep the row under it."""
    database.execute("ALTER TABLE t ADD code int UNIQUE NOT NULL DEFAULT 0")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a', 10)")
        assert len(read_rows(reader, 1)) == 1
        database.execute("ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key")
        database.execute("UPDATE t SET id = 2 WHERE id = 1")
        with pytest.raises(BadRecord, match="has another replica identity"):
            read_to_error(reader)


def test_a_table_that_loses_its_key_refuses_updates_on_the_server(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a')")
        for statement in ("REPLICA IDENTITY NOTHING", "DROP CONSTRAINT t_pkey"):
            database.execute(f"ALTER TABLE t {statement}".encode())
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
                database.execute("UPDATE t SET v = 'lost'")
        assert _shown(read_rows(reader, 1)) == [("c", 1, "a")]


@pytest.mark.parametrize(
    ("alter", "insert", "reason", "expected"),
    [
        ("DROP COLUMN v", "VALUES (2)", "has no column 'v'", {"id": 2}),
        (
            "RENAME COLUMN v TO w",
            "VALUES (2, 'y')",
            "has no column 'v'",
            {"id": 2, "w": "y"},
        ),
        (
            "ALTER COLUMN v TYPE bytea USING v::bytea",
            "VALUES (2, 'y')",
            "has column 'v' of another type",
            {"id": 2, "v": b"y"},
        ),
    ],
)
def test_a_job_stops_before_altered_columns_and_goes_on_with_them(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    alter: str,
    insert: str,
    reason: str,
    expected: dict[str, Any],
) -> None:
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'x')")
        database.execute(f"ALTER TABLE t {alter}; INSERT INTO t {insert}".encode())
        assert len(read_rows(reader, 1)) == 1
        with pytest.raises(BadRecord, match=reason):
            read_to_error(reader)
        decided = reader.snapshot()
    later = source_of(server, first_copy="none")
    assert later.discover(decided) == decided
    with contextlib.closing(later.reader(decided, CONTEXT)) as reader:
        assert read_rows(reader, 1) == [{**expected, "_op": "c"}]


def test_wider_limits_of_a_column_stop_no_job_and_a_value_beyond_the_old_ones_is_named(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("ALTER TABLE t ADD w numeric(5,2)")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("ALTER TABLE t ALTER w TYPE numeric(10,4)")
        database.execute("INSERT INTO t VALUES (1, 'x', 1.25)")
        assert len(read_rows(reader, 1)) == 1
        before = reader.snapshot()
        database.execute("INSERT INTO t VALUES (2, 'x', 1.1234)")
        with pytest.raises(BadRecord, match="column 'w'"):
            read_rows(reader, 1)
        assert reader.snapshot() == before
    later = source_of(server, first_copy="none")
    with contextlib.closing(later.reader(before, CONTEXT)) as reader:
        assert str(read_rows(reader, 1)[0]["w"]) == "1.1234"


_CASCADE = """
    CREATE TABLE parent (id int PRIMARY KEY);
    ALTER TABLE t ADD FOREIGN KEY (id) REFERENCES parent NOT VALID;
    TRUNCATE parent CASCADE;
    DROP TABLE parent CASCADE
"""
_UNLOGGED_PARTITION = """
    CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id);
    CREATE UNLOGGED TABLE child PARTITION OF t FOR VALUES FROM (0) TO (9)
"""


@pytest.mark.parametrize(
    "statement",
    ["TRUNCATE t", "TRUNCATE t RESTART IDENTITY", _CASCADE],
    ids=["plain", "restart", "cascade"],
)
def test_a_truncate_ends_the_job_by_name(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], statement: str
) -> None:
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a')")
        assert len(read_rows(reader, 1)) == 1
        before = reader.snapshot()
        database.execute(statement.encode())
        with pytest.raises(BadRecord, match=r"table public\.t was truncated"):
            read_to_error(reader)
        assert reader.snapshot() == before


def test_a_renamed_table_is_read_on_and_its_new_name_starts_the_job(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_reader, "PUBLICATION_CHECK_S", 0.0)
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a')")
        assert len(read_rows(reader, 1)) == 1
        database.execute("ALTER TABLE t RENAME TO u; INSERT INTO u VALUES (2, 'b')")
        assert _shown(read_rows(reader, 1)) == [("c", 2, "b")]
        decided = reader.snapshot()
    with pytest.raises(ConfigError, match="there is no table t"):
        source_of(server).discover(decided)
    database.execute("INSERT INTO u VALUES (3, 'c')")
    renamed = source_of(server, table="u")
    assert renamed.discover(decided) == decided
    with contextlib.closing(renamed.reader(decided, CONTEXT)) as reader:
        assert _shown(read_rows(reader, 1)) == [("c", 3, "c")]


def test_a_dropped_table_ends_the_job(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server sends nothing about it."""
    monkeypatch.setattr(postgres_reader, "PUBLICATION_CHECK_S", 0.0)
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        reader.poll(0.05)
        database.execute("DROP TABLE t")
        with pytest.raises(OffsetOutOfRange, match="no longer sends every change"):
            read_to_error(reader)


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("CREATE UNLOGGED TABLE t (id int PRIMARY KEY)", "it is unlogged.*SET LOGGED"),
        (_UNLOGGED_PARTITION, "its partition child is unlogged"),
        (
            "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE child () INHERITS (t)",
            "which inherits from it",
        ),
    ],
)
def test_tables_with_rows_outside_of_their_stream_are_refused(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    statements: str,
    reason: str,
) -> None:
    database.execute(f"DROP TABLE t; {statements}".encode())
    with pytest.raises(ConfigError, match=reason):
        source_of(server).splits()
    assert database.execute("SELECT FROM pg_publication").fetchall() == []


def test_programs_messages_origins_types_and_subtransactions_change_no_row(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('good'); ALTER TABLE t ADD w mood")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("SELECT pg_logical_emit_message(false, 'app', 'outside')")
        database.execute("SELECT pg_replication_origin_create('far')")
        database.execute("SELECT pg_replication_origin_session_setup('far')")
        database.execute(
            "BEGIN; SELECT pg_logical_emit_message(true, 'app', 'inside');"
            "INSERT INTO t VALUES (1, 'a', 'good'); SAVEPOINT one; INSERT INTO t VALUES (2, 'b');"
            "SAVEPOINT two; UPDATE t SET v = 'lost'; ROLLBACK TO SAVEPOINT one;"
            "INSERT INTO t VALUES (3, 'c', 'good'); COMMIT"
        )
        database.execute("SELECT pg_replication_origin_session_reset()")
        database.execute("SELECT pg_replication_origin_drop('far')")
        assert _shown(read_rows(reader, 2)) == [("c", 1, "a"), ("c", 3, "c")]
    database.execute("ALTER TABLE t DROP w; DROP TYPE mood")


def _partition(database: psycopg.Connection[TupleRow]) -> None:
    database.execute(
        "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (100);"
        # Its columns have another order.
        "CREATE TABLE high (v text, gone int, id int PRIMARY KEY); ALTER TABLE high DROP gone;"
        "ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (100) TO (200)"
    )


def test_a_row_that_moves_to_another_partition_is_a_delete_and_an_insert(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    _partition(database)
    database.execute("INSERT INTO t VALUES (1, 'a'), (101, 'b')")
    source = source_of(server)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        assert _shown(read_rows(reader, 2)) == [("r", 1, "a"), ("r", 101, "b")]
        database.execute("UPDATE t SET id = 102 WHERE id = 1; UPDATE t SET v = 'c' WHERE id = 101")
        database.execute("CREATE TABLE new PARTITION OF t FOR VALUES FROM (200) TO (300)")
        database.execute("INSERT INTO t VALUES (201, 'd')")
        changes = _shown(read_rows(reader, 4))
        assert changes == [("d", 1), ("c", 102, "a"), ("u", 101, "c"), ("c", 201, "d")]


def test_what_happens_to_a_whole_partition_is_no_change_of_its_rows(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """The server sends nothing about it, as docs/sources.md says."""
    _partition(database)
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a'), (101, 'b')")
        database.execute("TRUNCATE low; ALTER TABLE t DETACH PARTITION high")
        database.execute("UPDATE high SET v = 'c'")
        database.execute("ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (100) TO (200)")
        database.execute("UPDATE t SET v = 'd'")
        changes = _shown(read_rows(reader, 3))
        assert changes == [("c", 1, "a"), ("c", 101, "b"), ("u", 101, "d")]
    database.execute("DROP TABLE t; CREATE TABLE t (id int)")
