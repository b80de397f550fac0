"""Commits and rolls back what writers prepared or staged, on a connection of its own.

Both kinds at any time, because a job may change its commit mode between two attempts. What is
staged is settled by `staged_commits`.

A prepared transaction moves one way: prepared, then gone from the list of prepared ones, with its
ledger row (committed) or without (rolled back). The server makes the ledger row visible before it
forgets the prepared transaction (Source: FinishPreparedTransaction in twophase.c, PostgreSQL 12 to
18). So whoever looks first for the prepared transaction and then for the ledger row cannot miss a
transaction that is committed in between; in the other order it would look lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal, TypeVar, cast

import psycopg
from psycopg import sql

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
from onceflow.sinks.postgres.catalog import prepared_transactions
from onceflow.sinks.postgres.connection import BoundedConnection, is_lost
from onceflow.sinks.postgres.database import PostgresDatabase
from onceflow.sinks.postgres.failures import described
from onceflow.sinks.postgres.settings import SinkSettings
from onceflow.sinks.sql.replies import NoReply, settled
from onceflow.sinks.sql.staged_commits import StagedCommits

_logger = logging.getLogger("onceflow.sinks.postgres")
_T = TypeVar("_T")
_U = TypeVar("_U")
_PRUNE_ROUNDS_MAX = 100
_PREPARED_AT = """
    SELECT prepared FROM pg_catalog.pg_prepared_xacts
    WHERE gid = %s AND database = pg_catalog.current_database()
"""


class PostgresCommitter(Committer):
    """Commits by name alone: who prepared, where, and how often it is asked do not matter."""

    def __init__(self, settings: SinkSettings, context: CommitterContext) -> None:
        """Connect to nothing yet."""
        self._settings = settings
        self._context = context
        self._connection: BoundedConnection | None = None
        self._staged = StagedCommits(PostgresDatabase(settings), context, self._connected)

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
            f"COMMIT PREPARED '{transaction}'",
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
            f"ROLLBACK PREPARED '{transaction}'",
            sent_to=endpoint,
            timeout_s=endpoint.connect_timeout_s,
        )

    def in_doubt(self) -> Sequence[Committable]:
        """Return all that is prepared under exactly this sink id in this database, or staged.

        Raises:
            SinkError: The server cannot be asked now.
            StorageError: Checkpoint storage cannot be asked now.
        """
        try:
            found = self._listed()
        except psycopg.Error as error:
            raise SinkError(
                f"sink {self._context.sink_id}: what is in doubt at {self._settings.endpoint} "
                f"cannot be listed: {described(error)}"
            ) from error
        staging = self._context.staging
        staged = () if staging is None else staging.transactions()
        return (*map(Committable, found), *map(staged_committable, staged))

    def prepared_at(self, committable: Committable) -> datetime | None:
        """Return when the server prepared it, by its own clock; None when it is not prepared.

        Raises:
            SinkError: The server cannot be asked now.
        """
        name = str(committable.transaction)
        try:
            row = self._connected().execute(_PREPARED_AT, (name,)).fetchone()
        except psycopg.Error as error:
            raise SinkError(
                f"when {name} was prepared cannot be asked at {self._settings.endpoint}: "
                f"{described(error)}"
            ) from error
        return None if row is None else cast("datetime", row[0])

    def prune(self, before: CheckpointId) -> None:
        """Delete the ledger rows of committed transactions of checkpoints before `before`.

        A failure is logged and nothing else: the rows do no harm, and the next call comes soon.
        """
        ledger = self._settings.ledger
        try:
            for _ in range(_PRUNE_ROUNDS_MAX):
                if not ledger.prune(self._connected(), self._context.sink_id, before):
                    return
        except (psycopg.Error, SinkError, ConfigError) as error:
            self.close()
            reason = described(error) if isinstance(error, psycopg.Error) else str(error)
            _logger.warning(
                "sink %s: the ledger is not pruned below checkpoint %s: %s",
                self._context.sink_id,
                before,
                reason,
            )

    def close(self) -> None:
        """Disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _finish(
        self,
        verb: Literal["COMMIT", "ROLLBACK"],
        transaction: TransactionId,
        done: _T,
        gone: Callable[[TransactionId], _U],
    ) -> _T | _U | RetryLater:
        connection = self._connected()
        statement = sql.SQL(f"{verb} PREPARED {{}}").format(sql.Literal(str(transaction)))
        try:
            connection.execute(statement)
            return done
        except psycopg.errors.UndefinedObject:
            return self._answered(lambda: gone(transaction))
        except psycopg.Error as error:
            if is_lost(connection, error):
                self.close()
                raise NoReply(described(error)) from error
            # Another session is deciding the same one (55000), it was prepared by another role
            # (42501) or in another database (0A000): it is still there.
            return RetryLater(f"{verb} PREPARED '{transaction}': {described(error)}")

    def _gone_at_commit(self, transaction: TransactionId) -> AlreadyCommitted | Lost | RetryLater:
        """Tell committed from rolled back, after the server knew no prepared transaction.

        That answer was the look for the prepared transaction; the ledger is looked at after it. A
        PREPARE still under way on another connection would be seen by neither look, so both are
        repeated in the same order before rows are called lost.
        """
        if self._in_ledger(transaction):
            return AlreadyCommitted()
        if self._is_prepared(transaction):
            return RetryLater(
                f"transaction {transaction} is being prepared, or is in another database"
            )
        if self._in_ledger(transaction):
            return AlreadyCommitted()
        return Lost(
            f"prepared transaction {transaction} of checkpoint {transaction.checkpoint} is gone "
            f"from {self._settings.endpoint} and its row is not in the ledger: it was rolled back "
            "outside onceflow, by ROLLBACK PREPARED or by going back to an older copy of the "
            "database"
        )

    def _gone_at_abort(self, transaction: TransactionId) -> Aborted | AlreadyCommitted:
        return AlreadyCommitted() if self._in_ledger(transaction) else Aborted()

    def _listed(self) -> tuple[TransactionId, ...]:
        connection = self._connected()
        try:
            return prepared_transactions(connection, self._context.sink_id)
        except psycopg.Error as error:
            if not is_lost(connection, error):
                raise
            # The server may have restarted while nothing was asked of it.
            self.close()
            return prepared_transactions(self._connected(), self._context.sink_id)

    def _in_ledger(self, transaction: TransactionId) -> bool:
        return self._settings.ledger.has(self._connected(), transaction)

    def _is_prepared(self, transaction: TransactionId) -> bool:
        cursor = self._connected().execute(
            "SELECT FROM pg_catalog.pg_prepared_xacts WHERE gid = %s", (str(transaction),)
        )
        return cursor.fetchone() is not None

    def _answered(self, ask: Callable[[], _T]) -> _T | RetryLater:
        """Return what `ask` returns; it may be asked twice, so a lost reply means to ask again."""
        try:
            return ask()
        except psycopg.Error as error:
            connection = self._connection
            if connection is None or is_lost(connection, error):
                self.close()
                raise NoReply(described(error)) from error
            return RetryLater(f"the ledger cannot be asked: {described(error)}")

    def _connected(self) -> BoundedConnection:
        if self._connection is None or self._connection.closed:
            context = self._context
            self._connection = self._settings.endpoint.connect(
                f"onceflow {context.sink_id}/{context.attempt} committer"
            )
        return self._connection
