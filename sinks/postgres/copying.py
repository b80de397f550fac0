"""Inserts that stream to the server as they come: binary COPYs in the open transaction.

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
from typing_extensions import override

from onceflow.sinks.postgres.catalog import identifier
from onceflow.sinks.postgres.connection import BoundedConnection
from onceflow.sinks.postgres.encoder import BinaryRows
from onceflow.sinks.postgres.tables import PostgresTarget
from onceflow.sinks.sql.row_loader import RowLoader
from onceflow.sinks.sql.transactions import Transactions

_COPY_S_MAX = 1.0


class _GivenUp(Exception):
    """Tells the server that no more rows come."""


def copy_statement(target: PostgresTarget) -> sql.Composed:
    """Return the COPY into `target` of the columns that its fits have, in their order."""
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(
        identifier(target.name), sql.SQL(", ").join(sql.Identifier(fit.name) for fit in target.fits)
    )


class StreamedInserts(RowLoader):
    """Rows of one table that go in at once. The first bad row is the end of the transaction."""

    def __init__(
        self, transactions: Transactions[BoundedConnection], target: PostgresTarget
    ) -> None:
        self._transactions = transactions
        self._format = BinaryRows(target.fits)
        self._copy_in = copy_statement(target)
        self._open_copy = ExitStack()
        self._copy: psycopg.Copy | None = None
        self._copying_since = 0.0
        self._rows = 0

    @property
    @override
    def rows(self) -> int:
        return self._rows

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        copy = self._copy or self._begin_copy()
        copy.write(self._format.encode(batch))
        self._rows += batch.num_rows
        if time.monotonic() - self._copying_since > _COPY_S_MAX:
            self._end_copy()

    @override
    def finish(self) -> int:
        self._end_copy()
        rows, self._rows = self._rows, 0
        return rows

    @override
    def close(self) -> None:
        self._copy = None
        self._transactions.hasten()
        given_up = _GivenUp("the writer was closed")
        with suppress(psycopg.Error):
            self._open_copy.__exit__(_GivenUp, given_up, None)

    def _begin_copy(self) -> psycopg.Copy:
        connection = self._transactions.begin()
        copy = self._open_copy.enter_context(connection.cursor().copy(self._copy_in))
        copy.write(self._format.begin())
        self._copy = copy
        self._copying_since = time.monotonic()
        return copy

    def _end_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.write(self._format.end())
            self._open_copy.close()
