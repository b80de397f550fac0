"""The transactions that Postgres prepares, and their end by name from any session."""

from __future__ import annotations

import hashlib
from datetime import datetime
from functools import partial
from typing import ClassVar, cast

from typing_extensions import override

from onceflow.clients.postgres.catalog import literal
from onceflow.clients.postgres.connection import own, writer_name
from onceflow.clients.sql.session import NameTaken, Session, SqlEndpoint, SqlError, refusal
from onceflow.core.errors import PreparedLimitReached, SinkError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import WriterContext
from onceflow.core.spi.connector import Level
from onceflow.sinks.postgres.server import check_prepared_room
from onceflow.sinks.sql.dialect import TwoPhase
from onceflow.sinks.sql.transactions import PreparedTransactions


class PostgresTransactions(PreparedTransactions):
    """The transactions of one writer, each of which gets its name only when it is prepared.

    A DELETE or an UPDATE does not see a row that a prepared transaction has inserted, and does not
    wait for it. So each transaction that changes rows by key holds an advisory lock of its own
    until its end. A transaction that deletes rows, or updates single columns of them, waits for the
    locks of the earlier ones that the server lists. A transaction leaves the list after its rows
    are visible.

    The next checkpoint commits what an aborted checkpoint has prepared. If that next checkpoint
    deletes or updates rows, it waits in vain, and the attempt fails after the lock timeout. The
    next attempt rolls back the prepared transactions first, so it begins without any.
    """

    def __init__(self, endpoint: SqlEndpoint, context: WriterContext) -> None:
        """Connect, and check that the server has enough slots for the transactions of all subtasks.

        Raises:
            PreparedLimitReached: The server has too few slots.
            SinkError: The server cannot be reached or asked now.
        """
        name = writer_name(context.sink_id, context.attempt, context.subtask)
        super().__init__(partial(endpoint.connect, name), context.first_checkpoint)
        self._context = context
        self._is_ordered = False
        try:
            # A batch has one checkpoint and never waits for commits of others, so slots that others
            # hold now are not available to it.
            if context.checkpoints_at_once == 1:
                _require_room_beside_others(self.session, context)
            else:
                _require_room(self.session, context)
        except SqlError as error:
            self.close()
            text = f"sink {context.sink_id} subtask {context.subtask}: the server was not asked"
            raise refusal(error, text) from error
        except BaseException:
            self.close()
            raise

    @property
    @override
    def transaction(self) -> TransactionId:
        context = self._context
        return TransactionId(
            context.sink_id, context.attempt, self._next, context.subtask, sequence=0
        )

    @override
    def prepare(self) -> None:
        transaction = self.transaction
        if self._is_ordered:
            self.session.query(f"SELECT pg_catalog.pg_advisory_xact_lock({_lock_of(transaction)})")
        statement = f"PREPARE TRANSACTION {literal(str(transaction))}"
        try:
            own(self.session).end_transaction(statement, "PREPARE TRANSACTION")
        except NameTaken as error:
            raise SinkError(self.name_in_use(transaction)) from error
        self._open = False

    @override
    def order_changes(self) -> None:
        self._is_ordered = True

    @override
    def await_earlier(self) -> None:
        context = self._context
        for earlier in _list_prepared(self.session, context.sink_id):
            if (earlier.attempt, earlier.subtask) == (context.attempt, context.subtask):
                lock = _lock_of(earlier)
                self.session.query(f"SELECT pg_catalog.pg_advisory_xact_lock_shared({lock})")

    @override
    def _way_to_end(self, transaction: TransactionId) -> str:
        return f"See pg_prepared_xacts, and COMMIT or ROLLBACK PREPARED '{transaction}' there"


class PostgresTwoPhase(TwoPhase):
    """The two-phase operations of Postgres.

    Prepared transactions belong to a database; names are unique in the whole server.
    """

    commit_words: ClassVar[str] = "COMMIT PREPARED"
    roll_back_words: ClassVar[str] = "ROLLBACK PREPARED"

    @override
    def transactions(self, endpoint: SqlEndpoint, context: WriterContext) -> PostgresTransactions:
        return PostgresTransactions(endpoint, context)

    @override
    def list_prepared(self, session: Session, sink_id: str) -> tuple[TransactionId, ...]:
        return _list_prepared(session, sink_id)

    @override
    def is_prepared(self, session: Session, transaction: TransactionId) -> bool:
        name = literal(str(transaction))
        return bool(session.query(f"SELECT 1 FROM pg_catalog.pg_prepared_xacts WHERE gid = {name}"))

    @override
    def find_prepare_time(self, session: Session, transaction: TransactionId) -> datetime | None:
        rows = session.query(
            "SELECT prepared FROM pg_catalog.pg_prepared_xacts "
            f"WHERE gid = {literal(str(transaction))} AND database = pg_catalog.current_database()"
        )
        return cast("datetime", rows[0][0]) if rows else None

    @override
    def commit(self, session: Session, transaction: TransactionId) -> None:
        # Refused if another session is deciding the same transaction (55000), or if it was prepared
        # by another role (42501) or in another database (0A000). It is still prepared then.
        session.execute(f"COMMIT PREPARED {literal(str(transaction))}")

    @override
    def roll_back(self, session: Session, transaction: TransactionId) -> None:
        session.execute(f"ROLLBACK PREPARED {literal(str(transaction))}")

    @override
    def end_holding_session(self, session: Session, transaction: TransactionId) -> str:
        return f"transaction {transaction} is being prepared, or is in another database"

    @override
    def endings(self, transaction: TransactionId) -> str:
        return f"COMMIT PREPARED or ROLLBACK PREPARED '{transaction}'"


def _list_prepared(session: Session, sink_id: str) -> tuple[TransactionId, ...]:
    """Return the prepared transactions of `sink_id` in this database, in their order."""
    rows = session.query(
        "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()"
    )
    parsed = (TransactionId.parse(str(gid)) for (gid,) in rows)
    return tuple(
        sorted(
            transaction
            for transaction in parsed
            if transaction is not None and transaction.sink_id == sink_id
        )
    )


def _lock_of(transaction: TransactionId) -> int:
    """Return the number of the advisory lock that `transaction` holds until its end."""
    digest = hashlib.sha256(f"onceflow {transaction}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _require_room(session: Session, context: WriterContext) -> None:
    ((maximum,),) = session.query("SELECT current_setting('max_prepared_transactions')::int")
    finding = check_prepared_room(maximum, context.parallelism, at_once=context.checkpoints_at_once)
    if finding.level is Level.PROBLEM:
        raise PreparedLimitReached(
            f"sink {context.sink_id} subtask {context.subtask} of {context.parallelism}: {finding};"
            " or write with a lower parallelism; or pass commit_mode='ledger'",
            room=maximum,
        )


def _require_room_beside_others(session: Session, context: WriterContext) -> None:
    """Raise PreparedLimitReached unless there are free slots for all subtasks of a batch.

    Slots that others hold now count as used, because a batch does not wait for their commits. Slots
    of this attempt do not: each subtask has a number, and so a share of the slots, prepared or not.
    """
    # With the slash at the end, so that attempt 1 does not match attempt 12.
    own_prefix = literal(f"{context.sink_id}/{context.attempt}/")
    ((maximum, others),) = session.query(
        "SELECT current_setting('max_prepared_transactions')::int, (SELECT count(*) "
        f"FROM pg_catalog.pg_prepared_xacts WHERE NOT pg_catalog.starts_with(gid, {own_prefix}))"
    )
    room = max(0, maximum - others)
    if context.parallelism > room:
        raise PreparedLimitReached(
            f"sink {context.sink_id}: partition {context.subtask} needs prepared transaction"
            f" {context.parallelism} of this write, and the server has room for {room}:"
            f" max_prepared_transactions = {maximum}, {others} in use by others",
            room=room,
        )
