"""Writers and committers while others decide, fence, lock rows, drop tables or fill the disk."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pytest
from tests.integration.sink_kit import eventually, rows
from tests.integration.sql.databases import Database, Postgres, SqlJob
from typing_extensions import override

from onceflow.core.errors import BadRow, Fenced, PreCommitFailed, SinkError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import SinkWriter
from onceflow.sinks.sql.committer import SqlCommitter


def _send_by_writing(writer: SinkWriter) -> None:
    writer.write(rows([2]))


def _send_by_pre_commit(writer: SinkWriter) -> None:
    writer.write(rows([2]))
    writer.pre_commit(CheckpointId(2))


@dataclass(frozen=True)
class _Dialect:
    send: Callable[[SinkWriter], None]
    """What sends a row: Postgres gets each as it is written, MySQL when there are enough."""
    asked: tuple[type[committables.CommitOutcome], ...]
    """What is answered, asked again and again, while a PREPARE lands: MySQL's looks twice."""
    no_table: str
    no_column: str
    duplicate: str
    lock_timeout: str
    names_holder: tuple[str, ...]
    """What an error says of the session that holds a lock."""
    no_room: str
    """A trigger that raises at row 13 what the server does when it cannot extend a file."""
    said_without_room: str


_MYSQL = _Dialect(
    send=_send_by_pre_commit,
    asked=(committables.Committed,),
    no_table=r"Table '\w+\.ledger' doesn't exist",
    no_column="Unknown column 'amount'",
    duplicate="Duplicate entry '{}' for key '.*PRIMARY'",
    lock_timeout="Lock wait timeout exceeded",
    names_holder=(r"connection \d+ of user '\w+' from '", "open since .* and locks rows"),
    no_room=(
        "CREATE TRIGGER no_room BEFORE INSERT ON ledger FOR EACH ROW IF NEW.id = 13 THEN "
        "SIGNAL SQLSTATE 'HY000' SET MESSAGE_TEXT = 'table is full', MYSQL_ERRNO = 1114; END IF"
    ),
    said_without_room="table is full.*1114",
)
_DIALECTS = {
    "postgres": _Dialect(
        send=_send_by_writing,
        asked=(committables.RetryLater, committables.Committed),
        no_table='relation "public.ledger" does not exist',
        no_column='column "amount".*does not exist',
        duplicate=r"keyed_pkey; Key \(id\)=\({}\) already exists",
        lock_timeout="lock timeout",
        names_holder=(
            r"session \d+ of role '\w+' \(application 'monthly report', idle in transaction, ",
            r"command UPDATE since 2\d{3}-.*, which has a RowExclusiveLock on the table",
        ),
        no_room=(
            "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN IF NEW.id = 13 "
            "THEN RAISE ''could not extend file: No space left on device'' "
            "USING ERRCODE = ''disk_full''; END IF; RETURN NEW; END'; "
            "CREATE TRIGGER no_room BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION no_room()"
        ),
        said_without_room="No space left on device.*53100",
    ),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
}


@pytest.fixture
def dialect(kind: type[Database]) -> _Dialect:
    return _DIALECTS[kind.name]


# -- others decide at the same moment --------------------------------------------------------------


class _Interrupted(SqlCommitter):
    """A committer during whose first look at the ledger something happens elsewhere."""

    happens: Callable[[], None] | None = None

    @override
    def _in_ledger(self, transaction: TransactionId) -> bool:
        found = super()._in_ledger(transaction)
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return found


def _interrupted(job: SqlJob, happens: Callable[[], None]) -> _Interrupted:
    context = job.committer_context()
    committer = _Interrupted(job.sink.settings, context)
    committer.happens = happens
    return committer


def test_commit_elsewhere_between_two_looks_is_not_called_lost(
    job: SqlJob, database: Database
) -> None:
    """The last look finds a transaction that is prepared and committed after the first."""
    transaction = TransactionId("job.ledger", 1, 1, 0)

    def prepare_and_commit() -> None:
        assert job.committer().commit(job.prepare(1, [1])) == committables.Committed()

    committer = _interrupted(job, prepare_and_commit)
    assert (
        committer.commit(committables.Committable(transaction)) == committables.AlreadyCommitted()
    )
    committer.close()
    assert database.ids_in() == [1]


def test_prepare_that_lands_between_two_looks_is_not_called_lost(
    job: SqlJob, database: Database, dialect: _Dialect
) -> None:
    transaction = TransactionId("job.ledger", 1, 1, 0)

    def prepare() -> None:
        job.prepare(1, [1])

    committer = _interrupted(job, prepare)
    asked = [type(committer.commit(committables.Committable(transaction))) for _ in dialect.asked]
    assert asked == list(dialect.asked)
    committer.close()
    assert database.ids_in() == [1]
    assert database.prepared() == []


def test_rollback_elsewhere_between_two_looks_is_lost(job: SqlJob, database: Database) -> None:
    committable = job.prepare(1, [1])
    database.settle(database.words.rollback, committable.transaction)
    committer = _interrupted(job, lambda: None)
    assert isinstance(committer.commit(committable), committables.Lost)
    committer.close()


# -- a newer attempt, or another job, has the sink -------------------------------------------------


def test_older_attempt_is_fenced_and_its_sessions_are_ended(
    job: SqlJob, database: Database
) -> None:
    writer = job.writer()
    writer.write(rows(range(20_000)))
    assert len(database.sessions()) >= 1
    job.check(attempt=2)
    eventually(lambda: database.sessions() == [])
    with pytest.raises(PreCommitFailed):
        writer.pre_commit(CheckpointId(1))
    # Of another subtask: a server may still be rolling back what had the first one's name.
    late = job.writer(attempt=1, subtask=1)
    late.write(rows([1]))
    with pytest.raises(Fenced, match="attempt 2 has claimed the sink"):
        late.pre_commit(CheckpointId(1))
    assert database.prepared() == []
    assert database.ids_in() == []


def test_writer_of_an_older_attempt_prepares_nothing_more(job: SqlJob, database: Database) -> None:
    """The new attempt ends its session; had it not, the ledger row would have been refused."""
    idle, busy = job.writer(attempt=1, subtask=0), job.writer(attempt=1, subtask=1)
    busy.write(rows(range(20_000)))
    job.check(attempt=2)
    with pytest.raises(SinkError):
        for _ in range(1000):
            busy.write(rows(range(1000)))
    # An idle one finds its session gone, opens another, and is stopped by the fence.
    idle.write(rows([2]))
    with pytest.raises(Fenced, match="attempt 2"):
        idle.pre_commit(CheckpointId(1))
    assert database.prepared() == []
    assert database.ids_in() == []


def test_writer_whose_sink_was_never_checked_prepares_nothing(
    job: SqlJob, database: Database
) -> None:
    database.query(f"DELETE FROM {database.fence}")
    writer = job.writer()
    writer.write(rows([1]))
    with pytest.raises(PreCommitFailed, match="not in .*onceflow_sinks"):
        writer.pre_commit(CheckpointId(1))
    assert database.prepared() == []


def test_name_that_is_prepared_already_is_refused_and_said_how_to_settle(
    job: SqlJob, database: Database
) -> None:
    job.prepare(1, [1])
    writer = job.writer()
    writer.write(rows([2]))
    name = r"job\.ledger/1/1/0/0"
    said = f"{name} is already prepared.*used twice.*{database.words.rollback} '{name}'"
    with pytest.raises(PreCommitFailed, match=said):
        writer.pre_commit(CheckpointId(1))
    assert database.prepared() == ["job.ledger/1/1/0/0"]


def test_name_that_was_committed_already_is_refused(job: SqlJob, database: Database) -> None:
    job.committer().commit(job.prepare(1, [1]))
    writer = job.writer()
    writer.write(rows([2]))
    with pytest.raises(PreCommitFailed, match=r"job\.ledger/1/1/0/0 was already committed"):
        writer.pre_commit(CheckpointId(1))
    assert database.ids_in() == [1]


# -- the table does not take the rows --------------------------------------------------------------


@pytest.mark.parametrize("at", ["write", "pre_commit"])
def test_violated_constraint_names_itself_and_leaves_nothing(
    job: SqlJob, database: Database, at: str
) -> None:
    database.query("ALTER TABLE ledger ADD CONSTRAINT positive CHECK (amount >= 0)")
    writer = job.writer()
    bad = pa.record_batch([[5] * 1000, ["a"] * 1000, [-1] * 1000], schema=job.schema)
    said = re.escape(database.said_of_violation("positive"))
    with pytest.raises(BadRow, match=f"table ledger.*{said}"):
        if at == "write":
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline:
                writer.write(bad)
        else:
            writer.write(bad)
            writer.pre_commit(CheckpointId(1))
    assert database.ids_in() == []
    assert database.prepared() == []
    with pytest.raises(SinkError, match="failed before"):
        writer.write(rows([1]))
    with pytest.raises(PreCommitFailed, match="failed before"):
        writer.pre_commit(CheckpointId(2))


def test_constraint_violation_in_mid_batch_is_a_bad_row_and_nothing_is_prepared(
    job: SqlJob, database: Database
) -> None:
    """MySQL's LOAD DATA LOCAL makes a warning of it and goes on without the row."""
    database.query("ALTER TABLE ledger ADD PRIMARY KEY (id)")
    writer = job.writer()
    writer.write(rows([1, 2, 2, 3]))
    with pytest.raises(BadRow, match=re.escape(database.said_of_duplicate(2))):
        writer.pre_commit(CheckpointId(1))
    assert database.prepared() == []
    assert database.ids_in() == []


def test_duplicate_key_within_and_across_checkpoints_is_a_bad_row(
    database: Database, dialect: _Dialect
) -> None:
    with database.job(table="keyed", create=True, primary_key=("id",)) as job:
        job.check()
        job.committer().commit(job.prepare(1, [1]))
        for ids in ([1], [2, 2]):
            writer = job.writer()
            writer.write(rows(ids))
            with pytest.raises(BadRow, match=dialect.duplicate.format(ids[0])):
                writer.pre_commit(CheckpointId(2))
    assert database.ids_in("keyed") == [1]


def test_row_of_a_key_that_is_in_doubt_waits_no_longer_than_the_lock_timeout(
    database: Database, dialect: _Dialect
) -> None:
    settings = {"primary_key": ("id",), "lock_timeout_s": database.lock_timeout_s}
    with database.job(table="keyed", create=True, **settings) as job:
        job.check()
        job.prepare(1, [1])
        writer = job.writer()
        with pytest.raises(SinkError, match=dialect.lock_timeout):
            writer.write(rows([1]))
            writer.pre_commit(CheckpointId(2))


def test_writer_that_waits_in_vain_names_who_holds_the_rows_and_no_value_of_theirs(
    database: Database, dialect: _Dialect
) -> None:
    settings = {"primary_key": ("id",), "lock_timeout_s": database.lock_timeout_s}
    with database.job(table="keyed", create=True, **settings) as job:
        job.check()
        assert job.committer().commit(job.prepare(1, [1])) == committables.Committed()
        with job.sink.settings.endpoint.connect("monthly report") as other:
            other.begin()
            other.execute("UPDATE keyed SET id = id WHERE id + 12345678 > 0")
            writer = job.writer()
            with pytest.raises(SinkError, match=dialect.lock_timeout) as failure:
                writer.write(rows([1]))
                writer.pre_commit(CheckpointId(2))
            other.roll_back()
    text = str(failure.value)
    assert "sink job.ledger subtask 0, table keyed" in text
    for part in dialect.names_holder:
        assert re.search(part, text), text
    assert "12345678" not in text


def test_writer_that_waits_for_a_locked_table_names_who_has_locked_it(
    postgres_database: str,
) -> None:
    database = Postgres(postgres_database)
    settings = {"table": "locked", "create": True, "commit_mode": "two_phase"}
    with database.job(**settings, lock_timeout_s=0.3) as job:
        job.check()
        with job.sink.settings.endpoint.connect("nightly vacuum") as other:
            other.begin()
            other.execute("LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")
            writer = job.writer()
            with pytest.raises(SinkError, match="lock timeout") as failure:
                writer.write(rows([1]))
                writer.pre_commit(CheckpointId(1))
            other.roll_back()
    assert "application 'nightly vacuum', idle in transaction, command LOCK" in str(failure.value)


def test_table_dropped_under_a_writer_is_named(
    job: SqlJob, database: Database, dialect: _Dialect
) -> None:
    writer = job.writer()
    database.query("DROP TABLE ledger")
    with pytest.raises(SinkError, match=f"table ledger.*{dialect.no_table}"):
        dialect.send(writer)
    assert database.prepared() == []


def test_column_dropped_between_checkpoints_is_named(
    job: SqlJob, database: Database, dialect: _Dialect
) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    (committable,) = writer.pre_commit(CheckpointId(1))
    job.committer().commit(committable)
    database.query("ALTER TABLE ledger DROP COLUMN amount")
    with pytest.raises(SinkError, match=dialect.no_column):
        dialect.send(writer)
    assert database.prepared() == []
    assert database.ids_in() == [1]


def test_full_disk_fails_the_writer_and_loses_nothing_committed(
    job: SqlJob, database: Database, dialect: _Dialect
) -> None:
    database.query(dialect.no_room)
    assert job.committer().commit(job.prepare(1, [1])) == committables.Committed()
    writer = job.writer()
    writer.write(rows([12, 13]))
    with pytest.raises(PreCommitFailed, match=dialect.said_without_room):
        writer.pre_commit(CheckpointId(2))
    assert database.ids_in() == [1]
    assert database.prepared() == []
