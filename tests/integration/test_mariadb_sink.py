"""Tests MariaDB's sessions that end while another session commits their prepared transactions."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, prepared, query, xid
from tests.integration.sink_kit import until_settled

from onceflow.clients.mysql.catalog import XaNames
from onceflow.clients.mysql.connection import MySQLSession, own
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import WriterContext
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql.two_phase import XaTwoPhase


@pytest.fixture
def job(mariadb_database: str) -> Iterator[Job]:
    sink = MySQLSink(mariadb_database, table="ledger", create=True, commit_mode="two_phase")
    with Job(sink) as job:
        yield job.check()


@contextmanager
def _commits_only_answered(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Let the server answer each XA COMMIT with OK, and do nothing."""
    execute = MySQLSession.execute

    def answered(self: MySQLSession, statement: str) -> int:
        only_answered = statement.startswith("XA COMMIT")
        return execute(self, "DO 0" if only_answered else statement)

    with monkeypatch.context() as patched:
        patched.setattr(MySQLSession, "execute", answered)
        yield


def test_nothing_is_sent_while_the_session_that_prepared_is_ending(
    job: Job, mariadb_database: str
) -> None:
    """Its lock says that it is there; the name was free before, and the rows were not."""
    committable, committer = job.prepare(1, [1]), job.committer()
    lock = XaNames(job.sink.settings.ledger_schema).owner_lock(committable.transaction)
    with job.sink.settings.endpoint.connect("is ending") as ending:
        ending.query(f"SELECT GET_LOCK('{lock}', 0)")
        assert isinstance(committer.commit(committable), RetryLater)
        assert ids_in(mariadb_database) == []
        assert prepared(mariadb_database) == [str(committable.transaction)]
    assert until_settled(lambda: committer.commit(committable)) == Committed()
    assert ids_in(mariadb_database) == [1]


def test_commit_that_is_answered_and_not_done_is_never_called_done(
    job: Job, mariadb_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10.11 does so when the session that prepared is ending: XA COMMIT finds only the name."""
    committable, committer = job.prepare(1, [1]), job.committer()
    with _commits_only_answered(monkeypatch):
        outcome = committer.commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "committed nothing" in outcome.reason
    assert committer.commit(committable) == Committed()
    assert ids_in(mariadb_database) == [1]


def test_what_was_only_answered_is_waited_for_and_not_called_lost(
    job: Job, mariadb_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed no more, as one that somebody rolled back; here somebody does."""
    committable, committer = job.prepare(1, [1]), job.committer()
    with _commits_only_answered(monkeypatch):
        assert isinstance(committer.commit(committable), RetryLater)
    query(mariadb_database, f"XA ROLLBACK {xid(mariadb_database, committable.transaction)}")
    outcome = committer.commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "after a restart of the server" in outcome.reason


def test_writer_holds_its_lock_although_its_session_before_is_still_ending(job: Job) -> None:
    """By it the next attempt finds and ends it. A writer closes a session each checkpoint; here the
    server hears of that a third of a second late, when the next session is long there.
    """
    settings = job.sink.settings
    context = WriterContext(
        "job", "ledger", job.sink_id, 0, 1, AttemptId(1), first_checkpoint=CheckpointId(1)
    )
    lock = f"{XaNames(settings.ledger_schema).writers_lock(job.sink_id)}{context.subtask}"
    transactions = XaTwoPhase(settings.ledger_schema).transactions(settings.endpoint, context)
    session = transactions.begin()
    session.execute("INSERT INTO ledger (id) VALUES (1)")
    # Another handle of its socket: closing the session tells the server nothing before this one.
    still_open = cast("Any", own(session))._wire._connection._sock.dup()
    transactions.prepare()
    late = threading.Timer(0.3, still_open.close)
    late.start()
    transactions.expect(CheckpointId(2))
    ((holder, mine),) = transactions.begin().query(
        f"SELECT IS_USED_LOCK('{lock}'), CONNECTION_ID()"
    )
    assert holder == mine, "the check of the next attempt would not find this session"
    late.join()
    transactions.close()
