"""Jobs whose decided checkpoints wait to be committed together, whatever ends the wait.

The table is real. Its bound is never reached, so what is visible was committed by a new attempt, by
the end of the job, or by a start from a savepoint.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.waiting import await_in

from onceflow import Checkpointing, FixedDelay, HeapBackend, JobState, JobStatus, Pipeline
from onceflow.core.api.pipeline import Job
from onceflow.core.runtime.events.job_events import CheckpointCommitted, JobEvent
from onceflow.sinks import DeltaSink

_RECORDS = 4_000

pytestmark = pytest.mark.servers
_NEVER = {"commit_checkpoints": 1000}


class GatheringJob:
    """A job into a Delta table that commits when it must."""

    def __init__(self, cluster: AnyCluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory

    def start(
        self,
        *,
        storage: str = "checkpoints",
        parallelism: int = 2,
        savepoint: str | None = None,
        allow_rewind: bool = False,
    ) -> Job:
        pipeline = Pipeline(
            self.cluster,
            name="lake",
            parallelism=parallelism,
            checkpointing=Checkpointing(storage=str(self.directory / storage), interval=0.1),
            state_backend=HeapBackend(),
            restart=FixedDelay(attempts=20, delay_s=0.01),
        )
        source = CountingSource(_RECORDS, pause_s=0.02, ends_with=str(self.directory / "end"))
        sink = DeltaSink(str(self.directory / "table"), create=True, **cast("Any", _NEVER))
        pipeline.read(source, uid="records").write(sink, uid="lake")
        return pipeline.start(from_savepoint=savepoint, allow_rewind=allow_rewind)

    def finish(self, job: Job) -> None:
        (self.directory / "end").touch()
        status = job.wait(60)
        assert status.state is JobState.FINISHED, status.last_error
        (sink,) = status.sinks
        assert sink.prepared == 0, sink

    def ids(self) -> list[int]:
        rows: pa.Table = cast("Any", DeltaTable(self.directory / "table")).to_pyarrow_table()
        return sorted(rows["id"].to_pylist())

    def files(self) -> list[str]:
        return DeltaTable(self.directory / "table").file_uris()

    def ranges(self) -> list[tuple[int, int]]:
        """Return the checkpoints of each version with rows: after the first, up to the last."""
        log = sorted((self.directory / "table" / "_delta_log").glob("*.json"))
        lines = [json.loads(line) for one in log for line in one.read_text("utf-8").splitlines()]
        commits = [line["commitInfo"] for line in lines if "commitInfo" in line]
        return [
            (int(commit["onceflow.checkpoint-before"]), int(commit["onceflow.checkpoint"]))
            for commit in commits
            if commit["operation"] == "WRITE"
        ]

    def assert_each_row_once(self) -> None:
        """And at most two versions: what another attempt or job has found, and the end."""
        assert self.ids() == list(range(_RECORDS))
        ranges = self.ranges()
        assert 1 <= len(ranges) <= 2, ranges
        ends = [0, *(last for _, last in ranges)]
        assert [before for before, _ in ranges] == ends[:-1], "each begins where one has ended"


def wait_for_checkpoints(job: Job, count: int) -> None:
    goal = job.status().checkpoints_completed + count
    await_in(job, lambda: job.status().checkpoints_completed >= goal)


def test_what_waits_is_committed_by_the_next_attempt_and_by_the_end_of_the_job(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    made = GatheringJob(cluster, tmp_path)
    job = made.start()
    wait_for_checkpoints(job, 4)
    assert made.ids() == [], "what waits is visible to nobody"
    assert all(one.committed_ms is None for one in job.status().history)
    os.kill(job.status().slots[1].pid, signal.SIGKILL)
    await_in(job, lambda: job.status().attempt > 1 and bool(made.ids()))
    seen = made.ids()
    wait_for_checkpoints(job, 3)
    assert made.ids() == seen, "what the new attempt decides waits, too"
    made.finish(job)
    made.assert_each_row_once()


@pytest.mark.parametrize("drain", [False, True], ids=["stopped", "drained"])
def test_a_job_that_is_stopped_commits_what_waits_and_its_savepoint_begins_with_nothing_in_doubt(
    cluster: AnyCluster, tmp_path: Path, drain: bool
) -> None:
    made = GatheringJob(cluster, tmp_path)
    job = made.start()
    commits: list[CheckpointCommitted] = []

    def note_commit(event: JobEvent, status: JobStatus) -> None:
        if isinstance(event, CheckpointCommitted):
            commits.append(event)

    job.add_listener(note_commit)
    wait_for_checkpoints(job, 3)
    stopped = job.stop(60, savepoint=str(tmp_path / "kept"), drain=drain)
    assert made.ids()
    assert sum(commit.versions for commit in commits) == len(made.ranges()) == 1
    assert sum(commit.files for commit in commits) == len(made.files()) > 3, "which metrics count"
    place = stopped.savepoints[-1].place
    made.finish(made.start(storage="others", parallelism=3, savepoint=place))
    made.assert_each_row_once()


def test_a_savepoint_of_a_job_that_dies_has_what_waits(cluster: AnyCluster, tmp_path: Path) -> None:
    """Nothing of the first job was ever committed: the second one, of other width, commits it."""
    made = GatheringJob(cluster, tmp_path)
    job = made.start()
    wait_for_checkpoints(job, 3)
    place = job.savepoint(str(tmp_path / "kept"), timeout_s=60)
    job.cancel(60)
    assert made.ids() == []
    made.finish(made.start(storage="others", parallelism=3, savepoint=place, allow_rewind=True))
    made.assert_each_row_once()
