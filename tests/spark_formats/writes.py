"""`DataFrame.write` step by step, as Spark calls a format's writer, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import cloudpickle
from tests.spark_formats.batches import SCHEMA, rows

from onceflow.connectors.spark.arrow_rows import spark_schema
from onceflow.connectors.spark.batch.commits import BatchPlan
from onceflow.connectors.spark.batch.identity import MakeSink
from onceflow.connectors.spark.batch.task_writer import TaskIdentity, write_task
from onceflow.connectors.spark.batch.writer import BatchWriter, batch_writer
from onceflow.connectors.spark.streaming.writer import ReportMessage


class Write:
    """One `save`, planned; its tasks run in `write`."""

    def __init__(self, make_sink: MakeSink, options: Mapping[str, str]) -> None:
        planned = batch_writer(make_sink, options, spark_schema(SCHEMA), overwrite=False)
        # Spark sends it to the process that commits.
        self.writer = cast("BatchWriter", cloudpickle.loads(cloudpickle.dumps(planned)))
        self.messages: list[ReportMessage | None] = []

    @property
    def plan(self) -> BatchPlan:
        return self.writer._plan  # pyright: ignore[reportPrivateUsage]

    def write(self, *parts: Iterable[int], task_attempt: int = 0) -> None:
        """Run a task for each of `parts`, each as its try number `task_attempt`.

        Raises:
            Exception: What a task or the abort after it has raised.
        """
        self.messages = [None for _ in parts]
        try:
            for index, part in enumerate(parts):
                place = TaskIdentity(index, task_attempt, len(parts) * task_attempt + index)
                report = write_task(self.plan, place, iter([rows(part)]))
                self.messages[index] = ReportMessage(report)
        except Exception as error:
            self._abort(error)

    def commit(self) -> None:
        """Commit what the tasks have written; as Spark, abort where that fails.

        Raises:
            Exception: What commit or abort has raised.
        """
        try:
            self.writer.commit(self.messages)
        except Exception as error:
            self._abort(error)

    def commit_alone(self) -> None:
        """Commit in this process, which nobody repeats when it is killed."""
        self.writer._commit(self.messages)  # pyright: ignore[reportPrivateUsage]

    def _abort(self, cause: Exception) -> None:
        try:
            self.writer.abort(self.messages)
        except Exception as error:
            raise error from cause
        raise cause


def save(make_sink: MakeSink, options: Mapping[str, str], *parts: Iterable[int]) -> None:
    """Write rows as `DataFrame.write` does, a task for each of `parts`."""
    one = Write(make_sink, options)
    one.write(*parts)
    one.commit()


def save_alone(make_sink: MakeSink, options: Mapping[str, str], *parts: Iterable[int]) -> None:
    """Write rows as `save` does, in one process that may be killed anywhere."""
    one = Write(make_sink, options)
    one.write(*parts)
    one.commit_alone()
