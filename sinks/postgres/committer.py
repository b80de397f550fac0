"""Commits and rolls back what writers prepared; what is staged is settled as in every database.

A prepared transaction moves one way: prepared, then gone from the list of prepared ones, with its
ledger row (committed) or without (rolled back). The server makes the ledger row visible before it
forgets the prepared transaction (Source: FinishPreparedTransaction in twophase.c, PostgreSQL 12 to
18). So whoever looks first for the prepared transaction and then for the ledger row cannot miss a
transaction that is committed in between; in the other order it would look lost.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import ClassVar, Literal, TypeVar, cast

import psycopg
from psycopg import sql
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
from onceflow.sinks.postgres.catalog import TargetTable
from onceflow.sinks.postgres.connection import BoundedConnection, is_lost
from onceflow.sinks.postgres.database import PostgresDatabase
from onceflow.sinks.postgres.failures import described
from onceflow.sinks.postgres.fitting import ColumnFit
from onceflow.sinks.postgres.settings import SinkSettings
from onceflow.sinks.sql.committer import SqlCommitter

_T = TypeVar("_T")
_U = TypeVar("_U")
_PREPARED_AT = """
    SELECT prepared FROM pg_catalog.pg_prepared_xacts
    WHERE gid = %s AND database = pg_catalog.current_database()
"""


class PostgresCommitter(SqlCommitter[BoundedConnection, psycopg.Error, TargetTable, ColumnFit]):
    """Ends prepared transactions from any session, by their names."""

    commit_words: ClassVar[str] = "COMMIT PREPARED"
    abort_words: ClassVar[str] = "ROLLBACK PREPARED"

    def __init__(self, settings: SinkSettings, context: CommitterContext) -> None:
        """Connect to nothing yet."""
        super().__init__(PostgresDatabase(settings), context)

    @override
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
                f"when {name} was prepared cannot be asked at {self._endpoint}: {described(error)}"
            ) from error
        return None if row is None else cast("datetime", row[0])

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
                raise self._no_reply(error) from error
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
            f"from {self._endpoint} and its row is not in the ledger: it was rolled back "
            "outside onceflow, by ROLLBACK PREPARED or by going back to an older copy of the "
            "database"
        )

    def _gone_at_abort(self, transaction: TransactionId) -> Aborted | AlreadyCommitted:
        return AlreadyCommitted() if self._in_ledger(transaction) else Aborted()

    def _is_prepared(self, transaction: TransactionId) -> bool:
        cursor = self._connected().execute(
            "SELECT FROM pg_catalog.pg_prepared_xacts WHERE gid = %s", (str(transaction),)
        )
        return cursor.fetchone() is not None
