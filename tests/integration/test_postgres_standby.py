"""A source that reads its changes from a standby: the slot is on the standby."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import CONTEXT, CREATE_TABLE, read_rows, source_of
from tests.integration.postgres_changes_kit import wait_until as wait

from onceflow.core.errors import ConfigError, OffsetOutOfRange
from onceflow.core.spi import Split
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def primary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    directory = tmp_path_factory.mktemp("primary")
    with EmbeddedPostgres({"wal_level": "logical"}, directory) as running:
        with psycopg.connect(running.url, autocommit=True) as connection:
            connection.execute(CREATE_TABLE.encode())
            connection.execute("CREATE PUBLICATION p FOR TABLE t")
            ((version,),) = connection.execute("SHOW server_version_num").fetchall()
        if int(version) < 160000:
            pytest.skip("standbys have logical slots since PostgreSQL 16")
        yield running


@pytest.fixture
def standby(primary: EmbeddedPostgres, tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """Yield a standby that begins as a copy of the primary's files."""
    primary.stop()
    shutil.copytree(primary.directory, tmp_path / "standby", ignore=_ignore_slots)
    primary.start()
    data = tmp_path / "standby" / "data"
    (data / "standby.signal").touch()
    # Not an option of the command, which ALTER SYSTEM would not change.
    (data / "postgresql.auto.conf").write_text("hot_standby_feedback = on")
    options = {
        "wal_level": "logical",
        "primary_conninfo": f"host=127.0.0.1 port={primary.port} user=postgres",
        # The standby sends what its slots need at this interval.
        "wal_receiver_status_interval": "1s",
    }
    with EmbeddedPostgres(options, tmp_path / "standby") as running:
        yield running


def _ignore_slots(directory: str, names: list[str]) -> list[str]:
    return names if Path(directory).name == "pg_replslot" else []


@pytest.fixture
def database(primary: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(primary.url, autocommit=True) as connection:
        yield connection
        connection.execute("TRUNCATE t")


def _create_slot(source: PostgresChanges, database: psycopg.Connection[TupleRow]) -> list[Split]:
    """Return the splits of `source`. Its slot waits for the primary's list of transactions."""
    splits: list[Split] = []
    thread = threading.Thread(target=lambda: splits.extend(source.splits()))
    thread.start()

    def is_created() -> bool:
        database.execute("SELECT pg_log_standby_snapshot()")
        return not thread.is_alive()

    wait(is_created)
    return splits


def test_changes_are_read_from_a_standby_that_crashes(
    standby: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(standby, first_copy="none", publication="p")
    source.validate()
    position = _create_slot(source, database)
    seen: list[int] = []
    for crash in range(3):
        with contextlib.closing(source.reader(source.discover(position), CONTEXT)) as reader:
            first = 10 * crash
            database.execute(
                "INSERT INTO t SELECT n, 'x' FROM generate_series(%s::int, %s::int) AS n",
                [first, first + 4],
            )
            database.execute("BEGIN")
            database.execute("INSERT INTO t VALUES (%s, 'prepared')", [first + 5])
            database.execute("PREPARE TRANSACTION 'p'")
            seen += [row["id"] for row in read_rows(reader, 5 if not crash else 7)]
            position = list(reader.snapshot())
            reader.commit(position)
            # Neither is in a decided checkpoint, so the next attempt reads both again.
            database.execute("COMMIT PREPARED 'p'")
            database.execute("DELETE FROM t WHERE id = %s", [first])
            assert [row["_op"] for row in read_rows(reader, 2)] == ["c", "d"]
            progress = source.measure(reader.snapshot())
            assert progress is not None
            assert progress.lag_bytes is not None
            standby.kill()
        standby.start()
    with contextlib.closing(source.reader(source.discover(position), CONTEXT)) as reader:
        assert [(row["_op"], row["id"]) for row in read_rows(reader, 2)] == [("c", 25), ("d", 20)]
    # Changes after the decided position of an attempt come again in the next one.
    assert seen == [*range(5), 5, 0, *range(10, 15), 15, 10, *range(20, 25)]


def test_a_promoted_standby_ends_the_job(
    standby: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(standby, first_copy="none", publication="p")
    position = _create_slot(source, database)
    with psycopg.connect(standby.url, autocommit=True) as promoted:
        promoted.execute("SELECT pg_promote()")
        promoted.execute("CHECKPOINT")
    with pytest.raises(OffsetOutOfRange, match="a standby was promoted"):
        source.discover(position)


def test_what_a_standby_cannot_do_is_refused_at_the_start(
    standby: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    for first_copy in ("all", "only"):
        source = source_of(standby, first_copy=first_copy, publication="p")
        with pytest.raises(ConfigError, match=r"server is a standby.*or give first_copy='none'"):
            source.splits()
    with pytest.raises(ConfigError, match="cannot be created.*for a standby on its primary"):
        source_of(standby, first_copy="none", publication="absent").splits()
    several = source_of(standby, first_copy="none", publication="p", table=None, tables=("t",))
    position = _create_slot(several, database)
    database.execute("CREATE TABLE u (id int PRIMARY KEY)")
    database.execute("ALTER PUBLICATION p ADD TABLE u")
    more = source_of(standby, first_copy="none", publication="p", table=None, tables=("t", "u"))
    with psycopg.connect(standby.url, autocommit=True) as connection:
        wait(lambda: connection.execute("SELECT to_regclass('u')").fetchall() != [(None,)])
        with pytest.raises(ConfigError, match="the server is a standby"):
            more.discover(position)
        connection.execute("ALTER SYSTEM SET hot_standby_feedback = off")
        connection.execute("SELECT pg_reload_conf()")
        setting = "SHOW hot_standby_feedback"
        wait(lambda: connection.execute(setting).fetchall() == [("off",)])
    with pytest.raises(ConfigError, match="hot_standby_feedback = off; needed: on"):
        several.discover(position)
    database.execute("DROP TABLE u")
