"""Which commit mode is chosen, that everybody keeps to it, and that a pooler bears it."""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.integration.pgbouncer import PgBouncer, find_pgbouncer
from tests.integration.postgres_sink_kit import Job, ids_in, prepared, query
from tests.integration.sink_kit import rows

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import Aborted, AlreadyCommitted, Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi.staging import is_staged
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.sinks import PostgresSink
from onceflow.sinks.postgres.server import is_pooled

pooled_only = pytest.mark.skipif(find_pgbouncer() is None, reason="pgbouncer is not installed")


@pytest.fixture
def staging(tmp_path: Path) -> FileStagingArea:
    return FileStagingArea.in_directory(str(tmp_path / "storage"), "job.ledger")


@pytest.fixture(scope="module")
def unprepared() -> Iterator[EmbeddedPostgres]:
    """A server that prepares no transactions, as it comes from the shelf."""
    with EmbeddedPostgres({"max_prepared_transactions": "0"}) as server:
        yield server


@pytest.fixture
def unprepared_database(unprepared: EmbeddedPostgres) -> str:
    """The url of a database of this try's own on that server."""
    name = f"modes_{uuid.uuid4().hex[:16]}"
    query(unprepared.url, f"CREATE DATABASE {name}")
    return unprepared.database_url(name)


@pytest.fixture(scope="module")
def pooler(onceflow_postgres: Any) -> Iterator[PgBouncer]:
    with (
        tempfile.TemporaryDirectory(prefix="pgbouncer-") as directory,
        PgBouncer(onceflow_postgres.port, Path(directory)) as pooler,
    ):
        yield pooler


def _auto(url: str, staging: FileStagingArea | None, **settings: Any) -> Job:
    return Job(PostgresSink(url, table="ledger", create=True, **settings), staging=staging)


def _recorded(url: str) -> list[tuple[Any, ...]]:
    return query(url, "SELECT sink_id, attempt, commit_mode FROM onceflow.onceflow_sinks")


def test_ledger_is_chosen_where_nothing_is_prepared_and_said_why(
    unprepared_database: str, staging: FileStagingArea, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onceflow.sinks.postgres")
    with _auto(unprepared_database, staging) as job:
        committable = job.check().prepare(1, [1])
        assert is_staged(committable)
        assert job.committer().commit(committable) == Committed()
    assert "auto chose ledger: max_prepared_transactions = 0" in caplog.text
    assert _recorded(unprepared_database) == [("job.ledger", 1, "ledger")]
    assert ids_in(unprepared_database) == [1]


def test_two_phase_is_refused_where_nothing_is_prepared_and_told_both_ways_out(
    unprepared: EmbeddedPostgres, staging: FileStagingArea
) -> None:
    sink = PostgresSink(unprepared.url, table="t", create=True, commit_mode="two_phase")
    with Job(sink, staging=staging) as job, pytest.raises(ConfigError) as failure:
        job.check(9)
    assert "ALTER SYSTEM SET max_prepared_transactions = 64; then restart" in str(failure.value)
    assert "commit_mode='ledger'" in str(failure.value)


def test_server_without_prepared_transactions_is_told_the_statement(
    unprepared_database: str,
) -> None:
    """Nowhere to stage rows either; and nothing is created on the way to the refusal."""
    with Job(PostgresSink(unprepared_database, table="ledger", create=True)) as job:
        with pytest.raises(ConfigError) as failure:
            job.check()
        assert "ALTER SYSTEM SET max_prepared_transactions = 64; then restart" in str(failure.value)
    found = query(unprepared_database, "SELECT to_regclass('ledger'), to_regnamespace('onceflow')")
    assert found == [(None, None)]


def test_at_least_once_needs_no_prepared_transactions(unprepared_database: str) -> None:
    sink = PostgresSink(unprepared_database, table="loose", create=True, delivery="at_least_once")
    with Job(sink) as job:
        writer = job.check().writer()
        writer.write(rows([1]))
        writer.pre_commit(CheckpointId(1))
    assert ids_in(unprepared_database, "loose") == [1]


def test_too_few_prepared_transactions_for_the_parallelism_are_refused(
    postgres_database: str,
) -> None:
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        job.check()
        with pytest.raises(ConfigError, match=r"= 64; needed: 66.*= 132"):
            job.writer(parallelism=33)
        job.writer(parallelism=32)


@pooled_only
def test_pooler_is_told_from_a_server(pooler: PgBouncer, postgres_database: str) -> None:
    with PostgresSink(postgres_database, table="t").endpoint.connect("direct") as session:
        assert not is_pooled(session)
    pooled = PostgresSink(pooler.url(_name(postgres_database)), table="t")
    with pooled.endpoint.connect("pooled") as session:
        assert is_pooled(session)


def _name(url: str) -> str:
    return url.rpartition("/")[2]


@pooled_only
@pytest.mark.parametrize("by_key", [False, True])
def test_ledger_is_chosen_and_works_behind_a_transaction_pooler(
    pooler: PgBouncer,
    postgres_database: str,
    staging: FileStagingArea,
    caplog: pytest.LogCaptureFixture,
    by_key: bool,
) -> None:
    """Three sessions serve four writers and their committers, and none is held between barriers."""
    caplog.set_level(logging.INFO, "onceflow.sinks.postgres")
    settings: dict[str, Any] = {"primary_key": ("id",), "write_mode": "upsert"} if by_key else {}
    sink = PostgresSink(
        pooler.url(_name(postgres_database)), table="ledger", create=True, **settings
    )
    with Job(sink, staging=staging) as job:
        job.check()
        assert "auto chose ledger: the connection goes through a connection pooler" in caplog.text
        writers = [job.writer(subtask=subtask, parallelism=4) for subtask in range(4)]
        committers = [job.committer() for _ in writers]
        for checkpoint in range(1, 6):
            for subtask, writer in enumerate(writers):
                start = checkpoint * 1000 + subtask * 100
                writer.write(rows(range(start, start + 50)))
            for writer, committer in zip(writers, committers, strict=True):
                (committable,) = writer.pre_commit(CheckpointId(checkpoint))
                assert is_staged(committable)
                assert committer.commit(committable) == Committed()
                assert committer.commit(committable) == AlreadyCommitted()
            committers[0].prune(CheckpointId(checkpoint))
        aborted = job.prepare(9, [9])
        job.check(2)
        (found,) = job.committer(2).in_doubt()
        assert found.transaction == aborted.transaction
        assert job.committer(2).abort(found) == Aborted()
    expected = [c * 1000 + s * 100 + n for c in range(1, 6) for s in range(4) for n in range(50)]
    assert ids_in(postgres_database) == expected


@pooled_only
def test_two_phase_that_the_user_insists_on_works_behind_a_pooler_with_a_warning(
    pooler: PgBouncer, postgres_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = PostgresSink(
        pooler.url(_name(postgres_database)), table="ledger", create=True, commit_mode="two_phase"
    )
    with Job(sink) as job:
        job.check()
        assert "holds one of the server's sessions a subtask" in caplog.text
        committable = job.prepare(1, [1])
        assert prepared(postgres_database) == [str(committable.transaction)]
        assert job.committer().commit(committable) == Committed()
        assert job.committer().commit(committable) == AlreadyCommitted()
    assert ids_in(postgres_database) == [1]


def test_the_proofs_of_a_checkpoint_are_deleted_together_or_not_at_all(
    postgres_database: str,
) -> None:
    """One that is left alone would tell that the others were never there: see TargetRecord.proofs.

    More of them than are deleted at once; and some that another session is deleting.
    """
    ledger = "onceflow.onceflow_ledger"
    columns = "transaction_id, sink_id, attempt, checkpoint, subtask, row_count"
    counted = f"SELECT checkpoint, COUNT(*) FROM {ledger} GROUP BY checkpoint ORDER BY checkpoint"
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        job.check()
        query(
            postgres_database,
            f"INSERT INTO {ledger} ({columns}) SELECT"
            " 'job.ledger/1/' || c || '/' || s || '/0', 'job.ledger', 1, c, s, 1"
            " FROM generate_series(1, 4) c, generate_series(0, 699) s",
        )
        with psycopg.connect(postgres_database) as other:
            other.execute(f"DELETE FROM {ledger} WHERE checkpoint = 2 AND subtask = 7")
            job.committer().prune(CheckpointId(4))
            assert query(postgres_database, counted) == [(2, 700), (3, 700), (4, 700)]
            other.rollback()
        job.committer().prune(CheckpointId(4))
        assert query(postgres_database, counted) == [(4, 700)]
