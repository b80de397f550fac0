"""A slot, a publication or a server that no longer has every change: the job ends by name."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import psycopg
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import (
    CONTEXT,
    CREATE_TABLE,
    follow_advice,
    open_database,
    read_rows,
    read_to_error,
    source_of,
    wait_until,
)

from onceflow.core.errors import (
    BadRecord,
    ConfigError,
    OffsetOutOfRange,
    SourceUnavailable,
    StateIncompatible,
)
from onceflow.core.spi import Split
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges
from onceflow.sources.postgres import reader as postgres_reader
from onceflow.sources.postgres.position import SlotPosition

_SETTINGS = {
    "wal_level": "logical",
    # A slot is invalidated as soon as it keeps two segments.
    "max_slot_wal_keep_size": "1MB",
    "wal_keep_size": "0",
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(_SETTINGS) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with open_database(server, CREATE_TABLE) as connection:
        yield connection


def _invalidate(database: psycopg.Connection[TupleRow]) -> None:
    """Write WAL until the server has removed what the slot needs."""
    lost = "SELECT FROM pg_replication_slots WHERE wal_status = 'lost'"

    def write() -> bool:
        database.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))")
        database.execute("SELECT pg_switch_wal()")
        database.execute("CHECKPOINT")
        return bool(database.execute(lost).fetchall())

    wait_until(write)


def test_a_slot_whose_wal_was_removed_ends_the_job_and_is_not_tried_for_ever(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    splits = source.splits()
    _invalidate(database)
    with pytest.raises(OffsetOutOfRange, match=r"invalidated \(wal_removed\).*keep_size"):
        source.discover(splits)
    with (
        contextlib.closing(source.reader(splits, CONTEXT)) as reader,
        pytest.raises(OffsetOutOfRange, match="invalidated"),
    ):
        read_rows(reader, 1)


def test_a_slot_that_is_invalidated_while_it_is_read_ends_the_next_attempt(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """The server ends the stream like any other; what it lost is seen at the next start."""
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a')")
        assert len(read_rows(reader, 1)) == 1
        decided = reader.snapshot()
        # Nothing is acknowledged, so the slot keeps its WAL.
        _invalidate(database)
        with pytest.raises((SourceUnavailable, OffsetOutOfRange)):
            read_rows(reader, 1)
    with pytest.raises(OffsetOutOfRange, match="invalidated"):
        source.discover(decided)


def test_a_slot_that_another_program_moved_is_refused(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    splits = source.splits()
    database.execute("INSERT INTO t VALUES (1, 'a')")
    database.execute(
        "SELECT pg_replication_slot_advance('onceflow_job_t', pg_current_wal_flush_lsn())"
    )
    with pytest.raises(OffsetOutOfRange, match="past the checkpoint's position"):
        source.discover(splits)


def test_a_slot_for_prepared_transactions_is_refused(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """It would send a transaction when it is prepared, before it is known to be committed."""
    database.execute("CREATE PUBLICATION onceflow_job_t FOR TABLE t")
    database.execute(
        "SELECT pg_create_logical_replication_slot('onceflow_job_t', 'pgoutput', false, true)"
    )
    with pytest.raises(ConfigError, match="two_phase True"):
        source_of(server).splits()


_DROPPED = "DROP PUBLICATION onceflow_job_t", "CREATE PUBLICATION onceflow_job_t FOR TABLE t"
_ALTER = "ALTER PUBLICATION onceflow_job_t"
_WITHOUT_TABLE = f"{_ALTER} DROP TABLE t", f"{_ALTER} ADD TABLE t"
_WITHOUT_INSERTS = (
    f"{_ALTER} SET (publish = 'delete')",
    f"{_ALTER} SET (publish = 'insert, update, delete, truncate')",
)


@pytest.mark.parametrize(
    ("broken", "repaired"),
    [_DROPPED, _WITHOUT_TABLE, _WITHOUT_INSERTS],
    ids=["dropped", "without-the-table", "without-inserts"],
)
def test_a_publication_that_lacked_changes_for_a_moment_ends_the_job(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    repaired: str,
) -> None:
    """It looks as before when it is checked, and the server reports nothing to the reader."""
    monkeypatch.setattr(postgres_reader, "PUBLICATION_CHECK_S", 0.0)
    source = source_of(server, first_copy="none")
    splits = source.splits()
    with contextlib.closing(source.reader(splits, CONTEXT)) as reader:
        reader.poll(0.05)
        for statement in (broken, "INSERT INTO t VALUES (1, 'lost')", repaired):
            database.execute(statement.encode())
        with pytest.raises(OffsetOutOfRange, match="was altered, or dropped and created again"):
            read_to_error(reader)
    with pytest.raises(OffsetOutOfRange, match="was altered, or dropped and created again"):
        source.discover(splits)


_IN_SCHEMA = (
    "CREATE SCHEMA app; ALTER TABLE t SET SCHEMA app; SET search_path = app, public;"
    "CREATE PUBLICATION p FOR TABLES IN SCHEMA app"
)
_OF_ROOT = (
    "DROP TABLE t; CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
    "CREATE TABLE t PARTITION OF root FOR VALUES FROM (0) TO (9);"
)


@pytest.mark.parametrize(
    ("published", "table", "broken", "repaired"),
    [
        pytest.param(
            _IN_SCHEMA,
            "app.t",
            "ALTER PUBLICATION p DROP TABLES IN SCHEMA app",
            "ALTER PUBLICATION p ADD TABLES IN SCHEMA app",
            id="without-the-schema",
        ),
        pytest.param(
            _IN_SCHEMA,
            "app.t",
            "ALTER TABLE app.t SET SCHEMA public",
            "ALTER TABLE t SET SCHEMA app",
            id="in-another-schema",
        ),
        pytest.param(
            f"{_OF_ROOT} CREATE PUBLICATION p FOR TABLE root",
            "t",
            "ALTER TABLE root DETACH PARTITION t",
            "ALTER TABLE root ATTACH PARTITION t FOR VALUES FROM (0) TO (9)",
            id="detached",
        ),
        pytest.param(
            f"{_OF_ROOT} CREATE PUBLICATION p FOR TABLE root",
            "t",
            "ALTER PUBLICATION p DROP TABLE root",
            "ALTER PUBLICATION p ADD TABLE root",
            id="without-the-root",
        ),
    ],
)
def test_a_table_that_was_not_published_for_a_moment_ends_the_job(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    published: str,
    table: str,
    broken: str,
    repaired: str,
) -> None:
    """A publication may have the table by its schema, or as a partition of another table."""
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(database.execute, "DROP SCHEMA IF EXISTS app CASCADE")
        cleanup.callback(database.execute, "DROP PUBLICATION IF EXISTS p")
        database.execute(published.encode())
        options = {"first_copy": "none", "publication": "p", "table": table}
        splits = source_of(server, **options).splits()
        assert source_of(server, **options).discover(splits) == splits
        for statement in (broken, "INSERT INTO t VALUES (1, 'lost')", repaired):
            database.execute(statement.encode())
        with pytest.raises(OffsetOutOfRange, match="was altered, or dropped and created again"):
            source_of(server, **options).discover(splits)


def test_other_tables_of_a_publication_come_and_go(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    splits = source.splits()
    database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    database.execute("ALTER PUBLICATION onceflow_job_t ADD TABLE other")
    database.execute("VACUUM FREEZE pg_publication, pg_publication_rel")
    assert source.discover(splits) == splits
    database.execute("DROP TABLE other")
    assert source.discover(splits) == splits


def test_a_server_that_was_restored_from_a_backup_is_refused(tmp_path: Path) -> None:
    """It has the same identity and timeline: only its WAL ends earlier than before."""
    backup = tmp_path / "backup"
    with EmbeddedPostgres({"wal_level": "logical"}, tmp_path / "server") as server:
        with psycopg.connect(server.url, autocommit=True) as database:
            database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
            source = source_of(server, first_copy="none")
            splits = source.splits()
        server.stop()
        shutil.copytree(tmp_path / "server" / "data", backup)
        server.start()
        with (
            psycopg.connect(server.url, autocommit=True) as database,
            contextlib.closing(source.reader(splits, CONTEXT)) as reader,
        ):
            database.execute("INSERT INTO t VALUES (1, 'lost')")
            assert len(read_rows(reader, 1)) == 1
            decided = reader.snapshot()
        server.stop()
        shutil.rmtree(tmp_path / "server" / "data")
        shutil.copytree(backup, tmp_path / "server" / "data")
        server.start()
        assert source.discover(splits) == splits
        with pytest.raises(OffsetOutOfRange, match="a backup was restored"):
            source.discover(decided)


def test_a_copied_row_outlives_a_crash_of_the_server(tmp_path: Path) -> None:
    """With synchronous_commit off, rows are visible before the server has them on its disk."""
    options = {"wal_level": "logical", "wal_writer_delay": "10s"}
    with EmbeddedPostgres(options, tmp_path / "server") as server:
        with psycopg.connect(server.url, autocommit=True) as database:
            database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
            database.execute("INSERT INTO t SELECT n FROM generate_series(1, 30) AS n")
            database.execute("SET synchronous_commit = off")
            source = source_of(server, chunk_rows=1, batch_rows=1, copy_parallelism=1)
            with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
                rows = read_rows(reader, 1)
                database.execute("INSERT INTO t VALUES (1000, 'not flushed')")
                rows += read_rows(reader, 30)
                server.kill()
        assert rows[-1]["id"] == 1000
        server.start()
        with psycopg.connect(server.url) as database:
            assert database.execute("SELECT count(*) FROM t").fetchall() == [(31,)]


def test_a_slot_of_the_user_that_fails_over_is_read_like_any_other(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    ((version,),) = database.execute("SHOW server_version_num").fetchall()
    if int(version) < 170000:
        pytest.skip("failover slots came with PostgreSQL 17")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    database.execute("SELECT pg_create_logical_replication_slot('f', 'pgoutput', failover => true)")
    database.execute("INSERT INTO t VALUES (1, 'x')")
    source = source_of(server, slot="f", publication="p", first_copy="none")
    source.validate()
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        assert [row["id"] for row in read_rows(reader, 1)] == [1]
        decided = reader.snapshot()
    assert source.discover(decided) == decided


@pytest.mark.servers
def test_a_standby_is_refused_at_the_start_and_nothing_is_created() -> None:
    with EmbeddedPostgres({"wal_level": "logical"}) as standby:
        with psycopg.connect(standby.url, autocommit=True) as connection:
            connection.execute(CREATE_TABLE.encode())
            ((data,),) = connection.execute("SHOW data_directory").fetchall()
        Path(data, "standby.signal").touch()
        standby.kill()
        standby.start()
        for first_copy in ("all", "only"):
            source = source_of(standby, first_copy=first_copy)
            for call in (source.validate, source.splits):
                with pytest.raises(ConfigError, match="the server is a standby.*name the primary"):
                    call()
        with psycopg.connect(standby.url) as connection:
            assert connection.execute("SELECT FROM pg_replication_slots").fetchall() == []


_Connection: TypeAlias = psycopg.Connection[TupleRow]
_USED = "SELECT FROM pg_replication_slots WHERE active"


def _drop_slot(database: _Connection) -> None:
    database.execute("SELECT pg_drop_replication_slot('s')")


def _replace_slot(database: _Connection) -> None:
    _drop_slot(database)
    database.execute("SELECT pg_create_physical_replication_slot('s')")


def _move_slot(database: _Connection) -> None:
    database.execute("INSERT INTO t VALUES (3, 'skipped')")
    database.execute("SELECT pg_replication_slot_advance('s', pg_current_wal_flush_lsn())")


def _alter_publication(database: _Connection) -> None:
    for statement in (f"ALTER PUBLICATION s {change} TABLE t" for change in ("DROP", "ADD")):
        database.execute(statement.encode())


def _truncate(database: _Connection) -> None:
    database.execute("TRUNCATE t")


def _change_nothing(database: _Connection) -> None:
    del database


def _move_to_another_cluster(decided: list[Split]) -> list[Split]:
    position = SlotPosition.from_split(decided[0])
    return [replace(position, system="1").to_split()]


def _keep(decided: list[Split]) -> list[Split]:
    return decided


@pytest.mark.parametrize(
    ("lose", "read_from", "named"),
    [
        (_drop_slot, _keep, "does not exist any more"),
        (_replace_slot, _keep, "The checkpoint's slot had this name"),
        (_move_slot, _keep, "past the checkpoint's position"),
        (_invalidate, _keep, "raise max_slot_wal_keep_size, empty the target"),
        (_alter_publication, _keep, "was altered"),
        (_truncate, _keep, "was truncated"),
        (_change_nothing, _move_to_another_cluster, "To read the other cluster"),
    ],
    ids=["dropped", "replaced", "moved", "invalidated", "altered", "truncated", "cluster"],
)
def test_a_job_without_a_first_copy_is_repaired_as_its_error_advises(
    server: EmbeddedPostgres,
    database: _Connection,
    lose: Callable[[_Connection], None],
    read_from: Callable[[list[Split]], list[Split]],
    named: str,
) -> None:
    """Without the rows, the changes between the two jobs would be lost."""
    options = {"slot": "s", "first_copy": "none"}
    source = source_of(server, **options)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'read')")
        read_rows(reader, 1)
        decided = list(reader.snapshot())
    wait_until(lambda: not database.execute(_USED).fetchall())
    lose(database)
    database.execute("INSERT INTO t VALUES (2, 'in between')")
    with pytest.raises((OffsetOutOfRange, BadRecord), match=named) as ended:
        _read_on(source, read_from(decided))
    other = follow_advice(server, database, ended.value, **options)
    _check_equal(other, database)


def _read_on(source: PostgresChanges, decided: list[Split]) -> None:
    with contextlib.closing(source.reader(source.discover(decided), CONTEXT)) as reader:
        read_to_error(reader)


def _check_equal(source: PostgresChanges, database: _Connection) -> None:
    """Check that `source` reads the rows of the table, and then its changes."""
    expected = database.execute("SELECT id, v FROM t ORDER BY id").fetchall()
    source.validate()
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        rows = read_rows(reader, len(expected))
        assert sorted((row["id"], row["v"]) for row in rows) == expected
        if source.follows:
            database.execute("INSERT INTO t VALUES (1000, 'followed')")
            assert [row["id"] for row in read_rows(reader, 1)] == [1000]


@pytest.mark.parametrize(("before", "now"), [("only", "none"), ("none", "only")])
def test_another_kind_of_first_copy_is_begun_as_its_error_advises(
    server: EmbeddedPostgres, database: _Connection, before: str, now: str
) -> None:
    database.execute("INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    splits = source_of(server, first_copy=before).splits()
    source = source_of(server, first_copy=now)
    with pytest.raises(StateIncompatible, match="give it its old value") as refused:
        source.discover(splits)
    other = follow_advice(server, database, refused.value, first_copy=now)
    assert other.follows == (now != "only")
    _check_equal(other, database)
    assert len(database.execute(_USED.replace("WHERE active", "")).fetchall()) == other.follows
