"""Puts and deletes whole batches of rows in an open transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import TupleRow

from onceflow.sinks.postgres.arrays import accept_arrays, array_parameters
from onceflow.sinks.postgres.copying import copy_statement
from onceflow.sinks.postgres.encoder import BinaryRows
from onceflow.sinks.postgres.failures import described, is_row_refused
from onceflow.sinks.postgres.statements import delete_statement, put_statement
from onceflow.sinks.postgres.targets import Target
from onceflow.sinks.sql import BadRows, WriteMode

_Connection = psycopg.Connection[TupleRow]
_BYTES_A_STATEMENT = 16 * 1024 * 1024


class Applier:
    """What is done with rows, by their write mode. Errors are psycopg's own."""

    def __init__(self, mode: WriteMode, key: Sequence[str]) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        self._mode = mode
        self._key = tuple(key)

    def put(self, connection: _Connection, target: Target, rows: pa.RecordBatch) -> None:
        """Put `rows`, of which each key comes once unless they are inserted."""
        self.put_all(connection, target, [rows])

    def put_all(
        self, connection: _Connection, target: Target, batches: Iterable[pa.RecordBatch]
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

    def delete(self, connection: _Connection, target: Target, rows: pa.RecordBatch) -> None:
        """Delete the keys of `rows`."""
        statement = delete_statement(target, self._key)
        fits = target.fits_of(self._key)
        for part in _statement_sized(rows):
            _execute(connection, statement, array_parameters(fits, part))


def apply_without_refused(
    connection: _Connection,
    rows: pa.RecordBatch,
    apply: Callable[[pa.RecordBatch], None],
    bad_rows: BadRows,
) -> Iterator[pa.RecordBatch]:
    """Apply `rows` but those that the server refuses, and yield what it took.

    A refused batch is taken back to a savepoint and halved until the row is alone, so each bad row
    costs about twice the logarithm of the batch in statements.
    """
    try:
        with connection.transaction():
            apply(rows)
    except psycopg.Error as error:
        if not is_row_refused(error):
            raise
        if rows.num_rows == 1:
            bad_rows.reject(rows, [described(error)])
            return
    else:
        yield rows
        return
    half = rows.num_rows // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from apply_without_refused(connection, part, apply, bad_rows)


def _copy(connection: _Connection, target: Target, batches: Iterable[pa.RecordBatch]) -> None:
    names = [fit.name for fit in target.fits]
    encoder = BinaryRows(target.fits)
    with connection.cursor().copy(copy_statement(target)) as copy:
        copy.write(encoder.begin())
        for rows in batches:
            copy.write(encoder.encode(rows.select(names)))
        copy.write(encoder.end())


def _execute(
    connection: _Connection, statement: sql.Composed, parameters: Sequence[object]
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
