"""Ledger mode in MySQL and MariaDB, beyond what the conformance kit asks of every sink."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.mysql_sink_kit import (
    FLAVORS,
    Job,
    await_lock_wait,
    ids_in,
    ledger_rows,
    prepared,
    query,
    sessions,
)
from tests.integration.sink_kit import committables, eventually, rows

from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed, StateCorrupt, StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import OnBadRow
from onceflow.core.staging import is_staged
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import MySQLSink

SINK_ID = "job.ledger"


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    """URL of a new database, of both servers in turn."""
    found: str = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture
def staging(tmp_path: Path) -> FileStagingArea:
    return FileStagingArea.in_directory(str(tmp_path / "storage"), SINK_ID)


@pytest.fixture
def job(url: str, staging: FileStagingArea) -> Iterator[Job]:
    sink = MySQLSink(url, table="ledger", create=True, commit_mode="ledger")
    with Job(sink, staging=staging) as job:
        yield job.check()


def test_rows_are_seen_at_the_commit_and_nothing_is_held_before(
    job: Job, url: str, staging: FileStagingArea
) -> None:
    writer, committer = job.writer(), job.committer()
    writer.write(rows([1, 2]))
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    assert (committable.rows, is_staged(committable)) == (2, True)
    writer.write(rows([3]))
    assert ids_in(url) == []
    assert prepared(url) == []
    eventually(lambda: sessions(url) == [])
    assert committer.commit(committable) == Committed()
    assert ids_in(url) == [1, 2]
    assert ledger_rows(url) == [str(committable.transaction)]
    assert list(staging.transactions()) == []
    assert committer.commit(committable) == AlreadyCommitted()
    assert ids_in(url) == [1, 2]


def test_committer_left_behind_by_attempts_and_pruning_applies_nothing_again(
    job: Job, url: str
) -> None:
    """Not even the ledger tells it any more that the rows are committed."""
    committable = job.prepare(1, [1])
    job.check(2)
    newer = job.committer(2)
    assert newer.commit(committable) == Committed()
    newer.prune(CheckpointId(5))
    assert ledger_rows(url) == []
    outcome = job.committer(1).commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "attempt 2 has taken over" in outcome.reason
    assert ids_in(url) == [1]


def test_committer_waits_for_another_that_is_applying_and_goes_on_when_that_one_fails(
    job: Job, url: str
) -> None:
    committable = job.prepare(1, [1])
    with (
        job.sink.settings.endpoint.connect("another committer") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("START TRANSACTION")
        other.execute(
            "INSERT INTO onceflow_ledger (transaction_id, sink_id, attempt, checkpoint, subtask, "
            f"row_count) VALUES ('{committable.transaction}', '{SINK_ID}', 1, 1, 0, 1)"
        )
        outcome = pool.submit(job.committer().commit, committable)
        await_lock_wait(url)
        assert not outcome.done()
        other.execute("ROLLBACK")
        assert outcome.result(20) == Committed()
    assert ids_in(url) == [1]


def test_damaged_rows_are_refused_by_name_and_never_half_applied(
    job: Job, url: str, staging: FileStagingArea, tmp_path: Path
) -> None:
    committable = job.prepare(1, range(100))
    file = tmp_path / "storage" / staging.path(committable.transaction)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StateCorrupt, match=r"1-1-0-0\.arrow"):
        job.committer().commit(committable)
    assert (ids_in(url), ledger_rows(url)) == ([], [])
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert job.committer().commit(committable) == Committed()


def test_deleted_rows_are_lost_and_never_called_committed(
    job: Job, url: str, staging: FileStagingArea
) -> None:
    committable = job.prepare(1, [1])
    staging.discard(committable.transaction)
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, Lost)
    assert str(committable.transaction) in outcome.reason
    assert ledger_rows(url) == []


def test_rows_that_are_committed_are_discarded_before_it_counts(
    job: Job, url: str, tmp_path: Path, staging: FileStagingArea
) -> None:
    committable = job.prepare(1, [1])

    class Stuck(FileStagingArea):
        def discard(self, transaction: TransactionId) -> None:
            raise StorageError("the directory is read-only")

    stuck = Stuck.in_directory(str(tmp_path / "storage"), SINK_ID)
    with Job(job.sink, staging=stuck) as other:
        outcome = other.committer().commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "read-only" in outcome.reason
    assert ids_in(url) == [1]
    assert job.committer().commit(committable) == AlreadyCommitted()
    assert list(staging.transactions()) == []


def test_constraint_violation_keeps_the_rows_until_the_table_takes_them(job: Job, url: str) -> None:
    committable = job.prepare(1, [1, 2])
    query(url, "ALTER TABLE ledger ADD CONSTRAINT odd CHECK (id % 2 = 1)")
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, RetryLater)
    for part in ("odd", "They stay in checkpoint storage", str(committable.transaction)):
        assert part in outcome.reason
    assert ids_in(url) == []
    query(url, "ALTER TABLE ledger DROP CONSTRAINT odd")
    assert job.committer().commit(committable) == Committed()
    assert ids_in(url) == [1, 2]


def test_dropped_table_and_column_keep_the_rows_and_are_named(job: Job, url: str) -> None:
    first, second = job.prepare(1, [1]), job.prepare(2, [2])
    committer = job.committer()
    query(url, "ALTER TABLE ledger RENAME COLUMN amount TO total")
    outcome = committer.commit(first)
    assert isinstance(outcome, RetryLater)
    assert "amount" in outcome.reason
    query(url, "ALTER TABLE ledger RENAME COLUMN total TO amount")
    assert committer.commit(first) == Committed()
    query(url, "RENAME TABLE ledger TO moved")
    outcome = committer.commit(second)
    assert isinstance(outcome, RetryLater)
    assert "ledger" in outcome.reason
    query(url, "RENAME TABLE moved TO ledger")
    assert committer.commit(second) == Committed()
    assert ids_in(url) == [1, 2]


def test_value_that_does_not_fit_is_refused_or_rejected_when_it_is_written(
    job: Job, url: str, staging: FileStagingArea
) -> None:
    query(url, "ALTER TABLE ledger MODIFY amount smallint")
    writer = job.writer()
    with pytest.raises(BadRow, match=r"column 'amount'.*40000"):
        writer.write(rows([1, 4000]))
    with pytest.raises(PreCommitFailed, match="failed before"):
        writer.pre_commit(CheckpointId(1))
    assert list(staging.transactions()) == []
    with Job(job.sink, staging=staging, on_bad_row=OnBadRow.DROP) as lenient:
        writer = lenient.writer()
        writer.write(rows([1, 4000, 2]))
        committable = writer.pre_commit(CheckpointId(1))
        (rejected,) = writer.rejected()
        assert rejected.rows.column("id").to_pylist() == [4000]
        assert "40000" in rejected.reasons[0]
        assert committable is not None
        assert lenient.committer().commit(committable) == Committed()
    assert ids_in(url) == [1, 2]


def test_mode_may_change_between_attempts_and_nothing_in_doubt_is_forgotten(
    url: str, staging: FileStagingArea
) -> None:
    found: list[Committable] = []
    two_phase = MySQLSink(url, table="ledger", create=True, commit_mode="two_phase")
    # Told to create nothing: tables are created only while nothing is prepared.
    ledger = dataclasses.replace(two_phase, create=False, commit_mode="ledger")
    for attempt, sink in enumerate((two_phase, ledger, two_phase, ledger), 1):
        with Job(sink, staging=staging) as job:
            job.check(attempt)
            found.append(job.prepare(attempt, [attempt], attempt=attempt))
            in_doubt = committables(job.committer(attempt).in_doubt())
            assert in_doubt == sorted(str(one.transaction) for one in found)
    with Job(two_phase, staging=staging) as job:
        committer = job.check(5).committer(5)
        by_name = {one.transaction: one for one in committer.in_doubt()}
        decided, others = found[:2], found[2:]
        for one in decided:
            assert committer.commit(by_name[one.transaction]) == Committed()
        for one in others:
            assert committer.abort(by_name[one.transaction]) == Aborted()
        assert list(committer.in_doubt()) == []
    assert ids_in(url) == [1, 2]
    assert prepared(url) == []


def test_rows_go_where_and_how_they_were_staged_whatever_the_settings_say_later(
    url: str, staging: FileStagingArea
) -> None:
    sink = MySQLSink(
        url, table="ledger", create=True, commit_mode="ledger", primary_key=("id",),
        write_mode="upsert",
    )  # fmt: skip
    with Job(sink, staging=staging) as job:
        assert job.check().committer().commit(job.prepare(1, [1])) == Committed()
        second = job.prepare(2, [1, 2])
    other = MySQLSink(url, table="elsewhere", create=True, commit_mode="ledger")
    with Job(other, staging=staging) as job:
        assert job.check(2).committer(2).commit(second) == Committed()
    assert ids_in(url) == [1, 2]
    assert ids_in(url, "elsewhere") == []


def test_mode_without_checkpoint_storage_is_refused(url: str) -> None:
    sink = MySQLSink(url, table="ledger", create=True, commit_mode="ledger")
    with Job(sink) as job, pytest.raises(ConfigError, match="checkpoint storage"):
        job.check()
    assert query(url, "SHOW TABLES") == []


def _by_key(url: str, staging: FileStagingArea, mode: Any) -> Job:
    sink = MySQLSink(
        url, table="ledger", create=True, write_mode="upsert", primary_key=("id",),
        commit_mode=mode,
    )  # fmt: skip
    return Job(sink, staging=staging)


def _entangled(job: Job, act: Callable[[], object]) -> object:
    """Return what `act` returns, which puts 1 before 2, while another session does 2 before 1.

    The victim is who has changed less, and the other session has changed much.
    """
    url = job.sink.url
    query(url, "CREATE TABLE ballast (id bigint)")
    with job.sink.settings.endpoint.connect("rival") as rival, ThreadPoolExecutor(2) as pool:
        rival.execute("START TRANSACTION")
        rival.execute(f"INSERT INTO ballast VALUES {', '.join('(1)' for _ in range(3000))}")
        rival.execute("UPDATE ledger SET amount = 0 WHERE id = 2")
        acting = pool.submit(act)
        await_lock_wait(url)
        waiting = pool.submit(rival.execute, "UPDATE ledger SET amount = 0 WHERE id = 1")
        try:
            return acting.result(30)
        finally:
            waiting.result(30)
            rival.execute("ROLLBACK")


def test_deadlock_victim_in_pre_commit_fails_the_checkpoint_and_leaves_nothing(
    url: str, staging: FileStagingArea
) -> None:
    with _by_key(url, staging, "two_phase") as job:
        job.check().committer().commit(job.prepare(1, [1, 2]))
        writer = job.writer()
        writer.write(rows([2, 1]))
        with pytest.raises(PreCommitFailed, match=r"Deadlock found.*error 1213"):
            _entangled(job, lambda: writer.pre_commit(CheckpointId(2)))
        assert prepared(url) == []
        job.check(2).committer(2).commit(job.prepare(2, [1, 2, 3], attempt=2))
    assert ids_in(url) == [1, 2, 3]


def test_deadlock_victim_in_commit_is_committed_later(url: str, staging: FileStagingArea) -> None:
    with _by_key(url, staging, "ledger") as job:
        committer = job.check().committer()
        committer.commit(job.prepare(1, [1, 2]))
        committable = job.prepare(2, [2, 1, 3])
        outcome = _entangled(job, lambda: committer.commit(committable))
        assert isinstance(outcome, RetryLater)
        assert "Deadlock found" in outcome.reason
        assert ids_in(url) == [1, 2]
        assert committer.commit(committable) == Committed()
    assert ids_in(url) == [1, 2, 3]
