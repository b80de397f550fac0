"""What the server's refusals mean in onceflow's terms."""

from __future__ import annotations

import psycopg
from typing_extensions import override

from onceflow.sinks.postgres.connection import BoundedConnection, is_lost
from onceflow.sinks.sql import Failures

# Class 22: a value does not fit its type. Class 23: a constraint forbids the row. P0001: a trigger
# does. 54000: a value is too long for an index.
_ROW_STATES = ("22", "23", "P0001", "54000")


def described(error: psycopg.Error) -> str:
    """Return what the server said on one line: text, constraint, detail, hint, place, SQLSTATE."""
    diagnostics = error.diag
    if diagnostics.message_primary is None:
        return " ".join(str(error).split())
    parts = [diagnostics.message_primary]
    if diagnostics.constraint_name:
        parts.append(f"constraint {diagnostics.constraint_name}")
    elif diagnostics.column_name:
        parts.append(f"column {diagnostics.column_name}")
    parts += [part for part in (diagnostics.message_detail, diagnostics.message_hint) if part]
    if diagnostics.context:
        # The innermost first; the last line is the COPY's own and names row and column.
        parts += diagnostics.context.splitlines()[-2:]
    # A deadlock's detail has a line for each process in it.
    return f"{' '.join('; '.join(parts).split())} (SQLSTATE {error.sqlstate})"


class PostgresFailures(Failures[BoundedConnection, psycopg.Error]):
    """Goes by SQLSTATE."""

    @property
    @override
    def errors(self) -> type[psycopg.Error]:
        return psycopg.Error

    @override
    def described(self, error: psycopg.Error) -> str:
        return described(error)

    @override
    def is_lost(self, connection: BoundedConnection, error: psycopg.Error) -> bool:
        return is_lost(connection, error)

    @override
    def is_row_refused(self, error: psycopg.Error) -> bool:
        return (error.sqlstate or "").startswith(_ROW_STATES)

    @override
    def is_duplicate_key(self, error: psycopg.Error) -> bool:
        return isinstance(error, psycopg.errors.UniqueViolation)

    @override
    def is_lock_timeout(self, error: psycopg.Error) -> bool:
        return isinstance(error, psycopg.errors.LockNotAvailable)

    @override
    def is_denied(self, error: psycopg.Error) -> bool:
        return isinstance(error, psycopg.errors.InsufficientPrivilege)

    @override
    def is_table_missing(self, error: psycopg.Error) -> bool:
        return isinstance(error, psycopg.errors.UndefinedTable)


FAILURES = PostgresFailures()
