"""Puts and deletes whole batches of rows in an open transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import psycopg
import pyarrow as pa
from psycopg import sql
from typing_extensions import override

from onceflow.sinks.postgres.arrays import accept_arrays, array_parameters
from onceflow.sinks.postgres.connection import BoundedConnection
from onceflow.sinks.postgres.copying import copy_statement
from onceflow.sinks.postgres.encoder import BinaryRows
from onceflow.sinks.postgres.statements import delete_statement, put_statement
from onceflow.sinks.postgres.tables import PostgresTarget
from onceflow.sinks.sql import WriteMode
from onceflow.sinks.sql.dml import DmlExecutor

_BYTES_A_STATEMENT = 16 * 1024 * 1024


class PostgresDmlExecutor(DmlExecutor[BoundedConnection, PostgresTarget]):
    """COPY for inserts, statements over arrays for changes by key."""

    def __init__(self, mode: WriteMode, key: Sequence[str]) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        self._mode = mode
        self._key = tuple(key)

    @override
    def put(
        self, connection: BoundedConnection, target: PostgresTarget, rows: pa.RecordBatch
    ) -> None:
        """Put `rows`, of which each key comes once unless they are inserted."""
        self.put_all(connection, target, [rows])

    @override
    def put_all(
        self,
        connection: BoundedConnection,
        target: PostgresTarget,
        batches: Iterable[pa.RecordBatch],
    ) -> None:
        """Put one batch after another; inserts go in by one COPY."""
        if self._mode is WriteMode.INSERT:
            _copy(connection, target, batches)
            return
        statement = put_statement(target, self._mode, self._key)
        if statement is None:
            return
        for rows in batches:
            for part in _statement_sized(rows):
                _execute(connection, statement, array_parameters(target.fits, part))

    @override
    def delete(
        self, connection: BoundedConnection, target: PostgresTarget, rows: pa.RecordBatch
    ) -> None:
        """Delete the keys of `rows`."""
        statement = delete_statement(target, self._key)
        fits = target.fits_of(self._key)
        for part in _statement_sized(rows):
            _execute(connection, statement, array_parameters(fits, part))

    @override
    def savepoint(self, connection: BoundedConnection) -> AbstractContextManager[object]:
        return connection.transaction()


def _copy(
    connection: BoundedConnection, target: PostgresTarget, batches: Iterable[pa.RecordBatch]
) -> None:
    names = [fit.name for fit in target.fits]
    encoder = BinaryRows(target.fits)
    with connection.cursor().copy(copy_statement(target)) as copy:
        copy.write(encoder.begin())
        for rows in batches:
            copy.write(encoder.encode(rows.select(names)))
        copy.write(encoder.end())


def _execute(
    connection: BoundedConnection, statement: sql.Composed, parameters: Sequence[object]
) -> None:
    accept_arrays(connection)
    with psycopg.RawCursor(connection) as cursor:
        cursor.execute(statement, parameters)


def _statement_sized(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows that are so wide that one statement of them would be a burden."""
    parts = max(1, -(-rows.nbytes // _BYTES_A_STATEMENT))
    size = max(1, -(-rows.num_rows // parts))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)
