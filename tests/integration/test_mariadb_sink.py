"""What is of MariaDB alone: a session that ends while what it prepared is committed by another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, prepared, sessions
from tests.integration.sink_kit import eventually, rows

from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.wire import Reply


@pytest.fixture
def job(mariadb_database: str) -> Iterator[Job]:
    sink = MySQLSink(mariadb_database, table="ledger", create=True, commit_mode="two_phase")
    with Job(sink) as job:
        yield job.check()


def test_session_that_prepared_is_gone_before_anybody_hears_of_the_transaction(
    job: Job, mariadb_database: str
) -> None:
    writer = job.writer()
    # The server ends the check's sessions a moment after they were closed.
    eventually(lambda: len(sessions(mariadb_database)) == 1)
    for checkpoint in range(1, 20):
        before = sessions(mariadb_database)
        writer.write(rows([checkpoint]))
        committable = writer.pre_commit(CheckpointId(checkpoint))
        (left,) = sessions(mariadb_database)
        assert left not in before
        assert committable is not None
    assert ids_in(mariadb_database) == []
    assert len(prepared(mariadb_database)) == 19


def test_commit_that_is_answered_and_not_done_is_never_called_done(
    job: Job, mariadb_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10.11 does so when the session that prepared is ending: XA COMMIT finds only the name."""
    committable, committer = job.prepare(1, [1]), job.committer()
    execute = Session.execute

    def answered(self: Session, statement: str | bytes) -> Reply:
        only_answered = str(statement).startswith("XA COMMIT")
        return execute(self, "DO 0" if only_answered else statement)

    with monkeypatch.context() as patched:
        patched.setattr(Session, "execute", answered)
        outcome = committer.commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "committed nothing" in outcome.reason
    assert committer.commit(committable) == Committed()
    assert ids_in(mariadb_database) == [1]
