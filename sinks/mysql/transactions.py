"""The session of one writer and the one transaction that is open on it at a time.

XA wants a transaction's name at its beginning, when nobody knows which checkpoint will take it. It
is named after the next one; should that be given up, the name tells of it still. It is as unique:
each begins with a higher number than the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import WriterContext
from onceflow.sinks.mysql.connection import Session, is_lost
from onceflow.sinks.mysql.failures import DUPLICATE_XID, code
from onceflow.sinks.mysql.names import literal
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.sql import session_name

# A server that hangs is left alone after it; the end of the connection rolls back too.
_CLOSE_TIMEOUT_S = 2.0


class Transactions(ABC):
    """One transaction after another. Errors are PyMySQL's own."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect; nothing is open yet."""
        self._settings = settings
        self._context = context
        self._name = session_name(
            context.sink_id, context.attempt, f"subtask {context.subtask} writer"
        )
        self._session: Session | None = None
        self._open = False
        _ = self.connection

    @property
    def connection(self) -> Session:
        """The session, for what runs in the transaction or ends it."""
        if self._session is None:
            self._session = self._settings.endpoint.connect(self._name)
            self._enter(self._session)
        return self._session

    def begin(self) -> Session:
        """Return the session with a transaction open on it, the one that is or a new one."""
        if self._open:
            return self.connection
        try:
            self._begin(self.connection)
        except MySQLError as error:
            if not is_lost(self.connection, error):
                raise
            # Nothing was open on it, so nothing is lost with it.
            self.close()
            self._begin(self.connection)
        self._open = True
        return self.connection

    def roll_back(self) -> None:
        """End the transaction, if one is open, of which nothing is kept."""
        if self._open:
            self._roll_back(self.connection)
            self._open = False

    def hasten(self) -> None:
        """From now on wait for the server only as long as leaving it may take."""
        if self._session is not None:
            self._session.hasten(_CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Safe to call twice."""
        session, self._session = self._session, None
        self._open = False
        if session is not None:
            session.close()

    def _enter(self, session: Session) -> None:  # noqa: B027 - optional hook
        """Set up a new session."""

    @abstractmethod
    def _begin(self, session: Session) -> None:
        """Open a transaction."""

    @abstractmethod
    def _roll_back(self, session: Session) -> None:
        """Roll the open one back."""


class PlainTransactions(Transactions):
    """Ordinary ones."""

    def commit(self) -> str:
        """Commit the open transaction, of which the server says nothing else."""
        self.connection.execute("COMMIT")
        self._open = False
        return "COMMIT"

    @override
    def _begin(self, session: Session) -> None:
        session.execute("START TRANSACTION READ WRITE")

    @override
    def _roll_back(self, session: Session) -> None:
        session.execute("ROLLBACK")


class XaTransactions(Transactions):
    """Transactions that are prepared, each under a name."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect; nothing is open yet.

        Raises:
            SinkError: Another writer of the subtask is alive in the server.
        """
        self._next = context.first_checkpoint
        self._transaction: TransactionId | None = None
        super().__init__(settings, context)

    def expect(self, checkpoint: CheckpointId) -> None:
        """Take note of the checkpoint that will take the next transaction."""
        self._next = checkpoint

    @property
    def transaction(self) -> TransactionId:
        """The name of the open transaction."""
        if self._transaction is None:
            raise SinkError("no transaction is open")
        return self._transaction

    def prepare(self) -> None:
        """Prepare the open transaction, which survives everything from then on.

        MySQL's session goes on. MariaDB's owns what it has prepared until it ends: it is closed.
        """
        session, transaction = self.connection, self.transaction
        if session.is_mariadb:
            # By it a committer finds the session, should it not end.
            owned = literal(self._settings.names.owner_lock(transaction))
            session.query(f"SELECT GET_LOCK({owned}, 0)")
        xid = self._settings.names.xid(transaction)
        session.execute(f"XA END {xid}")
        session.execute(f"XA PREPARE {xid}")
        self._open = False
        if session.is_mariadb:
            self.close()

    def name_in_use(self, transaction: TransactionId) -> str:
        """Return what to say, and to do, when something is prepared under the name already."""
        return (
            f"a transaction named {transaction} is prepared already, so attempt or checkpoint "
            "numbers were used twice: by a second job under this sink id, or after the decision "
            "log was deleted. See XA RECOVER, and run XA COMMIT or XA ROLLBACK "
            f"{self._settings.names.xid(transaction)}"
        )

    @override
    def _enter(self, session: Session) -> None:
        """Hold the lock by which the next attempt's check finds and ends this session."""
        context = self._context
        lock = f"{self._settings.names.writers_lock(context.sink_id)}{context.subtask}"
        session.query(f"SELECT GET_LOCK({literal(lock)}, 0)")

    @override
    def _begin(self, session: Session) -> None:
        context = self._context
        transaction = TransactionId(
            context.sink_id, context.attempt, self._next, context.subtask, sequence=0
        )
        try:
            session.execute(f"XA START {self._settings.names.xid(transaction)}")
        except MySQLError as error:
            if code(error) != DUPLICATE_XID:
                raise
            raise SinkError(self.name_in_use(transaction)) from error
        self._transaction = transaction

    @override
    def _roll_back(self, session: Session) -> None:
        xid = self._settings.names.xid(self.transaction)
        session.execute(f"XA END {xid}")
        session.execute(f"XA ROLLBACK {xid}")
