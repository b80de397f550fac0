"""The sink for SQLite files that users configure, with its dialect and its statements.

Each statement that writes rows is prepared once for a batch, and run for every row.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.sql.session import Session, SqlEndpoint
from onceflow.clients.sql.tables import CheckConstraint, Table, TableColumn, TableName, Target
from onceflow.clients.sqlite import catalog
from onceflow.clients.sqlite.catalog import quote
from onceflow.clients.sqlite.connection import LIBRARY_VERSION, SQLiteEndpoint, endpoint_of, own
from onceflow.clients.sqlite.types import SQLiteFit, wire_of
from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.setting_values import accept_durations
from onceflow.core.spi import CommitterContext
from onceflow.core.spi.connector import Finding
from onceflow.core.spi.options import document_options, option
from onceflow.sinks.sql.dialect import (
    DATABASE,
    Dialect,
    DmlExecutor,
    InsertStream,
    ServerDiagnosis,
    TwoPhaseSupport,
)
from onceflow.sinks.sql.sink import SqlSink
from onceflow.sinks.sql.write_mode import WriteMode
from onceflow.sinks.sqlite.row_check import SQLiteRowCheck, find_row_check, insert, list_values

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect as Compiler
    from sqlalchemy.types import TypeEngine


class SQLiteDmlExecutor(DmlExecutor):
    """The executor of SQLite: INSERT, ON CONFLICT for changes by key, UPDATE and DELETE by key."""

    @override
    def inserts(self, target: Target) -> InsertStream:
        return _Inserts(_insert(target))

    @override
    def change(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        names = [fit.name for fit in target.fits]
        others = [name for name in names if name not in self.key]
        if self.mode is WriteMode.UPDATE:
            if others:
                self.update(session, target, rows)
            return
        put = "DO NOTHING"
        if self.mode is WriteMode.UPSERT and others:
            put = "DO UPDATE SET " + ", ".join(
                f"{quote(name)} = excluded.{quote(name)}" for name in others
            )
        conflict = f"ON CONFLICT ({', '.join(map(quote, self.key))}) {put}"
        own(session).execute_many(f"{_insert(target)} {conflict}", list_values(rows, names))

    @override
    def update(self, session: Session, target: Target, rows: pa.RecordBatch) -> int:
        table, match = quote(target.name.name), self._match_key()
        others = [fit.name for fit in target.fits if fit.name not in self.key]
        if others:
            assigned = ", ".join(f"{quote(name)} = ?" for name in others)
            statement = f"UPDATE OR ABORT {table} SET {assigned} WHERE {match}"
            values = list_values(rows, [*others, *self.key])
            count = own(session).execute_many(statement, values)
            if count == rows.num_rows:
                return count
        # A trigger may skip the update of a row that the table has.
        statement = f"SELECT count(*) FROM {table} WHERE {match}"
        return own(session).count_many(statement, list_values(rows, self.key))

    @override
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        statement = f"DELETE FROM {quote(target.name.name)} WHERE {self._match_key()}"
        own(session).execute_many(statement, list_values(rows, self.key))

    def _match_key(self) -> str:
        # The unique index compares every byte, but the column itself may ignore case.
        return " AND ".join(f"{quote(name)} = ? COLLATE BINARY" for name in self.key)


class _Inserts(InsertStream):
    def __init__(self, statement: str) -> None:
        self._statement = statement

    @override
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        own(begin()).execute_many(self._statement, list_values(rows, rows.schema.names))

    @override
    def finish(self, session: Session) -> None:
        """Do nothing: every row was accepted when `write` returned."""

    @override
    def give_up(self) -> None:
        """Do nothing: no row is unsent."""


def _insert(target: Target) -> str:
    return insert(target.name, [fit.name for fit in target.fits])


_VERSION_MIN = (3, 24, 0)
"""The oldest version with ON CONFLICT DO UPDATE."""
_NO_TWO_PHASE = "a transaction of a file cannot outlive the process that began it"


class SQLiteDialect(Dialect):
    """The dialect of SQLite. Only one transaction at a time writes to a file."""

    log: ClassVar[logging.Logger] = logging.getLogger("onceflow.sinks.sqlite")
    product: ClassVar[str] = "SQLite type"
    lists_locks: ClassVar[str] = "the processes that have the file open"
    folds_names: ClassVar[bool] = True
    alters_in_transaction: ClassVar[bool] = True
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
    def unique_key_creation(self, table: TableName, columns: Sequence[str]) -> str:
        # ALTER TABLE adds no constraint.
        names = ", ".join(map(self.quote, columns))
        index = self.quote("_".join((table.name, "by", *columns)))
        return f"CREATE UNIQUE INDEX {index} ON {self.quote(table.name)} ({names})"

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

        A crash leaves all effects of the block or none. An open transaction holds the lock already.
        """
        with nullcontext() if own(session).in_transaction else session.transaction():
            yield

    @override
    def has_schema(self, session: Session, schema: str | None) -> bool:
        return True

    @override
    def executor(self, session: Session, mode: WriteMode, key: Sequence[str]) -> SQLiteDmlExecutor:
        return SQLiteDmlExecutor(mode, key)

    @override
    def list_referenced_tables(self, session: Session, name: TableName) -> frozenset[TableName]:
        return catalog.list_referenced_tables(session, name)

    @override
    def find_row_check(
        self, target: Target, names: Sequence[str], constraints: Sequence[CheckConstraint]
    ) -> SQLiteRowCheck | None:
        return find_row_check(target.name, names, constraints)

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


NO_TABLE = "onceflow"
"""The table name of a sink that only describes how its file is reached."""
_NOT_HERE = "A SQLite file has none"


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class SQLiteSink(SqlSink):
    """Writes every row to its table in a SQLite file; each takes effect exactly once.

    Rows wait in checkpoint storage and are written once the checkpoint is decided, in one
    transaction with a row that proves it. All processes of the job must see the file on a local
    disk, so they run on one machine; one transaction at a time writes to it, and readers go on
    reading. The file gets a write-ahead log, which stays when the job has ended.
    """

    dialect: ClassVar[Dialect] = SQLITE

    url: str = field(
        kw_only=False,
        metadata=option(
            "`sqlite:////absolute/path/of/the/file.db`, or the path alone. A missing file is"
            " created",
            spark="url",
            secret=True,
        ),
    )
    commit_mode: Literal["auto", "two_phase", "ledger"] = field(
        default="ledger", metadata=option("`ledger` only; `auto` is the same")
    )
    delivery: Literal["exactly_once", "at_least_once"] = field(
        default="exactly_once", metadata=option("Exactly once only")
    )
    user: str | None = field(default=None, metadata=option(_NOT_HERE))
    password: str | None = field(default=None, metadata=option(_NOT_HERE))
    ledger_schema: str | None = field(default=None, metadata=option(_NOT_HERE))
    statement_timeout_s: float = field(
        default=120.0, metadata=option("Of servers; there is none here")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("user", "password", "ledger_schema"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} is given, and a SQLite file has none; leave it out")
        if self.delivery != "exactly_once":
            raise ConfigError(
                f"delivery={self.delivery!r}: a writer would keep the whole file locked between "
                "its commits, so the SQLite sink is exactly once only; leave delivery out"
            )

    @override
    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Check as `SqlSink` does. A file that does not exist yet is not opened."""
        if Path(self.endpoint.path).exists():
            super().validate(context, schema)
        elif not self.create:
            raise ConfigError(
                f"{self.endpoint} does not exist, so it has no table {self.table}; create it, or "
                "give create=True"
            )

    @override
    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        """Read as `SqlSink` does. A file that does not exist yet records nothing."""
        if Path(self.endpoint.path).exists():
            return super().target_record(context)
        return TargetRecord(context.sink_id)

    @property
    @override
    def endpoint(self) -> SQLiteEndpoint:
        return endpoint_of(self, lock_timeout_s=self.lock_timeout_s)
