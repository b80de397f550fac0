"""One job that is started in one checkpoint storage and another, into one target."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow.dataset
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, FixedDelay, Job, JobState, Pipeline
from onceflow.core.errors import ConfigError, SavepointRefused, StorageBehind
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.spi import Sink
from onceflow.integration.conformance.processes import eventually
from onceflow.sinks import FileSink

RECORDS = 2_000


class WrittenTarget(Protocol):
    """The target of the job."""

    def sink(self) -> Sink:
        """Return the sink as a user builds it."""
        ...

    def ids(self) -> list[int]:
        """Return the id of every row that a reader sees, sorted, doubles kept."""
        ...


class RestorableTarget(WrittenTarget, Protocol):
    """A target that can be put back to what it was."""

    def back_up(self) -> None:
        """Copy its rows and onceflow's own tables."""
        ...

    def put_back(self) -> None:
        """Make it what it was at the last copy."""
        ...


@dataclass(frozen=True)
class FilesTarget:
    """Files below a directory."""

    directory: Path

    def sink(self) -> FileSink:
        return FileSink(str(self.directory))

    def ids(self) -> list[int]:
        if not self.directory.exists():
            return []
        files = pyarrow.dataset.dataset(self.directory, format="parquet")
        if not files.schema.names:
            return []
        return sorted(files.to_table(columns=["id"]).column("id").to_pylist())


@dataclass(frozen=True)
class MovingJob:
    """The job; its storages are below `directory`."""

    cluster: AnyCluster
    directory: Path
    target: WrittenTarget
    sink_id: str = "ledger"
    parallelism: int = field(default=1, kw_only=True)

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
            parallelism=self.parallelism,
            checkpointing=Checkpointing(storage=str(self.directory / storage), interval=interval),
            restart=FixedDelay(attempts=3, delay_s=0.01),
            settings=SETTINGS,
        )
        source = CountingSource(RECORDS, batch_rows=5, pause_s=0.005, ends_with=str(self.read_all))
        records = pipeline.read(source, uid="records")
        records.write(self.target.sink(), uid="out", sink_id=self.sink_id)
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

    def assert_no_row_twice(self) -> None:
        ids = self.ids()
        assert ids == sorted(set(ids))

    def copy(self, storage: str, to: str) -> None:
        """Copy the storage; of a running job as of a moment at which it deletes no file."""
        target = self.directory / to

        def copied() -> bool:
            shutil.rmtree(target, ignore_errors=True)
            try:
                shutil.copytree(self.directory / storage, target)
            except (shutil.Error, FileNotFoundError):
                return False
            return True

        assert eventually(copied, 60)

    def ids(self) -> list[int]:
        """Return the id of every row that a reader sees, sorted, doubles kept."""
        return self.target.ids()

    def finish(self, storage: str, **start: object) -> None:
        """Run the job to its end: every record is there once."""
        self.read_all.touch()
        status = self.pipeline(storage).start(**start).wait(60)  # type: ignore[arg-type]
        assert status.state is JobState.FINISHED
        assert self.ids() == list(range(RECORDS))


def refuse_an_older_copy(moving: MovingJob, *, tries: int = 4) -> None:
    """Start from a copy that the job has gone on from; then where it ran last."""
    moving.stop(moving.start_for_a_while("a"))
    moving.copy("a", "older")
    moving.stop(moving.start_for_a_while("a"))
    before = moving.ids()
    # The more tries, the higher the number of the attempt.
    for _ in range(tries):
        with pytest.raises(StorageBehind, match="Either this storage is an older copy"):
            moving.pipeline("older").run(60)
    assert moving.ids() == before
    moving.finish("a")


def refuse_an_older_savepoint(moving: MovingJob, *, tries: int = 4) -> None:
    """Start in empty storage from a savepoint that the job has gone on from."""
    place = moving.stop_with_savepoint(moving.start_for_a_while("a"))
    kept = moving.directory / "kept"
    shutil.copytree(place, kept)
    moving.stop(moving.start_for_a_while("a"))
    before = moving.ids()
    for _ in range(tries):
        with pytest.raises(SavepointRefused, match=r"has committed since.*written a second time"):
            moving.pipeline("b").start(from_savepoint=str(kept)).wait(60)
    # Nor does it help to leave the savepoint out in the storage that it was tried in.
    with pytest.raises(StorageBehind, match="has decided nothing"):
        moving.pipeline("b").run(60)
    assert moving.ids() == before
    again = moving.stop_with_savepoint(moving.start_for_a_while("a"))
    moving.finish("c", from_savepoint=again)


def go_there_and_back(moving: MovingJob) -> None:
    """Move from storage a to b and back to a by savepoints, and start in what was left."""
    to_b = moving.stop_with_savepoint(moving.start_for_a_while("a"))
    to_a = moving.stop_with_savepoint(moving.start_for_a_while("b", to_b))
    before = moving.ids()
    for _ in range(2):
        with pytest.raises(StorageBehind, match="the job has run in other storage since"):
            moving.pipeline("a").run(60)
    assert moving.ids() == before
    to_b = moving.stop_with_savepoint(moving.start_for_a_while("a", to_a))
    # And a log that has come back is no better than before where the job has left it again.
    moving.stop(moving.start_for_a_while("b", to_b))
    with pytest.raises(StorageBehind):
        moving.pipeline("a").run(60)
    moving.finish("b")


def begin_again_from_a_savepoint(moving: MovingJob, target: RestorableTarget) -> None:
    """Do so as often as the target is put back; and not when it is not, though it is allowed."""
    place = moving.stop_with_savepoint(moving.start_for_a_while("a"))
    target.back_up()
    put_back = moving.ids()
    moving.stop(moving.start_for_a_while("a"))
    for _ in range(2):
        target.put_back()
        assert moving.ids() == put_back
        status = moving.stop(moving.start_for_a_while("a", place, allow_rewind=True))
        assert status.restored_savepoint == place
        moving.assert_no_row_twice()
    # The same start again, as a supervisor repeats it: the target is not put back.
    status = moving.stop(moving.start_for_a_while("a", place, allow_rewind=True))
    assert status.restored_savepoint == ""
    moving.assert_no_row_twice()
    moving.finish("a")


def refuse_empty_storage(moving: MovingJob) -> None:
    """Start where no job has run: it is the same job all the same, and so under another name."""
    moving.stop(moving.start_for_a_while("a"))
    before = moving.ids()
    for _ in range(2):
        with pytest.raises(ConfigError, match="the same job, in another checkpoint st") as refused:
            moving.pipeline("empty").run(60)
        assert "sink_id=" not in str(refused.value)
        assert "Start the job with its former storage" in str(refused.value)
    with pytest.raises(ConfigError, match=r"Two jobs.*Pipeline\(name='moving'\).*storage that it"):
        moving.pipeline("another", name="renamed").run(60)
    assert moving.ids() == before
    moving.finish("a")
