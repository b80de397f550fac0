"""Sends rows of one table, and checks what the server took of them.

Inserts go by LOAD DATA where the server allows it. LOAD DATA LOCAL makes of every error a warning
and goes on without the row, or with another value in it. So a reply counts only if all rows were
taken and nothing was warned of.

A reply is read when the next rows are sent, or at the end. So the server works on rows while this
process spells others, and a refused row is heard of one statement later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.sinks.mysql.connection import MySQLSession, Reply, own, refused
from onceflow.sinks.mysql.statements import (
    delete_statement,
    file_lines,
    insert_statement,
    load_statement,
    put_statements,
)
from onceflow.sinks.mysql.types import fits_of
from onceflow.sinks.sql.dml import DmlExecutor, InsertStream
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import Target
from onceflow.sinks.sql.write_mode import WriteMode

ROWS_A_STATEMENT = 10_000
BYTES_A_STATEMENT = 1 << 20
"""Of values; spelled they may take twice as much, which stays far below max_allowed_packet."""

# What a statement's form in the binary log is worth, and words that will be gone one day.
_HARMLESS = frozenset({1287, 1592, 1681})


class PipelinedInserts(InsertStream):
    """One statement after another, each of so many rows; at most one reply is awaited."""

    def __init__(self, target: Target, *, local_infile: bool) -> None:
        """Send nothing yet."""
        self._fits = fits_of(target)
        self._load = load_statement(target) if local_infile else None
        self._insert = insert_statement(target)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._awaited = 0

    @override
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if self._waiting_rows >= ROWS_A_STATEMENT or self._waiting_bytes >= BYTES_A_STATEMENT:
            self._send_waiting(own(begin()))

    @override
    def finish(self, session: Session) -> None:
        self._send_waiting(own(session))
        self._settle(own(session))

    @override
    def give_up(self) -> None:
        self._waiting.clear()
        self._awaited = 0

    def _send_waiting(self, session: MySQLSession) -> None:
        if not self._waiting:
            return
        rows = pa.concat_batches(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        for part in statement_sized(rows):
            self._send(session, part)
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0

    def _send(self, session: MySQLSession, rows: pa.RecordBatch) -> None:
        if self._load is not None:
            lines = file_lines(self._fits, rows)
            self._settle(session)
            session.send(self._load, [lines])
        else:
            statement = self._insert(self._fits, rows)
            self._settle(session)
            session.send(statement)
        self._awaited = rows.num_rows

    def _settle(self, session: MySQLSession) -> None:
        """Return when all rows that were sent are taken as they are."""
        awaited, self._awaited = self._awaited, 0
        if awaited:
            _require_taken(session, session.receive(), awaited)


def execute_checked(session: MySQLSession, statement: bytes) -> None:
    """Carry out `statement`, which may change any number of rows but must not warn.

    Raises:
        SqlError: The server refused, or warns.
    """
    session.send(statement)
    _require_taken(session, session.receive(), None)


def statement_sized(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows into parts of which one statement is no burden."""
    parts = max(1, -(-rows.nbytes // BYTES_A_STATEMENT))
    size = max(1, min(ROWS_A_STATEMENT, -(-rows.num_rows // parts)))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)


def _require_taken(session: MySQLSession, reply: Reply, rows: int | None) -> None:
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


class MySQLDmlExecutor(DmlExecutor):
    """LOAD DATA or INSERT for inserts, statements over tables of values for changes by key."""

    def __init__(self, mode: WriteMode, key: Sequence[str], *, local_infile: bool) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        super().__init__(mode, key)
        self._local_infile = local_infile

    @override
    def inserts(self, target: Target) -> PipelinedInserts:
        return PipelinedInserts(target, local_infile=self._local_infile)

    @override
    def change(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        connection, fits = own(session), fits_of(target)
        statements = put_statements(target, self.mode, self.key, mariadb=connection.is_mariadb)
        for part in statement_sized(rows):
            for statement in statements:
                execute_checked(connection, statement(fits, part))

    @override
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        connection, fits = own(session), fits_of(target, self.key)
        statement = delete_statement(target, self.key, mariadb=connection.is_mariadb)
        for part in statement_sized(rows.select(list(self.key))):
            execute_checked(connection, statement(fits, part))
