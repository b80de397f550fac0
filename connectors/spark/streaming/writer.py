"""The writer of a streaming query to a sink: each micro-batch becomes visible as a whole, once.

Spark creates the writer again for every batch: in a Python process next to the driver that plans,
and in another one that commits. Spark uses both processes for the next batch, too. So each process
keeps connections and other objects from batch to batch, in `_KEPT`. Tasks import this module, too,
so modules for planning and committing are imported inside functions.
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
from onceflow.core.errors import ConfigError, Fenced

if TYPE_CHECKING:
    from onceflow.connectors.spark.batch.identity import MakeSink
    from onceflow.connectors.spark.streaming.checkpoint_location import (
        CheckpointLocation,
        QueryRuns,
    )
    from onceflow.connectors.spark.streaming.noted_sinks import NotedSinks

_BATCH_ID = "streaming.sql.batchId"
_QUERY_RUN = "spark.jobGroup.id"
_KEPT: dict[str, _KeptQuery] = {}
"""The kept objects by the query's id."""
_KEPT_MAX = 8
"""The maximum number of queries in one process of Spark, each with two connections."""


@dataclass(frozen=True)
class ReportMessage(WriterCommitMessage):
    """A task's report, as Spark carries it."""

    report: TaskReport


@dataclass(frozen=True, slots=True)
class _KeptQuery:
    """The objects that a process next to the driver keeps for a query from batch to batch."""

    options: bytes
    commits: BatchCommits
    sinks: NotedSinks
    runs: QueryRuns


class BatchStreamWriter(Speaker, Shipped, DataSourceStreamWriter, DataSourceArrowWriter):
    """The writer that Spark calls.

    It takes Arrow batches, even in Spark 4.0, which has no class for it.
    """

    def __init__(self, query: _KeptQuery, schema: pa.Schema, plan: BatchPlan | None) -> None:
        """Store the result of planning; None in the process where Spark commits or aborts."""
        self._query = query
        self._schema = schema
        self._plan = plan

    def attributes_to_ship(self) -> dict[str, object]:
        """Return the plan for tasks, without any connection."""
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
        """Decide and commit the batch. Runs in a process next to the driver."""
        del batchId
        reports = reports_of(messages)
        self._query.sinks.note(reports)
        self._query.commits.commit(reports)

    @in_option_words
    def abort(  # type: ignore[override]
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        """Commit or roll back what a failed task or `commit` left. Runs next to the driver."""
        del messages, batchId
        self._query.commits.abort(self._schema)


def make_planned_writer(
    make_sink: MakeSink, options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> BatchStreamWriter:
    """Return the writer of the batch that Spark is about to run. Runs where Spark plans.

    Raises:
        ConfigError: The query cannot write to the target. The message says what to change.
        OnceflowError: See `BatchCommits.plan`.
    """
    query, location = _keep_query(make_sink, options, overwrite=overwrite)
    rows = arrow_schema(schema)
    planned = location.read_planned_batch()
    if not query.commits.has_claimed:
        query.runs.require_newest()
        location.require_not_done(planned)
    # Check this before the claim: a refused target must not get a record of the query.
    query.sinks.require()
    try:
        plan = query.commits.plan(rows, planned.number, planned.fingerprint)
    except Fenced:
        query.runs.forget()
        raise
    return BatchStreamWriter(query, rows, plan)


def committing_writer(
    make_sink: MakeSink, options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> BatchStreamWriter:
    """Return the writer with which Spark commits or aborts a planned batch."""
    query, _ = _keep_query(make_sink, options, overwrite=overwrite)
    return BatchStreamWriter(query, arrow_schema(schema), plan=None)


def reports_of(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    """Return the reports of the tasks, all of which have succeeded."""
    reports: list[TaskReport] = []
    for message in messages:
        assert isinstance(message, ReportMessage), message
        reports.append(message.report)
    return reports


def this_task() -> TaskIdentity:
    """Return the identity of the task that this process runs now."""
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


def _keep_query(
    make_sink: MakeSink, options: Mapping[str, str], *, overwrite: bool
) -> tuple[_KeptQuery, CheckpointLocation]:
    from onceflow.connectors.spark.batch.decision_keepers import resolve_keeper
    from onceflow.connectors.spark.batch.identity import replace_rows, stream_target
    from onceflow.connectors.spark.streaming.checkpoint_location import (
        CheckpointLocation,
        QueryRuns,
    )
    from onceflow.connectors.spark.streaming.noted_sinks import NotedSinks

    checkpoint = options.get("checkpointlocation")
    if not checkpoint:
        raise ConfigError(
            "option checkpointLocation is missing: give it to this query by"
            " .option('checkpointLocation', …). It identifies the query. Spark does not pass"
            " the session's spark.sql.streaming.checkpointLocation on to formats"
        )
    location = CheckpointLocation(checkpoint)
    query_id = location.query_id()
    given = pickle.dumps((sorted(options.items()), overwrite))
    query = _KEPT.get(query_id)
    if query is not None and query.options != given:
        # The query was started again with other options, so its targets must be checked again.
        _KEPT.pop(query_id).commits.close()
        query = None
    if query is None:
        named = stream_target(make_sink, options, location)
        if overwrite:
            named = replace_rows(named, "outputMode('complete')")
        commits = BatchCommits(*resolve_keeper(named))
        runs = QueryRuns(location.url, commits.target.driver)
        query = _KeptQuery(given, commits, NotedSinks(location.url, commits.target), runs)
        # Remove the oldest. If its query is still running, its next batch connects again.
        if len(_KEPT) == _KEPT_MAX:
            _KEPT.pop(next(iter(_KEPT))).commits.close()
        _KEPT[query_id] = query
    return query, location
