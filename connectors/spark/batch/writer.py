"""The writer of a DataFrame to a sink: all rows become visible at once, or none.

Spark plans in one Python process next to the driver, and commits in another, which gets the planned
writer. Modules that only these two need are imported there, not in tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.batch.commits import BatchCommits, BatchPlan
from onceflow.connectors.spark.batch.task_writer import write_task
from onceflow.connectors.spark.options.words import Speaker, in_option_words
from onceflow.connectors.spark.packages import Shipped
from onceflow.connectors.spark.streaming.writer import ReportMessage, reports_of, this_task
from onceflow.core import errors

if TYPE_CHECKING:
    from onceflow.connectors.spark.batch.identity import MakeSink, NamedTarget


class BatchWriter(Speaker, Shipped, DataSourceArrowWriter):
    """The writer that Spark calls. Pickles with the plan, and with the sink for the commit."""

    def __init__(self, named: NamedTarget, schema: pa.Schema, plan: BatchPlan) -> None:
        """Store the result of planning."""
        self._named = named
        self._schema = schema
        self._plan = plan

    @in_option_words
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        """Pre-commit the rows of one task. Runs on an executor."""
        return ReportMessage(write_task(self._plan, this_task(), iterator))

    @in_option_words
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Decide and commit all rows. Runs in a process next to the driver.

        If the process of a commit is killed, the commit is repeated.

        Raises:
            OnceflowError: See `BatchCommits.commit`.
        """
        from onceflow.connectors.spark.batch.commit_process import commit_in_process

        commit_in_process(lambda: self._commit(messages))

    @in_option_words
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit or roll back what is left. Runs next to the driver if a task or `commit` failed.

        Spark appends an error of this method to the error of `save`. So it raises nothing if
        `commit` has already reported the outcome and finished the batch itself.

        Raises:
            Fenced: Another run has claimed the sink id. The message names it.
            SinkError: All tasks succeeded, so `commit` failed or was killed. The message says
                whether the rows are written, and whether to repeat the write.
        """
        commits = _commits(self._named)
        try:
            # A task without a message has failed, so no commit was tried.
            if not messages or None in messages:
                self._abort(commits)
            # If this driver's claim follows that attempt, `_commit` made it. It has finished the
            # batch and reported the outcome.
            elif not commits.has_claimed_after(self._plan.attempt):
                raise _settle_failed_commit(commits, self._schema, self._plan)
        finally:
            commits.close()

    def _abort(self, commits: BatchCommits) -> None:
        try:
            commits.abort(self._schema, self._plan.attempt)
        except errors.Fenced as error:
            if self._plan.batch.source:
                raise
            raise _with_advice(error) from error

    def _commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        commits = _commits(self._named)
        try:
            commits.commit(reports_of(messages))
        except errors.Fenced as error:
            if self._plan.batch.source:
                raise
            raise _with_advice(error) from error
        except (errors.BadRow, errors.CommitFailed):
            # The error reports the batch's outcome. `abort` finds this claim, and adds no other
            # error.
            with suppress(errors.OnceflowError):
                commits.abort(self._schema, self._plan.attempt)
            raise
        finally:
            commits.close()


_LOOK_FIRST = (
    "Check the target before you repeat the write: a repetition writes all of its rows again."
    " With options txnAppId and txnVersion it would not"
)
_AT_ONCE = (
    "No row of this write is in the target: repeat it. Jobs that write to one table at the same"
    " time each need a txnAppId of their own, with txnVersion"
)


def _with_advice(error: errors.Fenced) -> errors.Fenced:
    """Return the error of an undecided write without a token, with advice to avoid it."""
    return errors.Fenced(f"{error}. {_AT_ONCE}")


def _settle_failed_commit(
    commits: BatchCommits, schema: pa.Schema, plan: BatchPlan
) -> errors.OnceflowError:
    """Commit or roll back a batch whose commit failed or was killed.

    Return an error with the outcome.

    Raises:
        CommitFailed: The batch is decided, but not completely committed.
        PreparedTransactionLost: The batch is decided, and some transactions are gone.
    """
    batch = plan.batch
    app = batch.source.rpartition("@")[0]
    token = f"txnAppId={app} and txnVersion={batch.number}"
    fenced: errors.Fenced | None = None
    try:
        try:
            # This claims first, so a commit that still runs elsewhere cannot decide afterwards.
            commits.abort(schema, plan.attempt)
        except errors.Fenced as error:
            fenced = error
        is_written = commits.is_decided(batch)
        if not is_written and commits.has_forgotten(batch, plan.attempt):
            return errors.SinkError(
                f"it is unknown whether {batch} is written: another run has written under this"
                f" sink id since. {_LOOK_FIRST}"
            )
    except (errors.CommitFailed, errors.PreparedTransactionLost):
        raise
    except (errors.SinkError, errors.StorageError, errors.CheckpointError) as error:
        advice = (
            f"Repeating the write with the same {token} is safe in any case" if app else _LOOK_FIRST
        )
        return errors.SinkError(f"it is unknown whether {batch} is written: {error}. {advice}")
    if is_written:
        advice = (
            f"Repeating the write with the same {token} is safe: it writes nothing"
            if app
            else "Do not repeat the write: without txnAppId and txnVersion its rows would be"
            " written again"
        )
        return errors.SinkError(
            f"{batch} is completely written, although Spark has received no confirmation. {advice}"
        )
    if fenced is not None:
        return fenced if plan.batch.source else _with_advice(fenced)
    return errors.SinkError(
        f"{batch} is not written: its commit failed before the decision. No row of it is visible"
        " or in doubt in the target. Repeat the write"
    )


def batch_writer(
    make_sink: MakeSink, options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> BatchWriter:
    """Return the writer of a DataFrame. Runs where Spark plans.

    Raises:
        ConfigError: The DataFrame cannot be written to the target. The message says what to change.
        OnceflowError: See `BatchCommits.plan`.
    """
    from onceflow.connectors.spark.batch.identity import (
        check_replaces,
        has_staging,
        replace_rows,
        write_target,
    )

    mode = "mode('overwrite')"
    if overwrite:
        # Check the options before a server is asked, which may be down.
        check_replaces(make_sink(options), mode, is_staged=has_staging(options))
    named, number = write_target(make_sink, options)
    if overwrite:
        named = replace_rows(named, mode)
    rows = arrow_schema(schema)
    if named.noted is not None:
        named.noted.require()
    commits = _commits(named)
    try:
        return BatchWriter(named, rows, commits.plan(rows, number))
    finally:
        commits.close()


def _commits(named: NamedTarget) -> BatchCommits:
    from onceflow.connectors.spark.batch.decision_keepers import resolve_keeper

    return BatchCommits(*resolve_keeper(named))
