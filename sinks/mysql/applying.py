"""Puts and deletes whole batches of rows in an open transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pymysql.err import MySQLError

from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.failures import described, is_row_refused
from onceflow.sinks.mysql.fitting import fitted_rows
from onceflow.sinks.mysql.sending import RowSender, execute_checked, statement_sized
from onceflow.sinks.mysql.statements import delete_statement, put_statements
from onceflow.sinks.mysql.targets import Target
from onceflow.sinks.sql import BadRows, WriteMode

_SAVEPOINT = "onceflow_rows"


class Applier:
    """What is done with rows, by their write mode. Errors are PyMySQL's own."""

    def __init__(self, mode: WriteMode, key: Sequence[str], *, local_infile: bool) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        self._mode = mode
        self._key = tuple(key)
        self._local_infile = local_infile

    def put(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Put `rows`, of which each key comes once unless they are inserted."""
        if self._mode is WriteMode.INSERT:
            sender = RowSender(target, local_infile=self._local_infile)
            for part in statement_sized(fitted_rows(target.fits, rows)):
                sender.send(session, part)
            sender.settle(session)
            return
        statements = put_statements(target, self._mode, self._key, mariadb=session.is_mariadb)
        for part in statement_sized(fitted_rows(target.fits, rows)):
            for statement in statements:
                execute_checked(session, statement(target.fits, part))

    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Delete the keys of `rows`."""
        fits = target.fits_of(self._key)
        statement = delete_statement(target, self._key, mariadb=session.is_mariadb)
        for part in statement_sized(fitted_rows(fits, rows)):
            execute_checked(session, statement(fits, part))


def apply_without_refused(
    session: Session,
    rows: pa.RecordBatch,
    apply: Callable[[pa.RecordBatch], None],
    bad_rows: BadRows,
) -> Iterator[pa.RecordBatch]:
    """Apply `rows` but those that the server refuses, and yield what it took.

    A refused batch is taken back to a savepoint, which XA transactions have too, and halved until
    the row is alone: each bad row costs about twice the logarithm of the batch in statements.
    """
    session.execute(f"SAVEPOINT {_SAVEPOINT}")
    try:
        apply(rows)
    except MySQLError as error:
        if not is_row_refused(error):
            raise
        session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
        if rows.num_rows == 1:
            bad_rows.reject(rows, [described(error)])
            return
    else:
        session.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
        yield rows
        return
    half = rows.num_rows // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from apply_without_refused(session, part, apply, bad_rows)
