"""A target has committed more than the checkpoint storage knows: nothing is written twice.

The storage is an older copy, the wrong one, an empty one, or the job has moved on. Each remedy that
an error names is followed word for word: every record is there once afterwards.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, FixedDelay, Job, JobState, Pipeline
from onceflow.core.errors import (
    ConfigError,
    PreparedTransactionLost,
    SavepointRefused,
    StorageBehind,
)
from onceflow.core.runtime.driver.status import JobStatus
from onceflow.sinks import SQLiteSink

RECORDS = 2_000


@dataclass(frozen=True)
class Moving:
    """One job that is started here and there; all of its rows are in one SQLite file."""

    cluster: AnyCluster
    directory: Path

    @property
    def read_all(self) -> Path:
        """Input ends when this file is there."""
        return self.directory / "read all"

    def pipeline(
        self, storage: str, *, name: str = "moving", interval: float | None = 0.05
    ) -> Pipeline:
        pipeline = Pipeline(
            self.cluster,
            name=name,
            parallelism=1,
            checkpointing=Checkpointing(storage=str(self.directory / storage), interval=interval),
            restart=FixedDelay(attempts=3, delay_s=0.01),
            settings=SETTINGS,
        )
        source = CountingSource(RECORDS, batch_rows=5, pause_s=0.005, ends_with=str(self.read_all))
        records = pipeline.read(source, uid="records")
        sink = SQLiteSink(str(self.directory / "target.db"), table="rows", create=True)
        records.write(sink, uid="out", sink_id="ledger")
        return pipeline

    def start_for_a_while(
        self, storage: str, from_savepoint: str | None = None, *, allow_rewind: bool = False
    ) -> Job:
        """Start the job and wait until it has committed rows that were not there before."""
        before = len(self.ids())
        job = self.pipeline(storage).start(from_savepoint=from_savepoint, allow_rewind=allow_rewind)
        deadline = time.monotonic() + 60
        while len(self.ids()) < before + 20:
            assert not job.status().state.ended, job.status().last_error
            assert time.monotonic() < deadline, job.status()
            time.sleep(0.01)
        return job

    def commit(self, job: Job, ids_min: int) -> None:
        """Take checkpoints until that many rows are in the target."""
        deadline = time.monotonic() + 60
        while len(self.ids()) < ids_min:
            assert time.monotonic() < deadline, job.status()
            done = job.status().checkpoints_completed
            job.checkpoint()
            while job.status().checkpoints_completed == done:
                assert time.monotonic() < deadline, job.status()
                time.sleep(0.01)

    def stop(self, job: Job) -> JobStatus:
        status = job.stop(60)
        assert status.state is JobState.STOPPED
        return status

    def stop_with_savepoint(self, job: Job) -> str:
        status = job.stop(60, savepoint=True)
        assert status.state is JobState.STOPPED
        return status.savepoints[-1].place

    def back_up(self) -> None:
        with closing(sqlite3.connect(self.directory / "target.db", timeout=30)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copy(self.directory / "target.db", self.directory / "backup.db")

    def put_back(self) -> None:
        for name in ("target.db-wal", "target.db-shm"):
            (self.directory / name).unlink(missing_ok=True)
        shutil.copy(self.directory / "backup.db", self.directory / "target.db")

    def assert_no_row_twice(self) -> None:
        ids = self.ids()
        assert ids == sorted(set(ids))

    def copy(self, storage: str, to: str) -> None:
        shutil.copytree(self.directory / storage, self.directory / to)

    def ids(self) -> list[int]:
        path = self.directory / "target.db"
        if not path.exists():
            return []
        with closing(sqlite3.connect(path, timeout=30)) as db:
            try:
                return [one for (one,) in db.execute("SELECT id FROM rows ORDER BY id")]
            except sqlite3.OperationalError:
                return []

    def finish(self, storage: str, **start: object) -> None:
        """Run the job to its end: every record is there once."""
        self.read_all.touch()
        status = self.pipeline(storage).start(**start).wait(60)  # type: ignore[arg-type]
        assert status.state is JobState.FINISHED
        assert self.ids() == list(range(RECORDS))


@pytest.fixture
def moving(cluster: AnyCluster, tmp_path: Path) -> Moving:
    return Moving(cluster, tmp_path)


def test_an_older_copy_of_the_storage_is_refused_at_every_try_and_the_newer_one_goes_on(
    moving: Moving,
) -> None:
    moving.stop(moving.start_for_a_while("a"))
    moving.copy("a", "older")
    moving.stop(moving.start_for_a_while("a"))
    before = moving.ids()
    # The more tries, the higher the number of the attempt.
    for _ in range(4):
        with pytest.raises(StorageBehind, match=r"older than what the target has committed.*copy"):
            moving.pipeline("older").run(60)
    assert moving.ids() == before
    moving.finish("a")


def test_an_older_copy_goes_on_once_the_target_is_the_copy_of_that_time(moving: Moving) -> None:
    """What the documents say of storage that is gone for good."""
    moving.stop(moving.start_for_a_while("a"))
    moving.copy("a", "older")
    moving.back_up()
    moving.stop(moving.start_for_a_while("a"))
    shutil.rmtree(moving.directory / "a")
    with pytest.raises(StorageBehind, match="'Storage that is behind its target'"):
        moving.pipeline("older").run(60)
    moving.put_back()
    moving.finish("older")


def test_a_savepoint_that_is_older_than_the_target_is_refused_at_every_try(moving: Moving) -> None:
    """In empty storage nobody but the target knows what was committed since."""
    place = moving.stop_with_savepoint(moving.start_for_a_while("a"))
    kept = moving.directory / "kept"
    shutil.copytree(place, kept)
    moving.stop(moving.start_for_a_while("a"))
    before = moving.ids()
    for _ in range(4):
        with pytest.raises(SavepointRefused, match=r"has committed since.*written again"):
            moving.pipeline("b").start(from_savepoint=str(kept)).wait(60)
    # Nor does it help to leave the savepoint out in the storage that it was tried in.
    with pytest.raises(StorageBehind, match="has decided nothing"):
        moving.pipeline("b").run(60)
    assert moving.ids() == before
    again = moving.stop_with_savepoint(moving.start_for_a_while("a"))
    moving.finish("c", from_savepoint=again)


def test_a_job_that_moved_by_savepoint_goes_back_to_where_it_was(moving: Moving) -> None:
    to_b = moving.stop_with_savepoint(moving.start_for_a_while("a"))
    to_a = moving.stop_with_savepoint(moving.start_for_a_while("b", to_b))
    before = moving.ids()
    for _ in range(2):
        with pytest.raises(StorageBehind, match="the job has gone on in other storage since"):
            moving.pipeline("a").run(60)
    assert moving.ids() == before
    to_b = moving.stop_with_savepoint(moving.start_for_a_while("a", to_a))
    # And a log that has come back is no better than before where the job has left it again.
    moving.stop(moving.start_for_a_while("b", to_b))
    with pytest.raises(StorageBehind):
        moving.pipeline("a").run(60)
    moving.finish("b")


def test_what_a_target_has_lost_that_was_committed_before_a_move_is_named(moving: Moving) -> None:
    """The new storage knows of those commits by the savepoint alone, which lists none."""
    job = moving.pipeline("a", interval=None).start()
    moving.commit(job, ids_min=1)
    moving.back_up()
    while job.status().records_in < RECORDS:
        time.sleep(0.01)
    moving.commit(job, ids_min=RECORDS)
    place = moving.stop_with_savepoint(job)
    moving.put_back()
    before = moving.ids()
    with pytest.raises(PreparedTransactionLost, match="ledger/1/2/0/0.*is an older copy of itself"):
        moving.pipeline("b").start(from_savepoint=place).wait(60)
    assert moving.ids() == before


def test_another_storage_is_named_as_the_same_job_and_nothing_is_advised_that_doubles(
    moving: Moving,
) -> None:
    moving.stop(moving.start_for_a_while("a"))
    before = moving.ids()
    with pytest.raises(ConfigError, match="the same job, in another checkpoint storage"):
        moving.pipeline("empty").run(60)
    with pytest.raises(ConfigError, match="the same job, in another checkpoint st") as refused:
        moving.pipeline("empty").run(60)
    assert "sink_id=" not in str(refused.value)
    assert "Start the job with the storage that it had" in str(refused.value)
    assert moving.ids() == before
    moving.finish("a")


def test_a_job_under_another_name_is_told_to_take_the_old_one(moving: Moving) -> None:
    moving.stop(moving.start_for_a_while("a"))
    with pytest.raises(ConfigError, match=r"Two jobs.*Pipeline\(name='moving'\).*storage that it"):
        moving.pipeline("empty", name="renamed").run(60)
    moving.finish("a")


def test_a_job_begins_again_from_a_savepoint_in_its_own_storage_once_the_target_is_put_back(
    moving: Moving,
) -> None:
    """As often as the target is put back; and not when it is not, though it is allowed."""
    place = moving.stop_with_savepoint(moving.start_for_a_while("a"))
    moving.back_up()
    put_back = moving.ids()
    moving.stop(moving.start_for_a_while("a"))
    for _ in range(2):
        moving.put_back()
        assert moving.ids() == put_back
        status = moving.stop(moving.start_for_a_while("a", place, allow_rewind=True))
        assert status.restored_savepoint == place
        moving.assert_no_row_twice()
    # The same start again, as a supervisor repeats it: the target is not put back.
    status = moving.stop(moving.start_for_a_while("a", place, allow_rewind=True))
    assert status.restored_savepoint == ""
    moving.assert_no_row_twice()
    moving.finish("a")


def test_a_job_whose_storage_is_gone_begins_anew_as_the_documents_say(moving: Moving) -> None:
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
