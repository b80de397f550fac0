"""A driver of batches like that of Spark's formats, without Spark: plan, tasks, commit, abort.

The objects of planning and commit are created again for each step, as after a crash. Values that
pass between them are pickled, as in Spark.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import pyarrow as pa

from onceflow.connectors.spark.batch.commits import (
    BatchCommits,
    BatchPlan,
    BatchTarget,
    TaskReport,
)
from onceflow.connectors.spark.batch.decision_keepers import resolve_keeper
from onceflow.connectors.spark.batch.identity import NamedTarget
from onceflow.connectors.spark.batch.task_writer import TaskIdentity, write_task
from onceflow.core.protocol.batches import BatchDecision
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId

RowsT = TypeVar("RowsT")


@dataclass
class BatchDriver(Generic[RowsT]):
    """A driver of a query, which runs single steps of planning and commit. One thread."""

    target: BatchTarget
    schema: pa.Schema
    rows_of: Callable[[RowsT], pa.RecordBatch]
    """The function that converts the steps' argument to the rows of a task."""
    directory: str | None = None
    """The directory of decisions for sinks without tables."""
    run: str = "run-1"
    tasks: int = 0

    def in_doubt(self) -> Sequence[Committable]:
        """Return the prepared transactions of the target."""
        sink, context = self.target.sink, self.target.committer_context(AttemptId(1))
        committer = sink.committer(context)
        try:
            return committer.in_doubt()
        finally:
            committer.close()

    def other(self, sink_id: str = "", owner: str = "", source: str = "") -> BatchDriver[RowsT]:
        """Return another driver. The default of each argument is this driver's value."""
        target = replace(
            self.target,
            sink_id=sink_id or self.target.sink_id,
            owner=owner or self.target.owner,
            source=source or self.target.source,
        )
        return replace(self, target=target, run="run-2")

    def commits(self) -> BatchCommits:
        """Return the object that carries out the steps. The caller closes it."""
        return BatchCommits(*resolve_keeper(NamedTarget(self.target, self.directory)))

    def plan(self, number: int | None, fingerprint: str | None = None) -> BatchPlan:
        """Return the plan for the tasks of batch `number`, whose input has `fingerprint`."""
        commits = self.commits()
        try:
            if fingerprint is None:
                fingerprint = f"offsets of {number}"
            plan = commits.plan(self.schema, number, fingerprint)
        finally:
            commits.close()
        sent: BatchPlan = pickle.loads(pickle.dumps(plan))  # noqa: S301 - its own
        return sent

    def task(
        self, plan: BatchPlan, partition: int, part: RowsT, *, task_attempt: int = 0
    ) -> TaskReport:
        """Pre-commit the rows of `part` as a task. Return its report."""
        self.tasks += 1
        task_place = TaskIdentity(partition, task_attempt, self.tasks, plan.batch.number, self.run)
        report = write_task(plan, task_place, iter([self.rows_of(part)]))
        sent: TaskReport = pickle.loads(pickle.dumps(report))  # noqa: S301 - its own
        return sent

    def commit(self, reports: Sequence[TaskReport]) -> BatchDecision | None:
        """Decide and commit the transactions in the tasks' reports."""
        commits = self.commits()
        try:
            return commits.commit(reports)
        finally:
            commits.close()

    def abort(self, plan: BatchPlan | None = None) -> None:
        """Commit or roll back the transactions of the failed batch of `plan`, or of the last."""
        commits = self.commits()
        try:
            commits.abort(self.schema, plan.attempt if plan else None)
        finally:
            commits.close()

    def batch(self, number: int, *parts: RowsT, fingerprint: str | None = None) -> None:
        """Run a batch from its plan to its commit, with a task for each of `parts`."""
        plan = self.plan(number, fingerprint)
        self.commit([self.task(plan, index, part) for index, part in enumerate(parts)])
