"""The claim of a sink id in a table, and the commits: one table version for each checkpoint.

    1. read the newest version, and its record of the sink id
    2. leave out transactions that the record says are committed; if none is left, the checkpoint
       was committed before
    3. make the next version on top of that one, with the files and the new record; if another
       commit was faster: 1.
    4. delete the staged descriptions

A crash between 3 and 4 leaves descriptions of committed files, which the next start deletes. After
a lost reply the table is read again, so it is no failure.

Staged changes may be committed for several checkpoints together.

The driver reads all changes of a commit into memory and keeps the last change of each key. One
version of the table applies them together with the sink's record. So a repeated commit finds the
record, as with files. Files that were written for a version that was not made are deleted, or
become orphans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.core.errors import (
    ConfigError,
    PreparedTransactionLost,
    SinkError,
    StorageError,
    TargetRefused,
)
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommitterContext, GlobalCommitter
from onceflow.core.spi.bad_rows import waits_for_person
from onceflow.core.spi.staging import make_staged_committable, require_staging
from onceflow.sinks.lake.table import (
    ChangesLabel,
    CommitConflict,
    CommitUnknown,
    LakeTable,
    SinkRecord,
    TableVersion,
    claim_record,
    merge_changes,
    parse_label,
    to_target_record,
)

_logger = logging.getLogger("onceflow.sinks.lake")

_NOT_NOW = (SinkError, StorageError, ConfigError)
"""ConfigError is included because a secret's file is missing while it is replaced."""
CONFLICTS_MAX = 20
"""The number of other commits that may come first, before the engine's own retries follow."""


class LakeCommitter(GlobalCommitter):
    """A committer of whole checkpoints to one table."""

    def __init__(self, table: LakeTable, context: CommitterContext) -> None:
        """Connect to nothing yet."""
        self._table = table
        self._log_id = context.log_id
        self._sink_id = context.sink_id
        self._staging = require_staging(
            context.staging, context.sink_id, "the description of data files waits"
        )

    @override
    def commit_checkpoint(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> CommitOutcome:
        try:
            for _ in range(CONFLICTS_MAX):
                try:
                    return self._commit_once(checkpoint, committables)
                except CommitConflict as conflict:
                    _logger.info("sink %s: committing again: %s", self._sink_id, conflict)
        except CommitUnknown as error:
            return self._look_for(checkpoint, committables, error)
        except _NOT_NOW as error:
            # A value or a column that the table cannot accept stays so for any committer.
            return RetryLater(str(error), until_fixed=waits_for_person(error))
        return RetryLater(f"{CONFLICTS_MAX} other commits to the table came first, one by one")

    @override
    def read_committed_through(self) -> CheckpointId:
        record = self._table.load().record
        return CheckpointId(record.through if record else 0)

    @override
    def in_doubt(self) -> Sequence[Committable]:
        """Return the staged transactions.

        Discard those that a driver committed right before it died.

        Raises:
            SinkError: The table cannot be asked now.
        """
        transactions = self._staging.transactions()
        if not transactions:
            return []
        version = self._table.load()
        through = version.record.through if version.record else 0
        left = (
            transaction
            for transaction in transactions
            if transaction.checkpoint > through or not self._forget_committed(version, transaction)
        )
        return [make_staged_committable(transaction) for transaction in left]

    @override
    def abort(self, committable: Committable) -> AbortOutcome:
        """Delete its data files and the staged rows, unless a version of the table has them."""
        transaction = committable.transaction
        try:
            version = self._table.load()
            committed = self._is_in_table(version, transaction)
            if committed is None:
                return AlreadyCommitted() if version.is_committed(transaction) else Aborted()
            if not committed:
                self._delete_data(transaction)
            self._staging.discard(transaction)
        except _NOT_NOW as error:
            return RetryLater(str(error))
        return AlreadyCommitted() if committed else Aborted()

    @override
    def close(self) -> None:
        self._table.close()

    def _commit_once(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> CommitOutcome:
        # 1.
        version = self._table.load()
        record = version.record
        refusal = self._find_refusal(version, record)
        if record is None or refusal:
            return RetryLater(refusal, until_fixed=True)
        # 2.
        if record.through >= checkpoint:
            self._forget(committables)
            return AlreadyCommitted()
        transactions = [c.transaction for c in committables if c.checkpoint > record.through]
        # 3.
        outcome = self._make_version(version, record.advance(checkpoint), transactions)
        # 4.
        if isinstance(outcome, Committed):
            self._forget(committables)
        return outcome

    def _make_version(
        self, version: TableVersion, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> CommitOutcome:
        """Make the version that contains the staged files of `transactions`, and `record`.

        Raises:
            CommitConflict: Another version came first.
            CommitUnknown: It is unknown whether the version was made.
            SinkError: The version was not made.
            StorageError: The staged rows cannot be read.
        """
        staged: list[pa.RecordBatch] = []
        descriptions = self._table.requests.ask(self._read_staged, transactions)
        for transaction, description in zip(transactions, descriptions, strict=True):
            if description is None:
                return self._explain_missing(record.through, transaction)
            staged.append(description)
        loss = version.find_loss(staged)
        if loss:
            return Lost(loss)
        return Committed(version.append(staged, record, transactions))

    def _is_in_table(self, version: TableVersion, transaction: TransactionId) -> bool | None:
        """Return True if `version` has the staged files of `transaction`.

        None if nothing is staged.
        """
        staged = self._read_staged(transaction)
        return None if staged is None else version.refers_to(staged)

    def _delete_data(self, transaction: TransactionId) -> None:
        """Delete the files that were written into the table's directories under `transaction`."""
        staged = self._read_staged(transaction)
        if staged is not None:
            self._table.delete_files(self._table.list_paths(staged))

    def _find_refusal(self, version: TableVersion, record: SinkRecord | None) -> str:
        if record is None:
            return (
                f"the table no longer has a record of sink id {self._sink_id!r}: the table was"
                " replaced, or the record was removed"
            )
        if record.log_id != self._log_id:
            return f"decision log {record.log_id!r} has claimed sink id {self._sink_id!r}"
        return version.damage or version.refusal

    def _explain_missing(self, checkpoint: int, transaction: TransactionId) -> CommitOutcome:
        """Tell a checkpoint that another committer has just committed from lost rows."""
        if self.read_committed_through() >= checkpoint:
            return AlreadyCommitted()
        return Lost(
            f"the staged files of {transaction} are no longer in checkpoint storage, and the"
            " table has not committed them: they were deleted"
        )

    def _look_for(
        self, checkpoint: CheckpointId, committables: Sequence[Committable], error: SinkError
    ) -> CommitOutcome:
        try:
            if self.read_committed_through() < checkpoint:
                # The request may still be running. If it is made on top of an older version, it
                # will be refused.
                return Unknown(str(error))
        except _NOT_NOW as unanswered:
            return Unknown(f"{error}; asked again: {unanswered}")
        self._forget(committables)
        return AlreadyCommitted()

    def _forget_committed(self, version: TableVersion, transaction: TransactionId) -> bool:
        """Discard and return True if `version` has its files or nothing is staged.

        Else return False.
        """
        if self._is_in_table(version, transaction) is False:
            return False
        self._forget([make_staged_committable(transaction)])
        return True

    def _read_staged(self, transaction: TransactionId) -> pa.RecordBatch | None:
        parts = self._staging.read(transaction)
        if parts is None:
            return None
        batches: list[pa.RecordBatch] = []
        for part, batch in parts:
            if part:
                raise TargetRefused(
                    f"{transaction} waits for its commit and was written with write_mode='upsert';"
                    " start the job once with that setting, stop it, and change the setting then"
                )
            batches.append(batch)
        (description,) = batches
        return description

    def _forget(self, committables: Sequence[Committable]) -> None:
        self._table.requests.ask(self._forget_one, committables)

    def _forget_one(self, committable: Committable) -> None:
        try:
            self._staging.discard(committable.transaction)
        except StorageError as error:
            # A later abort finds the files in the table, and discards the staged rows then.
            _logger.warning(
                "%s is committed, but its staged files could not be deleted: %s", committable, error
            )


class LakeChangeCommitter(LakeCommitter):
    """A committer of whole checkpoints of changes to one table."""

    @override
    def _make_version(
        self, version: TableVersion, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> CommitOutcome:
        batches: list[pa.RecordBatch] = []
        labels: set[ChangesLabel] = set()
        # By attempt, then by checkpoint: the order in which the changes of a key were made. In one
        # checkpoint all changes of a key come from one subtask.
        ordered = sorted(transactions)
        staged = self._table.requests.ask(self._read_changes, ordered)
        for transaction, changes in zip(ordered, staged, strict=True):
            if changes is None:
                return self._explain_missing(record.through, transaction)
            for part, batch in changes:
                labels.add(parse_label(part))
                batches.append(batch)
        other = next((label for label in labels if label.table_id != version.table_id), None)
        if other is not None:
            return Lost(version.describe_replaced(other.table_id))
        keys = {label.key for label in labels}
        if len(keys) > 1:
            raise TargetRefused(
                f"staged changes that wait for their commit have several keys, {sorted(keys)}:"
                " start the job with the former primary_key and without commit_interval and"
                " commit_checkpoints, stop it, and change the setting then"
            )
        merged = merge_changes(batches, keys.pop())
        return Committed(version.replace_rows(merged, record, transactions))

    def _read_changes(self, transaction: TransactionId) -> list[tuple[str, pa.RecordBatch]] | None:
        parts = self._staging.read(transaction)
        return None if parts is None else list(parts)

    @override
    def _is_in_table(self, version: TableVersion, transaction: TransactionId) -> bool | None:
        if not self._staging.contains(transaction):
            return None
        return version.is_committed(transaction)

    @override
    def _delete_data(self, transaction: TransactionId) -> None:
        """Delete nothing: writers write no files, only the driver does for versions."""


def claim_table(table: LakeTable, context: CommitterContext) -> None:
    """Record in `table`, in a separate version, that the attempt of `context` owns the sink id.

    Raises:
        ConfigError: Another decision log owns the sink id.
        Fenced: This attempt or a newer one has claimed it.
        PreparedTransactionLost: The table has lost the last commit of the sink id.
        SinkError: The table does not answer, or other commits came first too often.
    """
    conflict: CommitConflict | None = None
    for _ in range(CONFLICTS_MAX):
        version = table.load()
        require_undamaged(version)
        record = claim_record(version.record, context)
        try:
            version.append((), record, ())
        except CommitConflict as error:
            conflict = error
            continue
        return
    raise SinkError(
        f"sink {context.sink_id}: {CONFLICTS_MAX} commits of other writers came first: {conflict}"
    )


def read_target_record(version: TableVersion, context: CommitterContext) -> TargetRecord:
    """Return the table's record of the sink id.

    Raises:
        ConfigError: Another decision log owns the sink id.
        PreparedTransactionLost: The table has lost the last commit of the sink id.
    """
    require_undamaged(version)
    return to_target_record(version.record, context)


def require_undamaged(version: TableVersion) -> None:
    """Raise PreparedTransactionLost unless the last commit of the sink id is part of `version`.

    Raises:
        PreparedTransactionLost: It is not.
    """
    if version.damage:
        raise PreparedTransactionLost(version.damage)
