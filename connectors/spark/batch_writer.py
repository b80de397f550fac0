"""A sink as the writer of a DataFrame: all of its rows are visible at once, or none.

Spark plans in one Python process beside the driver and commits in another, to which it hands the
writer that was planned. What only these two need is imported there, not in tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.batch_commits import BatchCommits, BatchPlan
from onceflow.connectors.spark.option_words import Speaker, in_option_words
from onceflow.connectors.spark.packages import Shipped
from onceflow.connectors.spark.stream_writer import ReportMessage, reports_of, task_place
from onceflow.connectors.spark.task_writer import write_task

if TYPE_CHECKING:
    from onceflow.connectors.spark.batch_identity import MakeSink, NamedTarget


class BatchWriter(Speaker, Shipped, DataSourceArrowWriter):
    """What Spark asks for. Pickles with the plan, and with the sink for the commit."""

    def __init__(self, named: NamedTarget, schema: pa.Schema, plan: BatchPlan) -> None:
        """Take what planning has planned."""
        self._named = named
        self._schema = schema
        self._plan = plan

    @in_option_words
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        """Pre-commit the rows of one task. Runs on an executor."""
        return ReportMessage(write_task(self._plan, task_place(), iterator))

    @in_option_words
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Decide and commit all of it. Runs beside the driver."""
        commits = _commits(self._named)
        try:
            commits.commit(reports_of(messages))
        finally:
            commits.close()

    @in_option_words
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Settle what is left. Runs beside the driver, when a task or `commit` has failed."""
        del messages
        commits = _commits(self._named)
        try:
            commits.abort(self._schema, self._plan.attempt)
        finally:
            commits.close()


def batch_writer(
    make_sink: MakeSink, options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> BatchWriter:
    """Return the writer of a DataFrame. Runs where Spark plans.

    Raises:
        ConfigError: It cannot be written there; says what mends it.
        OnceflowError: As `BatchCommits.plan`.
    """
    from onceflow.connectors.spark.batch_identity import write_target
    from onceflow.connectors.spark.replaced_tables import replace_rows

    named, number = write_target(make_sink, options)
    if overwrite:
        named = replace_rows(named, "mode('overwrite')")
    rows = arrow_schema(schema)
    if named.noted is not None:
        named.noted.require()
    commits = _commits(named)
    try:
        return BatchWriter(named, rows, commits.plan(rows, number))
    finally:
        commits.close()


def _commits(named: NamedTarget) -> BatchCommits:
    from onceflow.connectors.spark.decision_keepers import kept_target

    return BatchCommits(*kept_target(named))
