"""The connection of one writer and the one transaction that is open on it at a time."""

from __future__ import annotations

import psycopg
from psycopg import sql

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import WriterContext
from onceflow.sinks.postgres.catalog import server_facts
from onceflow.sinks.postgres.connection import BoundedConnection, is_lost
from onceflow.sinks.postgres.failures import FAILURES
from onceflow.sinks.postgres.settings import SinkSettings, writer_name

# Limits of the role's own would end a COPY that lasts as long as a checkpoint interval; the wait
# for each reply has its deadline in the client. Keepalives: should this machine vanish without a
# word, the server rolls back within a minute, and a new attempt finds no lock of ours in its way.
# A commit after which nobody has the rows any more must not be in the server's memory alone.
_BEGIN = """
    BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
    SET LOCAL lock_timeout = {lock_timeout_ms};
    SET LOCAL statement_timeout = 0;
    SET LOCAL idle_in_transaction_session_timeout = 0;
    SET LOCAL tcp_keepalives_idle = 20;
    SET LOCAL tcp_keepalives_interval = 10;
    SET LOCAL tcp_keepalives_count = 3;
    SELECT pg_catalog.set_config('synchronous_commit', 'on', true)
    WHERE pg_catalog.current_setting('synchronous_commit') = 'off';
"""
# A server that hangs is left alone after it; the end of the connection rolls back too.
_CLOSE_TIMEOUT_S = 2.0


def begin_statement(settings: SinkSettings) -> sql.Composed:
    """Return what opens a transaction whose waits have their deadlines, and no session state."""
    return sql.SQL(_BEGIN).format(
        lock_timeout_ms=sql.Literal(round(settings.lock_timeout_s * 1000))
    )


class Transactions:
    """One transaction after another on one connection. Errors are psycopg's own."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect; nothing is open yet."""
        self._settings = settings
        self._context = context
        self._name = name = writer_name(context.sink_id, context.attempt, context.subtask)
        self._begin = begin_statement(settings)
        self._connection = settings.endpoint.connect(name)
        self._open = False

    @property
    def connection(self) -> BoundedConnection:
        """The connection, for what runs in the transaction or ends it."""
        return self._connection

    def begin(self) -> BoundedConnection:
        """Return the connection with a transaction open on it, the one that is or a new one."""
        if self._open:
            return self._connection
        try:
            self._connection.execute(self._begin)
        except psycopg.Error as error:
            if not is_lost(self._connection, error):
                raise
            # Nothing was open on it, so nothing is lost with it.
            self._connection.close()
            self._connection = self._settings.endpoint.connect(self._name)
            self._connection.execute(self._begin)
        self._open = True
        return self._connection

    def roll_back(self) -> None:
        """End the transaction, if one is open, of which nothing is kept."""
        if self._open:
            self._connection.execute("ROLLBACK")
            self._open = False

    def hasten(self) -> None:
        """From now on wait for the server only as long as leaving it may take."""
        connection = self._connection
        connection.reply_timeout_s = min(connection.reply_timeout_s, _CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Safe to call twice."""
        self._connection.close()


class PlainTransactions(Transactions):
    """Ordinary ones."""

    def commit(self) -> str:
        """Commit the open one; in a failed one the server answers ROLLBACK, and no error."""
        cursor = self._connection.execute("COMMIT")
        self._open = False
        return cursor.statusmessage or ""


class PreparedTransactions(Transactions):
    """Ones that are prepared; each gets its name only then."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect, and see that the server has room for what all subtasks prepare.

        Raises:
            ConfigError: It has not.
            SinkError: The server cannot be reached or asked now.
        """
        super().__init__(settings, context)
        self._next = context.first_checkpoint
        try:
            _require_room(self._connection, context)
        except psycopg.Error as error:
            self.close()
            text = f"sink {context.sink_id} subtask {context.subtask}: the server was not asked"
            raise FAILURES.refusal(error, text) from error
        except BaseException:
            self.close()
            raise

    @property
    def transaction(self) -> TransactionId:
        """The name that the open one will get."""
        context = self._context
        return TransactionId(
            context.sink_id, context.attempt, self._next, context.subtask, sequence=0
        )

    def expect(self, checkpoint: CheckpointId) -> None:
        """Take note of the checkpoint that will take the open transaction, or the next."""
        self._next = checkpoint

    def prepare(self) -> None:
        """Prepare the open transaction, which survives everything from then on.

        Raises:
            SinkError: The name is in use, or the transaction had failed.
        """
        transaction = self.transaction
        statement = sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(str(transaction)))
        try:
            cursor = self._connection.execute(statement)
        except psycopg.errors.DuplicateObject as error:
            raise SinkError(self.name_in_use(transaction)) from error
        # In a failed transaction the server answers ROLLBACK, and no error.
        if cursor.statusmessage != "PREPARE TRANSACTION":
            raise SinkError(
                f"PREPARE TRANSACTION '{transaction}' was answered with {cursor.statusmessage}: "
                "the transaction had failed and is rolled back"
            )
        self._open = False

    def name_in_use(self, transaction: TransactionId) -> str:
        """Return what to say, and to do, when something is prepared under the name already."""
        return (
            f"a transaction named {transaction} is prepared already, so attempt or checkpoint "
            "numbers were used twice: by a second job under this sink id, or after the decision "
            "log was deleted. See pg_prepared_xacts, and COMMIT or ROLLBACK PREPARED "
            f"'{transaction}' there"
        )


def _require_room(connection: BoundedConnection, context: WriterContext) -> None:
    maximum = server_facts(connection).max_prepared_transactions
    # One waits for its commit while the next one is prepared.
    needed = 2 * context.parallelism
    if maximum < needed:
        raise ConfigError(
            f"sink {context.sink_id} subtask {context.subtask}: max_prepared_transactions is "
            f"{maximum} and parallelism {context.parallelism} needs {needed}. Run: ALTER SYSTEM "
            f"SET max_prepared_transactions = {max(64, 2 * needed)}; then restart the server; or "
            "pass commit_mode='ledger'"
        )
