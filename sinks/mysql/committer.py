"""Commits and rolls back what writers prepared or staged, on a session of its own.

Both kinds at any time, because a job may change its commit mode between two attempts. What is
staged is settled by `staged_commits`.

A prepared transaction moves one way: prepared, then gone from XA RECOVER, with its ledger row
(committed) or without (rolled back). The server makes the ledger row visible before it forgets the
transaction (measured over 80,000 looks, MySQL 9.7 and MariaDB 10.11). So whoever looks first for
the prepared transaction and then for the ledger row cannot miss one that is committed in between;
in the other order it would look lost.

"Unknown XID" alone proves nothing. It is also what MariaDB answers about a transaction that it
lists, while the session that prepared it is connected, and both servers while another session is
committing it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Literal, TypeVar

from pymysql.err import MySQLError

from onceflow.core.errors import ConfigError, SinkError
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
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.staging import is_staged, staged_committable
from onceflow.sinks.mysql.catalog import prepared_transactions
from onceflow.sinks.mysql.connection import Session, is_lost, reply_missing
from onceflow.sinks.mysql.database import MySQLDatabase
from onceflow.sinks.mysql.failures import NO_SUCH_SESSION, UNKNOWN_XID, code, described
from onceflow.sinks.mysql.names import literal
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.sql import session_name
from onceflow.sinks.sql.replies import NoReply, settled
from onceflow.sinks.sql.staged_commits import StagedCommits

_logger = logging.getLogger("onceflow.sinks.mysql")
_T = TypeVar("_T")
_U = TypeVar("_U")
_PRUNE_ROUNDS_MAX = 100
# How long a session that prepared may take to end, or another committer to commit.
_OWNER_LEAVES_S = 1.0
_PAUSE_S, _PAUSE_MAX_S = 0.001, 0.02


class MySQLCommitter(Committer):
    """Commits by name alone: who prepared, where, and how often it is asked do not matter."""

    def __init__(self, settings: SinkSettings, context: CommitterContext) -> None:
        """Connect to nothing yet."""
        self._settings = settings
        self._context = context
        self._session: Session | None = None
        self._staged = StagedCommits(MySQLDatabase(settings), context, self._connected)

    def commit(self, committable: Committable) -> CommitOutcome:
        """Return how it ended. A lost connection is opened anew and the server asked again.

        Waits for the server's replies and, when one was lost, for as long as connecting may take.

        Raises:
            StateCorrupt: Staged rows are not what was staged; they are not applied.
        """
        transaction, endpoint = committable.transaction, self._settings.endpoint
        if is_staged(committable):
            return settled(
                lambda: self._answered(lambda: self._staged.commit(committable)),
                f"COMMIT of the staged rows of {transaction}",
                sent_to=endpoint,
                timeout_s=endpoint.connect_timeout_s,
            )
        return settled(
            lambda: self._finish("COMMIT", transaction, Committed(), self._gone_at_commit),
            f"XA COMMIT {transaction}",
            sent_to=endpoint,
            timeout_s=endpoint.connect_timeout_s,
        )

    def abort(self, committable: Committable) -> AbortOutcome:
        """Return how it ended; `Aborted` also when nothing of the name was ever prepared.

        What a living writer of an older attempt is preparing at this moment is not seen: it is in
        doubt afterwards, and found by the next `in_doubt`.
        """
        transaction, endpoint = committable.transaction, self._settings.endpoint
        if is_staged(committable):
            return settled(
                lambda: self._answered(lambda: self._staged.abort(transaction)),
                f"the ledger's question for {transaction}",
                sent_to=endpoint,
                timeout_s=endpoint.connect_timeout_s,
            )
        return settled(
            lambda: self._finish("ROLLBACK", transaction, Aborted(), self._gone_at_abort),
            f"XA ROLLBACK {transaction}",
            sent_to=endpoint,
            timeout_s=endpoint.connect_timeout_s,
        )

    def in_doubt(self) -> Sequence[Committable]:
        """Return all that is prepared under exactly this sink id with this ledger, or staged.

        Raises:
            SinkError: The server cannot be asked now.
            StorageError: Checkpoint storage cannot be asked now.
        """
        try:
            found = self._listed()
        except MySQLError as error:
            raise SinkError(
                f"sink {self._context.sink_id}: what is in doubt at {self._settings.endpoint} "
                f"cannot be listed: {described(error)}"
            ) from error
        staging = self._context.staging
        staged = () if staging is None else staging.transactions()
        return (*map(Committable, found), *map(staged_committable, staged))

    def prepared_at(self, committable: Committable) -> datetime | None:
        """Return when the server was about to prepare it, by its own clock; None when it has not.

        Raises:
            SinkError: The server cannot be asked now.
        """
        transaction = committable.transaction
        try:
            if transaction not in self._listed():
                return None
            seconds = self._settings.ledger.prepared_at_s(self._connected(), transaction)
        except MySQLError as error:
            raise SinkError(
                f"when {transaction} was prepared cannot be asked at {self._settings.endpoint}: "
                f"{described(error)}"
            ) from error
        return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)

    def prune(self, before: CheckpointId) -> None:
        """Delete the ledger rows of committed transactions of checkpoints before `before`.

        A failure is logged and nothing else: the rows do no harm, and the next call comes soon.
        """
        ledger = self._settings.ledger
        try:
            for _ in range(_PRUNE_ROUNDS_MAX):
                if not ledger.prune(self._connected(), self._context.sink_id, before):
                    return
        except (MySQLError, SinkError, ConfigError) as error:
            self.close()
            reason = described(error) if isinstance(error, MySQLError) else str(error)
            _logger.warning(
                "sink %s: the ledger is not pruned below checkpoint %s: %s",
                self._context.sink_id,
                before,
                reason,
            )

    def close(self) -> None:
        """Disconnect."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

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
            session.execute(f"XA {verb} {self._settings.names.xid(transaction)}")
            return done
        except MySQLError as error:
            if code(error) == UNKNOWN_XID:
                return self._answered(lambda: gone(transaction))
            if is_lost(session, error):
                self.close()
                raise NoReply(reply_missing(session, error)) from error
            return RetryLater(f"XA {verb} {transaction}: {described(error)}")

    def _gone_at_commit(self, transaction: TransactionId) -> AlreadyCommitted | Lost | None:
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
        return Lost(
            f"prepared transaction {transaction} of checkpoint {transaction.checkpoint} is gone "
            f"from {self._settings.endpoint} and its row is not in the ledger: it was rolled back "
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
        lock = literal(self._settings.names.owner_lock(transaction))
        ((owner,),) = session.query(f"SELECT IS_USED_LOCK({lock})")
        if owner is None:
            return RetryLater(f"transaction {transaction} is being prepared, committed or aborted")
        try:
            session.execute(f"KILL {int(owner)}")
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

    def _listed(self) -> tuple[TransactionId, ...]:
        names, sink_id = self._settings.names, self._context.sink_id
        session = self._connected()
        try:
            return prepared_transactions(session, names, sink_id)
        except MySQLError as error:
            if not is_lost(session, error):
                raise
            # The server may have restarted while nothing was asked of it.
            self.close()
            return prepared_transactions(self._connected(), names, sink_id)

    def _in_ledger(self, transaction: TransactionId) -> bool:
        return self._settings.ledger.has(self._connected(), transaction)

    def _answered(self, ask: Callable[[], _T]) -> _T | RetryLater:
        """Return what `ask` returns; it may be asked twice, so a lost reply means to ask again."""
        try:
            return ask()
        except MySQLError as error:
            session = self._session
            if session is None or is_lost(session, error):
                self.close()
                raise NoReply(described(error)) from error
            return RetryLater(f"the server cannot be asked: {described(error)}")

    def _connected(self) -> Session:
        if self._session is None or not self._session.open:
            context = self._context
            name = session_name(context.sink_id, context.attempt, "committer")
            self._session = self._settings.endpoint.connect(name)
        return self._session
