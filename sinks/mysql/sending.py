"""Sends rows of one table, by LOAD DATA where the server allows it, and checks what it took.

LOAD DATA LOCAL makes of every error a warning and goes on without the row, or with another value in
it. So a reply counts only if all rows were taken and nothing was warned of.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from onceflow.sinks.mysql.connection import MySQLSession, Reply, refused
from onceflow.sinks.mysql.fitting import fits_of
from onceflow.sinks.mysql.spelling import file_lines
from onceflow.sinks.mysql.statements import insert_statement, load_statement
from onceflow.sinks.sql.tables import Target

ROWS_A_STATEMENT = 10_000
BYTES_A_STATEMENT = 1 << 20
"""Of values; spelled they may take twice as much, which stays far below max_allowed_packet."""

# What a statement's form in the binary log is worth, and words that will be gone one day.
_HARMLESS = frozenset({1287, 1592, 1681})


class RowSender:
    """Inserts rows into one table. Errors are `SqlError`s, of a refused row too."""

    def __init__(self, target: Target, *, local_infile: bool) -> None:
        """Prepare the statements."""
        self._fits = fits_of(target)
        self._load = load_statement(target) if local_infile else None
        self._insert = insert_statement(target)
        self._awaited = 0

    def send(self, session: MySQLSession, rows: pa.RecordBatch) -> None:
        """Send `rows`, which are `fitted_rows`; `settle` knows what became of them."""
        if self._load is not None:
            lines = file_lines(self._fits, rows)
            self.settle(session)
            session.send(self._load, [lines])
        else:
            statement = self._insert(self._fits, rows)
            self.settle(session)
            session.send(statement)
        self._awaited = rows.num_rows

    def settle(self, session: MySQLSession) -> None:
        """Return when all rows that were sent are taken as they are.

        Raises:
            SqlError: One is not, or the connection broke.
        """
        awaited, self._awaited = self._awaited, 0
        if awaited:
            require_taken(session, session.receive(), awaited)

    def forget(self) -> None:
        """Await no reply any more; the connection is to be closed."""
        self._awaited = 0


def require_taken(session: MySQLSession, reply: Reply, rows: int | None) -> None:
    """Return when `reply` says that `rows` rows were taken, and warns of nothing.

    Raises:
        SqlError: Its number and text are those of the first warning.
    """
    if reply.warnings:
        for _, number, text in session.query("SHOW WARNINGS"):
            if int(number) not in _HARMLESS:
                raise refused(int(number), str(text))
    if rows is not None and reply.rows != rows:
        raise refused(1261, f"{rows} rows were sent, and the server took {reply.rows}")


def execute_checked(session: MySQLSession, statement: bytes) -> None:
    """Carry out `statement`, which may change any number of rows but must not warn.

    Raises:
        SqlError: The server refused, or warns.
    """
    session.send(statement)
    require_taken(session, session.receive(), None)


def statement_sized(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows into parts of which one statement is no burden."""
    parts = max(1, -(-rows.nbytes // BYTES_A_STATEMENT))
    size = max(1, min(ROWS_A_STATEMENT, -(-rows.num_rows // parts)))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)
