"""The work of one task: it pre-commits its rows in its own transaction, or drops them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from onceflow.connectors.spark.batch.commits import BatchPlan, BatchTarget, TaskReport
from onceflow.connectors.spark.reused_worker import spare_imports
from onceflow.connectors.spark.streaming.checkpoint_location import MICRO_BATCHES_ONLY
from onceflow.core import errors
from onceflow.core.crash_points import reach
from onceflow.core.protocol.batches import find_prepared_twin, task_checkpoint
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.spi.dead_letters import DEAD_LETTERS, batch_of_letters, letters_of_rows
from onceflow.core.spi.staging import is_staged
from onceflow.core.traces import Trace

_log = logging.getLogger("onceflow.spark")


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """The identity of a task, as Spark knows it."""

    partition: int
    task_attempt: int
    """The number of this try of the partition, within one try of the stage."""
    task_id: int
    """The id of the task, which is unique in the application."""
    batch: int | None = None
    """The micro-batch of the task; None outside of queries."""
    run: str = ""
    """The run of the query; empty outside of queries."""


def write_task(
    plan: BatchPlan, task: TaskIdentity, batches: Iterator[pa.RecordBatch]
) -> TaskReport:
    """Pre-commit the rows of `batches`, or drop them if `plan` says that the batch is decided.

    Pre-committed rows survive any crash, and are not visible yet. Runs in the task. After a crash,
    the next attempt rolls back what was left. All rows are read in any case, because earlier steps
    in the same task keep state that is complete only then.

    Raises:
        BadRow: A row does not fit the target.
        ConfigError: The plan is for another batch, or this write is repeated in one run.
        PreparedLimitReached: The server cannot prepare the rows, and there is no place to stage
            them.
        SinkError: Nothing is pre-committed, or the next attempt rolls it back.
    """
    _require_planned(plan, task)
    task = replace(task, partition=plan.transaction_number(task.partition))
    report = TaskReport(
        plan.batch, plan.attempt, task.partition, plan.fingerprint, task.run, dropped=plan.decided
    )
    if plan.decided:
        # Read to the end even so: Spark expects that a task consumes its rows.
        return replace(report, rows=sum(batch.num_rows for batch in batches))
    # Empty batches are dropped, so a task without rows opens no connection.
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        return report
    checkpoint = task_checkpoint(plan.attempt, task.task_attempt, task.task_id)
    # Look for it before the writer would wait: a prepared transaction of a lost try locks its rows.
    twin = _find_prepared_twin(plan.target, plan, task)
    target = plan.target if twin is None else _to_staging(plan.target)
    writer = _open_writer(target, _context(target, plan, task, checkpoint, first.schema))
    letters = _Letters(plan, task, checkpoint)
    try:
        count = 0
        batch: pa.RecordBatch | None = first
        while batch is not None:
            writer.write(batch)
            reach("write")
            letters.take(writer.take_rejected())
            count += batch.num_rows
            batch = next(rows, None)
        committables = tuple(writer.pre_commit(checkpoint))
        letters.take(writer.take_rejected())
        # Do this after the second `take`: the pre-commit of the rows may reject some, too.
        committables += letters.pre_commits()
        Trace(plan.traced_as, plan.attempt, task.partition).record(
            "prepared", checkpoint=checkpoint, transactions=(c.transaction for c in committables)
        )
        reach("prepared")
    except errors.SinkError as error:
        advice = _advice(error, plan.target, task, twin)
        if not advice:
            raise
        raise errors.PreCommitFailed(f"{error}. {advice}") from error
    finally:
        writer.close()
        letters.close()
    spare_imports()
    return TaskReport(
        report.batch,
        report.attempt,
        report.partition,
        report.fingerprint,
        report.run,
        rows=count,
        committables=committables,
        beside="" if twin is None else str(twin.transaction),
    )


def _find_prepared_twin(
    target: BatchTarget, plan: BatchPlan, task: TaskIdentity
) -> Committable | None:
    """Return the prepared transaction of an earlier try of this partition, or None.

    Such a transaction locks its rows. Its report was lost with its process, or is still being sent.
    A first try does not ask.
    """
    # Only a failed try can have left a transaction, so a first try saves the connection.
    if task.task_attempt == 0 or target.sink.to_staging() is None:
        return None
    committer = target.sink.committer(target.committer_context(plan.attempt))
    try:
        return find_prepared_twin(
            committer.in_doubt(),
            sink_id=target.sink_id,
            attempt=plan.attempt,
            partition=task.partition,
            staged=is_staged,
        )
    finally:
        committer.close()


def _to_staging(target: BatchTarget) -> BatchTarget:
    """Return the target with staged instead of prepared rows; unchanged if it cannot stage."""
    sink = target.sink.to_staging()
    return target if target.staging is None or sink is None else replace(target, sink=sink)


def _open_writer(target: BatchTarget, context: WriterContext) -> SinkWriter:
    """Return a writer. If the server has no room to prepare its rows, the writer stages them.

    Raises:
        PreparedLimitReached: No option names a place to stage rows.
    """
    try:
        return target.sink.writer(context)
    except errors.PreparedLimitReached as error:
        if target.staging is None:
            coalesce = f"; or write fewer partitions: .coalesce({error.room})" if error.room else ""
            raise errors.PreparedLimitReached(
                f"{error}. Give option stagingLocation, a directory or the URL of a bucket that"
                f" driver and executors see: rows of further partitions wait there{coalesce}; or"
                " raise max_prepared_transactions and restart the server",
                room=error.room,
            ) from None
        _log.info("%s; its rows are staged", error)
        return _to_staging(target).sink.writer(context)


def _advice(
    error: errors.SinkError, target: BatchTarget, task: TaskIdentity, twin: Committable | None
) -> str:
    """Return advice for `error` if the task may have waited for another task's locks, else ""."""
    if isinstance(error, errors.BadRow):
        return ""
    if twin is not None:
        return (
            f"An earlier task of partition {task.partition} has prepared its rows as"
            f" {twin.transaction}, and this task waits for their locks. The next run rolls that"
            " transaction back. With option stagingLocation, a directory or bucket URL that"
            " driver and executors share, a repeated task does not wait"
        )
    key = target.sink.routing_key()
    if not key or not _is_lock_timeout(error):
        return ""
    return (
        f"Two tasks of a batch have rows of the same {', '.join(key)}: the second task waits for"
        " the transaction that the first one has prepared. Bring the rows together by"
        f" .repartition({', '.join(map(repr, key))}) before the write, or use"
        " connectors.foreach_batch, which does so"
    )


def _is_lock_timeout(error: errors.SinkError) -> bool:
    # Import it only here: other sinks must not load what databases need.
    from onceflow.clients.sql.session import LockTimeout

    return isinstance(error.__cause__, LockTimeout)


def _context(
    target: BatchTarget,
    plan: BatchPlan,
    task: TaskIdentity,
    checkpoint: CheckpointId,
    schema: pa.Schema,
) -> WriterContext:
    return WriterContext(
        job=target.owner,
        uid=target.sink_id,
        sink_id=target.sink_id,
        subtask=task.partition,
        # Python tasks do not know the number of partitions; this is the minimum.
        parallelism=task.partition + 1,
        attempt=plan.attempt,
        first_checkpoint=checkpoint,
        schema=schema,
        staging=target.staging,
        on_bad_row=target.on_bad_row,
        checkpoints_at_once=1,
    )


def _require_planned(plan: BatchPlan, task: TaskIdentity) -> None:
    batch = plan.batch
    if plan.fingerprint:
        # A query's own batch.
        if task.batch is None:
            raise errors.ConfigError(
                f"sink id {plan.target.sink_id!r}: {batch} was planned, but the task belongs to"
                f" no micro-batch. {MICRO_BATCHES_ONLY}"
            )
        if task.batch != batch.number:
            raise errors.ConfigError(
                f"sink id {plan.target.sink_id!r}: {batch} was planned, but the task belongs to"
                f" batch {task.batch}: another query uses the same checkpointLocation. Give each"
                " query its own"
            )
        return
    if plan.decided and task.run and task.run == plan.decided_by:
        raise errors.ConfigError(
            f"sink id {plan.target.sink_id!r}: the same run of the query has already written"
            f" {batch}. Two writes in one batch need different names (txnAppId, or sinkId)"
        )


class _Letters:
    """The rows that the sink of one task rejects.

    They are dropped and counted, or written as dead letters.
    """

    def __init__(self, plan: BatchPlan, task: TaskIdentity, checkpoint: CheckpointId) -> None:
        """Prepare without a connection. The first letter opens it."""
        self._plan = plan
        self._task = task
        self._checkpoint = checkpoint
        self._writer: SinkWriter | None = None

    def take(self, rejected: Sequence[RejectedRows]) -> None:
        """Write the rejected rows as dead letters, or log their number."""
        target = self._plan.dead_letters
        for rejection in rejected:
            if target is None:
                _log.warning(
                    "sink %s: %s: %d bad rows dropped, the first: %s",
                    self._plan.target.sink_id,
                    self._plan.batch,
                    rejection.rows.num_rows,
                    rejection.reasons[0],
                )
                continue
            if self._writer is None:
                # The letters have their own transaction and number; see
                # `BatchPlan.transaction_number`.
                task = replace(self._task, partition=self._task.partition + 1)
                context = _context(target, self._plan, task, self._checkpoint, DEAD_LETTERS)
                self._writer = _open_writer(target, context)
            letters = letters_of_rows(rejection.rows, rejection.reasons)
            self._writer.write(batch_of_letters(self._plan.target.sink_id, letters))

    def pre_commits(self) -> tuple[Committable, ...]:
        """Return the transactions that make the letters visible together with the rows."""
        return () if self._writer is None else tuple(self._writer.pre_commit(self._checkpoint))

    def close(self) -> None:
        """Close the letters' writer."""
        if self._writer is not None:
            self._writer.close()
