"""The check of rows that are staged: constraints and generated columns that SQLite evaluates.

The rows are written into a copy of the table in memory, which has the same definition. The file is
not touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import CheckConstraint, TableName
from onceflow.clients.sqlite.catalog import quote
from onceflow.clients.sqlite.connection import open_memory
from onceflow.sinks.sql.dialect import RowCheck

_JUDGES = re.compile(r"\b(CHECK|AS)\b", re.IGNORECASE)
"""A word in the definition of each table that has a CHECK constraint or a generated column."""


class SQLiteRowCheck(RowCheck):
    """A check of the written columns of a table."""

    def __init__(self, table: TableName, names: Sequence[str], definition: str) -> None:
        """Write nothing yet; `definition` is the statement that creates the table."""
        self._names = names
        self._definition = definition
        self._statement = insert(table, names)

    @override
    def __call__(self, session: Session, rows: pa.RecordBatch) -> None:
        with closing(open_memory()) as copy:
            copy.execute(self._definition)
            copy.begin()
            copy.execute_many(self._statement, list_values(rows, self._names))


def find_row_check(
    table: TableName, names: Sequence[str], constraints: Sequence[CheckConstraint]
) -> SQLiteRowCheck | None:
    """Return the check of the columns `names`, or None if the table needs none."""
    definition = next((each.expression for each in constraints), "")
    return SQLiteRowCheck(table, names, definition) if _JUDGES.search(definition) else None


def insert(table: TableName, names: Sequence[str]) -> str:
    """Return the INSERT of one row with the columns `names`."""
    columns = ", ".join(map(quote, names))
    marks = ", ".join("?" * len(names))
    # OR ABORT: with an ON CONFLICT clause of the table, SQLite would drop the row without an error,
    # or delete another one.
    return f"INSERT OR ABORT INTO {quote(table.name)} ({columns}) VALUES ({marks})"


def list_values(rows: pa.RecordBatch, names: Sequence[str]) -> Iterable[Sequence[object]]:
    """Yield the values of each row in the order of `names`."""
    return zip(*(rows.column(name).to_pylist() for name in names), strict=True)
