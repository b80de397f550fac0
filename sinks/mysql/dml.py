"""Puts and deletes whole batches of rows in an open transaction."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.sinks.mysql.connection import own
from onceflow.sinks.mysql.fitting import fits_of, fitted_rows
from onceflow.sinks.mysql.sending import RowSender, execute_checked, statement_sized
from onceflow.sinks.mysql.statements import delete_statement, put_statements
from onceflow.sinks.sql.dml import DmlExecutor
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import Target
from onceflow.sinks.sql.write_mode import WriteMode


class MySQLDmlExecutor(DmlExecutor):
    """LOAD DATA or INSERT for inserts, statements over tables of values for changes by key."""

    def __init__(self, mode: WriteMode, key: Sequence[str], *, local_infile: bool) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        self._mode = mode
        self._key = tuple(key)
        self._local_infile = local_infile

    @override
    def put(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Put `rows`, of which each key comes once unless they are inserted."""
        connection, fits = own(session), fits_of(target)
        if self._mode is WriteMode.INSERT:
            sender = RowSender(target, local_infile=self._local_infile)
            for part in statement_sized(fitted_rows(fits, rows)):
                sender.send(connection, part)
            sender.settle(connection)
            return
        statements = put_statements(target, self._mode, self._key, mariadb=connection.is_mariadb)
        for part in statement_sized(fitted_rows(fits, rows)):
            for statement in statements:
                execute_checked(connection, statement(fits, part))

    @override
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Delete the keys of `rows`."""
        connection = own(session)
        fits = fits_of(target, self._key)
        statement = delete_statement(target, self._key, mariadb=connection.is_mariadb)
        for part in statement_sized(fitted_rows(fits, rows)):
            execute_checked(connection, statement(fits, part))
