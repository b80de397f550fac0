"""`foreachBatch` step by step, as its function works, in this process."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from tests.spark_formats.batches import SCHEMA, rows

from onceflow.connectors.spark.batch.commits import BatchCommits, BatchPlan, TaskReport
from onceflow.connectors.spark.batch.sink_group import group_schema
from onceflow.connectors.spark.batch.task_writer import TaskIdentity, write_task
from onceflow.connectors.spark.streaming.foreach_batch import (
    _ForeachBatch,  # pyright: ignore[reportPrivateUsage]
    foreach_batch,
)
from onceflow.core.spi import Sink


class ForeachRun:
    """One micro-batch into several sinks under one decision, planned, with the steps of `Write`.

    The function's connections stay from the plan to the commit; tasks get their plan pickled.
    """

    def __init__(self, sinks: Mapping[str, Sink], checkpoint: Path, number: int) -> None:
        made = foreach_batch(sinks, lambda _, __: {}, checkpoint_location=str(checkpoint))
        self._function = cast("_ForeachBatch", made)
        self._schema = group_schema(dict.fromkeys(sinks, SCHEMA))
        _, self.plan = self._function._plan(  # pyright: ignore[reportPrivateUsage]
            self._schema, number, f"offsets of {number}"
        )
        self._reports: list[TaskReport] = []

    def write(self, *parts: Iterable[int], task_attempt: int = 0) -> None:
        """Run a task for each of `parts` and each sink, each as its try number `task_attempt`."""
        with self._aborted_if_it_fails():
            self._reports = [
                self._run_task(sink, index, part, task_attempt, len(parts))
                for sink in range(len(self._function.sinks))
                for index, part in enumerate(parts)
            ]

    def commit(self) -> None:
        """Commit what the tasks have written."""
        with self._aborted_if_it_fails():
            self.commit_alone()

    def commit_alone(self) -> None:
        """Commit, and leave what fails to the next run."""
        self._function._commit(self._commits, self._reports)  # pyright: ignore[reportPrivateUsage]

    @contextmanager
    def _aborted_if_it_fails(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception:
            self._commits.abort(self._schema, self.plan.attempt)
            raise

    def _run_task(
        self, sink: int, index: int, part: Iterable[int], task_attempt: int, parts: int
    ) -> TaskReport:
        sinks = list(self._function.sinks)
        plan = self._part(sinks[sink], sink)
        task_id = parts * len(sinks) * task_attempt + index * len(sinks) + sink
        place = TaskIdentity(index, task_attempt, task_id, plan.batch.number, "run-1")
        report = write_task(plan, place, iter([rows(part)]))
        return cast("TaskReport", pickle.loads(pickle.dumps(report)))

    def _part(self, name: str, index: int) -> BatchPlan:
        part = self._function._part(self.plan, name, index)  # pyright: ignore[reportPrivateUsage]
        return cast("BatchPlan", pickle.loads(pickle.dumps(part)))

    @property
    def _commits(self) -> BatchCommits:
        commits = self._function._commits  # pyright: ignore[reportPrivateUsage]
        assert commits is not None, "it was unpickled, and only plans and commits connect"
        return commits
