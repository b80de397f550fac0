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
from contextlib import closing, contextmanager, suppress
from itertools import groupby
from typing import TypeVar, cast

import psycopg
import pyarrow as pa
from psycopg.pq import TransactionStatus

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
from onceflow.sinks.postgres.applying import Applier
from onceflow.sinks.postgres.connection import BoundedConnection, is_lost
from onceflow.sinks.postgres.failures import described, is_row_refused
from onceflow.sinks.postgres.settings import SinkSettings
from onceflow.sinks.postgres.targets import Target, Targets
from onceflow.sinks.postgres.transactions import begin_statement
from onceflow.sinks.sql import ChangeRules
from onceflow.sinks.sql.instructions import Instruction
from onceflow.sinks.sql.replies import NoReply

_Outcome = TypeVar("_Outcome")
_IDLE = TransactionStatus.IDLE

# A commit whose rows are discarded must not depend on the server's memory.
_DURABLE = """
    SELECT pg_catalog.set_config('synchronous_commit', 'on', true)
    WHERE pg_catalog.current_setting('synchronous_commit') = 'off'
"""


class StagedCommits:
    """What a committer does with staged rows, on the committer's own connection."""

    def __init__(
        self,
        settings: SinkSettings,
        context: CommitterContext,
        connected: Callable[[], BoundedConnection],
    ) -> None:
        """Ask nothing yet; `connected` returns the connection, opened anew when it was lost."""
        self._settings = settings
        self._context = context
        self._connected = connected
        self._begin = begin_statement(settings)
        self._targets: dict[tuple[Instruction, pa.Schema], Target] = {}

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
            if self._settings.ledger.record_applied(connection, transaction, committable.rows):
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
            fresh = self._settings.ledger.record_applied(connection, transaction, 0)
            # Before the ledger row is given up: a committer that waits for it then finds nothing.
            return _discarded(staging, transaction, Aborted() if fresh else AlreadyCommitted())

    def _applied(
        self, connection: BoundedConnection, staging: StagingArea, transaction: TransactionId
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
            cursor = connection.execute("COMMIT")
        except psycopg.Error as error:
            if is_lost(connection, error):
                raise
            self._targets.clear()
            return RetryLater(_refused(transaction, error))
        if cursor.statusmessage != "COMMIT":
            return RetryLater(f"{transaction}: COMMIT was answered {cursor.statusmessage}")
        return Committed()

    @contextmanager
    def _transaction(self) -> Generator[BoundedConnection, None, None]:
        """Give a connection with a transaction open, rolled back at the end if it is there still.

        Raises:
            NoReply: The connection broke.
        """
        connection = self._connected()
        try:
            connection.execute(self._begin)
            connection.execute(_DURABLE)
            yield connection
        except psycopg.Error as error:
            if is_lost(connection, error):
                connection.close()
                raise NoReply(described(error)) from error
            raise
        finally:
            _roll_back(connection)

    def _apply(
        self, connection: BoundedConnection, staged: Iterator[tuple[str, pa.RecordBatch]]
    ) -> None:
        with closing(cast("Generator[tuple[str, pa.RecordBatch], None, None]", staged)) as parts:
            for (label, schema), group in groupby(parts, key=_label_and_schema):
                instruction = Instruction.decoded(label)
                target = self._target(connection, instruction, schema)
                applier = Applier(instruction.mode, instruction.key)
                batches = (rows for _, rows in group)
                if instruction.deletes:
                    for rows in batches:
                        applier.delete(connection, target, rows)
                else:
                    applier.put_all(connection, target, batches)

    def _target(
        self, connection: BoundedConnection, instruction: Instruction, schema: pa.Schema
    ) -> Target:
        """Return the table as it is now; looked at once, until something is refused."""
        found = self._targets.get((instruction, schema))
        if found is None:
            rules = ChangeRules(instruction.mode, instruction.key)
            targets = Targets(self._settings, schema, lambda: connection, rules)
            found = self._targets[instruction, schema] = (
                targets.keyed(instruction.table)
                if instruction.deletes
                else targets.named(instruction.table)
            )
        return found

    def _gone(self, connection: BoundedConnection, transaction: TransactionId) -> RetryLater | Lost:
        """Tell rows that are lost from those that a newer attempt has committed, proof and all."""
        owner = self._settings.ledger.owner(connection, transaction.sink_id)
        if owner is not None and owner.attempt > self._context.attempt:
            return RetryLater(
                f"{transaction} is staged no more; attempt {owner.attempt} has taken over from "
                f"{self._context.attempt}, and settles it"
            )
        return Lost(
            f"the staged rows of {transaction}, checkpoint {transaction.checkpoint}, are gone from "
            f"checkpoint storage and their row is not in the ledger at {self._settings.endpoint}: "
            "somebody deleted the file, or the database is an older copy of itself"
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


def _roll_back(connection: BoundedConnection) -> None:
    """End what is open; a connection on which that fails is closed, by which the server ends it."""
    if connection.closed or connection.info.transaction_status == _IDLE:
        return
    try:
        connection.execute("ROLLBACK")
    except psycopg.Error:
        with suppress(psycopg.Error):
            connection.close()


def _no_storage(transaction: TransactionId) -> RetryLater:
    return RetryLater(
        f"{transaction} is staged in the job's checkpoint storage, which is not given here"
    )


def _refused(transaction: TransactionId, error: psycopg.Error) -> str:
    text = f"{transaction}: its rows are decided and cannot be applied now: {described(error)}"
    if not is_row_refused(error):
        return text
    return (
        f"{text}. They stay in checkpoint storage, and nothing after them is committed, until the "
        "table takes them: remove or change the row or the constraint that is in their way"
    )
