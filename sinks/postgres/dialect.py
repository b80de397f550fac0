"""The dialect of Postgres."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.postgres import catalog
from onceflow.clients.postgres.connection import attempt_of_writer, writer_name
from onceflow.clients.postgres.types import PostgresFit, wire_of
from onceflow.clients.sql.session import Session, SqlEndpoint
from onceflow.clients.sql.tables import (
    CheckConstraint,
    ColumnFacts,
    Table,
    TableColumn,
    TableName,
    Target,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.sinks.postgres.dml import PostgresDmlExecutor
from onceflow.sinks.postgres.locks import list_blockers, lock_holders
from onceflow.sinks.postgres.row_check import PostgresRowCheck, find_row_check
from onceflow.sinks.postgres.server import PostgresDiagnosis, is_pooled
from onceflow.sinks.postgres.two_phase import PostgresTwoPhase
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.write_mode import WriteMode

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect as Compiler
    from sqlalchemy.types import TypeEngine

# Held in every transaction that creates or alters something. IF NOT EXISTS alone can fail with a
# unique violation in the catalogs if another session creates the same object. The number is
# "onceflow" in ASCII.
_DDL_LOCK = int.from_bytes(b"onceflow", "big")
_DEFAULT_SCHEMA = "public"


class PostgresDialect(Dialect):
    """The Postgres dialect.

    Transactions set their own settings, so that a pooler may be in between.
    """

    log: ClassVar[logging.Logger] = logging.getLogger("onceflow.sinks.postgres")
    product: ClassVar[str] = "Postgres type"
    user: ClassVar[str] = "role"
    lists_locks: ClassVar[str] = "pg_locks and pg_stat_activity"
    lists_prepared: ClassVar[str] = "pg_prepared_xacts"
    unless_there: ClassVar[str] = " ON CONFLICT DO NOTHING"
    before_pruning: ClassVar[Sequence[str]] = ("SET LOCAL synchronous_commit TO off",)
    locks_what_is_pruned: ClassVar[str] = " FOR UPDATE SKIP LOCKED"

    @override
    def quote(self, name: str) -> str:
        return catalog.quote(name)

    @override
    def check_name(self, name: str) -> None:
        catalog.check_name(name)

    @override
    def literal(self, value: str) -> str:
        return catalog.literal(value)

    @override
    def find_table(self, session: Session, name: TableName) -> Table | None:
        return catalog.find_table(session, name)

    @override
    def read_column_facts(self, session: Session, name: TableName) -> Mapping[str, ColumnFacts]:
        return catalog.read_column_facts(session, name)

    @override
    def list_referenced_tables(self, session: Session, name: TableName) -> frozenset[TableName]:
        return catalog.list_referenced_tables(session, name)

    @override
    def describe_altered_keys(self, session: Session, table: Table) -> str:
        """Look for tables that inherit from it.

        The server itself refuses statements without their index.
        """
        child = "" if table.inherited_by else catalog.find_child(session, table.name)
        return child and f"table {child} inherits from it now, whose keys no index of it covers"

    @override
    def resolve_table(self, endpoint: SqlEndpoint, name: TableName) -> TableName:
        schema = name.schema
        if schema is None:
            # Only the server knows the search path, and which of its schemas contains the table.
            with endpoint.connect("onceflow looks for a table") as session:
                schema = catalog.find_schema(session, name)
        return replace(name, schema=None if schema == _DEFAULT_SCHEMA else schema)

    @override
    def fit(self, column: TableColumn, given: pa.DataType, *, is_key: bool) -> PostgresFit | None:
        kind = column.type
        assert isinstance(kind, catalog.PostgresType), kind
        wire = wire_of(given, kind)
        if wire is None:
            return None
        fit = PostgresFit(column, wire, is_key, type=kind)
        # Two texts may be one value, such as 1.0 and 1.00, and so two keys of the stream one row.
        return None if is_key and fit.is_text_form else fit

    @override
    def column_type(self, field: pa.Field, *, is_key: bool) -> TypeEngine[Any] | None:
        from onceflow.clients.postgres.column_types import column_type

        return column_type(field)

    @override
    def compiler(self) -> Compiler:
        from onceflow.clients.postgres.column_types import compiler

        return compiler()

    @contextmanager
    @override
    def one_at_a_time(self, session: Session) -> Generator[None, None, None]:
        """Hold a lock in a transaction; a crash leaves either all effects of the block or none."""
        with session.transaction():
            session.query(f"SELECT pg_catalog.pg_advisory_xact_lock({_DDL_LOCK})")
            yield

    @override
    def has_schema(self, session: Session, schema: str | None) -> bool:
        if schema is None:
            return session.query("SELECT current_schema()::text") != [(None,)]
        name = catalog.literal(schema)
        return bool(session.query(f"SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = {name}"))

    @override
    def list_namesakes(self, session: Session, name: TableName) -> Sequence[TableName]:
        rows = session.query(
            "SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class AS c"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
            f" WHERE lower(c.relname) = lower({catalog.literal(name.name)})"
            " AND c.relkind IN ('r', 'p') AND n.nspname NOT LIKE 'pg\\_%'"
            " ORDER BY 1, 2 LIMIT 3"
        )
        return [TableName(str(schema), str(table)) for schema, table in rows]

    @override
    def cascades_of(self, session: Session, name: TableName) -> Sequence[str]:
        table = catalog.literal(self.identifier(name))
        rows = session.query(
            "SELECT conname::text || ' of ' || conrelid::regclass::text "
            "FROM pg_catalog.pg_constraint "
            f"WHERE contype = 'f' AND confrelid = {table}::regclass "
            "AND confdeltype IN ('c', 'n', 'd') ORDER BY 1"
        )
        return [str(row[0]) for row in rows]

    @override
    def executor(
        self, session: Session, mode: WriteMode, key: Sequence[str]
    ) -> PostgresDmlExecutor:
        return PostgresDmlExecutor(mode, key)

    @override
    def writer_name(self, context: WriterContext) -> str:
        return writer_name(context.sink_id, context.attempt, context.subtask)

    @override
    def find_row_check(
        self, target: Target, names: Sequence[str], constraints: Sequence[CheckConstraint]
    ) -> PostgresRowCheck | None:
        return find_row_check(target, names, constraints)

    @override
    def lock_holders(
        self, session: Session, table: TableName, context: WriterContext, most: int
    ) -> Sequence[str]:
        return lock_holders(session, table, self.writer_name(context), most)

    @override
    def list_blockers(
        self, session: Session, ledger_schema: str, context: CommitterContext, most: int
    ) -> Sequence[str]:
        return list_blockers(session, context.sink_id, context.attempt, most)

    @override
    def guard_of_record(self, transaction: TransactionId) -> str:
        # The statement would wait for that transaction's ledger row until the lock timeout.
        name = catalog.literal(str(transaction))
        return f" AND NOT EXISTS (SELECT FROM pg_catalog.pg_prepared_xacts WHERE gid = {name})"

    @override
    def two_phase(self, schema: str) -> PostgresTwoPhase:
        return PostgresTwoPhase(schema)

    @override
    def look_at_server(self, session: Session) -> PostgresDiagnosis:
        return PostgresDiagnosis(session)

    @override
    def end_older_writers(self, session: Session, schema: str, context: CommitterContext) -> None:
        if is_pooled(session):
            # A pooler's sessions serve any client, and no transaction stays open in them for long.
            return
        for pid, name in session.query(
            "SELECT pid, application_name FROM pg_catalog.pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'onceflow %' "
            "AND usename = current_user"
        ):
            attempt = attempt_of_writer(str(name), context.sink_id)
            if attempt is not None and attempt < context.attempt:
                self.log.info(
                    "ending the session of %s, attempt %s took over", name, context.attempt
                )
                session.query(f"SELECT pg_catalog.pg_terminate_backend({int(pid)})")


POSTGRES = PostgresDialect()
