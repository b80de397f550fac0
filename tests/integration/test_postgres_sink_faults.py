"""Tests Postgres alone: commits that wait for a standby, roles, and unpreparable statements."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, prepared, query
from tests.integration.sink_kit import eventually, rows, until_settled
from tests.integration.sql.databases import Postgres
from tests.integration.word_proxy import WordProxy

from onceflow.core.errors import PreCommitFailed
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.sinks import PostgresSink


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture
def url(server: EmbeddedPostgres) -> Iterator[str]:
    """URL of a new database on the server that is told to wait for standbys."""
    database = Postgres.create(server, "alone")
    yield database.url
    database.drop(server)


@pytest.fixture
def job(url: str) -> Iterator[Job]:
    with Job(PostgresSink(url, table="ledger", create=True)) as job:
        yield job.check()


@pytest.fixture
def proxy(server: EmbeddedPostgres) -> Iterator[WordProxy]:
    proxy = WordProxy(("127.0.0.1", server.port))
    yield proxy
    proxy.close()


# -- others decide at the same moment --------------------------------------------------------------


def test_commit_that_another_session_is_carrying_out_is_asked_again_later(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    """A commit that waits for a standby holds the transaction: others find it busy."""
    committable = job.prepare(1, [1])
    outcomes: list[committables.CommitOutcome] = []
    with _waiting_for_a_standby(server):
        thread = threading.Thread(
            target=lambda: outcomes.append(job.committer().commit(committable))
        )
        thread.start()
        eventually(lambda: query(url, "SELECT 1 FROM pg_stat_activity WHERE wait_event='SyncRep'"))
        outcome = job.committer().commit(committable)
        assert isinstance(outcome, committables.RetryLater)
        assert "busy" in outcome.reason
        assert isinstance(job.committer().abort(committable), committables.RetryLater)
        assert ids_in(url) == []
    thread.join(30)
    assert outcomes == [committables.Committed()]
    assert job.committer().commit(committable) == committables.AlreadyCommitted()
    assert ids_in(url) == [1]


def test_commit_cut_off_while_the_server_still_works_on_it_is_settled_in_the_end(
    server: EmbeddedPostgres, proxy: WordProxy, job: Job, url: str
) -> None:
    committable = job.prepare(1, [1])
    with Postgres(url).through(proxy.port).job(table="ledger") as remote:
        committer = remote.committer()
        with _waiting_for_a_standby(server):
            proxy.lose_reply("COMMIT PREPARED")
            outcome = committer.commit(committable)
            assert isinstance(outcome, committables.RetryLater)
            assert "busy" in outcome.reason
        outcome = until_settled(lambda: committer.commit(committable))
        assert outcome == committables.AlreadyCommitted()
    assert ids_in(url) == [1]


def test_transaction_of_another_role_is_refused_and_stays(job: Job, url: str) -> None:
    committable = job.prepare(1, [1])
    query(url, "DROP ROLE IF EXISTS outsider")
    query(url, "CREATE ROLE outsider LOGIN")
    try:
        sink = PostgresSink(url, table="ledger", user="outsider")
        with Job(sink) as other:
            outcome = other.committer().commit(committable)
        assert isinstance(outcome, committables.RetryLater)
        assert "permission denied" in outcome.reason
        assert job.committer().commit(committable) == committables.Committed()
    finally:
        query(url, "DROP ROLE outsider")


# -- what Postgres does not prepare ----------------------------------------------------------------


def test_server_that_runs_out_of_room_for_prepared_transactions_says_so() -> None:
    with (
        EmbeddedPostgres({"max_prepared_transactions": "2"}) as server,
        Job(PostgresSink(server.url, table="ledger", create=True)) as job,
    ):
        job.check()
        job.prepare(1, [1])
        job.prepare(2, [2])
        writer = job.writer()
        writer.write(rows([3]))
        with pytest.raises(PreCommitFailed, match="maximum number of prepared transactions"):
            writer.pre_commit(CheckpointId(3))
        assert len(prepared(server.url)) == 2


def test_transaction_that_cannot_be_prepared_leaves_nothing_and_says_why(
    job: Job, url: str
) -> None:
    """A trigger that notifies makes PREPARE TRANSACTION fail."""
    query(
        url,
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_notify(''x'', ''y''); RETURN NEW; END'; "
        "CREATE TRIGGER tell BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION tell()",
    )
    writer = job.writer()
    writer.write(rows([1]))
    with pytest.raises(PreCommitFailed, match="NOTIFY"):
        writer.pre_commit(CheckpointId(1))
    assert prepared(url) == []
    assert ids_in(url) == []


@contextmanager
def _waiting_for_a_standby(server: EmbeddedPostgres) -> Generator[None, None, None]:
    def wait_for(standby: str) -> None:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("SET synchronous_commit TO local")
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standby}'".encode())
            connection.execute("SELECT pg_reload_conf()")
        eventually(lambda: query(server.url, "SHOW synchronous_standby_names") == [(standby,)])

    wait_for("nobody")
    try:
        yield
    finally:
        wait_for("")
