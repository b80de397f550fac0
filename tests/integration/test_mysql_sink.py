"""Tests the parts of MySQL and MariaDB alone: XA names, their sessions, and buffered rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.mysql_sink_kit import FLAVORS, Job, ids_in, prepared, query, xid
from tests.integration.sink_kit import eventually, rows, until_settled

from onceflow.clients.mysql.catalog import XaNames
from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import Aborted, Committable, Committed, RetryLater
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import WriterContext
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql import two_phase
from onceflow.sinks.mysql.two_phase import XaTwoPhase


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    """URL of a new database, of both servers in turn."""
    found: str = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture
def job(url: str) -> Iterator[Job]:
    with Job(MySQLSink(url, table="ledger", create=True)) as job:
        yield job.check()


def test_in_doubt_lists_nothing_of_another_format_or_qualifier(job: Job, url: str) -> None:
    own = job.prepare(1, [1])
    strangers = [
        # Of our sink id, and of another format, and of a ledger in another database.
        xid(url, "job.ledger/1/9/0/0").replace("1869505381", "1"),
        xid(f"{url}x", "job.ledger/1/9/0/0"),
    ]
    for number, name in enumerate(strangers):
        query(
            url,
            f"XA START {name}",
            f"INSERT INTO ledger (id) VALUES ({number})",
            f"XA END {name}",
            f"XA PREPARE {name}",
        )
    assert list(job.committer().in_doubt()) == [Committable(own.transaction)]


def test_two_databases_of_one_server_have_each_its_own_transaction_of_a_name(
    job: Job, url: str
) -> None:
    """Two jobs of one sink id in two databases of one server: each has its own."""
    committable = job.prepare(1, [1])
    elsewhere = f"{url}_other"
    query(url, f"CREATE DATABASE {elsewhere.rpartition('/')[2]}")
    try:
        with Job(MySQLSink(elsewhere, table="ledger", create=True), log_id="log-2") as other:
            own = other.check().prepare(1, [2])
            assert list(job.committer().in_doubt()) == [Committable(committable.transaction)]
            assert other.committer().abort(own) == Aborted()
        assert job.committer().commit(committable) == Committed()
        assert ids_in(url) == [1]
        assert ids_in(elsewhere) == []
    finally:
        query(url, f"DROP DATABASE {elsewhere.rpartition('/')[2]}")


def test_name_begun_for_a_checkpoint_that_was_given_up_is_committed_with_the_next(
    job: Job, url: str
) -> None:
    """XA names a transaction at its first row; the checkpoint that takes it may be a later one."""
    writer, committer = job.writer(), job.committer()
    writer.write(rows(range(20_000)))
    (committable,) = writer.pre_commit(CheckpointId(4))
    assert str(committable.transaction) == "job.ledger/1/1/0/0"
    writer.write(rows(range(20_000, 40_000)))
    (following,) = writer.pre_commit(CheckpointId(5))
    assert str(following.transaction) == "job.ledger/1/5/0/0"
    assert [committer.commit(one) for one in (committable, following)] == [Committed()] * 2
    assert query(url, "SELECT COUNT(DISTINCT id), COUNT(*) FROM ledger") == [(40_000, 40_000)]


def test_writer_takes_the_lock_that_another_session_held_at_its_next_transaction(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt ends the session that holds this lock, even if that session hangs."""
    monkeypatch.setattr(two_phase, "_LOCK_WAIT_S", 0)
    settings = job.sink.settings
    context = WriterContext(
        "job", "ledger", job.sink_id, 0, 1, AttemptId(1), first_checkpoint=CheckpointId(1)
    )
    lock = f"{XaNames(settings.ledger_schema).writers_lock(job.sink_id)}{context.subtask}"
    with settings.endpoint.connect("is ending") as other:
        other.query(f"SELECT GET_LOCK('{lock}', 0)")
        transactions = XaTwoPhase(settings.ledger_schema).transactions(settings.endpoint, context)
        transactions.begin()
        transactions.roll_back()
    free = f"SELECT IS_FREE_LOCK('{lock}')"
    eventually(lambda: int(transactions.session.query(free)[0][0]) == 1, timeout_s=10.0)
    ((holder, mine),) = transactions.begin().query(
        f"SELECT IS_USED_LOCK('{lock}'), CONNECTION_ID()"
    )
    transactions.close()
    assert holder == mine


@pytest.mark.parametrize("url", ["mariadb"], indirect=True)
def test_owner_that_stays_connected_in_mariadb_is_ended_and_its_rows_are_committed(
    job: Job, url: str
) -> None:
    """A process that hangs between XA PREPARE and its disconnect: unknown XID, and yet listed."""
    committable = job.prepare(1, [1])
    names = XaNames(job.sink.settings.ledger_schema)
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
    names = XaNames(job.sink.settings.ledger_schema)
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


def test_dropped_table_and_column_fail_the_checkpoint_by_name(job: Job, url: str) -> None:
    """Rows that are few wait in the writer: it holds no lock, so both can go meanwhile."""
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
