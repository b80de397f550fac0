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
from typing import TypeVar, cast

import pyarrow as pa
from pymysql.err import MySQLError

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
from onceflow.sinks.mysql.applying import Applier
from onceflow.sinks.mysql.catalog import server_facts
from onceflow.sinks.mysql.connection import Session, is_lost
from onceflow.sinks.mysql.failures import described, is_row_refused
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.mysql.targets import Target, Targets
from onceflow.sinks.sql import ChangeRules
from onceflow.sinks.sql.instructions import Instruction
from onceflow.sinks.sql.replies import NoReply

_Outcome = TypeVar("_Outcome")


class StagedCommits:
    """What a committer does with staged rows, on the committer's own session."""

    def __init__(
        self,
        settings: SinkSettings,
        context: CommitterContext,
        connected: Callable[[], Session],
    ) -> None:
        """Ask nothing yet; `connected` returns the session, opened anew when it was lost."""
        self._settings = settings
        self._context = context
        self._connected = connected
        self._targets: dict[tuple[Instruction, pa.Schema], Target] = {}
        self._loads: bool | None = None

    def commit(self, committable: Committable) -> CommitOutcome:
        """Apply and discard what is staged, unless the ledger has it already.

        Raises:
            StateCorrupt: What is staged is not what was sealed, and was not committed.
            NoReply: The session broke; the server must be asked again.
            SinkError: The server cannot be reached, and nothing was sent to it.
        """
        staging = self._context.staging
        transaction = committable.transaction
        if staging is None:
            return _no_storage(transaction)
        with self._transaction() as session:
            if self._settings.ledger.record_applied(session, transaction, committable.rows):
                outcome = self._applied(session, staging, transaction)
            else:
                outcome = AlreadyCommitted()
        if isinstance(outcome, (Committed, AlreadyCommitted)):
            return _discarded(staging, transaction, outcome)
        return outcome

    def abort(self, transaction: TransactionId) -> AbortOutcome:
        """Discard what is staged, unless the ledger has it.

        Raises:
            NoReply: The session broke; the server must be asked again.
            SinkError: The server cannot be reached, and nothing was sent to it.
        """
        staging = self._context.staging
        if staging is None:
            return _no_storage(transaction)
        with self._transaction() as session:
            fresh = self._settings.ledger.record_applied(session, transaction, 0)
            # Before the ledger row is given up: a committer that waits for it then finds nothing.
            return _discarded(staging, transaction, Aborted() if fresh else AlreadyCommitted())

    def _applied(
        self, session: Session, staging: StagingArea, transaction: TransactionId
    ) -> CommitOutcome:
        """Apply what is staged and commit it with the ledger row, which is written."""
        try:
            staged = staging.read(transaction)
        except StorageError as error:
            return RetryLater(str(error))
        if staged is None:
            return self._gone(session, transaction)
        try:
            self._apply(session, staged)
            session.execute("COMMIT")
        except MySQLError as error:
            if is_lost(session, error):
                raise
            self._targets.clear()
            return RetryLater(_refused(transaction, error))
        return Committed()

    @contextmanager
    def _transaction(self) -> Generator[Session, None, None]:
        """Give a session with a transaction open, rolled back at the end if it is there still.

        Raises:
            NoReply: The session broke.
        """
        session = self._connected()
        try:
            session.execute("START TRANSACTION READ WRITE")
            yield session
        except MySQLError as error:
            if is_lost(session, error):
                session.close()
                raise NoReply(described(error)) from error
            raise
        finally:
            _roll_back(session)

    def _apply(self, session: Session, staged: Iterator[tuple[str, pa.RecordBatch]]) -> None:
        with closing(cast("Generator[tuple[str, pa.RecordBatch], None, None]", staged)) as parts:
            for label, rows in parts:
                instruction = Instruction.decoded(label)
                target = self._target(session, instruction, rows.schema)
                applier = Applier(
                    instruction.mode, instruction.key, local_infile=self._local_infile(session)
                )
                if instruction.deletes:
                    applier.delete(session, target, rows)
                else:
                    applier.put(session, target, rows)

    def _local_infile(self, session: Session) -> bool:
        if self._loads is None:
            self._loads = server_facts(session).local_infile
        return self._loads

    def _target(self, session: Session, instruction: Instruction, schema: pa.Schema) -> Target:
        """Return the table as it is now; looked at once, until something is refused."""
        found = self._targets.get((instruction, schema))
        if found is None:
            rules = ChangeRules(instruction.mode, instruction.key)
            targets = Targets(self._settings, schema, lambda: session, rules)
            found = self._targets[instruction, schema] = (
                targets.keyed(instruction.table)
                if instruction.deletes
                else targets.named(instruction.table)
            )
        return found

    def _gone(self, session: Session, transaction: TransactionId) -> RetryLater | Lost:
        """Tell rows that are lost from those that a newer attempt has committed, proof and all."""
        owner = self._settings.ledger.owner(session, transaction.sink_id)
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


def _roll_back(session: Session) -> None:
    """End what is open; a session on which that fails is closed, by which the server ends it."""
    if not session.open:
        return
    try:
        session.execute("ROLLBACK")
    except MySQLError:
        session.close()


def _no_storage(transaction: TransactionId) -> RetryLater:
    return RetryLater(
        f"{transaction} is staged in the job's checkpoint storage, which is not given here"
    )


def _refused(transaction: TransactionId, error: MySQLError) -> str:
    text = f"{transaction}: its rows are decided and cannot be applied now: {described(error)}"
    if not is_row_refused(error):
        return text
    return (
        f"{text}. They stay in checkpoint storage, and nothing after them is committed, until the "
        "table takes them: remove or change the row or the constraint that is in their way"
    )
