"""Puts and deletes whole batches of rows in an open transaction."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.failures import is_row_refused
from onceflow.sinks.mysql.fitting import fitted_rows
from onceflow.sinks.mysql.sending import RowSender, execute_checked, statement_sized
from onceflow.sinks.mysql.statements import delete_statement, put_statements
from onceflow.sinks.mysql.tables import MySQLTarget
from onceflow.sinks.sql import WriteMode
from onceflow.sinks.sql.dml import DmlExecutor

_SAVEPOINT = "onceflow_rows"


class MySQLDmlExecutor(DmlExecutor[Session, MySQLTarget]):
    """LOAD DATA or INSERT for inserts, statements over tables of values for changes by key."""

    def __init__(self, mode: WriteMode, key: Sequence[str], *, local_infile: bool) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        self._mode = mode
        self._key = tuple(key)
        self._local_infile = local_infile

    @override
    def put(self, connection: Session, target: MySQLTarget, rows: pa.RecordBatch) -> None:
        """Put `rows`, of which each key comes once unless they are inserted."""
        if self._mode is WriteMode.INSERT:
            sender = RowSender(target, local_infile=self._local_infile)
            for part in statement_sized(fitted_rows(target.fits, rows)):
                sender.send(connection, part)
            sender.settle(connection)
            return
        statements = put_statements(target, self._mode, self._key, mariadb=connection.is_mariadb)
        for part in statement_sized(fitted_rows(target.fits, rows)):
            for statement in statements:
                execute_checked(connection, statement(target.fits, part))

    @override
    def delete(self, connection: Session, target: MySQLTarget, rows: pa.RecordBatch) -> None:
        """Delete the keys of `rows`."""
        fits = target.fits_of(self._key)
        statement = delete_statement(target, self._key, mariadb=connection.is_mariadb)
        for part in statement_sized(fitted_rows(fits, rows)):
            execute_checked(connection, statement(fits, part))

    @contextmanager
    @override
    def savepoint(self, connection: Session) -> Generator[None, None, None]:
        # XA transactions have savepoints, too.
        connection.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            yield
        except MySQLError as error:
            # A deadlock takes the savepoint with it, and nobody goes on after other errors.
            if is_row_refused(error):
                connection.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            raise
        connection.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
