"""Commits and aborts rows that wait in checkpoint storage, each in one ordinary transaction.

    commit   BEGIN, ledger row, read what is staged, apply it, COMMIT | discard what is staged
    abort    BEGIN, ledger row | discard what is staged | ROLLBACK

The ledger row comes first and its primary key is the transaction's name. So of several committers
of one transaction, in any processes and of any attempts, one at a time goes on, and the others then
find it committed. A committer that was left behind long ago, when even the ledger row has been
pruned, finds nothing staged: a commit counts as done only when its rows are discarded, and pruning
comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from typing import Generic, TypeVar, cast

import pyarrow as pa

from onceflow.core.errors import StorageError
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
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.core.staging import StagingArea
from onceflow.sinks.sql.connection import ConnectionT
from onceflow.sinks.sql.database import Database
from onceflow.sinks.sql.failures import ErrorT
from onceflow.sinks.sql.replies import NoReply
from onceflow.sinks.sql.staged_operation import StagedOperation
from onceflow.sinks.sql.tables import FitT, TableT, Target
from onceflow.sinks.sql.targets import Targets
from onceflow.sinks.sql.write_mode import ChangeRules

_Outcome = TypeVar("_Outcome")


class StagedCommits(Generic[ConnectionT, ErrorT, TableT, FitT]):
    """What a committer does with staged rows, on the committer's own connection."""

    def __init__(
        self,
        database: Database[ConnectionT, ErrorT, TableT, FitT],
        context: CommitterContext,
        connected: Callable[[], ConnectionT],
    ) -> None:
        """Ask nothing yet; `connected` returns the connection, opened anew when it was lost."""
        self._database = database
        self._context = context
        self._connected = connected
        self._targets: dict[tuple[StagedOperation, pa.Schema], Target[TableT, FitT]] = {}

    def commit(self, committable: Committable) -> CommitOutcome:
        """Apply and discard what is staged, unless the ledger has it already.

        Raises:
            StateCorrupt: What is staged is not what was sealed, and was not committed.
            NoReply: The connection broke; the server must be asked again.
            SinkError: The server cannot be reached, and nothing was sent to it.
        """
        staging = self._context.staging
        transaction = committable.transaction
        if staging is None:
            return _no_storage(transaction)
        with self._transaction() as connection:
            ledger = self._database.settings.ledger
            if ledger.record_applied(connection, transaction, committable.rows):
                outcome = self._applied(connection, staging, transaction)
            else:
                outcome = AlreadyCommitted()
        if isinstance(outcome, (Committed, AlreadyCommitted)):
            return _discarded(staging, transaction, outcome)
        return outcome

    def abort(self, transaction: TransactionId) -> AbortOutcome:
        """Discard what is staged, unless the ledger has it.

        Raises:
            NoReply: The connection broke; the server must be asked again.
            SinkError: The server cannot be reached, and nothing was sent to it.
        """
        staging = self._context.staging
        if staging is None:
            return _no_storage(transaction)
        with self._transaction() as connection:
            ledger = self._database.settings.ledger
            fresh = ledger.record_applied(connection, transaction, 0)
            # Before the ledger row is given up: a committer that waits for it then finds nothing.
            return _discarded(staging, transaction, Aborted() if fresh else AlreadyCommitted())

    def _applied(
        self, connection: ConnectionT, staging: StagingArea, transaction: TransactionId
    ) -> CommitOutcome:
        """Apply what is staged and commit it with the ledger row, which is written."""
        try:
            staged = staging.read(transaction)
        except StorageError as error:
            return RetryLater(str(error))
        if staged is None:
            return self._gone(connection, transaction)
        try:
            self._apply(connection, staged)
            answer = self._database.commit(connection)
        except self._database.failures.errors as error:
            if self._database.failures.is_lost(connection, error):
                raise
            self._targets.clear()
            return RetryLater(self._refused(transaction, error))
        if answer != "COMMIT":
            return RetryLater(f"{transaction}: COMMIT was answered {answer}")
        return Committed()

    @contextmanager
    def _transaction(self) -> Generator[ConnectionT, None, None]:
        """Give a connection with a transaction open, rolled back at the end if it is there still.

        Raises:
            NoReply: The connection broke.
        """
        connection = self._connected()
        failures = self._database.failures
        try:
            self._database.begin(connection)
            yield connection
        except failures.errors as error:
            if failures.is_lost(connection, error):
                connection.close()
                raise NoReply(failures.described(error)) from error
            raise
        finally:
            self._database.roll_back(connection)

    def _apply(self, connection: ConnectionT, staged: Iterator[tuple[str, pa.RecordBatch]]) -> None:
        with closing(cast("Generator[tuple[str, pa.RecordBatch], None, None]", staged)) as parts:
            for (label, schema), group in groupby(parts, key=_label_and_schema):
                operation = StagedOperation.decoded(label)
                target = self._target(connection, operation, schema)
                executor = self._database.executor(connection, operation.mode, operation.key)
                batches = (rows for _, rows in group)
                if operation.deletes:
                    for rows in batches:
                        executor.delete(connection, target, rows)
                else:
                    executor.put_all(connection, target, batches)

    def _target(
        self, connection: ConnectionT, operation: StagedOperation, schema: pa.Schema
    ) -> Target[TableT, FitT]:
        """Return the table as it is now; looked at once, until something is refused."""
        found = self._targets.get((operation, schema))
        if found is None:
            rules = ChangeRules(operation.mode, operation.key)
            targets = Targets(self._database.tables, schema, lambda: connection, rules)
            found = self._targets[operation, schema] = (
                targets.keyed(operation.table)
                if operation.deletes
                else targets.named(operation.table)
            )
        return found

    def _gone(self, connection: ConnectionT, transaction: TransactionId) -> RetryLater | Lost:
        """Tell rows that are lost from those that a newer attempt has committed, proof and all."""
        settings = self._database.settings
        owner = settings.ledger.owner(connection, transaction.sink_id)
        if owner is not None and owner.attempt > self._context.attempt:
            return RetryLater(
                f"{transaction} is staged no more; attempt {owner.attempt} has taken over from "
                f"{self._context.attempt}, and settles it"
            )
        return Lost(
            f"the staged rows of {transaction}, checkpoint {transaction.checkpoint}, are gone from "
            f"checkpoint storage and their row is not in the ledger at {settings.endpoint}: "
            "somebody deleted the file, or the database is an older copy of itself"
        )

    def _refused(self, transaction: TransactionId, error: ErrorT) -> str:
        failures = self._database.failures
        reason = failures.described(error)
        text = f"{transaction}: its rows are decided and cannot be applied now: {reason}"
        if not failures.is_row_refused(error):
            return text
        return (
            f"{text}. They stay in checkpoint storage, and nothing after them is committed, until "
            "the table takes them: remove or change the row or the constraint that is in their way"
        )


def _discarded(
    staging: StagingArea, transaction: TransactionId, outcome: _Outcome
) -> _Outcome | RetryLater:
    try:
        staging.discard(transaction)
    except StorageError as error:
        return RetryLater(
            f"{transaction}: {type(outcome).__name__}, but its staged rows are still there, and "
            f"must be gone before it counts: {error}"
        )
    return outcome


def _label_and_schema(part: tuple[str, pa.RecordBatch]) -> tuple[str, pa.Schema]:
    label, rows = part
    return label, rows.schema


def _no_storage(transaction: TransactionId) -> RetryLater:
    return RetryLater(
        f"{transaction} is staged in the job's checkpoint storage, which is not given here"
    )
