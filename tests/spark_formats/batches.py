"""Batches as Spark runs them, without Spark: plan, tasks, commit, abort, each by its own process.

What planning and commit keep is made anew for each step, as after a crash.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
from onceflow.core.protocol.batches import BatchDecision

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("part", pa.int32())])


def rows(ids: Iterable[int], part: int) -> pa.RecordBatch:
    listed = list(ids)
    return pa.RecordBatch.from_arrays(
        [pa.array(listed, pa.int64()), pa.array([part] * len(listed), pa.int32())], schema=SCHEMA
    )


@dataclass
class Driver:
    """One driver of a job, as its planning and commit processes do their steps."""

    target: BatchTarget
    directory: str | None = None
    run: str = "run-1"
    tasks: int = 0

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
        report = write_task(plan, place, iter([rows(ids, partition)]))
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
