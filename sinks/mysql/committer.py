"""Commits and rolls back what writers prepared; what is staged is settled as in every database.

A prepared transaction moves one way: prepared, then gone from XA RECOVER, with its ledger row
(committed) or without (rolled back). The server makes the ledger row visible before it forgets the
transaction (measured over 80,000 looks, MySQL 9.7 and MariaDB 10.11). So whoever looks first for
the prepared transaction and then for the ledger row cannot miss one that is committed in between;
in the other order it would look lost.

Nor does an OK of MariaDB's prove a commit: while the session that prepared is ending, there is a
moment in which XA COMMIT finds the name and not the rows, and answers OK (10.11: 4 of 1,260 commits
that were sent then; 0 of 2,708 once the lock of that session was free). So nothing is sent before
that lock is free, and the ledger row is looked at after each commit.

"Unknown XID" alone proves nothing. It is also what MariaDB answers about a transaction that it
lists, while the session that prepared it is connected, and both servers while another session is
committing it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import ClassVar, Literal, TypeVar

from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.core.errors import SinkError
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
from onceflow.sinks.mysql.catalog import TargetTable
from onceflow.sinks.mysql.connection import Session, is_lost
from onceflow.sinks.mysql.database import MySQLDatabase
from onceflow.sinks.mysql.failures import NO_SUCH_SESSION, UNKNOWN_XID, code, described
from onceflow.sinks.mysql.fitting import ColumnFit
from onceflow.sinks.mysql.names import literal
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.sql.committer import SqlCommitter

_T = TypeVar("_T")
_U = TypeVar("_U")
# How long a session that prepared may take to end, or another committer to commit.
_OWNER_LEAVES_S = 1.0
_PAUSE_S, _PAUSE_MAX_S = 0.001, 0.02


class MySQLCommitter(SqlCommitter[Session, MySQLError, TargetTable, ColumnFit]):
    """Ends XA transactions whose sessions have let go of them."""

    commit_words: ClassVar[str] = "XA COMMIT"
    abort_words: ClassVar[str] = "XA ROLLBACK"

    def __init__(self, settings: SinkSettings, context: CommitterContext) -> None:
        """Connect to nothing yet."""
        super().__init__(MySQLDatabase(settings), context)
        self._names = settings.names
        self._ledger = settings.ledger
        self._only_answered: set[TransactionId] = set()

    @override
    def prepared_at(self, committable: Committable) -> datetime | None:
        """Return when the server was about to prepare it, by its own clock; None when it has not.

        Raises:
            SinkError: The server cannot be asked now.
        """
        transaction = committable.transaction
        try:
            if transaction not in self._listed():
                return None
            seconds = self._ledger.prepared_at_s(self._connected(), transaction)
        except MySQLError as error:
            raise SinkError(
                f"when {transaction} was prepared cannot be asked at {self._endpoint}: "
                f"{described(error)}"
            ) from error
        return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)

    @override
    def _commit_prepared(self, transaction: TransactionId) -> CommitOutcome:
        return self._finish("COMMIT", transaction, Committed(), self._gone_at_commit)

    @override
    def _abort_prepared(self, transaction: TransactionId) -> AbortOutcome:
        return self._finish("ROLLBACK", transaction, Aborted(), self._gone_at_abort)

    def _finish(
        self,
        verb: Literal["COMMIT", "ROLLBACK"],
        transaction: TransactionId,
        done: _T,
        gone: Callable[[TransactionId], _U | None],
    ) -> _T | _U | RetryLater:
        deadline = time.monotonic() + _OWNER_LEAVES_S
        pause_s = _PAUSE_S
        while True:
            outcome = self._decided(verb, transaction, done, gone)
            if outcome is not None:
                return outcome
            if time.monotonic() + pause_s > deadline:
                return self._answered(lambda: self._held(transaction))
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)

    def _decided(
        self,
        verb: Literal["COMMIT", "ROLLBACK"],
        transaction: TransactionId,
        done: _T,
        gone: Callable[[TransactionId], _U | None],
    ) -> _T | _U | RetryLater | None:
        """Return how it ended; None when a session holds the transaction now."""
        session = self._connected()
        try:
            if session.is_mariadb and self._owner(session, transaction) is not None:
                return None
            session.execute(f"XA {verb} {self._names.xid(transaction)}")
            if verb == "ROLLBACK" or not session.is_mariadb or self._in_ledger(transaction):
                return done
            self._only_answered.add(transaction)
            return _nothing_done(transaction)
        except MySQLError as error:
            if code(error) == UNKNOWN_XID:
                return self._answered(lambda: gone(transaction))
            if is_lost(session, error):
                raise self._no_reply(error) from error
            return RetryLater(f"XA {verb} {transaction}: {described(error)}")

    def _gone_at_commit(
        self, transaction: TransactionId
    ) -> AlreadyCommitted | Lost | RetryLater | None:
        """Tell committed from rolled back, after the server knew no prepared transaction.

        That answer was the look for the prepared transaction; the ledger is looked at after it. A
        PREPARE still under way on another session would be seen by neither look, so both are
        repeated in the same order before rows are called lost. None when a session holds it.
        """
        if self._in_ledger(transaction):
            return AlreadyCommitted()
        if transaction in self._listed():
            return None
        if self._in_ledger(transaction):
            return AlreadyCommitted()
        if transaction in self._only_answered:
            return _nothing_done(transaction)
        return Lost(
            f"prepared transaction {transaction} of checkpoint {transaction.checkpoint} is gone "
            f"from {self._endpoint} and its row is not in the ledger: it was rolled back "
            "outside onceflow, by XA ROLLBACK or by going back to an older copy of the database"
        )

    def _gone_at_abort(self, transaction: TransactionId) -> Aborted | AlreadyCommitted | None:
        if self._in_ledger(transaction):
            return AlreadyCommitted()
        if transaction in self._listed():
            return None
        return AlreadyCommitted() if self._in_ledger(transaction) else Aborted()

    def _held(self, transaction: TransactionId) -> RetryLater:
        """Say that a session holds `transaction`; end it if it is the one that prepared it.

        In MariaDB that one holds it to its end, which comes a moment after its writer has gone.
        Only a machine that vanished without a word, or a process that hangs, stays connected.
        """
        session = self._connected()
        owner = self._owner(session, transaction)
        if owner is None:
            return RetryLater(f"transaction {transaction} is being prepared, committed or aborted")
        try:
            session.execute(f"KILL {owner}")
        except MySQLError as error:
            if code(error) != NO_SUCH_SESSION:
                return RetryLater(
                    f"transaction {transaction} is held by session {owner}, which prepared it and "
                    f"is connected still, and cannot be ended: {described(error)}"
                )
        return RetryLater(
            f"transaction {transaction} was held by session {owner}, which prepared it and was "
            "connected still; it is being ended"
        )

    def _owner(self, session: Session, transaction: TransactionId) -> int | None:
        """Return the session that prepared `transaction`, while it is there."""
        lock = literal(self._names.owner_lock(transaction))
        ((owner,),) = session.query(f"SELECT IS_USED_LOCK({lock})")
        return None if owner is None else int(owner)


def _nothing_done(transaction: TransactionId) -> RetryLater:
    return RetryLater(
        f"MariaDB answered XA COMMIT {transaction} with OK and committed nothing. Its rows are in"
        " the server, prepared: XA RECOVER lists them again after a restart of the server"
    )
