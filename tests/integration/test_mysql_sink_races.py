"""The MySQL sink while others decide at the same moment, fence it, lock rows or drop its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.integration.mysql_sink_kit import FLAVORS, Job, ids_in, prepared, query, sessions, xid
from tests.integration.sink_kit import eventually, rows, until_settled

from onceflow.core.errors import BadRow, Fenced, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql.committer import MySQLCommitter


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    """URL of a new database, of both servers in turn."""
    found: str = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture
def job(url: str) -> Iterator[Job]:
    with Job(MySQLSink(url, table="ledger", create=True)) as job:
        yield job.check()


@pytest.mark.parametrize("url", ["mariadb"], indirect=True)
def test_owner_that_stays_connected_in_mariadb_is_ended_and_its_rows_are_committed(
    job: Job, url: str
) -> None:
    """A process that hangs between XA PREPARE and its disconnect: unknown XID, and yet listed."""
    committable = job.prepare(1, [1])
    names = job.sink.settings.names
    with job.sink.settings.endpoint.connect("hangs") as owner:
        transaction = TransactionId("job.ledger", 1, 2, 0)
        owner.execute(f"XA START {names.xid(transaction)}")
        owner.execute("INSERT INTO ledger (id) VALUES (2)")
        job.sink.settings.ledger.record(owner, transaction, 1)
        owner.query(f"SELECT GET_LOCK('{names.owner_lock(transaction)}', 0)")
        owner.execute(f"XA END {names.xid(transaction)}")
        owner.execute(f"XA PREPARE {names.xid(transaction)}")
        committer = job.committer()
        assert committer.commit(committable) == Committed()
        outcome = committer.commit(Committable(transaction))
        assert isinstance(outcome, RetryLater)
        assert "which prepared it and was connected still" in outcome.reason
        assert until_settled(lambda: committer.commit(Committable(transaction))) == Committed()
    assert ids_in(url) == [1, 2]


@pytest.mark.parametrize("url", ["mariadb"], indirect=True)
def test_session_that_holds_a_transaction_unknown_to_us_is_waited_for_and_never_called_lost(
    job: Job, url: str
) -> None:
    names = job.sink.settings.names
    transaction = TransactionId("job.ledger", 1, 1, 0)
    with job.sink.settings.endpoint.connect("operator") as owner:
        owner.execute(f"XA START {names.xid(transaction)}")
        owner.execute("INSERT INTO ledger (id) VALUES (2)")
        owner.execute(f"XA END {names.xid(transaction)}")
        owner.execute(f"XA PREPARE {names.xid(transaction)}")
        for ask in (job.committer().commit, job.committer().abort):
            assert isinstance(ask(Committable(transaction)), RetryLater)
    assert until_settled(lambda: job.committer().abort(Committable(transaction))) == Aborted()
    assert ids_in(url) == []


def test_older_attempt_is_fenced_and_its_sessions_are_ended(job: Job, url: str) -> None:
    writer = job.writer()
    writer.write(rows(range(20_000)))
    assert len(sessions(url)) >= 1
    job.check(attempt=2)
    eventually(lambda: sessions(url) == [])
    with pytest.raises(PreCommitFailed):
        writer.pre_commit(CheckpointId(1))
    late = job.writer(attempt=1)
    late.write(rows([1]))
    with pytest.raises(Fenced, match="attempt 2 has claimed the sink"):
        late.pre_commit(CheckpointId(1))
    assert prepared(url) == []
    assert ids_in(url) == []


def test_dropped_table_and_column_fail_the_checkpoint_by_name(job: Job, url: str) -> None:
    for statement, said in (
        ("ALTER TABLE ledger DROP COLUMN amount", "amount"),
        ("DROP TABLE ledger", "ledger"),
    ):
        writer = job.writer()
        writer.write(rows([1]))
        query(url, statement)
        with pytest.raises(SinkError, match=said):
            writer.pre_commit(CheckpointId(1))
        assert prepared(url) == []
        if statement.startswith("ALTER"):
            query(url, "ALTER TABLE ledger ADD COLUMN amount bigint")


def test_constraint_violation_in_mid_batch_is_a_bad_row_and_nothing_is_prepared(
    job: Job, url: str
) -> None:
    """LOAD DATA LOCAL makes a warning of it and goes on without the row."""
    query(url, "ALTER TABLE ledger ADD PRIMARY KEY (id)")
    writer = job.writer()
    writer.write(rows([1, 2, 2, 3]))
    with pytest.raises(BadRow, match="Duplicate entry '2'"):
        writer.pre_commit(CheckpointId(1))
    assert prepared(url) == []
    assert ids_in(url) == []


def test_name_that_is_prepared_already_is_refused_and_said_how_to_settle(
    job: Job, url: str
) -> None:
    job.prepare(1, [1])
    writer = job.writer()
    writer.write(rows([2]))
    with pytest.raises(PreCommitFailed, match="used twice.*XA ROLLBACK 'job.ledger/1/1/0/0'"):
        writer.pre_commit(CheckpointId(1))
    assert prepared(url) == ["job.ledger/1/1/0/0"]


class _Interrupted(MySQLCommitter):
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


def test_prepare_that_lands_between_two_looks_is_committed(job: Job, url: str) -> None:
    transaction = TransactionId("job.ledger", 1, 1, 0)

    def prepare() -> None:
        job.prepare(1, [1])

    committer = _interrupted(job, prepare)
    assert committer.commit(Committable(transaction)) == Committed()
    committer.close()
    assert ids_in(url) == [1]
    assert prepared(url) == []


def test_rollback_elsewhere_between_two_looks_is_lost(job: Job, url: str) -> None:
    committable = job.prepare(1, [1])
    query(url, f"XA ROLLBACK {xid(url, committable.transaction)}")
    committer = _interrupted(job, lambda: None)
    assert isinstance(committer.commit(committable), Lost)
    committer.close()


def test_full_disk_fails_the_writer_and_loses_nothing_committed(job: Job, url: str) -> None:
    """A trigger raises what the server does when it cannot extend a file."""
    query(
        url,
        "CREATE TRIGGER no_room BEFORE INSERT ON ledger FOR EACH ROW IF NEW.id = 13 THEN "
        "SIGNAL SQLSTATE 'HY000' SET MESSAGE_TEXT = 'table is full', MYSQL_ERRNO = 1114; END IF",
    )
    assert job.committer().commit(job.prepare(1, [1])) == Committed()
    writer = job.writer()
    writer.write(rows([12, 13]))
    with pytest.raises(PreCommitFailed, match="table is full.*1114"):
        writer.pre_commit(CheckpointId(2))
    assert ids_in(url) == [1]
    assert prepared(url) == []


def _interrupted(job: Job, happens: Callable[[], None]) -> _Interrupted:
    committer = _Interrupted(job.sink.settings, job.committer_context())
    committer.happens = happens
    return committer
