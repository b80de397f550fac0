"""The dialect of SQLite."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.sql.session import Session, SqlEndpoint
from onceflow.clients.sql.tables import Table, TableColumn, TableName
from onceflow.clients.sqlite import catalog
from onceflow.clients.sqlite.connection import LIBRARY_VERSION
from onceflow.clients.sqlite.types import SQLiteFit, wire_of
from onceflow.core.spi.connector import Finding
from onceflow.sinks.sql.dialect import DATABASE, Dialect, ServerDiagnosis, TwoPhaseSupport
from onceflow.sinks.sql.write_mode import WriteMode
from onceflow.sinks.sqlite.dml import SQLiteDmlExecutor

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect as Compiler
    from sqlalchemy.types import TypeEngine

_VERSION_MIN = (3, 24, 0)
"""The oldest version with ON CONFLICT DO UPDATE."""
_NO_TWO_PHASE = "a transaction of a file cannot outlive the process that began it"


class SQLiteDialect(Dialect):
    """The dialect of SQLite. Only one transaction at a time writes to a file."""

    log: ClassVar[logging.Logger] = logging.getLogger("onceflow.sinks.sqlite")
    product: ClassVar[str] = "SQLite type"
    lists_locks: ClassVar[str] = "the processes that have the file open"
    folds_names: ClassVar[bool] = True
    adds_columns_one_by_one: ClassVar[bool] = True
    unless_there: ClassVar[str] = " ON CONFLICT DO NOTHING"
    # A transaction that has begun is already the only writer.
    locks_row: ClassVar[str] = ""
    no_type_advice: ClassVar[str] = "nested data to JSON text, durations to whole numbers"

    @override
    def quote(self, name: str) -> str:
        return catalog.quote(name)

    @override
    def literal(self, value: str) -> str:
        return catalog.literal(value)

    @override
    def find_table(self, session: Session, name: TableName) -> Table | None:
        return catalog.find_table(session, name)

    @override
    def resolve_table(self, endpoint: SqlEndpoint, name: TableName) -> TableName:
        # Do not connect: connecting would create the file.
        schema = None if name.schema == "main" else name.schema
        return TableName(schema, name.name.lower())

    @override
    def fit(self, column: TableColumn, given: pa.DataType, *, is_key: bool) -> SQLiteFit | None:
        kind = column.type
        assert isinstance(kind, catalog.SQLiteType), kind
        wire = wire_of(given, kind)
        return None if wire is None else SQLiteFit(column, wire, is_key, type=kind)

    @override
    def column_type(self, field: pa.Field, *, is_key: bool) -> TypeEngine[Any] | None:
        from onceflow.clients.sqlite.column_types import column_type

        return column_type(field)

    @override
    def compiler(self) -> Compiler:
        from onceflow.clients.sqlite.column_types import compiler

        return compiler()

    @contextmanager
    @override
    def one_at_a_time(self, session: Session) -> Generator[None, None, None]:
        """Hold the file's lock in a transaction.

        A crash leaves all effects of the block or none.
        """
        with session.transaction():
            yield

    @override
    def has_schema(self, session: Session, schema: str | None) -> bool:
        return True

    @override
    def executor(self, session: Session, mode: WriteMode, key: Sequence[str]) -> SQLiteDmlExecutor:
        return SQLiteDmlExecutor(mode, key)

    @override
    def look_at_server(self, session: Session) -> SQLiteServer:
        return SQLiteServer()


class SQLiteServer(ServerDiagnosis):
    """The diagnosis of the SQLite library in this process."""

    user = "of this process"

    @override
    def fitness(self, where: SqlEndpoint) -> Sequence[Finding]:
        shown = f"SQLite {_show(LIBRARY_VERSION)}"
        if LIBRARY_VERSION < _VERSION_MIN:
            needed = f"SQLite {_show(_VERSION_MIN)} or newer"
            return [DATABASE.problem(shown, needed, "run a newer Python")]
        return [DATABASE.ok(f"{shown}, {where}")]

    @override
    def two_phase_support(self, session: Session, parallelism: int) -> TwoPhaseSupport:
        return TwoPhaseSupport("", (DATABASE.problem(_NO_TWO_PHASE, "", ""),))

    @override
    def bookkeeping(self, session: Session, schema: str, tables: Sequence[str]) -> Finding:
        path, about = Path(session.query("PRAGMA database_list")[0][2]), "onceflow's own two tables"
        if all(os.access(location, os.W_OK) for location in (path, path.parent)):
            return DATABASE.ok(f"this process may keep {about} in {path}")
        remedy = f"chmod u+w {path} {path.parent}, or run as their owner"
        return DATABASE.problem(f"{path} or its directory is not writable", about, remedy)


SQLITE = SQLiteDialect()


def _show(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
