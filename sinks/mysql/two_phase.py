"""XA transactions: their names, their sessions, and their end by name from any session.

XA requires a transaction's name at its beginning, when its checkpoint is not known yet. It is named
after the next checkpoint. If that checkpoint is given up, the transaction keeps the name. Names
stay unique, because each transaction begins with a higher number than the last.

MariaDB's OK does not prove a commit. While the session that prepared is ending, there is a moment
in which XA COMMIT finds the name but not the rows, and replies OK (10.11: 4 of 1,260 commits that
were sent then; 0 of 2,708 once the lock of that session was free). So nothing is sent before that
lock is free, and the ledger row is read after each commit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from onceflow.clients.mysql.catalog import XaNames, grantee, identifier, literal
from onceflow.clients.mysql.connection import XA_FATAL, own
from onceflow.clients.sql.session import (
    AccessDenied,
    NameTaken,
    NameUnknown,
    Session,
    SqlEndpoint,
    SqlError,
    session_name,
)
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import WriterContext
from onceflow.sinks.sql.dialect import TwoPhase
from onceflow.sinks.sql.ledger import LEDGER
from onceflow.sinks.sql.transactions import PreparedTransactions

_logger = logging.getLogger("onceflow.sinks.mysql")
_LOCK_WAIT_S = 2
"""The time that a writer's next session waits for the previous one, which ends within
milliseconds."""


class XaTransactions(PreparedTransactions):
    """The prepared transactions of one writer, each named when it begins."""

    def __init__(self, names: XaNames, endpoint: SqlEndpoint, context: WriterContext) -> None:
        """Connect; no transaction is open yet.

        Raises:
            ConfigError: The server refuses the connection for good.
            SinkError: The server refuses the connection now.
        """
        self._names = names
        self._context = context
        self._transaction: TransactionId | None = None
        self._lock = f"{names.writers_lock(context.sink_id)}{context.subtask}"
        self._is_locked = False
        role = f"subtask {context.subtask} writer"
        name = session_name(context.sink_id, context.attempt, role)
        super().__init__(partial(endpoint.connect, name), context.first_checkpoint)

    @property
    @override
    def transaction(self) -> TransactionId:
        if self._transaction is None:
            raise SinkError("no transaction is open")
        return self._transaction

    @override
    def prepare(self) -> None:
        """Prepare the open transaction. MariaDB's session owns it until the session is closed.

        MySQL's session continues.
        """
        session, transaction = own(self.session), self.transaction
        if session.is_mariadb:
            # By this lock a committer finds the session if it does not end.
            owned = literal(self._names.owner_lock(transaction))
            # The lock is taken before XA PREPARE: a session that hangs right after it can then be
            # found.
            session.query(f"SELECT GET_LOCK({owned}, 0)")
        xid = self._names.xid(transaction)
        session.execute(f"XA END {xid}")
        session.execute(f"XA PREPARE {xid}")
        self._open = False
        if session.is_mariadb:
            self.close()

    @override
    def _set_up(self, session: Session) -> None:
        """Take the lock by which the next attempt's check finds and ends this session.

        In MariaDB the previous session was closed a moment ago, and holds the lock until it has
        ended.
        """
        self._is_locked = self._try_lock(session, _LOCK_WAIT_S)
        if not self._is_locked:
            _logger.warning(
                "sink %s subtask %s: another session has held the lock %s for %s s; until that"
                " session ends, the next attempt does not find this one to end it",
                self._context.sink_id,
                self._context.subtask,
                self._lock,
                _LOCK_WAIT_S,
            )

    def _try_lock(self, session: Session, wait_s: int) -> bool:
        ((is_ours,),) = session.query(f"SELECT GET_LOCK({literal(self._lock)}, {wait_s})")
        return bool(is_ours)

    @override
    def _begin(self, session: Session) -> None:
        context = self._context
        if not self._is_locked:
            self._is_locked = self._try_lock(session, 0)
        transaction = TransactionId(
            context.sink_id, context.attempt, self._next, context.subtask, sequence=0
        )
        try:
            session.execute(f"XA START {self._names.xid(transaction)}")
        except NameTaken as error:
            raise SinkError(self.name_in_use(transaction)) from error
        self._transaction = transaction

    @override
    def _roll_back(self, session: Session) -> None:
        xid = self._names.xid(self.transaction)
        session.execute(f"XA END {xid}")
        session.execute(f"XA ROLLBACK {xid}")

    @override
    def _way_to_end(self, transaction: TransactionId) -> str:
        return f"See XA RECOVER, and run XA COMMIT or XA ROLLBACK {self._names.xid(transaction)}"


class XaTwoPhase(TwoPhase):
    """The two-phase operations of MySQL and MariaDB.

    XA ids belong to the whole server; those of one ledger contain the name of its database.
    """

    commit_words: ClassVar[str] = "XA COMMIT"
    roll_back_words: ClassVar[str] = "XA ROLLBACK"
    holder_leaves_s: ClassVar[float] = 1.0

    def __init__(self, schema: str) -> None:
        super().__init__(schema)
        self.names = XaNames(schema)

    @override
    def transactions(self, endpoint: SqlEndpoint, context: WriterContext) -> XaTransactions:
        return XaTransactions(self.names, endpoint, context)

    @override
    def list_prepared(self, session: Session, sink_id: str) -> tuple[TransactionId, ...]:
        parsed = (
            self.names.parse(int(format_id), int(gtrid), data)
            for format_id, gtrid, _, data in xa_recover(session)
        )
        return tuple(
            sorted(
                transaction
                for transaction in parsed
                if transaction is not None and transaction.sink_id == sink_id
            )
        )

    @override
    def may_list(self, session: Session) -> bool:
        return may_recover(session)

    @override
    def find_prepare_time(self, session: Session, transaction: TransactionId) -> datetime | None:
        """Return the time in its ledger row, which is written just before it is prepared."""
        if not self.is_prepared(session, transaction):
            return None
        # The ledger row is part of the prepared transaction, so it is uncommitted. Only READ
        # UNCOMMITTED shows it.
        session.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        rows = session.query(
            "SELECT UNIX_TIMESTAMP(prepared_at) FROM "
            f"{identifier(TableName(self.schema, LEDGER))} "
            f"WHERE transaction_id = {literal(str(transaction))}"
        )
        return datetime.fromtimestamp(float(rows[0][0]), timezone.utc) if rows else None

    @override
    def is_held(self, session: Session, transaction: TransactionId) -> bool:
        # In MySQL any session may end a prepared transaction at once. In MariaDB it belongs to its
        # session.
        return own(session).is_mariadb and self._owner(session, transaction) is not None

    @override
    def commit(self, session: Session, transaction: TransactionId) -> None:
        session.execute(f"XA COMMIT {self.names.xid(transaction)}")

    @override
    def roll_back(self, session: Session, transaction: TransactionId) -> None:
        session.execute(f"XA ROLLBACK {self.names.xid(transaction)}")

    @override
    def commit_is_proof(self, session: Session) -> bool:
        return not own(session).is_mariadb

    @override
    def end_holding_session(self, session: Session, transaction: TransactionId) -> str:
        """Describe the holder; end the session if it is the one that prepared the transaction.

        In MariaDB that session holds the transaction until it ends, shortly after its writer has
        gone. It stays connected only if its machine vanished or its process hangs.
        """
        owner = self._owner(session, transaction)
        if owner is None:
            return f"transaction {transaction} is being prepared, committed or aborted"
        try:
            session.execute(f"KILL {owner}")
        # The session has ended by itself in the meantime.
        except NameUnknown:
            pass
        except AccessDenied as error:
            return (
                f"transaction {transaction} is held by session {owner}, which prepared it and is "
                f"connected still, and cannot be ended: {error}"
            )
        return (
            f"transaction {transaction} was held by session {owner}, which prepared it and was "
            "connected still; it is being ended"
        )

    @override
    def endings(self, transaction: TransactionId) -> str:
        return f"XA COMMIT or XA ROLLBACK {self.names.xid(transaction)}"

    def _owner(self, session: Session, transaction: TransactionId) -> int | None:
        """Return the session that prepared `transaction`, or None if it has ended."""
        lock = literal(self.names.owner_lock(transaction))
        ((owner,),) = session.query(f"SELECT IS_USED_LOCK({lock})")
        return None if owner is None else int(owner)


def may_recover(session: Session) -> bool:
    """Return True if the user may list prepared transactions and commit those of others."""
    try:
        xa_recover(session)
    except AccessDenied:
        return False
    return True


def xa_recover(session: Session) -> Sequence[tuple[Any, ...]]:
    """Return the rows of XA RECOVER: format, lengths of both parts, both parts as bytes.

    Raises:
        AccessDenied: The user may not list prepared transactions.
    """
    try:
        branches = session.query("XA RECOVER")
    except SqlError as error:
        # MySQL replies "fatal error" to users without XA_RECOVER_ADMIN.
        if not isinstance(error, AccessDenied) and error.code != XA_FATAL:
            raise
        ((user,),) = session.query("SELECT CURRENT_USER()")
        raise AccessDenied(
            "the user may not list prepared transactions. Run: GRANT XA_RECOVER_ADMIN ON *.* TO "
            f"{grantee(str(user))}",
            error.code,
        ) from error
    return [
        (format_id, gtrid, bqual, data if isinstance(data, bytes) else data.encode())
        for format_id, gtrid, bqual, data in branches
    ]
