"""What is of MariaDB alone: a session that ends while what it prepared is committed by another."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, prepared, query, xid
from tests.integration.sink_kit import until_settled

from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql.catalog import XaNames
from onceflow.sinks.mysql.connection import MySQLSession


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
