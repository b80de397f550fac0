"""A sink as the writer of a streaming query: each micro-batch is visible as a whole, once.

Spark builds the writer anew for every batch, in a Python process beside the driver that plans, and
once more in another one that commits; both are used again for the next batch. So each keeps what
it needs from batch to batch, connections above all, in `_KEPT`. Tasks import this module, too: what
only planning and committing need is imported there.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.batch.commits import BatchCommits, BatchPlan, TaskReport
from onceflow.connectors.spark.batch.task_writer import TaskIdentity, write_task
from onceflow.connectors.spark.options.words import Speaker, in_option_words
from onceflow.connectors.spark.packages import Shipped
from onceflow.core.errors import ConfigError

if TYPE_CHECKING:
    from onceflow.connectors.spark.batch.identity import MakeSink
    from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation

_BATCH_ID = "streaming.sql.batchId"
_QUERY_RUN = "spark.jobGroup.id"
_KEPT: dict[bytes, BatchCommits] = {}
_KEPT_MAX = 8
"""Queries that share a process of Spark's, each with two connections."""


@dataclass(frozen=True)
class ReportMessage(WriterCommitMessage):
    """A task's report, as Spark carries it."""

    report: TaskReport


class BatchStreamWriter(Speaker, Shipped, DataSourceStreamWriter, DataSourceArrowWriter):
    """What Spark asks for. Takes Arrow batches, in Spark 4.0 too, which knows no class for it."""

    def __init__(self, commits: BatchCommits, schema: pa.Schema, plan: BatchPlan | None) -> None:
        """Take what planning has planned; None where Spark commits or aborts."""
        self._commits = commits
        self._schema = schema
        self._plan = plan

    def attributes_to_ship(self) -> dict[str, object]:
        """Give tasks the plan, and no connection."""
        return {"_plan": self._plan, "words": self.words}

    @in_option_words
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        """Pre-commit the rows of one task. Runs on an executor."""
        assert self._plan is not None
        return ReportMessage(write_task(self._plan, this_task(), iterator))

    @in_option_words
    def commit(  # type: ignore[override]
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        """Decide and commit the batch. Runs beside the driver."""
        del batchId
        self._commits.commit(reports_of(messages))

    @in_option_words
    def abort(  # type: ignore[override]
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        """Settle what is left. Runs beside the driver, when a task or `commit` has failed."""
        del messages, batchId
        self._commits.abort(self._schema)


def make_planned_writer(
    make_sink: MakeSink, options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> BatchStreamWriter:
    """Return the writer of the batch that Spark is about to run. Runs where Spark plans.

    Raises:
        ConfigError: The query cannot write there; says what mends it.
        OnceflowError: As `BatchCommits.plan`.
    """
    commits, location = _stream_commits(make_sink, options, overwrite=overwrite)
    rows = arrow_schema(schema)
    planned = location.read_planned_batch()
    plan = commits.plan(rows, planned.number, planned.fingerprint)
    return BatchStreamWriter(commits, rows, plan)


def committing_writer(
    make_sink: MakeSink, options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> BatchStreamWriter:
    """Return the writer with which Spark commits or aborts the batch that was planned."""
    commits, _ = _stream_commits(make_sink, options, overwrite=overwrite)
    return BatchStreamWriter(commits, arrow_schema(schema), plan=None)


def reports_of(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    """Return what the tasks reported, which all have ended well."""
    reports: list[TaskReport] = []
    for message in messages:
        assert isinstance(message, ReportMessage), message
        reports.append(message.report)
    return reports


def this_task() -> TaskIdentity:
    """Return which task this process runs now."""
    context = TaskContext.get()
    assert context is not None, "not in a task"
    batch = context.getLocalProperty(_BATCH_ID)
    return TaskIdentity(
        context.partitionId(),
        context.attemptNumber(),
        context.taskAttemptId(),
        int(batch) if batch else None,
        (context.getLocalProperty(_QUERY_RUN) or "") if batch else "",
    )


def _stream_commits(
    make_sink: MakeSink, options: Mapping[str, str], *, overwrite: bool
) -> tuple[BatchCommits, CheckpointLocation]:
    from onceflow.connectors.spark.batch.decision_keepers import resolve_keeper
    from onceflow.connectors.spark.batch.identity import stream_target
    from onceflow.connectors.spark.batch.replaced_tables import replace_rows
    from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation

    given = options.get("checkpointlocation")
    if not given:
        raise ConfigError(
            "option checkpointLocation is missing: give it to this query by"
            " .option('checkpointLocation', …). It names the query. Spark does not pass the"
            " session's spark.sql.streaming.checkpointLocation on to formats"
        )
    location = CheckpointLocation(given)
    # With the options: a query that was started again with other ones gets connections of its own.
    key = pickle.dumps((location.query_id(), sorted(options.items()), overwrite))
    commits = _KEPT.get(key)
    if commits is None:
        named = stream_target(make_sink, options, location)
        if overwrite:
            named = replace_rows(named, "outputMode('complete')")
        commits = BatchCommits(*resolve_keeper(named))
        # The oldest goes; if its query still runs, its next batch connects anew.
        if len(_KEPT) == _KEPT_MAX:
            _KEPT.pop(next(iter(_KEPT))).close()
        _KEPT[key] = commits
    return commits, location
