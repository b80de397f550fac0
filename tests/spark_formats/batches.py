"""Batches as Spark runs them, without Spark: plan, tasks, commit, abort, each by its own process.

What planning and commit keep is made anew for each step, as after a crash. A step may be run in a
process that kills itself at a crash point, as Spark's processes do.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from onceflow.connectors.spark.batch_commits import (
    BatchCommits,
    BatchPlan,
    BatchTarget,
    TaskReport,
)
from onceflow.connectors.spark.batch_identity import NamedTarget
from onceflow.connectors.spark.decision_keepers import kept_target
from onceflow.connectors.spark.task_writer import TaskPlace, write_task
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.protocol.batches import BatchDecision
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import Sink
from onceflow.core.storage.staging import FileStagingArea

SCHEMA = pa.schema(
    [pa.field("id", pa.int64()), pa.field("account", pa.string()), pa.field("amount", pa.int64())]
)


def rows(ids: Iterable[int]) -> pa.RecordBatch:
    listed = list(ids)
    columns = [
        pa.array(listed, pa.int64()),
        pa.array([f"acct-{one % 7}" for one in listed], pa.string()),
        pa.array([one % 100 for one in listed], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def driver_of(sink: Sink, directory: Path) -> Driver:
    """Return the driver of a query whose checkpoint is in `directory`."""
    staging = FileStagingArea.in_directory(str(directory), "events-1")
    return Driver(BatchTarget(sink, "events-1", "Spark query q", "q", staging), str(directory))


def killed_at(point: CrashPoint, directory: Path, step: Callable[[], object]) -> None:
    """Run `step` in a process that is killed when it reaches `point`.

    Raises:
        AssertionError: It ended in another way.
    """
    points = directory / "points"
    points.mkdir(exist_ok=True)
    (points / point).touch()
    child = os.fork()
    if child == 0:
        os.environ[VARIABLE] = str(points)
        try:
            step()
        except BaseException:
            traceback.print_exc()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), (point, os.waitstatus_to_exitcode(status))
    assert os.WTERMSIG(status) == signal.SIGKILL


@dataclass
class Driver:
    """One driver of a job, as its planning and commit processes do their steps."""

    target: BatchTarget
    directory: str | None = None
    run: str = "run-1"
    tasks: int = 0

    def in_doubt(self) -> Sequence[Committable]:
        """Return what the target holds prepared."""
        committer = self.target.sink.committer(self.target.committer_context(AttemptId(1)))
        try:
            return committer.in_doubt()
        finally:
            committer.close()

    def other(self, sink_id: str = "", owner: str = "", source: str = "") -> Driver:
        """Return another driver, of the same job unless something else is given."""
        target = replace(
            self.target,
            sink_id=sink_id or self.target.sink_id,
            owner=owner or self.target.owner,
            source=source or self.target.source,
        )
        return replace(self, target=target, run="run-2")

    def commits(self) -> BatchCommits:
        return BatchCommits(*kept_target(NamedTarget(self.target, self.directory)))

    def plan(self, number: int | None, fingerprint: str | None = None) -> BatchPlan:
        commits = self.commits()
        try:
            if fingerprint is None:
                fingerprint = f"offsets of {number}"
            plan = commits.plan(SCHEMA, number, fingerprint)
        finally:
            commits.close()
        sent: BatchPlan = pickle.loads(pickle.dumps(plan))
        return sent

    def task(
        self, plan: BatchPlan, partition: int, ids: Iterable[int], *, task_attempt: int = 0
    ) -> TaskReport:
        self.tasks += 1
        place = TaskPlace(partition, task_attempt, self.tasks, plan.batch.number, self.run)
        report = write_task(plan, place, iter([rows(ids)]))
        sent: TaskReport = pickle.loads(pickle.dumps(report))
        return sent

    def commit(self, reports: Sequence[TaskReport]) -> BatchDecision | None:
        commits = self.commits()
        try:
            return commits.commit(reports)
        finally:
            commits.close()

    def abort(self) -> None:
        commits = self.commits()
        try:
            commits.abort(SCHEMA)
        finally:
            commits.close()

    def batch(
        self, number: int, *partitions: Iterable[int], fingerprint: str | None = None
    ) -> None:
        """Run one batch from its plan to its commit."""
        plan = self.plan(number, fingerprint)
        self.commit([self.task(plan, index, ids) for index, ids in enumerate(partitions)])
