"""The commit and abort of rows in checkpoint storage, each in one ordinary transaction.

    commit   BEGIN, ledger row, read what is staged, apply it, COMMIT | discard what is staged
    abort    BEGIN, ledger row | discard what is staged | ROLLBACK
    apply    ledger row, read what is staged, apply it, in a transaction of the caller's; `commit`
             then finds the ledger row

The ledger row is written first, and its primary key is the transaction's name. So of several
committers of one transaction, in any processes and of any attempts, only one proceeds at a time.
The others then find the transaction committed. A committer that was delayed until even the ledger
row was pruned finds no staged rows: a commit is complete only when its rows are discarded, and
pruning comes after that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from typing import TypeVar, cast

import pyarrow as pa

from onceflow.clients.sql.session import (
    AccessDenied,
    ConnectionLost,
    RowRefused,
    Session,
    SqlError,
    StatementInvalid,
    TableMissing,
)
from onceflow.clients.sql.tables import Target
from onceflow.core.errors import BadRow, ConfigError, SinkError, StorageError
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
from onceflow.core.spi.staging import StagingArea
from onceflow.sinks.sql.row_validator import convert_staged
from onceflow.sinks.sql.settings import SqlSettings
from onceflow.sinks.sql.table_resolver import TableResolver, require_unaltered
from onceflow.sinks.sql.write_mode import StagedOperation, StagedRules, StagedVerb, WriteMode

_Outcome = TypeVar("_Outcome")


class StagedCommits:
    """The operations of a committer on staged rows, on the committer's own session."""

    def __init__(
        self,
        settings: SqlSettings,
        context: CommitterContext,
        open_session: Callable[[], Session],
    ) -> None:
        """Ask nothing yet; `open_session` returns the session, and reopens it after it was lost."""
        self._settings = settings
        self._context = context
        self._open_session = open_session
        self._targets: dict[tuple[StagedOperation, pa.Schema], Target] = {}

    def commit(self, committable: Committable) -> CommitOutcome:
        """Apply and discard the staged rows, unless the ledger proves that they are committed.

        Raises:
            StateCorrupt: The staged rows differ from the sealed ones, and are not committed.
            ConnectionLost: The connection broke; the server must be asked again.
            SinkError: The server cannot be reached, and nothing was sent to it.
        """
        staging = self._context.staging
        transaction = committable.transaction
        if staging is None:
            return _no_storage(transaction)
        with self._transaction() as session:
            ledger = self._settings.ledger
            # Before the staged rows are read: the ledger row's key makes other committers of this
            # transaction wait here.
            if ledger.record_applied(session, transaction, committable.rows):
                outcome = self._apply_and_commit(session, staging, transaction)
            else:
                outcome = AlreadyCommitted()
        if isinstance(outcome, (Committed, AlreadyCommitted)):
            return _discard(staging, transaction, outcome)
        return outcome

    def apply(self, session: Session, committable: Committable) -> None:
        """Apply the staged rows and their ledger row in the transaction that is open on `session`.

        Raises:
            SqlError: The server refuses a statement; the caller must roll back the transaction.
            SinkError: No rows are staged under this name, or they were committed before.
            StateCorrupt: The staged rows differ from the sealed ones.
            StorageError: The staged rows cannot be read now.
        """
        transaction, staging = committable.transaction, self._context.staging
        ledger = self._settings.ledger
        if not ledger.record_applied(session, transaction, committable.rows):
            raise SinkError(
                f"transaction {transaction} is in the ledger, so its rows are committed, but no"
                " decision contains it: a person has committed it, or the ledger was copied"
                " here. See docs/operations.md"
            )
        staged = None if staging is None else staging.read(transaction)
        if staged is None:
            raise SinkError(
                f"{transaction}: the driver finds nothing staged under this name. Give option"
                " stagingLocation (or checkpointLocation, of a query) a directory or URL that"
                " driver and executors share"
            )
        try:
            self._apply(session, staged)
        except SqlError:
            self._targets.clear()
            raise

    def abort(self, transaction: TransactionId) -> AbortOutcome:
        """Discard the staged rows, unless the ledger proves that they are committed.

        Raises:
            ConnectionLost: The connection broke; the server must be asked again.
            SinkError: The server cannot be reached, and nothing was sent to it.
        """
        staging = self._context.staging
        if staging is None:
            return _no_storage(transaction)
        with self._transaction() as session:
            ledger = self._settings.ledger
            fresh = ledger.record_applied(session, transaction, 0)
            # Discard before the ledger row is rolled back: a committer that waits for the row then
            # finds no staged rows.
            return _discard(staging, transaction, Aborted() if fresh else AlreadyCommitted())

    def _apply_and_commit(
        self, session: Session, staging: StagingArea, transaction: TransactionId
    ) -> CommitOutcome:
        """Apply the staged rows and commit them with the ledger row, which is already written."""
        try:
            staged = staging.read(transaction)
        except StorageError as error:
            return RetryLater(str(error))
        if staged is None:
            return self._explain_gone(session, transaction)
        try:
            self._apply(session, staged)
            session.commit()
        except ConnectionLost:
            raise
        except (SqlError, BadRow, ConfigError) as error:
            self._targets.clear()
            return _to_retry(transaction, error)
        return Committed()

    @contextmanager
    def _transaction(self) -> Generator[Session, None, None]:
        """Yield a session with an open transaction; roll it back at the end if it is still open."""
        session = self._open_session()
        try:
            session.begin()
            yield session
        finally:
            session.roll_back()

    def _apply(self, session: Session, staged: Iterator[tuple[str, pa.RecordBatch]]) -> None:
        written: dict[tuple[StagedOperation, pa.Schema], Target] = {}
        with closing(cast("Generator[tuple[str, pa.RecordBatch], None, None]", staged)) as parts:
            # Group only adjacent parts, in the order in which they were staged: deletes must stay
            # before puts.
            for (label, schema), group in groupby(parts, key=_label_and_schema):
                operation = StagedOperation.from_label(label)
                target = self._target(session, operation, schema)
                written[operation, schema] = target
                executor = self._settings.dialect.executor(session, operation.mode, operation.key)
                batches = (convert_staged(target.fits, operation, rows) for _, rows in group)
                match operation.verb:
                    case StagedVerb.DELETE:
                        for rows in batches:
                            executor.delete(session, target, rows)
                    case StagedVerb.UPDATE:
                        for rows in batches:
                            executor.update_existing(session, target, rows)
                    case StagedVerb.PUT:
                        executor.put(session, target, batches)
        # Check after the last row: the written rows prevent other sessions from altering the
        # tables.
        require_unaltered(self._settings, session, written.values())

    def _target(self, session: Session, operation: StagedOperation, schema: pa.Schema) -> Target:
        """Return the table as it is now.

        It is read once, and again after a statement was refused.
        """
        target = self._targets.get((operation, schema))
        if target is None:
            # Updates need no values for the columns that they lack, whatever the mode.
            is_update = operation.verb is StagedVerb.UPDATE
            mode = WriteMode.UPDATE if is_update else operation.mode
            rules = StagedRules(mode, operation.key)
            tables = TableResolver(self._settings, schema, lambda: session, rules)
            target = self._targets[operation, schema] = (
                tables.find_key_target(operation.table)
                if operation.verb is StagedVerb.DELETE
                else tables.ensure_target(operation.table)
            )
        return target

    def _explain_gone(self, session: Session, transaction: TransactionId) -> RetryLater | Lost:
        """Tell lost rows from rows that a newer attempt may have committed and pruned."""
        settings = self._settings
        owner = settings.ledger.owner(session, transaction.sink_id)
        # A newer attempt may have committed the rows and pruned their proof, so they are not called
        # lost.
        if owner is not None and owner.attempt > self._context.attempt:
            return RetryLater(
                f"{transaction} is staged no more; attempt {owner.attempt} has taken over from "
                f"{self._context.attempt}, and settles it"
            )
        return Lost(
            f"the staged rows of {transaction}, checkpoint {transaction.checkpoint}, are gone"
            f" from checkpoint storage and their row is not in the ledger at {settings.endpoint}:"
            " the file was deleted, or the database was set back to an older copy"
        )


_WAIT_FOR_A_PERSON = (
    AccessDenied,
    BadRow,
    ConfigError,
    RowRefused,
    StatementInvalid,
    TableMissing,
)
"""Refusals of decided rows that stay the same until a person changes the table or a right."""


def _to_retry(transaction: TransactionId, error: SqlError | BadRow | ConfigError) -> RetryLater:
    text = f"{transaction}: its rows are decided, but cannot be applied now: {error}"
    if not isinstance(error, _WAIT_FOR_A_PERSON):
        return RetryLater(text)
    if isinstance(error, AccessDenied):
        condition = "the user may write them: grant the privilege that the server asks for"
    else:
        condition = (
            "the table takes them: remove or change the row, the constraint or the alteration that"
            " is in their way"
        )
    return RetryLater(
        f"{text}. They stay in checkpoint storage, and nothing after them is committed, until"
        f" {condition}",
        until_fixed=True,
    )


def _discard(
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
        f"{transaction} is staged in the job's checkpoint storage, which was not given",
        until_fixed=True,
    )
