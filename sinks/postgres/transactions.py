"""The connection of one writer and the one transaction that is open on it at a time."""

from __future__ import annotations

import psycopg
from psycopg import sql

from onceflow.sinks.postgres.connection import BoundedConnection, is_lost
from onceflow.sinks.postgres.settings import SinkSettings

# Limits of the role's own would end a COPY that lasts as long as a checkpoint interval; the wait
# for each reply has its deadline in the client. Keepalives: should this machine vanish without a
# word, the server rolls back within a minute, and a new attempt finds no lock of ours in its way.
_BEGIN = """
    BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
    SET LOCAL lock_timeout = {lock_timeout_ms};
    SET LOCAL statement_timeout = 0;
    SET LOCAL idle_in_transaction_session_timeout = 0;
    SET LOCAL tcp_keepalives_idle = 20;
    SET LOCAL tcp_keepalives_interval = 10;
    SET LOCAL tcp_keepalives_count = 3;
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

    def __init__(self, settings: SinkSettings, name: str) -> None:
        """Connect; nothing is open yet."""
        self._settings = settings
        self._name = name
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

    def ended(self) -> None:
        """Take note that the open transaction was prepared, committed or rolled back."""
        self._open = False

    def hasten(self) -> None:
        """From now on wait for the server only as long as leaving it may take."""
        connection = self._connection
        connection.reply_timeout_s = min(connection.reply_timeout_s, _CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Safe to call twice."""
        self._connection.close()
