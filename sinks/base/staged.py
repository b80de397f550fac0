"""The base classes for your own sinks into targets that cannot prepare: rows wait in storage.

    pre_commit   rows → checkpoint storage, durable under the transaction's name
    commit       rows + proof → target, in one transaction of the target's own; then the rows go
    prune        floor → target, and the proofs below it go, in one transaction

You implement only how the target stores rows with a proof, and how it is asked for the proof. The
proof is a row, record or key that holds the transaction's name and becomes visible if and only if
the rows do. A target that accepts an idempotency key keeps the proof itself.

A committer may be delayed at any moment, while another one commits the same transaction, discards
its rows and prunes. Its request may then arrive when the proof is already deleted. The floor
prevents a second write: the target applies no transaction of a checkpoint below it. Transactions
that still have to be committed are never below it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.core import spi
from onceflow.core.errors import PreCommitFailed, SinkError, StorageError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi.bad_rows import BadRows, waits_for_person
from onceflow.core.spi.staging import (
    RowStager,
    StagingArea,
    make_staged_committable,
    require_staging,
)

_logger = logging.getLogger("onceflow.sinks.base.staged")


class StagedSink(spi.Sink):
    """A sink whose target stores rows and their proof in one step, or not at all.

    Pickled by value: holds settings and no open resource. Every call may come from any process and
    thread, at any time, also twice at once.
    """

    @abstractmethod
    def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        """Make `rows` and the proof of `transaction` visible and durable at once; return True.

        Returns False, and changes nothing, if the proof exists already, also if another process
        applies the same transaction at this moment, or if the checkpoint is below the floor that
        `forget` has stored. Looking for both and writing rows and proof are one atomic step; a
        crash in it leaves all or nothing. `rows` are opened when the first batch is requested:
        request it inside the transaction that holds the proof, if the target has transactions.

        Raises:
            SinkError: The target refused, or did not answer; it is asked again later.
        """

    @abstractmethod
    def is_applied(self, transaction: TransactionId) -> bool:
        """Return True if the target holds the proof of `transaction`.

        Raises:
            SinkError: The target cannot be asked now.
        """

    def forget(self, sink_id: str, before: CheckpointId) -> None:
        """Make `before` the sink id's floor and delete the proofs below it, in one atomic step.

        A floor never decreases: if it is higher already, it stays. All decided transactions below
        it are applied, but delayed requests for them may still arrive. A target that keeps its
        proofs for ever needs no floor, and does nothing here.

        Raises:
            SinkError: The proofs are not deleted, which does no harm.
        """

    def refusals(self, rows: pa.RecordBatch) -> Mapping[int, str]:
        """Return, by row, why the target can never accept it; empty if it can accept all rows.

        A row that only `apply` refuses is refused too late: it is decided by then.
        """
        del rows
        return {}

    @override
    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        return StagedWriter(self, context)

    @override
    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        return StagedCommitter(self, context)


class StagedWriter(spi.SinkWriter):
    """A writer that stages the rows of each checkpoint."""

    def __init__(self, sink: StagedSink, context: spi.WriterContext) -> None:
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
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[committables.Committable]:
        try:
            return self._stager.pre_commit(checkpoint)
        except StorageError as error:
            self.close()
            raise PreCommitFailed(f"checkpoint {checkpoint} is not staged: {error}") from error

    @override
    def take_rejected(self) -> Sequence[spi.RejectedRows]:
        return self._bad_rows.take()

    @override
    def close(self) -> None:
        self._stager.close()


class StagedCommitter(spi.Committer):
    """A committer that applies staged rows, once.

    A concurrent commit and abort of one transaction are not excluded here. The engine decides for
    one of the two, and never calls both.
    """

    def __init__(self, sink: StagedSink, context: spi.CommitterContext) -> None:
        """Connect to nothing yet."""
        self._sink = sink
        self._sink_id = context.sink_id
        self._staging = require_staging(context.staging, context.sink_id, "rows wait")

    @override
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        transaction = committable.transaction
        staged = _Staged(self._staging, transaction)
        rows = staged.rows()
        applied = False
        try:
            applied = self._sink.apply(transaction, rows)
        except (SinkError, StorageError) as error:
            if not staged.are_gone:
                return committables.RetryLater(str(error), until_fixed=waits_for_person(error))
        finally:
            # Closing the generator closes the file from which the rows are read.
            rows.close()
        if applied and not staged.are_gone:
            self._discard_quietly(transaction)
            return committables.Committed()
        return self._not_applied(transaction, asked_for_rows=staged.are_gone)

    @override
    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        transaction = committable.transaction
        try:
            applied = self._sink.is_applied(transaction)
            self._staging.discard(transaction)
        except (SinkError, StorageError) as error:
            return committables.RetryLater(str(error))
        return committables.AlreadyCommitted() if applied else committables.Aborted()

    @override
    def in_doubt(self) -> Sequence[committables.Committable]:
        # A transaction that is applied and still staged was committed by a process that died before
        # it discarded the rows.
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
                # The process that applied it may have died before it discarded the staged rows.
                if self._sink.is_applied(transaction):
                    self._staging.discard(transaction)
                else:
                    before = CheckpointId(transaction.checkpoint)
            self._sink.forget(self._sink_id, before)
        except (SinkError, StorageError) as error:
            _logger.warning("sink %s: old proofs could not be deleted: %s", self._sink_id, error)

    @override
    def close(self) -> None:
        """Release nothing: no connection outlives a call."""

    def _not_applied(
        self, transaction: TransactionId, *, asked_for_rows: bool
    ) -> committables.AlreadyCommitted | committables.Lost | committables.RetryLater:
        """Tell an applied transaction from one below the floor, and from a lost one.

        If the target asked for rows and they were gone, it had found neither proof nor floor
        before.
        """
        try:
            if self._sink.is_applied(transaction):
                self._discard_quietly(transaction)
                return committables.AlreadyCommitted()
            if asked_for_rows:
                return _make_lost(transaction)
            if not self._staging.contains(transaction):
                # Another committer has applied and discarded it, and has deleted the proof.
                return committables.AlreadyCommitted()
        except (SinkError, StorageError) as error:
            return committables.RetryLater(str(error))
        # This cannot happen while one log counts the checkpoints: all staged transactions are above
        # the floor.
        return committables.RetryLater(
            f"{transaction} is staged, but the target accepts nothing of checkpoint"
            f" {transaction.checkpoint} any more: it has committed more of sink id"
            f" {self._sink_id} than this decision log contains. Either the storage is an older"
            " copy, or the job has run in other storage since: start it there. See 'Storage that"
            " is behind its target' in docs/operations.md"
        )

    def _discard_quietly(self, transaction: TransactionId) -> None:
        try:
            self._staging.discard(transaction)
        except StorageError as error:
            # `prune` discards it, before it deletes the proof.
            _logger.warning(
                "transaction %s is committed, but its staged rows could not be deleted: %s",
                transaction,
                error,
            )


class _Staged:
    """The rows of one transaction, which are read only when they are requested.

    So a target that holds its proof while it requests rows cannot get rows that another committer
    has applied and discarded.
    """

    def __init__(self, staging: StagingArea, transaction: TransactionId) -> None:
        self._staging = staging
        self._transaction = transaction
        self.are_gone = False
        """True if the rows were requested and do not exist."""

    def rows(self) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows.

        Raises:
            SinkError: The rows are gone; so the target rolls back its transaction.
            StorageError: The rows cannot be read.
        """
        staged = self._staging.read(self._transaction)
        if staged is None:
            self.are_gone = True
            raise SinkError(f"the rows of transaction {self._transaction} are not staged any more")
        for _, batch in staged:
            yield batch


def _make_lost(transaction: TransactionId) -> committables.Lost:
    return committables.Lost(
        f"the rows of transaction {transaction} are not in checkpoint storage any more, and the"
        " target has no proof that they were applied: the rows or the proof were deleted"
    )
