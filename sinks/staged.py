"""Base classes of your own sinks into targets that cannot prepare: rows wait in storage.

    pre_commit   rows → checkpoint storage, durable under the transaction's name
    commit       rows + proof → target, in one transaction of the target's own; then the rows go
    prune        floor → target, and the proofs below it go, in one transaction

What is left to write is how the target takes rows with a proof, and how it is asked for the proof.
The proof is a row, record or key that holds the transaction's name and becomes visible if and only
if the rows do. A target that takes an idempotency key keeps the proof itself.

A committer may be held up at any moment, while another one commits the same transaction, discards
its rows and prunes; what it sends arrives when no proof is in its way any more. The floor is:
nothing below it is applied. What is still to be committed is not below it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.core.errors import PreCommitFailed, SinkError, StorageError
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
    RejectedRows,
    Sink,
    SinkWriter,
    WriterContext,
)
from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.spi.refusals import waits_for_person
from onceflow.core.spi.staging import (
    RowStager,
    StagingArea,
    make_staged_committable,
    require_staging,
)

_logger = logging.getLogger("onceflow.sinks.staged")


class StagedSink(Sink):
    """A sink whose target takes rows and their proof in one step, or not at all.

    Pickled by value: holds settings and no open resource. Every call may come from any process and
    thread, at any time, also twice at once.
    """

    @abstractmethod
    def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        """Make `rows` and the proof of `transaction` visible and durable at once; return True.

        Returns False, and changes nothing, when the proof is there already, also when another
        process applies the same transaction at this moment, and when the checkpoint is below the
        floor that `forget` has stored. Looking for both, writing rows and proof are one atomic
        step; a crash in it leaves all or nothing. `rows` are opened when the first is asked for:
        ask inside the transaction that holds the proof, where the target has one.

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
        """Make `before` the sink id's floor and delete the proofs below it, in one atomic step.

        A floor never falls: when it is higher already, it stays. Nothing below it is decided and
        not applied, but requests for it may be under way. A target that keeps its proofs for ever
        needs no floor, and does nothing here.

        Raises:
            SinkError: The proofs are still there, which does no harm.
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
        self._bad_rows = BadRows(
            context.on_bad_row, context.schema, where=f"sink {context.sink_id}"
        )
        self._stager = RowStager(
            require_staging(context.staging, context.sink_id, "rows wait"),
            sink_id=context.sink_id,
            attempt=context.attempt,
            subtask=context.subtask,
        )

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        batch = self._bad_rows.without(batch, self._sink.refusals(batch))
        if batch.num_rows:
            self._stager.write(batch)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        try:
            return self._stager.pre_commit(checkpoint)
        except StorageError as error:
            self.close()
            raise PreCommitFailed(f"checkpoint {checkpoint} is not staged: {error}") from error

    @override
    def take_rejected(self) -> Sequence[RejectedRows]:
        return self._bad_rows.take()

    @override
    def close(self) -> None:
        self._stager.close()


class StagedCommitter(Committer):
    """Applies what writers staged, once.

    Commit and abort of one transaction at one moment are not kept apart; the engine, which decides
    one or the other, never calls both.
    """

    def __init__(self, sink: StagedSink, context: CommitterContext) -> None:
        """Connect to nothing."""
        self._sink = sink
        self._sink_id = context.sink_id
        self._staging = require_staging(context.staging, context.sink_id, "rows wait")

    @override
    def commit(self, committable: Committable) -> CommitOutcome:
        transaction = committable.transaction
        staged = _Staged(self._staging, transaction)
        rows = staged.rows()
        applied = False
        try:
            applied = self._sink.apply(transaction, rows)
        except (SinkError, StorageError) as error:
            if not staged.are_gone:
                return RetryLater(str(error), until_mended=waits_for_person(error))
        finally:
            # Only at its end is the file closed that they are read from.
            rows.close()
        if applied and not staged.are_gone:
            self._discard_quietly(transaction)
            return Committed()
        return self._not_applied(transaction, asked_for_rows=staged.are_gone)

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
            make_staged_committable(transaction)
            for transaction in self._staging.transactions()
            if not self._sink.is_applied(transaction)
        ]

    @override
    def prune(self, before: CheckpointId) -> None:
        try:
            for transaction in self._staging.transactions():
                if transaction.checkpoint >= before:
                    continue
                # Whoever applied it may have died before it discarded what was staged.
                if self._sink.is_applied(transaction):
                    self._staging.discard(transaction)
                else:
                    before = CheckpointId(transaction.checkpoint)
            self._sink.forget(self._sink_id, before)
        except (SinkError, StorageError) as error:
            _logger.warning("sink %s: old proofs are not deleted: %s", self._sink_id, error)

    @override
    def close(self) -> None:
        """Release nothing: no connection outlives a call."""

    def _not_applied(
        self, transaction: TransactionId, *, asked_for_rows: bool
    ) -> AlreadyCommitted | Lost | RetryLater:
        """Tell a transaction that is applied from one below the floor, and from one that is lost.

        A target that asked for rows, which are gone, has found neither proof nor floor before.
        """
        try:
            if self._sink.is_applied(transaction):
                self._discard_quietly(transaction)
                return AlreadyCommitted()
            if asked_for_rows:
                return _make_lost(transaction)
            if not self._staging.contains(transaction):
                # Another committer has applied and discarded it, and forgotten the proof.
                return AlreadyCommitted()
        except (SinkError, StorageError) as error:
            return RetryLater(str(error))
        # Never so while one log counts the checkpoints: the floor is below all that is staged.
        return RetryLater(
            f"{transaction} is staged, and the target takes nothing of checkpoint"
            f" {transaction.checkpoint} any more: it has committed more of sink id {self._sink_id}"
            " than this decision log knows. The storage is an older copy, or the job has gone on in"
            " other storage: start it there. See 'Storage that is behind its target' in"
            " docs/operations.md"
        )

    def _discard_quietly(self, transaction: TransactionId) -> None:
        try:
            self._staging.discard(transaction)
        except StorageError as error:
            # `prune` does it, before it deletes the proof.
            _logger.warning("transaction %s is committed and still staged: %s", transaction, error)


class _Staged:
    """The rows of one transaction, read when they are asked for, and not before.

    Then a target that holds its proof while it asks cannot get rows that another committer has
    applied and discarded.
    """

    def __init__(self, staging: StagingArea, transaction: TransactionId) -> None:
        self._staging = staging
        self._transaction = transaction
        self.are_gone = False
        """Whether they were asked for and are not there."""

    def rows(self) -> Generator[pa.RecordBatch, None, None]:
        """Yield them.

        Raises:
            SinkError: They are gone; so the target rolls back what it has begun.
            StorageError: They cannot be read.
        """
        staged = self._staging.read(self._transaction)
        if staged is None:
            self.are_gone = True
            raise SinkError(f"the rows of transaction {self._transaction} are not staged any more")
        for _, batch in staged:
            yield batch


def _make_lost(transaction: TransactionId) -> Lost:
    return Lost(
        f"the rows of transaction {transaction} are not in checkpoint storage any more, and the "
        "target has no proof that they were applied: somebody deleted them, or the proof"
    )
