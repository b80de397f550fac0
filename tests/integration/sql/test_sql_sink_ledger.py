"""Ledger mode: rows wait in checkpoint storage, and are applied once, whoever commits how often."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sink_kit import committables, eventually, rows
from tests.integration.sql.databases import Database, SqlJob

from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed, StateCorrupt, StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.staging import is_staged
from onceflow.core.storage import FileStagingArea

SINK_ID = "job.ledger"


@dataclass(frozen=True)
class Dialect:
    """The messages of one database about deadlocks."""

    outlive_deadlock: tuple[str, ...]
    """Make another than this session the victim."""
    said_of_deadlock: str
    code_of_deadlock: str


_MYSQL = Dialect(
    # The victim is who has changed less.
    outlive_deadlock=(
        "CREATE TABLE ballast (id bigint)",
        "START TRANSACTION",
        f"INSERT INTO ballast VALUES {', '.join('(1)' for _ in range(3000))}",
    ),
    said_of_deadlock="Deadlock found",
    code_of_deadlock="error 1213",
)
DIALECTS = {
    "postgres": Dialect(
        # The victim is who waits longer than its deadlock timeout.
        outlive_deadlock=("SET deadlock_timeout = '60s'", "START TRANSACTION"),
        said_of_deadlock="deadlock detected",
        code_of_deadlock="40P01",
    ),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
}


@pytest.fixture
def job(database: Database, staging: FileStagingArea) -> Iterator[SqlJob]:
    """A job that inserts into `ledger`, in ledger mode."""
    sink = database.sink(table="ledger", create=True, commit_mode="ledger")
    with SqlJob(sink, staging=staging) as job:
        yield job.check()


def _staged(job: SqlJob) -> list[str]:
    assert job.staging is not None
    return [str(transaction) for transaction in job.staging.transactions()]


def test_rows_are_seen_at_the_commit_and_nothing_is_held_before(
    job: SqlJob, database: Database
) -> None:
    writer, committer = job.writer(), job.committer()
    writer.write(rows([1, 2]))
    writer.write(rows([3]))
    assert database.ids_in() == []
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert (committable.rows, is_staged(committable)) == (3, True)
    writer.write(rows([4]))
    assert database.ids_in() == []
    assert database.prepared() == [], "nothing is prepared in this mode"
    # No session is held between barriers; the server ends one a moment after it was closed.
    eventually(lambda: database.sessions() == [])
    assert committer.commit(committable) == Committed()
    assert database.ids_in() == [1, 2, 3]
    assert database.ledger_rows() == [str(committable.transaction)]
    assert _staged(job) == []
    assert committer.commit(committable) == AlreadyCommitted()
    assert database.ids_in() == [1, 2, 3]


def test_checkpoints_without_rows_stage_nothing(job: SqlJob) -> None:
    writer = job.writer()
    assert writer.pre_commit(CheckpointId(1)) == ()
    writer.write(rows([]))
    assert writer.pre_commit(CheckpointId(2)) == ()
    assert _staged(job) == []


def test_what_is_staged_is_in_doubt_and_aborted_by_a_later_attempt(
    job: SqlJob, database: Database
) -> None:
    committable = job.prepare(1, [1])
    job.check(2)
    later = job.committer(2)
    assert committables(later.in_doubt()) == [str(committable.transaction)]
    (found,) = later.in_doubt()
    assert is_staged(found)
    assert later.abort(found) == Aborted()
    assert later.abort(found) == Aborted()
    assert list(later.in_doubt()) == []
    assert database.ids_in() == []
    assert isinstance(job.committer().commit(committable), RetryLater), "attempt 2 has settled it"


def test_abort_of_what_is_committed_is_told_so_and_leaves_the_rows(
    job: SqlJob, database: Database
) -> None:
    committable = job.prepare(1, [1])
    assert job.committer().commit(committable) == Committed()
    assert job.committer().abort(committable) == AlreadyCommitted()
    assert database.ids_in() == [1]


def test_decided_rows_are_applied_by_an_attempt_that_never_saw_them(
    job: SqlJob, database: Database
) -> None:
    committable = job.prepare(1, [1])
    job.check(2)
    assert job.committer(2).commit(committable) == Committed()
    assert job.committer(1).commit(committable) == AlreadyCommitted()
    assert database.ids_in() == [1]


def test_committer_left_behind_by_attempts_and_pruning_applies_nothing_again(
    job: SqlJob, database: Database
) -> None:
    """Not even the ledger tells it any more that the rows are committed."""
    committable = job.prepare(1, [1])
    job.check(2)
    newer = job.committer(2)
    assert newer.commit(committable) == Committed()
    newer.prune(CheckpointId(5))
    assert database.ledger_rows() == []
    outcome = job.committer(1).commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "attempt 2 has taken over" in outcome.reason
    assert database.ids_in() == [1]


def _all_at_once(calls: Sequence[tuple[SqlJob, Committable]]) -> list[CommitOutcome]:
    barrier = threading.Barrier(len(calls))

    def call(job: SqlJob, committable: Committable) -> CommitOutcome:
        committer = job.sink.committer(job.committer_context())
        barrier.wait(60)
        try:
            return committer.commit(committable)
        finally:
            committer.close()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(60) for one in [pool.submit(call, *args) for args in calls]]


def test_committers_at_once_apply_the_rows_once(job: SqlJob, database: Database) -> None:
    for checkpoint in range(1, 6):
        committable = job.prepare(checkpoint, range(checkpoint * 100, checkpoint * 100 + 50))
        outcomes = _all_at_once([(job, committable)] * 4)
        assert outcomes.count(Committed()) == 1
        assert outcomes.count(AlreadyCommitted()) == 3
    assert len(database.ids_in()) == 250
    assert len(set(database.ids_in())) == 250


def test_committer_waits_for_another_that_is_applying_and_goes_on_when_that_one_fails(
    job: SqlJob, database: Database
) -> None:
    committable = job.prepare(1, [1])
    proof = (
        f"INSERT INTO {database.ledger} (transaction_id, sink_id, attempt, checkpoint, subtask, "
        f"row_count) VALUES ('{committable.transaction}', '{SINK_ID}', 1, 1, 0, 1)"
    )
    with (
        job.sink.settings.endpoint.connect("another committer") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("START TRANSACTION")
        other.execute(proof)
        outcome = pool.submit(job.committer().commit, committable)
        database.await_lock_wait()
        assert not outcome.done()
        other.execute("ROLLBACK")
        assert outcome.result(60) == Committed()
    assert database.ids_in() == [1]


def test_damaged_rows_are_refused_by_name_and_never_half_applied(
    job: SqlJob, database: Database, staging: FileStagingArea, tmp_path: Path
) -> None:
    committable = job.prepare(1, range(100))
    file = tmp_path / "storage" / staging.path(committable.transaction)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StateCorrupt, match=r"1-1-0-0\.arrow"):
        job.committer().commit(committable)
    assert database.ids_in() == []
    assert database.ledger_rows() == []
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert job.committer().commit(committable) == Committed()


def test_deleted_rows_are_lost_and_never_called_committed(
    job: SqlJob, database: Database, staging: FileStagingArea
) -> None:
    committable = job.prepare(1, [1])
    staging.discard(committable.transaction)
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, Lost)
    assert str(committable.transaction) in outcome.reason
    assert database.ledger_rows() == []


def test_rows_that_are_committed_are_discarded_before_it_counts(
    job: SqlJob, database: Database, tmp_path: Path
) -> None:
    committable = job.prepare(1, [1])

    class Stuck(FileStagingArea):
        def discard(self, transaction: TransactionId) -> None:
            raise StorageError("the directory is read-only")

    stuck = Stuck.in_directory(str(tmp_path / "storage"), SINK_ID)
    with SqlJob(job.sink, staging=stuck) as other:
        outcome = other.committer().commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "read-only" in outcome.reason
    assert database.ids_in() == [1]
    assert job.committer().commit(committable) == AlreadyCommitted()
    assert database.ids_in() == [1]
    assert _staged(job) == []


def test_constraint_violation_keeps_the_rows_until_the_table_takes_them(
    job: SqlJob, database: Database
) -> None:
    committable = job.prepare(1, [1, 2])
    database.query("ALTER TABLE ledger ADD CONSTRAINT odd CHECK (id % 2 = 1)")
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, RetryLater)
    said = database.said_of_violation("odd")
    for part in (said, "They stay in checkpoint storage", str(committable.transaction)):
        assert part in outcome.reason
    assert database.ids_in() == []
    database.query("ALTER TABLE ledger DROP CONSTRAINT odd")
    assert job.committer().commit(committable) == Committed()
    assert database.ids_in() == [1, 2]


def test_dropped_table_and_column_keep_the_rows_and_are_named(
    job: SqlJob, database: Database
) -> None:
    first, second = job.prepare(1, [1]), job.prepare(2, [2])
    committer = job.committer()
    database.query("ALTER TABLE ledger RENAME COLUMN amount TO total")
    outcome = committer.commit(first)
    assert isinstance(outcome, RetryLater)
    assert "no column 'amount'" in outcome.reason
    database.query("ALTER TABLE ledger RENAME COLUMN total TO amount")
    assert committer.commit(first) == Committed()
    database.query("ALTER TABLE ledger RENAME TO moved")
    outcome = committer.commit(second)
    assert isinstance(outcome, RetryLater)
    assert database.said_of_missing("ledger") in outcome.reason
    database.query("ALTER TABLE moved RENAME TO ledger")
    assert committer.commit(second) == Committed()
    assert database.ids_in() == [1, 2]


def test_value_that_does_not_fit_is_refused_or_rejected_when_it_is_written(
    job: SqlJob, database: Database, staging: FileStagingArea
) -> None:
    database.retype("amount", "smallint")
    writer = job.writer()
    with pytest.raises(BadRow, match=r"column 'amount'.*40000"):
        writer.write(rows([1, 4000]))
    with pytest.raises(PreCommitFailed, match="failed before"):
        writer.pre_commit(CheckpointId(1))
    assert _staged(job) == []
    with SqlJob(job.sink, staging=staging, on_bad_row=OnBadRow.DROP) as lenient:
        writer = lenient.writer()
        writer.write(rows([1, 4000, 2]))
        (committable,) = writer.pre_commit(CheckpointId(1))
        (rejected,) = writer.take_rejected()
        assert rejected.rows.column("id").to_pylist() == [4000]
        assert "40000" in rejected.reasons[0]
        assert lenient.committer().commit(committable) == Committed()
    assert database.ids_in() == [1, 2]


def test_mode_may_change_between_attempts_and_nothing_in_doubt_is_forgotten(
    database: Database, staging: FileStagingArea
) -> None:
    found: list[Committable] = []
    two_phase = database.sink(table="ledger", create=True, commit_mode="two_phase")
    # Told to create nothing: tables are created only while nothing is prepared.
    ledger = dataclasses.replace(two_phase, create=False, commit_mode="ledger")
    for attempt, sink in enumerate((two_phase, ledger, two_phase, ledger), 1):
        with SqlJob(sink, staging=staging) as job:
            job.check(attempt)
            found.append(job.prepare(attempt, [attempt], attempt=attempt))
            in_doubt = committables(job.committer(attempt).in_doubt())
            assert in_doubt == sorted(str(one.transaction) for one in found)
    with SqlJob(two_phase, staging=staging) as job:
        committer = job.check(5).committer(5)
        by_name = {one.transaction: one for one in committer.in_doubt()}
        decided, others = found[:2], found[2:]
        for one in decided:
            assert committer.commit(by_name[one.transaction]) == Committed()
        for one in others:
            assert committer.abort(by_name[one.transaction]) == Aborted()
        assert list(committer.in_doubt()) == []
    assert database.ids_in() == [1, 2]
    assert database.prepared() == []


def test_rows_go_where_and_how_they_were_staged_whatever_the_settings_say_later(
    database: Database, staging: FileStagingArea
) -> None:
    with _by_key(database, staging, "ledger") as job:
        assert job.check().committer().commit(job.prepare(1, [1])) == Committed()
        second = job.prepare(2, [1, 2])
    other = database.sink(table="elsewhere", create=True, commit_mode="ledger")
    with SqlJob(other, staging=staging) as job:
        assert job.check(2).committer(2).commit(second) == Committed()
    assert database.ids_in() == [1, 2]
    assert database.ids_in("elsewhere") == []


def test_mode_without_checkpoint_storage_is_refused(database: Database) -> None:
    job = database.job(table="ledger", create=True, commit_mode="ledger")
    with job, pytest.raises(ConfigError, match="checkpoint storage"):
        job.check()
    assert database.tables() == []


# -- deadlocks -------------------------------------------------------------------------------------


def _by_key(database: Database, staging: FileStagingArea, mode: str) -> SqlJob:
    by_key: dict[str, Any] = {"write_mode": "upsert", "primary_key": ("id",)}
    sink = database.sink(table="ledger", create=True, commit_mode=mode, **by_key)
    return SqlJob(sink, staging=staging)


def _entangled(database: Database, job: SqlJob, act: Callable[[], object]) -> object:
    """Return what `act` returns, which puts 1 before 2, while another session does 2 before 1."""
    with (
        job.sink.settings.endpoint.connect("rival") as rival,
        ThreadPoolExecutor(2) as pool,
    ):
        for statement in DIALECTS[database.name].outlive_deadlock:
            rival.execute(statement)
        rival.execute("UPDATE ledger SET amount = 0 WHERE id = 2")
        acting = pool.submit(act)
        database.await_lock_wait()
        waiting = pool.submit(lambda: rival.execute("UPDATE ledger SET amount = 0 WHERE id = 1"))
        try:
            return acting.result(30)
        finally:
            waiting.result(30)
            rival.execute("ROLLBACK")


def test_deadlock_victim_in_pre_commit_fails_the_checkpoint_and_leaves_nothing(
    database: Database, staging: FileStagingArea
) -> None:
    dialect = DIALECTS[database.name]
    with _by_key(database, staging, "two_phase") as job:
        job.check().committer().commit(job.prepare(1, [1, 2]))
        writer = job.writer()
        writer.write(rows([2, 1]))
        said = f"{dialect.said_of_deadlock}.*{dialect.code_of_deadlock}"
        with pytest.raises(PreCommitFailed, match=said):
            _entangled(database, job, lambda: writer.pre_commit(CheckpointId(2)))
        assert database.prepared() == []
        job.check(2).committer(2).commit(job.prepare(2, [1, 2, 3], attempt=2))
    assert database.ids_in() == [1, 2, 3]


def test_deadlock_victim_in_commit_is_committed_later(
    database: Database, staging: FileStagingArea
) -> None:
    with _by_key(database, staging, "ledger") as job:
        committer = job.check().committer()
        committer.commit(job.prepare(1, [1, 2]))
        committable = job.prepare(2, [2, 1, 3])
        outcome = _entangled(database, job, lambda: committer.commit(committable))
        assert isinstance(outcome, RetryLater)
        assert DIALECTS[database.name].said_of_deadlock in outcome.reason
        assert database.ids_in() == [1, 2]
        assert committer.commit(committable) == Committed()
    assert database.ids_in() == [1, 2, 3]
