"""For sinks of your own into targets that cannot prepare: rows wait in checkpoint storage.

    pre_commit   rows → checkpoint storage, durable under the transaction's name
    commit       rows + proof → target, in one transaction of the target's own; then the rows go

What is left to write is how the target takes rows with a proof, and how it is asked for the proof.
The proof is a row, record or key that holds the transaction's name and becomes visible if and only
if the rows do. A target that takes an idempotency key keeps the proof itself.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.core.crash_points import reach
from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed, SinkError, StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import (
    Committer,
    CommitterContext,
    OnBadRow,
    RejectedRows,
    Sink,
    SinkWriter,
    WriterContext,
)
from onceflow.core.staging import StagingArea, staged_committable

_logger = logging.getLogger("onceflow.sinks.staged")


class StagedSink(Sink):
    """A sink whose target takes rows and their proof in one step, or not at all.

    Pickled by value: holds settings and no open resource. Every call may come from any process and
    thread, at any time, also twice at once.
    """

    @abstractmethod
    def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        """Make `rows` and the proof of `transaction` visible and durable at once; return True.

        Returns False, and changes nothing, when the proof is there already: also when another
        process applies the same transaction at this moment. A crash in it leaves all or nothing.

        Raises:
            SinkError: The target refused, or did not answer; it is asked again later.
        """

    @abstractmethod
    def is_applied(self, transaction: TransactionId) -> bool:
        """Return whether the target holds the proof of `transaction`.

        Raises:
            SinkError: The target cannot be asked now.
        """

    def forget(self, sink_id: str, before: CheckpointId) -> None:
        """Delete the proofs of a sink id's checkpoints before `before`; nobody asks for them.

        Raises:
            SinkError: They are still there, which does no harm.
        """

    def refusals(self, rows: pa.RecordBatch) -> Mapping[int, str]:
        """Return, by row, why the target can never take it; empty when it can take all.

        What is found only by `apply` is found too late: the rows are decided by then.
        """
        del rows
        return {}

    @override
    def writer(self, context: WriterContext) -> SinkWriter:
        return StagedWriter(self, context)

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return StagedCommitter(self, context)


class StagedWriter(SinkWriter):
    """Stages the rows of each checkpoint."""

    def __init__(self, sink: StagedSink, context: WriterContext) -> None:
        """Begin with no rows."""
        self._sink = sink
        self._context = context
        self._staging = _required(context.staging, context.sink_id)
        self._rows = self._staging.open()
        self._rejected: list[RejectedRows] = []

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        refusals = self._sink.refusals(batch)
        if refusals:
            batch = self._accepted(batch, refusals)
        if batch.num_rows:
            self._rows.write(batch)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        if not self._rows.rows:
            return None
        it = self._context
        transaction = TransactionId(it.sink_id, it.attempt, checkpoint, it.subtask)
        reach("flushed")
        try:
            committable = self._rows.seal(transaction)
        except StorageError as error:
            self.close()
            raise PreCommitFailed(f"checkpoint {checkpoint} is not staged: {error}") from error
        self._rows.close()
        self._rows = self._staging.open()
        return committable

    @override
    def rejected(self) -> Sequence[RejectedRows]:
        rejected, self._rejected = self._rejected, []
        return rejected

    @override
    def close(self) -> None:
        self._rows.close()

    def _accepted(self, batch: pa.RecordBatch, refusals: Mapping[int, str]) -> pa.RecordBatch:
        bad = sorted(refusals)
        if self._context.on_bad_row is OnBadRow.FAIL:
            raise BadRow(f"sink {self._context.sink_id}: row {bad[0]}: {refusals[bad[0]]}")
        rows = batch.take(pa.array(bad, pa.int64()))
        self._rejected.append(RejectedRows(rows, [refusals[row] for row in bad]))
        keep = [row not in refusals for row in range(batch.num_rows)]
        return batch.filter(pa.array(keep, pa.bool_()))


class StagedCommitter(Committer):
    """Applies what writers staged, once.

    Commit and abort of one transaction at one moment are not kept apart; the engine, which decides
    one or the other, never calls both.
    """

    def __init__(self, sink: StagedSink, context: CommitterContext) -> None:
        """Connect to nothing."""
        self._sink = sink
        self._sink_id = context.sink_id
        self._staging = _required(context.staging, context.sink_id)

    @override
    def commit(self, committable: Committable) -> CommitOutcome:
        transaction = committable.transaction
        try:
            # Staged rows first, then the proof: rows go only after the proof has come.
            rows = self._staging.read(transaction)
            if rows is None:
                applied = self._sink.is_applied(transaction)
                return AlreadyCommitted() if applied else _lost(transaction)
            try:
                applied = self._sink.apply(transaction, (batch for _, batch in rows))
            finally:
                # Only at its end is the file closed that they are read from.
                deque(rows, maxlen=0)
        except (SinkError, StorageError) as error:
            return RetryLater(str(error))
        self._discard_quietly(transaction)
        return Committed() if applied else AlreadyCommitted()

    @override
    def abort(self, committable: Committable) -> AbortOutcome:
        transaction = committable.transaction
        try:
            applied = self._sink.is_applied(transaction)
            self._staging.discard(transaction)
        except (SinkError, StorageError) as error:
            return RetryLater(str(error))
        return AlreadyCommitted() if applied else Aborted()

    @override
    def in_doubt(self) -> Sequence[Committable]:
        # What is applied and still staged was committed by somebody who died before the last step.
        return [
            staged_committable(transaction)
            for transaction in self._staging.transactions()
            if not self._sink.is_applied(transaction)
        ]

    @override
    def prune(self, before: CheckpointId) -> None:
        try:
            # Whoever applied a transaction may have died before it discarded what was staged.
            for transaction in self._staging.transactions():
                if transaction.checkpoint < before and self._sink.is_applied(transaction):
                    self._staging.discard(transaction)
            self._sink.forget(self._sink_id, before)
        except (SinkError, StorageError) as error:
            _logger.warning("sink %s: old proofs are not deleted: %s", self._sink_id, error)

    @override
    def close(self) -> None:
        """Release nothing: no connection outlives a call."""

    def _discard_quietly(self, transaction: TransactionId) -> None:
        try:
            self._staging.discard(transaction)
        except StorageError as error:
            # `prune` does it, before it deletes the proof.
            _logger.warning("transaction %s is committed and still staged: %s", transaction, error)


def _lost(transaction: TransactionId) -> Lost:
    return Lost(
        f"the rows of transaction {transaction} are not in checkpoint storage any more, and the "
        "target has no proof that they were applied: somebody deleted them, or the proof"
    )


def _required(staging: StagingArea | None, sink_id: str) -> StagingArea:
    if staging is None:
        raise ConfigError(f"sink {sink_id} needs checkpoint storage in which rows can be staged")
    return staging
