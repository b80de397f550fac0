"""Batches as Spark's formats write them, without Spark: plan, tasks, commit, abort, step by step.

What planning and commit keep is made anew for each step, as after a crash; what travels between
them is pickled, as Spark does.
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
    """One driver of a query, as its planning and commit processes do their steps. One thread."""

    target: BatchTarget
    schema: pa.Schema
    rows_of: Callable[[RowsT], pa.RecordBatch]
    """Makes the rows of a task of what the steps are given."""
    directory: str | None = None
    """Where decisions stand for sinks without tables."""
    run: str = "run-1"
    tasks: int = 0

    def in_doubt(self) -> Sequence[Committable]:
        """Return what the target holds prepared."""
        sink, context = self.target.sink, self.target.committer_context(AttemptId(1))
        committer = sink.committer(context)
        try:
            return committer.in_doubt()
        finally:
            committer.close()

    def other(self, sink_id: str = "", owner: str = "", source: str = "") -> BatchDriver[RowsT]:
        """Return another driver, of the same job unless something else is given."""
        target = replace(
            self.target,
            sink_id=sink_id or self.target.sink_id,
            owner=owner or self.target.owner,
            source=source or self.target.source,
        )
        return replace(self, target=target, run="run-2")

    def commits(self) -> BatchCommits:
        """Return what carries the steps out; to be closed."""
        return BatchCommits(*resolve_keeper(NamedTarget(self.target, self.directory)))

    def plan(self, number: int | None, fingerprint: str | None = None) -> BatchPlan:
        """Return what the tasks of batch `number` are told, whose input has `fingerprint`."""
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
        """Return what a task reports that has pre-committed the rows of `part`."""
        self.tasks += 1
        task_place = TaskIdentity(partition, task_attempt, self.tasks, plan.batch.number, self.run)
        report = write_task(plan, task_place, iter([self.rows_of(part)]))
        sent: TaskReport = pickle.loads(pickle.dumps(report))  # noqa: S301 - its own
        return sent

    def commit(self, reports: Sequence[TaskReport]) -> BatchDecision | None:
        """Decide and commit what the tasks have reported."""
        commits = self.commits()
        try:
            return commits.commit(reports)
        finally:
            commits.close()

    def abort(self, plan: BatchPlan | None = None) -> None:
        """Settle what is left of the batch of `plan`, or the one planned last, which has failed."""
        commits = self.commits()
        try:
            commits.abort(self.schema, plan.attempt if plan else None)
        finally:
            commits.close()

    def batch(self, number: int, *parts: RowsT, fingerprint: str | None = None) -> None:
        """Run one batch from its plan to its commit, a task for each of `parts`."""
        plan = self.plan(number, fingerprint)
        self.commit([self.task(plan, index, part) for index, part in enumerate(parts)])
