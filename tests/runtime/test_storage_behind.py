"""A target has committed more than the checkpoint storage knows: nothing is written twice.

The storage is an older copy, the wrong one, an empty one, or the job has moved on. Each remedy that
an error names is followed word for word: every record is there once afterwards.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support import moving_job
from tests.support.clusters import AnyCluster

from onceflow import Job, JobState
from onceflow.core.errors import ConfigError, PreparedTransactionLost, StorageBehind
from onceflow.core.protocol.committables import CommitOutcome, Committable
from onceflow.core.spi import Committer, CommitterContext
from onceflow.integration.conformance.processes import eventually
from onceflow.sinks import SQLiteSink


@dataclass(frozen=True)
class SQLiteTarget:
    """A file that can be put back to what it was."""

    directory: Path

    @property
    def path(self) -> Path:
        return self.directory / "target.db"

    def sink(self) -> SQLiteSink:
        return SQLiteSink(str(self.path), table="rows", create=True)

    def ids(self) -> list[int]:
        if not self.path.exists():
            return []
        with closing(sqlite3.connect(self.path, timeout=30)) as db:
            try:
                return [one for (one,) in db.execute("SELECT id FROM rows ORDER BY id")]
            except sqlite3.OperationalError:
                return []

    def back_up(self) -> None:
        with closing(sqlite3.connect(self.path, timeout=30)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copy(self.path, self.directory / "backup.db")

    def put_back(self) -> None:
        for name in ("target.db-wal", "target.db-shm"):
            (self.directory / name).unlink(missing_ok=True)
        shutil.copy(self.directory / "backup.db", self.path)


class HeldSink(SQLiteSink):
    """Commits nothing of the second subtask while the file `held` is beside the target."""

    def committer(self, context: CommitterContext) -> Committer:
        committer = super().committer(context)
        commit, held = committer.commit, Path(self.url).with_name("held")

        def commit_when_free(committable: Committable) -> CommitOutcome:
            while committable.transaction.subtask == 1 and held.exists():
                time.sleep(0.01)
            return commit(committable)

        committer.commit = commit_when_free  # type: ignore[method-assign]
        return committer


@dataclass(frozen=True)
class HeldTarget(SQLiteTarget):
    """A file that can be copied between the commits of two subtasks."""

    def sink(self) -> SQLiteSink:
        return HeldSink(str(self.path), table="rows", create=True)

    def last_commits(self) -> list[int]:
        """Return the last checkpoint that each subtask has committed."""
        with closing(sqlite3.connect(self.path, timeout=30)) as db:
            last = "SELECT MAX(checkpoint) FROM onceflow_ledger GROUP BY subtask ORDER BY subtask"
            return [checkpoint for (checkpoint,) in db.execute(last)]

    @contextmanager
    def held(self, moving: moving_job.MovingJob, job: Job) -> Generator[None]:
        """Run the body when the first subtask has committed more checkpoints than the second.

        Afterwards the second one commits them, too.
        """
        moving.commit(job, ids_min=20)
        while len(self.last_commits()) < 2:
            moving.commit(job, ids_min=len(self.ids()) + 20)
        # A commit of the second subtask that is still on its way would end the difference below.
        assert eventually(lambda: len(set(self.last_commits())) == 1, 60)
        held = self.directory / "held"
        held.touch()
        try:
            job.checkpoint()
            assert eventually(lambda: self.last_commits()[0] > self.last_commits()[1], 60)
            yield
        finally:
            held.unlink()
        assert eventually(lambda: self.last_commits()[0] == self.last_commits()[1], 60)

    def add_rows(self, ids: Iterable[int]) -> None:
        with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            template = db.execute("SELECT * FROM rows LIMIT 1").fetchone()
            marks = ", ".join("?" * len(template))
            for number in ids:
                db.execute(f"INSERT INTO rows VALUES ({marks})", (number, *template[1:]))

    def record_commit(self, transaction: str) -> None:
        """Add the proof of a commit, by the statement of the documents."""
        sink_id, attempt, checkpoint, subtask, _ = transaction.split("/")
        with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            db.execute(
                "INSERT INTO onceflow_ledger"
                " (transaction_id, sink_id, attempt, checkpoint, subtask, row_count)"
                " VALUES (?, ?, ?, ?, ?, 0)",
                (transaction, sink_id, attempt, checkpoint, subtask),
            )


@pytest.fixture
def target(tmp_path: Path) -> SQLiteTarget:
    return SQLiteTarget(tmp_path)


@pytest.fixture
def moving(
    request: pytest.FixtureRequest, cluster: AnyCluster, tmp_path: Path, target: SQLiteTarget
) -> moving_job.MovingJob:
    if getattr(request, "param", "sqlite") == "files":
        return moving_job.MovingJob(cluster, tmp_path, moving_job.FilesTarget(tmp_path / "files"))
    return moving_job.MovingJob(cluster, tmp_path, target)


ON_FILES_TOO = pytest.mark.parametrize(
    "moving", ["sqlite", pytest.param("files", marks=pytest.mark.servers)], indirect=True
)


@ON_FILES_TOO
def test_an_older_copy_of_the_storage_is_refused_at_every_try_and_the_newer_one_goes_on(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.refuse_an_older_copy(moving)


def test_an_older_copy_goes_on_once_the_target_is_the_copy_of_that_time(
    moving: moving_job.MovingJob, target: SQLiteTarget
) -> None:
    """The test does what the documents advise for storage that is gone for good."""
    moving.stop(moving.start_for_a_while("a"))
    moving.copy("a", "older")
    target.back_up()
    moving.stop(moving.start_for_a_while("a"))
    shutil.rmtree(moving.directory / "a")
    with pytest.raises(StorageBehind, match="'Storage that is behind its target'"):
        moving.pipeline("older").run(60)
    target.put_back()
    moving.finish("older")


def test_an_older_copy_takes_no_number_of_an_attempt_that_the_target_has_seen(
    moving: moving_job.MovingJob,
) -> None:
    """The other attempt has committed nothing, but may have left something prepared."""
    moving.stop(moving.start_for_a_while("a"))
    moving.copy("a", "older")
    job = moving.pipeline("a", interval=None).start()
    assert eventually(lambda: job.status().state is JobState.RUNNING, 60)
    seen = job.status().attempt
    job.cancel(60)
    assert moving.stop(moving.start_for_a_while("older")).attempt > seen
    moving.assert_no_row_twice()


@ON_FILES_TOO
@pytest.mark.only_proof
def test_a_savepoint_that_is_older_than_the_target_is_refused_at_every_try(
    moving: moving_job.MovingJob,
) -> None:
    """In empty storage nobody but the target knows what was committed since."""
    moving_job.refuse_an_older_savepoint(moving)


def test_a_job_that_moved_by_savepoint_goes_back_to_where_it_was(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.go_there_and_back(moving)


def test_what_a_target_has_lost_that_was_committed_before_a_move_is_named(
    moving: moving_job.MovingJob, target: SQLiteTarget
) -> None:
    """The new storage knows of those commits by the savepoint alone, which lists none."""
    job = moving.pipeline("a", interval=None).start()
    moving.commit(job, ids_min=1)
    target.back_up()
    while job.status().records_in < moving_job.RECORDS:
        time.sleep(0.01)
    moving.commit(job, ids_min=moving_job.RECORDS)
    place = moving.stop_with_savepoint(job)
    target.put_back()
    before = moving.ids()
    with pytest.raises(
        PreparedTransactionLost, match=r"ledger/1/\d/0/0.*set back to an older copy"
    ):
        moving.pipeline("b").start(from_savepoint=place).wait(60)
    assert moving.ids() == before


def test_a_target_put_back_to_between_two_subtasks_commits_goes_on_with_the_storage_of_then(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    target = HeldTarget(tmp_path)
    moving = moving_job.MovingJob(cluster, tmp_path, target, parallelism=2)
    job = moving.pipeline("a", interval=None).start()
    with target.held(moving, job):
        target.back_up()
        moving.copy("a", "then")
    job.cancel()
    target.put_back()
    moving.finish("then")


@pytest.mark.parametrize(
    "goes_on", [pytest.param(False, marks=pytest.mark.servers), True], ids=["ends there", "goes on"]
)
def test_a_target_put_back_to_between_two_subtasks_commits_is_refused_until_all_rows_are_back(
    cluster: AnyCluster, tmp_path: Path, goes_on: bool
) -> None:
    """The test does exactly what 'After a loss' advises: each row is there once in the end."""
    target = HeldTarget(tmp_path)
    moving = moving_job.MovingJob(cluster, tmp_path, target, parallelism=2)
    job = moving.pipeline("a", interval=None).start()
    with target.held(moving, job):
        target.back_up()
    if goes_on:
        for _ in range(2):
            moving.commit(job, ids_min=len(moving.ids()) + 20)
    job.cancel()
    committed = moving.ids()
    target.put_back()
    between = moving.ids()
    first, second = target.last_commits()
    assert second < first, "the highest checkpoint alone would hide what the second one lacks"
    target.add_rows(set(committed) - set(between))
    named: list[str] = []
    moving.read_all.touch()
    while reason := _run_or_name(moving, named):
        assert "'After a loss'" in reason
        assert moving.ids() == committed
        target.record_commit(named[-1])
    assert moving.ids() == list(range(moving_job.RECORDS))
    assert named
    assert sorted(set(named)) == sorted(named)


def _run_or_name(moving: moving_job.MovingJob, named: list[str]) -> str:
    """Run the job; return why it lacks a transaction, which is added to `named`, or nothing."""
    try:
        moving.pipeline("a").run(60)
    except PreparedTransactionLost as error:
        named.append(str(error).split()[1])
        return str(error)
    return ""


@ON_FILES_TOO
def test_another_storage_is_named_as_the_same_job_or_as_another_and_no_remedy_doubles_a_row(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.refuse_empty_storage(moving)


def test_a_job_begins_again_from_a_savepoint_in_its_own_storage_once_the_target_is_put_back(
    moving: moving_job.MovingJob, target: SQLiteTarget
) -> None:
    moving_job.begin_again_from_a_savepoint(moving, target)


def test_a_job_whose_storage_is_gone_begins_anew_as_the_documents_say(
    moving: moving_job.MovingJob,
) -> None:
    """The target is emptied and forgets the old log, by the statements that the error has."""
    moving.stop(moving.start_for_a_while("a"))
    shutil.rmtree(moving.directory / "a")
    with pytest.raises(ConfigError, match="'The checkpoint storage is gone'") as refused:
        moving.pipeline("b").run(60)
    _, _, statements = str(refused.value).partition("forget the old log by: ")
    assert statements.count("DELETE FROM") == 2
    with closing(sqlite3.connect(moving.directory / "target.db", timeout=30)) as db, db:
        db.executescript(f"DELETE FROM rows; {statements}")
    moving.finish("b")
