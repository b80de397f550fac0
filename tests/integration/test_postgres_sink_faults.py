"""The Postgres sink while others decide at the same moment, and when there is no room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, prepared, query
from tests.integration.sink_kit import rows
from tests.integration.word_proxy import WordProxy

from onceflow.core.errors import PreCommitFailed
from onceflow.core.protocol.committables import (
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.sinks import PostgresSink
from onceflow.sinks.postgres.committer import PostgresCommitter


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture
def url(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a new database on the server that may be killed."""
    name = f"f{abs(hash(request.node.name)):x}"
    query(server.url, f"CREATE DATABASE {name}")
    yield server.database_url(name)
    for gid in prepared(server.database_url(name)):
        query(server.database_url(name), f"ROLLBACK PREPARED '{gid}'")
    query(server.url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def job(url: str) -> Iterator[Job]:
    with Job(PostgresSink(url, table="ledger", create=True)) as job:
        yield job.check()


@pytest.fixture
def proxy(server: EmbeddedPostgres) -> Iterator[WordProxy]:
    proxy = WordProxy(("127.0.0.1", server.port))
    yield proxy
    proxy.close()


def _through(proxy: WordProxy, url: str, **settings: float) -> Job:
    host, _, database = url.rpartition("@")[2].partition("/")
    assert host.startswith("127.0.0.1:")
    return Job(
        PostgresSink(
            f"postgresql://postgres@127.0.0.1:{proxy.port}/{database}",
            table="ledger",
            connect_timeout_s=settings.get("connect_timeout_s", 10.0),
            statement_timeout_s=settings.get("statement_timeout_s", 120.0),
        )
    )


# -- others decide at the same moment --------------------------------------------------------------


def test_commit_that_another_session_is_carrying_out_is_asked_again_later(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    """A commit that waits for a standby holds the transaction: others find it busy."""
    committable = job.prepare(1, [1])
    outcomes: list[CommitOutcome] = []
    with _waiting_for_a_standby(server):
        thread = threading.Thread(
            target=lambda: outcomes.append(job.committer().commit(committable))
        )
        thread.start()
        _eventually(lambda: query(url, "SELECT 1 FROM pg_stat_activity WHERE wait_event='SyncRep'"))
        outcome = job.committer().commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "busy" in outcome.reason
        assert isinstance(job.committer().abort(committable), RetryLater)
        assert ids_in(url) == []
    thread.join(30)
    assert outcomes == [Committed()]
    assert job.committer().commit(committable) == AlreadyCommitted()
    assert ids_in(url) == [1]


def test_commit_cut_off_while_the_server_still_works_on_it_is_settled_in_the_end(
    server: EmbeddedPostgres, proxy: WordProxy, job: Job, url: str
) -> None:
    committable = job.prepare(1, [1])
    with _through(proxy, url) as remote:
        committer = remote.committer()
        with _waiting_for_a_standby(server):
            proxy.lose_reply("COMMIT PREPARED")
            outcome = committer.commit(committable)
            assert isinstance(outcome, RetryLater)
            assert "busy" in outcome.reason
        outcome = _until_settled(lambda: committer.commit(committable))
        assert outcome == AlreadyCommitted()
    assert ids_in(url) == [1]


class _Interrupted(PostgresCommitter):
    """A committer during whose first look at the ledger something happens elsewhere."""

    happens: Callable[[], None] | None = None

    def _in_ledger(self, transaction: TransactionId) -> bool:
        found = super()._in_ledger(transaction)
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return found


def test_commit_elsewhere_between_two_looks_is_not_called_lost(job: Job, url: str) -> None:
    """What is prepared and committed after the first look at the ledger is found by the last."""
    transaction = TransactionId("job.ledger", 1, 1, 0)

    def prepare_and_commit() -> None:
        assert job.committer().commit(job.prepare(1, [1])) == Committed()

    committer = _interrupted(job, prepare_and_commit)
    assert committer.commit(Committable(transaction)) == AlreadyCommitted()
    committer.close()
    assert ids_in(url) == [1]


def test_prepare_that_lands_between_two_looks_is_not_called_lost(job: Job, url: str) -> None:
    transaction = TransactionId("job.ledger", 1, 1, 0)

    def prepare() -> None:
        job.prepare(1, [1])

    committer = _interrupted(job, prepare)
    assert isinstance(committer.commit(Committable(transaction)), RetryLater)
    assert committer.commit(Committable(transaction)) == Committed()
    committer.close()
    assert ids_in(url) == [1]


def test_rollback_elsewhere_between_two_looks_is_lost(job: Job, url: str) -> None:
    committable = job.prepare(1, [1])
    query(url, f"ROLLBACK PREPARED '{committable.transaction}'")
    committer = _interrupted(job, lambda: None)
    assert isinstance(committer.commit(committable), Lost)
    committer.close()


# -- the disk --------------------------------------------------------------------------------------


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


def test_full_disk_fails_the_writer_and_loses_nothing_committed(job: Job, url: str) -> None:
    """A trigger raises what the server does when it cannot extend a file."""
    query(
        url,
        "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN IF NEW.id = 13 THEN RAISE ''could not extend file: No space left on device'' "
        "USING ERRCODE = ''disk_full''; END IF; RETURN NEW; END'; "
        "CREATE TRIGGER no_room BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION no_room()",
    )
    assert job.committer().commit(job.prepare(1, [1])) == Committed()
    writer = job.writer()
    writer.write(rows([12, 13]))
    with pytest.raises(PreCommitFailed, match="No space left on device.*53100"):
        writer.pre_commit(CheckpointId(2))
    assert ids_in(url) == [1]
    assert prepared(url) == []


def _interrupted(job: Job, happens: Callable[[], None]) -> _Interrupted:
    committer = _Interrupted(job.sink.settings, job.committer_context())
    committer.happens = happens
    return committer


def _until_settled(ask: Callable[[], CommitOutcome]) -> CommitOutcome:
    deadline = time.monotonic() + 60
    while True:
        outcome = ask()
        if not isinstance(outcome, (RetryLater, Unknown)) or time.monotonic() > deadline:
            return outcome
        time.sleep(0.05)


def _eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def _waiting_for_a_standby(server: EmbeddedPostgres) -> Generator[None, None, None]:
    def wait_for(standby: str) -> None:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("SET synchronous_commit TO local")
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standby}'".encode())
            connection.execute("SELECT pg_reload_conf()")
        _eventually(lambda: query(server.url, "SHOW synchronous_standby_names") == [(standby,)])

    wait_for("nobody")
    try:
        yield
    finally:
        wait_for("")
