"""The Postgres sink while servers die, replies are lost and others decide at the same moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest
from tests.integration.postgres_sink_kit import (
    Job,
    WordProxy,
    committables,
    ids_in,
    prepared,
    query,
    rows,
)

from onceflow.core.errors import ConfigError, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
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


# -- the server dies -------------------------------------------------------------------------------


def test_rows_that_were_only_written_die_with_the_server(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    server.restart()
    with pytest.raises(PreCommitFailed):
        writer.pre_commit(CheckpointId(1))
    assert prepared(url) == []
    assert ids_in(url) == []


def test_prepared_rows_outlive_the_server_and_are_committed_once(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    committer = job.committer()
    assert list(committer.in_doubt()) == []
    committable = job.prepare(1, [1, 2])
    server.restart()
    # The committer's connection died with the server; it opens another by itself.
    assert committables(committer.in_doubt()) == ["job.ledger/1/1/0/0"]
    server.restart()
    assert committer.commit(committable) == Committed()
    server.restart()
    assert committer.commit(committable) == AlreadyCommitted()
    assert ids_in(url) == [1, 2]


def test_committed_rows_and_their_proof_outlive_the_server(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    committable = job.prepare(1, [1])
    assert job.committer().commit(committable) == Committed()
    server.restart()
    assert ids_in(url) == [1]
    assert job.committer().commit(committable) == AlreadyCommitted()


def test_idle_writer_goes_on_after_the_server_has_restarted(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    first = writer.pre_commit(CheckpointId(1))
    server.restart()
    writer.write(rows([2]))
    second = writer.pre_commit(CheckpointId(2))
    assert first is not None
    assert second is not None
    committer = job.committer()
    assert [committer.commit(one) for one in (first, second)] == [Committed(), Committed()]
    assert ids_in(url) == [1, 2]


def test_everything_waits_for_a_server_that_is_down_and_nothing_is_called_lost(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    committable = job.prepare(1, [1])
    committer = job.committer()
    server.kill()
    try:
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "refused" in outcome.reason
        assert isinstance(committer.abort(committable), RetryLater)
        with pytest.raises(SinkError):
            committer.in_doubt()
        with pytest.raises(SinkError, match="refused") as failure:
            job.check(attempt=2)
        assert not isinstance(failure.value, ConfigError), "a restart of the job may mend it"
        committer.prune(CheckpointId(9))
    finally:
        server.start()
    assert committer.commit(committable) == Committed()
    assert ids_in(url) == [1]


def test_commit_is_answered_while_the_server_dies_again_and_again(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    """Kills the server at any moment of thirty commits; asks until each is settled."""
    todo = [job.prepare(checkpoint, [checkpoint]) for checkpoint in range(1, 31)]
    committer = job.committer()
    stop = threading.Event()
    kills: list[float] = []

    def kill_and_start() -> None:
        while not stop.wait(0.1):
            server.restart()
            kills.append(time.monotonic())

    killer = threading.Thread(target=kill_and_start)
    killer.start()
    try:
        for committable in todo:
            outcome = _until_settled(partial(committer.commit, committable))
            assert outcome in (Committed(), AlreadyCommitted()), outcome
            time.sleep(0.02)
    finally:
        stop.set()
        killer.join(60)
    assert len(kills) >= 3
    assert ids_in(url) == list(range(1, 31))
    assert prepared(url) == []


# -- replies are lost ------------------------------------------------------------------------------


def test_commit_that_landed_but_was_reported_failed_is_not_applied_twice(
    proxy: WordProxy, job: Job, url: str
) -> None:
    committable = job.prepare(1, [1, 2])
    with _through(proxy, url) as remote:
        committer = remote.committer()
        proxy.lose_reply("COMMIT PREPARED")
        assert committer.commit(committable) in (AlreadyCommitted(), Committed())
        assert proxy.resets == 1
        assert committer.commit(committable) == AlreadyCommitted()
    assert ids_in(url) == [1, 2]
    assert prepared(url) == []


def test_commit_that_never_arrived_is_sent_again(proxy: WordProxy, job: Job, url: str) -> None:
    committable = job.prepare(1, [1])
    with _through(proxy, url) as remote:
        committer = remote.committer()
        proxy.lose_request("COMMIT PREPARED")
        assert committer.commit(committable) == Committed()
        assert proxy.resets == 1
    assert ids_in(url) == [1]


def test_rollback_that_landed_but_was_reported_failed_is_aborted(
    proxy: WordProxy, job: Job, url: str
) -> None:
    committable = job.prepare(1, [1])
    with _through(proxy, url) as remote:
        proxy.lose_reply("ROLLBACK PREPARED")
        assert remote.committer().abort(committable) == Aborted()
        assert proxy.resets == 1
    assert prepared(url) == []
    assert ids_in(url) == []


def test_lost_answer_of_the_ledger_is_asked_for_again(proxy: WordProxy, job: Job, url: str) -> None:
    committable = job.prepare(1, [1])
    assert job.committer().commit(committable) == Committed()
    with _through(proxy, url) as remote:
        proxy.lose_reply("onceflow_ledger")
        assert remote.committer().commit(committable) == AlreadyCommitted()
        assert proxy.resets == 1


@pytest.mark.parametrize("arrives", [True, False])
def test_lost_reply_to_prepare_fails_the_checkpoint_and_leaves_what_can_be_rolled_back(
    proxy: WordProxy, job: Job, url: str, arrives: bool
) -> None:
    with _through(proxy, url) as remote:
        writer = remote.writer()
        writer.write(rows([1]))
        lose = proxy.lose_reply if arrives else proxy.lose_request
        lose("PREPARE TRANSACTION")
        with pytest.raises(PreCommitFailed, match="checkpoint 1"):
            writer.pre_commit(CheckpointId(1))
        assert proxy.resets == 1
    _eventually(lambda: prepared(url) == (["job.ledger/1/1/0/0"] if arrives else []))
    committer = job.check(attempt=2).committer(attempt=2)
    for orphan in committer.in_doubt():
        assert committer.abort(orphan) == Aborted()
    assert prepared(url) == []
    assert ids_in(url) == []


def test_commit_whose_connection_breaks_and_whose_server_stays_away_is_unknown(
    server: EmbeddedPostgres, proxy: WordProxy, job: Job, url: str
) -> None:
    committable = job.prepare(1, [1])
    with _through(proxy, url, connect_timeout_s=0.5) as remote:
        committer = remote.committer()
        assert committables(committer.in_doubt()) == ["job.ledger/1/1/0/0"]
        server.kill()
        try:
            outcome = committer.commit(committable)
        finally:
            server.start()
        assert isinstance(outcome, Unknown)
        assert "job.ledger/1/1/0/0" in outcome.reason
        assert committer.commit(committable) == Committed()
    assert ids_in(url) == [1]


def test_frozen_server_hangs_nobody_and_nothing_is_called_done_or_lost(
    server: EmbeddedPostgres, job: Job, url: str
) -> None:
    committable = job.prepare(1, [1])
    quick = Job(PostgresSink(url, table="ledger", statement_timeout_s=0.5, connect_timeout_s=1.0))
    with quick:
        committer, writer = quick.committer(), quick.writer()
        assert committables(committer.in_doubt()) == ["job.ledger/1/1/0/0"]
        writer.write(rows([2]))
        began = time.monotonic()
        server.pause()
        try:
            assert isinstance(committer.commit(committable), Unknown)
            with pytest.raises(PreCommitFailed, match=r"did not answer within 0\.5 s"):
                writer.pre_commit(CheckpointId(2))
            assert isinstance(committer.abort(committable), (RetryLater, Unknown))
            with pytest.raises(SinkError):
                committer.in_doubt()
            with pytest.raises(SinkError, match="did not answer within 1 s|timeout") as failure:
                quick.check(2)
            assert not isinstance(failure.value, ConfigError)
        finally:
            server.unpause()
        assert time.monotonic() - began < 15
        outcome = _until_settled(lambda: committer.commit(committable))
        assert outcome in (Committed(), AlreadyCommitted())
    _eventually(lambda: ids_in(url) == [1])


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
