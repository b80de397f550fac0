"""One transaction after another, each fed by binary COPYs; its first row opens it.

libpq does not tell of an error before the COPY is ended, and the server drops what comes after one
in silence. So a COPY is ended after a second and another begun in the same transaction: a refused
row is heard of soon, whatever the checkpoint interval, at the cost of one round trip a second. It
also bounds what the server queues for the end of the statement, the checks of foreign keys.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import TupleRow

from onceflow.core.errors import ConfigError
from onceflow.sinks.postgres.catalog import server_facts, target_table
from onceflow.sinks.postgres.connection import BoundedConnection, is_lost
from onceflow.sinks.postgres.encoder import BinaryRows
from onceflow.sinks.postgres.matching import matched
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
# A server that hangs is left alone after it; the end of the connection ends the COPY too.
_CLOSE_TIMEOUT_S = 2.0
_COPY_S_MAX = 1.0


class _GivenUp(Exception):
    """Tells the server that no more rows come."""


class CopyTransactions:
    """The connection of one writer and what is open on it. Errors are psycopg's own."""

    def __init__(self, settings: SinkSettings, name: str, schema: pa.Schema) -> None:
        """Connect and match `schema` to the table as it is now."""
        self._settings = settings
        self._name = name
        self._connection = settings.endpoint.connect(name)
        self._open_copy = ExitStack()
        self._copy: psycopg.Copy | None = None
        self._copying_since = 0.0
        self.rows = 0
        """Rows of the open transaction."""
        try:
            self.facts = server_facts(self._connection)
            table = target_table(self._connection, settings.table)
            if table is None:
                raise ConfigError(f"table {settings.table} does not exist in {settings.endpoint}")
            self._format = BinaryRows(matched(table, schema))
        except BaseException:
            self.close()
            raise
        self._begin = sql.SQL(_BEGIN).format(
            lock_timeout_ms=sql.Literal(round(settings.lock_timeout_s * 1000))
        )
        self._copy_in = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(
            table.name.identifier, sql.SQL(", ").join(map(sql.Identifier, self._format.names))
        )

    @property
    def connection(self) -> psycopg.Connection[TupleRow]:
        """The connection, for what ends the transaction."""
        return self._connection

    def write(self, batch: pa.RecordBatch) -> None:
        """Send `batch`, which has rows, opening transaction and COPY when none is open."""
        copy = self._copy or self._begin_copy()
        copy.write(self._format.encode(batch))
        self.rows += batch.num_rows
        if time.monotonic() - self._copying_since > _COPY_S_MAX:
            self._end_copy()

    def finish_copy(self) -> int:
        """Return how many rows the transaction has, when the server has taken all of them."""
        self._end_copy()
        rows, self.rows = self.rows, 0
        return rows

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Idempotent, never waits long."""
        self._copy = None
        connection = self._connection
        connection.reply_timeout_s = min(connection.reply_timeout_s, _CLOSE_TIMEOUT_S)
        given_up = _GivenUp("the writer was closed")
        with suppress(psycopg.Error):
            self._open_copy.__exit__(_GivenUp, given_up, None)
        connection.close()

    def _begin_copy(self) -> psycopg.Copy:
        if not self.rows:
            self._begin_transaction()
        copy = self._open_copy.enter_context(self._connection.cursor().copy(self._copy_in))
        copy.write(self._format.begin())
        self._copy = copy
        self._copying_since = time.monotonic()
        return copy

    def _end_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.write(self._format.end())
            self._open_copy.close()

    def _begin_transaction(self) -> None:
        try:
            self._connection.execute(self._begin)
        except psycopg.Error as error:
            if not is_lost(self._connection, error):
                raise
            # Nothing was open on it, so nothing is lost with it.
            self._connection = self._reconnected()
            self._connection.execute(self._begin)

    def _reconnected(self) -> BoundedConnection:
        self._connection.close()
        return self._settings.endpoint.connect(self._name)
