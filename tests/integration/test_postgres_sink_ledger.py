"""Ledger mode: rows wait in checkpoint storage, and are applied once, whoever commits how often."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from tests.integration.postgres_sink_kit import (
    Job,
    await_lock_wait,
    ids_in,
    ledger_rows,
    prepared,
    query,
)
from tests.integration.sink_kit import committables, rows

from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed, StateCorrupt
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
from onceflow.core.staging import is_staged
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.sinks import PostgresSink

SINK_ID = "job.ledger"


@pytest.fixture
def staging(tmp_path: Path) -> FileStagingArea:
    return FileStagingArea.in_directory(str(tmp_path / "storage"), SINK_ID)


@pytest.fixture
def job(postgres_database: str, staging: FileStagingArea) -> Iterator[Job]:
    sink = PostgresSink(postgres_database, table="ledger", create=True, commit_mode="ledger")
    with Job(sink, staging=staging) as job:
        yield job.check()


def _staged(job: Job) -> list[str]:
    assert job.staging is not None
    return [str(one) for one in job.staging.transactions()]


def test_rows_are_seen_at_the_commit_and_not_before(
    job: Job, postgres_database: str, staging: FileStagingArea
) -> None:
    writer, committer = job.writer(), job.committer()
    writer.write(rows([1, 2]))
    writer.write(rows([3]))
    assert ids_in(postgres_database) == []
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    assert (committable.rows, is_staged(committable)) == (3, True)
    writer.write(rows([4]))
    assert ids_in(postgres_database) == []
    assert prepared(postgres_database) == [], "nothing is prepared in this mode"
    assert query(
        postgres_database,
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'onceflow%writer'",
    ) == [(0,)], "no session is held between barriers"
    assert committer.commit(committable) == Committed()
    assert ids_in(postgres_database) == [1, 2, 3]
    assert ledger_rows(postgres_database) == [str(committable.transaction)]
    assert _staged(job) == []
    assert committer.commit(committable) == AlreadyCommitted()
    assert ids_in(postgres_database) == [1, 2, 3]


def test_checkpoints_without_rows_stage_nothing(job: Job) -> None:
    writer = job.writer()
    assert writer.pre_commit(CheckpointId(1)) is None
    writer.write(rows([]))
    assert writer.pre_commit(CheckpointId(2)) is None
    assert _staged(job) == []


def test_what_is_staged_is_in_doubt_and_aborted_by_a_later_attempt(
    job: Job, postgres_database: str
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
    assert ids_in(postgres_database) == []
    assert isinstance(job.committer().commit(committable), RetryLater), "attempt 2 has settled it"


def test_abort_of_what_is_committed_is_told_so_and_leaves_the_rows(
    job: Job, postgres_database: str
) -> None:
    committable = job.prepare(1, [1])
    assert job.committer().commit(committable) == Committed()
    assert job.committer().abort(committable) == AlreadyCommitted()
    assert ids_in(postgres_database) == [1]


def test_decided_rows_are_applied_by_an_attempt_that_never_saw_them(
    job: Job, postgres_database: str
) -> None:
    committable = job.prepare(1, [1])
    job.check(2)
    assert job.committer(2).commit(committable) == Committed()
    assert job.committer(1).commit(committable) == AlreadyCommitted()
    assert ids_in(postgres_database) == [1]


def test_committer_left_behind_by_attempts_and_pruning_applies_nothing_again(
    job: Job, postgres_database: str
) -> None:
    """Not even the ledger tells it any more that the rows are committed."""
    committable = job.prepare(1, [1])
    job.check(2)
    newer = job.committer(2)
    assert newer.commit(committable) == Committed()
    newer.prune(CheckpointId(5))
    assert ledger_rows(postgres_database) == []
    outcome = job.committer(1).commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "attempt 2 has taken over" in outcome.reason
    assert ids_in(postgres_database) == [1]


def _all_at_once(calls: Sequence[tuple[Job, Committable]]) -> list[CommitOutcome]:
    barrier = threading.Barrier(len(calls))

    def call(job: Job, committable: Committable) -> CommitOutcome:
        committer = job.sink.committer(job.committer_context())
        barrier.wait(10)
        try:
            return committer.commit(committable)
        finally:
            committer.close()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(60) for one in [pool.submit(call, *args) for args in calls]]


def test_committers_at_once_apply_the_rows_once(job: Job, postgres_database: str) -> None:
    for checkpoint in range(1, 6):
        committable = job.prepare(checkpoint, range(checkpoint * 100, checkpoint * 100 + 50))
        outcomes = _all_at_once([(job, committable)] * 4)
        assert outcomes.count(Committed()) == 1
        assert outcomes.count(AlreadyCommitted()) == 3
    assert len(ids_in(postgres_database)) == 250
    assert len(set(ids_in(postgres_database))) == 250


def test_committer_waits_for_another_that_is_applying_and_goes_on_when_that_one_fails(
    job: Job, postgres_database: str
) -> None:
    committable = job.prepare(1, [1])
    with psycopg.connect(postgres_database) as other, ThreadPoolExecutor(1) as pool:
        other.execute(
            "INSERT INTO onceflow.onceflow_ledger (transaction_id, sink_id, attempt, checkpoint,"
            " subtask, row_count) VALUES (%s, 'job.ledger', 1, 1, 0, 1)",
            (str(committable.transaction),),
        )
        outcome = pool.submit(job.committer().commit, committable)
        await_lock_wait(postgres_database)
        assert not outcome.done()
        other.rollback()
        assert outcome.result(20) == Committed()
    assert ids_in(postgres_database) == [1]


def test_damaged_rows_are_refused_by_name_and_never_half_applied(
    job: Job, postgres_database: str, staging: FileStagingArea, tmp_path: Path
) -> None:
    committable = job.prepare(1, range(100))
    file = tmp_path / "storage" / staging.path(committable.transaction)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StateCorrupt, match=r"1-1-0-0\.arrow"):
        job.committer().commit(committable)
    assert ids_in(postgres_database) == []
    assert ledger_rows(postgres_database) == []
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert job.committer().commit(committable) == Committed()


def test_deleted_rows_are_lost_and_never_called_committed(
    job: Job, postgres_database: str, staging: FileStagingArea
) -> None:
    committable = job.prepare(1, [1])
    staging.discard(committable.transaction)
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, Lost)
    assert str(committable.transaction) in outcome.reason
    assert ledger_rows(postgres_database) == []


def test_rows_that_are_committed_are_discarded_before_it_counts(
    job: Job, postgres_database: str, tmp_path: Path
) -> None:
    committable = job.prepare(1, [1])
    directory = next((tmp_path / "storage").rglob("*.arrow")).parent

    class Stuck(FileStagingArea):
        def discard(self, transaction: TransactionId) -> None:
            from onceflow.core.errors import StorageError

            raise StorageError(f"{directory} is read-only")

    stuck = Stuck.in_directory(str(tmp_path / "storage"), SINK_ID)
    with Job(job.sink, staging=stuck) as other:
        outcome = other.committer().commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "read-only" in outcome.reason
    assert ids_in(postgres_database) == [1]
    assert job.committer().commit(committable) == AlreadyCommitted()
    assert ids_in(postgres_database) == [1]
    assert _staged(job) == []


def test_constraint_violation_keeps_the_rows_until_the_table_takes_them(
    job: Job, postgres_database: str
) -> None:
    committable = job.prepare(1, [1, 2])
    query(postgres_database, "ALTER TABLE ledger ADD CONSTRAINT odd CHECK (id % 2 = 1)")
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "constraint odd" in outcome.reason
    assert "They stay in checkpoint storage" in outcome.reason
    assert ids_in(postgres_database) == []
    query(postgres_database, "ALTER TABLE ledger DROP CONSTRAINT odd")
    assert job.committer().commit(committable) == Committed()
    assert ids_in(postgres_database) == [1, 2]


def test_dropped_table_and_column_keep_the_rows_and_are_named(
    job: Job, postgres_database: str
) -> None:
    committable, committer = job.prepare(1, [1]), job.committer()
    first = job.prepare(2, [2])
    query(postgres_database, "ALTER TABLE ledger RENAME COLUMN amount TO total")
    outcome = committer.commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "no column 'amount'" in outcome.reason
    query(postgres_database, "ALTER TABLE ledger RENAME COLUMN total TO amount")
    assert committer.commit(committable) == Committed()
    query(postgres_database, "ALTER TABLE ledger RENAME TO moved")
    outcome = committer.commit(first)
    assert isinstance(outcome, RetryLater)
    assert 'relation "public.ledger" does not exist' in outcome.reason
    query(postgres_database, "ALTER TABLE moved RENAME TO ledger")
    assert committer.commit(first) == Committed()
    assert ids_in(postgres_database) == [1, 2]


def test_value_that_does_not_fit_is_refused_when_it_is_written(job: Job) -> None:
    query(job.sink.url, "ALTER TABLE ledger ALTER amount TYPE smallint")
    writer = job.writer()
    with pytest.raises(BadRow, match=r"column 'amount'.*40000"):
        writer.write(rows([1, 4000]))
    with pytest.raises(PreCommitFailed, match="failed before"):
        writer.pre_commit(CheckpointId(1))
    assert _staged(job) == []


def test_mode_may_change_between_attempts_and_nothing_in_doubt_is_forgotten(
    postgres_database: str, staging: FileStagingArea
) -> None:
    found: list[Committable] = []
    two_phase = PostgresSink(
        postgres_database, table="ledger", create=True, commit_mode="two_phase"
    )
    # Told to create nothing: tables are created only while nothing is prepared.
    ledger = dataclasses.replace(two_phase, create=False, commit_mode="ledger")
    for attempt, sink in enumerate((two_phase, ledger, two_phase, ledger), 1):
        with Job(sink, staging=staging) as job:
            job.check(attempt)
            found.append(job.prepare(attempt, [attempt], attempt=attempt))
            assert committables(job.committer(attempt).in_doubt()) == sorted(
                str(one.transaction) for one in found
            )
    with Job(two_phase, staging=staging) as job:
        job.check(5)
        committer = job.committer(5)
        by_name = {one.transaction: one for one in committer.in_doubt()}
        assert [committer.commit(by_name[one.transaction]) for one in found[:2]] == [
            Committed()
        ] * 2
        assert [committer.abort(by_name[one.transaction]) for one in found[2:]] == [Aborted()] * 2
        assert list(committer.in_doubt()) == []
    assert ids_in(postgres_database) == [1, 2]
    assert prepared(postgres_database) == []


def test_rows_go_where_and_how_they_were_staged_whatever_the_settings_say_later(
    postgres_database: str, staging: FileStagingArea
) -> None:
    sink = PostgresSink(
        postgres_database, table="ledger", create=True, commit_mode="ledger", primary_key=("id",),
        write_mode="upsert",
    )  # fmt: skip
    with Job(sink, staging=staging) as job:
        job.check()
        first = job.prepare(1, [1])
        assert job.committer().commit(first) == Committed()
        second = job.prepare(2, [1, 2])
    other = PostgresSink(postgres_database, table="elsewhere", create=True, commit_mode="ledger")
    with Job(other, staging=staging) as job:
        job.check(2)
        assert job.committer(2).commit(second) == Committed()
    assert ids_in(postgres_database) == [1, 2]
    assert ids_in(postgres_database, "elsewhere") == []


def test_works_on_a_server_that_prepares_nothing(tmp_path: Path) -> None:
    staging = FileStagingArea.in_directory(str(tmp_path), SINK_ID)
    with EmbeddedPostgres({"max_prepared_transactions": "0"}) as server:
        sink = PostgresSink(server.url, table="ledger", create=True, commit_mode="ledger")
        with Job(sink, staging=staging) as job:
            job.check()
            assert job.committer().commit(job.prepare(1, [1, 2])) == Committed()
        assert ids_in(server.url) == [1, 2]


def test_mode_without_checkpoint_storage_is_refused(postgres_database: str) -> None:
    sink = PostgresSink(postgres_database, table="ledger", create=True, commit_mode="ledger")
    with Job(sink) as job, pytest.raises(ConfigError, match="checkpoint storage"):
        job.check()
    assert query(postgres_database, "SELECT to_regclass('ledger')") == [(None,)]


def test_commit_is_durable_where_the_role_does_not_wait_for_the_disk(
    postgres_database: str, staging: FileStagingArea
) -> None:
    """The staged rows are deleted after it: what the server forgets then is gone."""
    query(postgres_database, "CREATE TABLE seen (value text)")
    query(
        postgres_database,
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen "
        "VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$",
    )
    url = f"{postgres_database}?options=-c%20synchronous_commit%3Doff"
    sink = PostgresSink(url, table="ledger", create=True, commit_mode="ledger")
    with Job(sink, staging=staging) as job:
        job.check()
        query(
            postgres_database,
            "CREATE TRIGGER note BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION note()",
        )
        assert job.committer().commit(job.prepare(1, [1])) == Committed()
    assert query(postgres_database, "SELECT value FROM seen") == [("on",)]
