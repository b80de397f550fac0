"""Tests the sinks while servers die, hang, and replies are lost: rows are visible once."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from tests.integration.sink_kit import committables, eventually, rows, until_settled
from tests.integration.sql.databases import Database, SqlJob, SqlServer
from tests.integration.word_proxy import WordProxy

from onceflow.core.errors import ConfigError, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committed,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId

_NUMBERS = itertools.count()


@pytest.fixture
def database(kind: type[Database], server: SqlServer) -> Iterator[Database]:
    """A new database on that server."""
    database = kind.create(server, f"f{next(_NUMBERS)}")
    yield database
    database.drop(server)


def _through(proxy: WordProxy, database: Database, **settings: float) -> SqlJob:
    return database.through(proxy.port).job(table="ledger", **settings)


# -- the server dies -------------------------------------------------------------------------------


def test_rows_that_were_only_written_die_with_the_server(
    database: Database, server: SqlServer, job: SqlJob
) -> None:
    writer = job.writer()
    writer.write(rows(range(20_000)))
    server.restart()
    with pytest.raises(PreCommitFailed):
        writer.pre_commit(CheckpointId(1))
    assert database.prepared() == []
    assert database.ids_in() == []


def test_prepared_rows_outlive_the_server_and_are_committed_once(
    database: Database, server: SqlServer, job: SqlJob
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
    assert database.ids_in() == [1, 2]


def test_committed_rows_and_their_proof_outlive_the_server(
    database: Database, server: SqlServer, job: SqlJob
) -> None:
    committable = job.prepare(1, [1])
    assert job.committer().commit(committable) == Committed()
    server.restart()
    assert database.ids_in() == [1]
    assert job.committer().commit(committable) == AlreadyCommitted()


def test_idle_writer_goes_on_after_the_server_has_restarted(
    database: Database, server: SqlServer, job: SqlJob
) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    (first,) = writer.pre_commit(CheckpointId(1))
    server.restart()
    writer.write(rows([2]))
    (second,) = writer.pre_commit(CheckpointId(2))
    committer = job.committer()
    assert [committer.commit(one) for one in (first, second)] == [Committed(), Committed()]
    assert database.ids_in() == [1, 2]


def test_everything_waits_for_a_server_that_is_down_and_nothing_is_called_lost(
    database: Database, server: SqlServer, job: SqlJob
) -> None:
    committable = job.prepare(1, [1])
    committer = job.committer()
    server.kill()
    try:
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert database.said_when_down in outcome.reason
        assert isinstance(committer.abort(committable), RetryLater)
        with pytest.raises(SinkError):
            committer.in_doubt()
        with pytest.raises(SinkError, match=database.said_when_down) as failure:
            job.check(attempt=2)
        assert not isinstance(failure.value, ConfigError), "a restart of the job may fix it"
        committer.prune(CheckpointId(9))
    finally:
        server.start()
    assert committer.commit(committable) == Committed()
    assert database.ids_in() == [1]


def test_commit_is_answered_while_the_server_dies_again_and_again(
    database: Database, server: SqlServer, job: SqlJob
) -> None:
    """Kills the server at some moments of fifteen commits; asks until each is settled."""
    todo = [job.prepare(checkpoint, [checkpoint]) for checkpoint in range(1, 16)]
    committer = job.committer()
    stop = threading.Event()
    kills: list[float] = []

    def kill_and_start() -> None:
        while len(kills) < 3 and not stop.wait(0.1):
            server.restart()
            kills.append(time.monotonic())

    def struck(times: int) -> bool:
        return len(kills) >= times

    killer = threading.Thread(target=kill_and_start)
    killer.start()
    try:
        for number, committable in enumerate(todo):
            # A killer that is slow must not come when all is done.
            eventually(partial(struck, number // 6))
            outcome = until_settled(partial(committer.commit, committable))
            assert outcome in (Committed(), AlreadyCommitted()), outcome
            time.sleep(0.02)
    finally:
        stop.set()
        killer.join(60)
    assert len(kills) >= 2
    assert database.ids_in() == list(range(1, 16))
    assert database.prepared() == []


# -- replies are lost ------------------------------------------------------------------------------


def test_commit_that_landed_but_was_reported_failed_is_not_applied_twice(
    database: Database, proxy: WordProxy, job: SqlJob
) -> None:
    committable = job.prepare(1, [1, 2])
    with _through(proxy, database) as remote:
        committer = remote.committer()
        proxy.lose_reply(database.words.commit)
        assert committer.commit(committable) in (AlreadyCommitted(), Committed())
        assert proxy.resets == 1
        assert committer.commit(committable) == AlreadyCommitted()
    assert database.ids_in() == [1, 2]
    assert database.prepared() == []


def test_commit_that_never_arrived_is_sent_again(
    database: Database, proxy: WordProxy, job: SqlJob
) -> None:
    committable = job.prepare(1, [1])
    with _through(proxy, database) as remote:
        committer = remote.committer()
        proxy.lose_request(database.words.commit)
        assert committer.commit(committable) == Committed()
        assert proxy.resets == 1
    assert database.ids_in() == [1]


def test_rollback_that_landed_but_was_reported_failed_is_aborted(
    database: Database, proxy: WordProxy, job: SqlJob
) -> None:
    committable = job.prepare(1, [1])
    with _through(proxy, database) as remote:
        proxy.lose_reply(database.words.rollback)
        assert remote.committer().abort(committable) == Aborted()
        assert proxy.resets == 1
    assert database.prepared() == []
    assert database.ids_in() == []


def test_lost_answer_of_the_ledger_is_asked_for_again(
    database: Database, proxy: WordProxy, job: SqlJob
) -> None:
    committable = job.prepare(1, [1])
    assert job.committer().commit(committable) == Committed()
    with _through(proxy, database) as remote:
        proxy.lose_reply("onceflow_ledger")
        assert remote.committer().commit(committable) == AlreadyCommitted()
        assert proxy.resets == 1


@pytest.mark.parametrize("arrives", [True, False])
def test_lost_reply_to_prepare_fails_the_checkpoint_and_leaves_what_can_be_rolled_back(
    database: Database, proxy: WordProxy, job: SqlJob, arrives: bool
) -> None:
    with _through(proxy, database) as remote:
        writer = remote.writer()
        writer.write(rows([1]))
        lose = proxy.lose_reply if arrives else proxy.lose_request
        lose(database.words.prepare)
        with pytest.raises(PreCommitFailed, match="checkpoint 1"):
            writer.pre_commit(CheckpointId(1))
        assert proxy.resets == 1
    eventually(lambda: database.prepared() == (["job.ledger/1/1/0/0"] if arrives else []))
    committer = job.check(attempt=2).committer(attempt=2)
    for orphan in committer.in_doubt():
        assert committer.abort(orphan) == Aborted()
    assert database.prepared() == []
    assert database.ids_in() == []


def test_commit_whose_connection_breaks_and_whose_server_stays_away_is_unknown(
    database: Database, server: SqlServer, proxy: WordProxy, job: SqlJob
) -> None:
    committable = job.prepare(1, [1])
    with _through(proxy, database, connect_timeout_s=0.5) as remote:
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
    assert database.ids_in() == [1]


def test_frozen_server_hangs_nobody_and_nothing_is_called_done_or_lost(
    database: Database, server: SqlServer, job: SqlJob
) -> None:
    committable = job.prepare(1, [1])
    settings = {"statement_timeout_s": 0.5, "connect_timeout_s": 1.0}
    with database.job(table="ledger", **settings) as quick:
        committer, writer = quick.committer(), quick.writer(first_checkpoint=2)
        assert committables(committer.in_doubt()) == ["job.ledger/1/1/0/0"]
        writer.write(rows(range(2, 20_000)))
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
        assert time.monotonic() - began < 60
        outcome = until_settled(lambda: committer.commit(committable))
        assert outcome in (Committed(), AlreadyCommitted())
    eventually(lambda: database.ids_in() == [1])
