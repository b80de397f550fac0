"""The slot of a source of changes on a real Postgres, as those who operate it see it.

Measurements, warnings, refusals at the start, `onceflow doctor` and `onceflow slots`.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import TupleRow
from tests.integration.pgbouncer import PgBouncer, find_pgbouncer
from typer.testing import CliRunner

from onceflow.cli.doctor.command import examine_source
from onceflow.cli.main import app
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import CopyProgress, ReaderContext, SourceProgress, SourceReader
from onceflow.core.spi.connector import Level
from onceflow.integration.conformance.processes import eventually
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges

_CONTEXT = ReaderContext("job", "t", 0, 1, AttemptId(1))
_PASSWORD = "hunter2-correct-horse"
_OPTIONS = {
    "wal_level": "logical",
    "max_replication_slots": "3",
    "max_wal_senders": "3",
    "max_wal_size": "32MB",
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    hba = ["host all plain,copier,watcher 127.0.0.1/32 scram-sha-256"]
    with EmbeddedPostgres(_OPTIONS, hba_lines=hba) as running:
        # A setting of the command line could not be changed by the tests.
        _configure(running, max_slot_wal_keep_size="128MB")
        yield running


def _configure(server: EmbeddedPostgres, **settings: str) -> None:
    """Set `settings`, and wait until new sessions have them."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        for name, value in settings.items():
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        connection.execute("SELECT pg_reload_conf()")

    def is_set() -> bool:
        with psycopg.connect(server.url, autocommit=True) as connection:
            return all(
                connection.execute(f"SHOW {name}".encode()).fetchall() == [(value,)]
                for name, value in settings.items()
            )

    assert eventually(is_set, 60)


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        yield connection
        for (name,) in connection.execute("SELECT pubname FROM pg_publication").fetchall():
            connection.execute(f'DROP PUBLICATION "{name}"'.encode())
        unused = "SELECT FROM pg_replication_slots WHERE active"
        assert eventually(lambda: not connection.execute(unused).fetchall(), 60)
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        connection.execute("DROP TABLE t")


def _source(server: EmbeddedPostgres, **options: Any) -> PostgresChanges:
    given: dict[str, Any] = {"table": "t", **options}
    return PostgresChanges(server.url, **given).bind("job", "t")


def _poll(reader: SourceReader) -> int:
    batch = reader.poll(0.05)
    return batch.num_rows if isinstance(batch, pa.RecordBatch) else 0


def _measure(source: PostgresChanges, reader: SourceReader) -> SourceProgress:
    progress = source.measure(reader.snapshot())
    assert progress is not None
    return progress


def test_the_first_copy_and_the_distance_are_measured(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 25) i")
    source = _source(server, chunk_rows=10, batch_rows=10)
    assert source.measure([]) is None
    reader = source.reader(source.splits(), _CONTEXT)
    began = _measure(source, reader)
    # Without statistics the server has no estimate.
    assert began.copies == (CopyProgress("public.t", 0, 0),)
    assert (began.lag_s, began.warnings) == (None, ())
    database.execute("ANALYZE t")
    assert eventually(lambda: _poll(reader) > 0, 60)
    assert _measure(source, reader).copies == (CopyProgress("public.t", 10, 1, 25, 3),)
    assert eventually(lambda: _poll(reader) >= 0 and not _measure(source, reader).copies, 60)
    database.execute("INSERT INTO t VALUES (26, repeat('x', 100000))")
    assert eventually(lambda: _poll(reader) == 1, 60)
    behind = _measure(source, reader)
    assert behind.lag_s is not None
    assert 0 <= behind.lag_s < 3600
    database.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(27, 999) i")
    further = _measure(source, reader)
    assert further.lag_bytes is not None
    assert further.retained_bytes is not None
    assert 100_000 < further.lag_bytes <= further.retained_bytes
    # The reader has the row, but no checkpoint is decided.
    assert further.retained_from == began.retained_from

    def move() -> bool:
        _poll(reader)
        reader.commit(reader.snapshot())
        return _measure(source, reader).retained_from != began.retained_from

    assert eventually(move, 60)
    reader.close()


def test_a_slot_is_warned_about_before_the_server_gives_it_up(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = _source(server, first_copy="none")
    splits = source.splits()

    def fill(segments: int) -> str:
        for at in range(segments):
            database.execute("INSERT INTO t VALUES (%s) ON CONFLICT DO NOTHING", [at])
            database.execute("SELECT pg_switch_wal()")
        progress = source.measure(splits)
        assert progress is not None
        return "; ".join(f"{warning.state}: {warning.text}" for warning in progress.warnings)

    assert fill(0) == ""
    early = fill(4)
    assert early.startswith(f"extended: slot {source.slot_name} makes the server keep ")
    assert "more than max_wal_size, up to 128 MiB" in early
    # The quarter that should be left has two segments, so a step of one meets it.
    assert eventually(lambda: fill(1).startswith("nearly lost: "), 60)
    assert "max_slot_wal_keep_size is 128 MiB" in fill(0)
    fill(4)
    database.execute("CHECKPOINT")
    assert eventually(lambda: fill(0).startswith("lost: "), 60)
    assert "(wal_removed)" in fill(0)
    database.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    assert fill(0) == f"missing: slot {source.slot_name} does not exist any more"


def _invoke(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, arguments)
    assert _PASSWORD not in outcome.output
    return outcome.exit_code, outcome.output


def test_slots_are_listed_and_dropped_unless_they_are_in_use(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = _source(server, first_copy="none")
    name = source.slot_name
    database.execute("SELECT pg_create_logical_replication_slot('others', 'pgoutput')")
    reader = source.reader(source.splits(), _CONTEXT)
    listed: dict[str, Any] = {}

    def is_active() -> bool:
        _poll(reader)
        status, output = _invoke("slots", "list", "--url", server.url, "--json")
        assert status == 0, output
        (found,) = json.loads(output)["slots"]
        listed.update(found)
        return bool(found["active"])

    assert eventually(is_active, 60)
    assert (listed["slot"], listed["job"], listed["source"]) == (name, "job", "t")
    assert listed["publication"] == name
    assert listed["retained_bytes"] >= listed["lag_bytes"] >= 0
    status, output = _invoke("slots", "drop", name, "--url", server.url, "--yes")
    assert status == 1
    assert f"slot {name} is in use by onceflow job/" in output
    reader.close()

    def drop() -> bool:
        status, output = _invoke("slots", "drop", name, "--url", server.url, "--yes")
        if status == 0:
            assert output == f"dropped slot {name} and publication {name}\n"
        return status == 0

    assert eventually(drop, 60)
    left = database.execute("SELECT slot_name FROM pg_replication_slots").fetchall()
    assert left == [("others",)]
    assert not database.execute("SELECT FROM pg_publication").fetchall()
    status, output = _invoke("slots", "drop", "others", "--url", server.url, "--yes")
    assert status == 2
    assert "no slot of onceflow named others (its slots: none)" in output
    assert _invoke("slots", "list", "--url", "postgresql://postgres@127.0.0.1:1/x")[0] == 3


def test_a_database_without_writes_does_not_keep_the_wal_of_another(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """No heartbeat is needed: the server's keepalives move the position."""
    source = _source(server, first_copy="none")
    reader = source.reader(source.splits(), _CONTEXT)
    database.execute("CREATE DATABASE busy")
    with psycopg.connect(server.database_url("busy"), autocommit=True) as busy:
        busy.execute("CREATE TABLE b AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)")
        ((end,),) = busy.execute("SELECT pg_current_wal_lsn()::text").fetchall()
    moved = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots"

    def move() -> bool:
        assert _poll(reader) == 0
        reader.commit(reader.snapshot())
        return database.execute(moved, [end]).fetchall() == [(True,)]

    assert eventually(move, 60)
    lag_bytes = _measure(source, reader).lag_bytes
    assert lag_bytes is not None
    assert lag_bytes < 1_000_000
    reader.close()
    database.execute("DROP DATABASE busy")


@pytest.fixture
def roles(database: psycopg.Connection[TupleRow]) -> Iterator[None]:
    for role, options in (("plain", ""), ("copier", "REPLICATION"), ("watcher", "REPLICATION")):
        database.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{_PASSWORD}' {options}".encode())
    database.execute("GRANT SELECT ON t TO copier")
    yield
    database.execute("DROP OWNED BY copier; DROP ROLE plain, copier, watcher")


def _url(server: EmbeddedPostgres, role: str, password: str = "") -> str:
    return f"postgresql://{role}:{password or _PASSWORD}@127.0.0.1:{server.port}/postgres"


def test_a_start_is_refused_by_name_and_creates_nothing(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], roles: None
) -> None:
    def refuse(match: str, url: str = server.url, **options: Any) -> None:
        given: dict[str, Any] = {"table": "t", **options}
        with pytest.raises(ConfigError, match=match):
            PostgresChanges(url, **given).bind("job", "t").splits()
        assert not database.execute("SELECT FROM pg_publication").fetchall()
        taken = "SELECT FROM pg_replication_slots WHERE slot_name LIKE 'onceflow%'"
        assert not database.execute(taken).fetchall()

    refuse("role plain may not read changes. Run: ALTER ROLE plain", _url(server, "plain"))
    refuse("role copier does not own table public.t", _url(server, "copier"))
    refuse("role watcher may not read table public.t.*GRANT SELECT", _url(server, "watcher"))
    refuse("password authentication failed", _url(server, "copier", "wrong"))
    refuse('role "nobody" does not exist', _url(server, "nobody"))
    refuse("server does not support SSL", server.url + "?sslmode=require")
    refuse("there is no table nothing", table="nothing")
    with psycopg.connect(server.url, autocommit=True) as owner:
        owner.execute("ALTER ROLE postgres SET default_transaction_read_only = on")
        refuse("onceflow_job_t cannot be created: .*default_transaction_read_only = off")
        owner.execute("ALTER ROLE postgres RESET default_transaction_read_only")
    database.execute("ALTER TABLE t REPLICA IDENTITY NOTHING")
    refuse("table public.t has REPLICA IDENTITY NOTHING")
    database.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT")
    database.execute(
        "SELECT pg_create_logical_replication_slot('s' || i, 'pgoutput')"
        " FROM generate_series(1, 3) i"
    )
    refuse("slot onceflow_job_t cannot be created: .*all replication slots are in use")
    with contextlib.ExitStack() as senders:
        for _ in range(3):
            connection = psycopg.connect(server.url, replication="database", autocommit=True)
            senders.callback(connection.close)
        refuse("no WAL sender is free: .*raise max_wal_senders")


def test_the_doctor_names_each_fault_with_its_remedy(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], roles: None
) -> None:
    def examine(url: str = server.url, **options: Any) -> dict[str, tuple[str, str]]:
        given: dict[str, Any] = {"table": "t", **options}
        source = PostgresChanges(url, **given).bind("job", "t")
        questions = examine_source(source, 1)
        assert questions is not None
        findings = [one for one in questions() if one.level is not Level.OK]
        return {one.found: (one.level.value, one.remedy) for one in findings}

    (only,) = examine()
    assert only.startswith("an update that leaves a large value as it was ends the job")
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    assert examine() == {}
    found = examine(_url(server, "watcher"))
    assert found["role watcher may not read table public.t"] == (
        "problem",
        'GRANT SELECT ON "public"."t" TO watcher',
    )
    assert any("does not own table public.t" in text for text in found)
    found = examine(_url(server, "plain"))
    assert "role plain may not read changes. Run: ALTER ROLE plain REPLICATION" in found
    ((text, (level, remedy)),) = examine(_url(server, "copier", "wrong")).items()
    assert "password authentication failed" in text
    assert (level, "ALTER ROLE" in remedy) == ("problem", True)
    ((text, (level, remedy)),) = examine("postgresql://postgres@127.0.0.1:1/x").items()
    assert (level, "listen_addresses" in remedy) == ("problem", True)
    _configure(server, max_slot_wal_keep_size="-1", wal_sender_timeout="5s")
    (size, (level, remedy)), (timeout, (severe, shorter)) = examine().items()
    assert size.startswith("max_slot_wal_keep_size = -1: a slot that does not move fills")
    assert (level, remedy.startswith("ALTER SYSTEM SET")) == ("warning", True)
    assert timeout.startswith("wal_sender_timeout = 5000 ms, and status_interval = 10 s")
    assert (severe, shorter) == ("problem", "status_interval=1.66667")
    _configure(server, max_slot_wal_keep_size="128MB", wal_sender_timeout="1min")


@pytest.mark.servers
@pytest.mark.skipif(not find_pgbouncer(), reason="no pgbouncer: apt-get install pgbouncer")
def test_a_pooler_that_refuses_replication_is_named(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    # The pooler runs as another user, who may not enter tmp_path.
    with (
        tempfile.TemporaryDirectory() as directory,
        PgBouncer(server.port, Path(directory)) as pooler,
    ):
        source = PostgresChanges(pooler.url("postgres"), table="t").bind("job", "t")
        with pytest.raises(ConfigError, match="leads to a pooler, such as PgBouncer"):
            source.splits()
    assert not database.execute("SELECT FROM pg_publication").fetchall()
    assert not database.execute("SELECT FROM pg_replication_slots").fetchall()
