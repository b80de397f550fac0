"""The dialect of MySQL and MariaDB."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.mysql import catalog
from onceflow.clients.mysql.connection import own
from onceflow.clients.mysql.types import MySQLFit, wire_of
from onceflow.clients.sql.session import AccessDenied, NameUnknown, Session, SqlEndpoint
from onceflow.clients.sql.tables import (
    CheckConstraint,
    ColumnFacts,
    Table,
    TableColumn,
    TableName,
    Target,
)
from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.sinks.mysql.dml import MySQLDmlExecutor
from onceflow.sinks.mysql.row_check import MySQLRowCheck, find_row_check
from onceflow.sinks.mysql.server import MySQLDiagnosis
from onceflow.sinks.mysql.two_phase import XaTwoPhase
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.write_mode import ChangeRules, WriteMode

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect as Compiler
    from sqlalchemy.types import TypeEngine

# The locks of up to 10,000 subtasks; a server has fewer connections.
_HELD_LOCKS = """
    SELECT IS_USED_LOCK(CONCAT({prefix}, subtask)) AS session FROM (
        SELECT a.n + 10 * b.n + 100 * c.n + 1000 * d.n AS subtask
        FROM {ten} AS a, {ten} AS b, {ten} AS c, {ten} AS d
    ) AS every_subtask HAVING session IS NOT NULL
"""
# Without performance_schema a server does not tell which session blocks which.
_WAITS = """
    SELECT DISTINCT COALESCE(p.state, '')
    FROM information_schema.processlist AS p
    LEFT JOIN information_schema.innodb_trx AS t ON t.trx_mysql_thread_id = p.id
    WHERE p.id <> CONNECTION_ID() AND p.user = SUBSTRING_INDEX(USER(), '@', 1)
      AND p.db = DATABASE() AND (t.trx_state = 'LOCK WAIT' OR p.state LIKE 'Waiting for %lock%')
"""
# Prepared transactions have no connection. The query needs the PROCESS privilege. It avoids
# performance_schema, which may be switched off.
_LOCKING_TRANSACTIONS = """
    SELECT p.id, p.user, p.host, p.command, t.trx_started, t.trx_state
    FROM information_schema.innodb_trx AS t
    JOIN information_schema.processlist AS p ON p.id = t.trx_mysql_thread_id
    WHERE t.trx_rows_locked > 0 AND p.id <> CONNECTION_ID()
    ORDER BY t.trx_started LIMIT {most}
"""
_TEN = "(SELECT 0 AS n" + "".join(f" UNION ALL SELECT {n}" for n in range(1, 10)) + ")"


def _describe_locking(
    number: int, user: str, host: str, command: str, since: object, trx_state: str
) -> str:
    del trx_state
    return (
        f"connection {number} of user {user!r} from {host!r} (command {command}), whose"
        f" transaction has been open since {since} and locks rows"
    )


class MySQLDialect(Dialect):
    """The dialect of MySQL and MariaDB. Sessions keep their settings for all their transactions."""

    log: ClassVar[logging.Logger] = logging.getLogger("onceflow.sinks.mysql")
    product: ClassVar[str] = "type"
    lists_locks: ClassVar[str] = "information_schema.innodb_trx and XA RECOVER"
    lists_prepared: ClassVar[str] = "XA RECOVER"
    absence: ClassVar[str] = "does not exist, or may not be seen by the user,"
    folds_names: ClassVar[bool] = True
    deletes_by_index: ClassVar[bool] = True
    creates_index_if_missing: ClassVar[bool] = False
    options_of_tables: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"mysql_engine": "InnoDB", "mysql_charset": catalog.CHARSET}
    )
    options_of_bookkeeping: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {**options_of_tables, "mysql_collate": catalog.KEY_COLLATION}
    )
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
    def read_column_facts(self, session: Session, name: TableName) -> Mapping[str, ColumnFacts]:
        return catalog.read_column_facts(session, name)

    @override
    def list_referenced_tables(self, session: Session, name: TableName) -> frozenset[TableName]:
        return catalog.list_referenced_tables(session, name)

    @override
    def describe_altered_keys(self, session: Session, table: Table) -> str:
        """Describe how the table's unique indexes have changed, or return an empty text.

        An added index counts, too, because ON DUPLICATE KEY matches any unique index.
        """
        then = (table.unique_keys, table.other_unique)
        now = catalog.read_unique_keys(session, table.name)
        if now == then:
            return ""
        return (
            f"its unique indexes were {_describe_indexes(*then)} when the rows were converted, and"
            f" are {_describe_indexes(*now)}"
        )

    @override
    def resolve_table(self, endpoint: SqlEndpoint, name: TableName) -> TableName:
        with endpoint.connect("onceflow looks for a table") as session:
            return catalog.resolve_table(session, name)

    @override
    def fit(self, column: TableColumn, given: pa.DataType, *, is_key: bool) -> MySQLFit | None:
        kind = column.type
        assert isinstance(kind, catalog.MySQLType), kind
        wire = wire_of(given, kind)
        return None if wire is None else MySQLFit(column, wire, is_key, type=kind)

    @override
    def column_type(self, field: pa.Field, *, is_key: bool) -> TypeEngine[Any] | None:
        from onceflow.clients.mysql.column_types import column_type

        return column_type(field, is_key=is_key)

    @override
    def compiler(self) -> Compiler:
        from onceflow.clients.mysql.column_types import compiler

        return compiler()

    @override
    def columns_to_assign(
        self, table: Table, others: Sequence[TableColumn], rules: ChangeRules
    ) -> Sequence[TableColumn]:
        if others and rules.mode is not WriteMode.IGNORE:
            return others
        first = table.column(rules.primary_key[0])
        alone = len(table.unique_keys) == 1 and not table.other_unique
        # ON DUPLICATE KEY requires an assignment even if nothing changes.
        return (first,) if first and alone and rules.mode is not WriteMode.UPDATE else ()

    @contextmanager
    @override
    def one_at_a_time(self, session: Session) -> Generator[None, None, None]:
        """Hold a lock of the server. Each statement of the block is a transaction of its own."""
        name = catalog.literal("onceflow/ddl")
        wait_s = max(1, round(own(session).reply_timeout_s / 2))
        ((taken,),) = session.query(f"SELECT GET_LOCK({name}, {wait_s})")
        if taken != 1:
            raise SinkError(
                f"another job has been creating tables for {wait_s} s; see IS_USED_LOCK"
            )
        try:
            yield
        finally:
            if session.is_open:
                session.query(f"SELECT RELEASE_LOCK({name})")

    @override
    def has_schema(self, session: Session, schema: str | None) -> bool:
        if schema is None:
            return True
        name = catalog.literal(schema)
        return bool(
            session.query(f"SELECT 1 FROM information_schema.schemata WHERE schema_name = {name}")
        )

    @override
    def list_namesakes(self, session: Session, name: TableName) -> Sequence[TableName]:
        database = "DATABASE()" if name.schema is None else catalog.literal(name.schema)
        rows = session.query(
            "SELECT table_name FROM information_schema.tables"
            f" WHERE lower(table_name) = lower({catalog.literal(name.name)})"
            f" AND table_schema = {database} AND table_type = 'BASE TABLE' ORDER BY 1 LIMIT 3"
        )
        return [TableName(name.schema, str(table)) for (table,) in rows]

    @override
    def executor(self, session: Session, mode: WriteMode, key: Sequence[str]) -> MySQLDmlExecutor:
        return MySQLDmlExecutor(mode, key, local_infile=own(session).loads)

    @override
    def find_row_check(
        self, target: Target, names: Sequence[str], constraints: Sequence[CheckConstraint]
    ) -> MySQLRowCheck | None:
        return find_row_check(target, names, constraints)

    @override
    def lock_holders(
        self, session: Session, table: TableName, context: WriterContext, most: int
    ) -> Sequence[str]:
        """Describe sessions with an open transaction that locks rows, of any table."""
        return [
            _describe_locking(*row)
            for row in session.query(_LOCKING_TRANSACTIONS.format(most=most))
        ]

    @override
    def list_blockers(
        self, session: Session, ledger_schema: str, context: CommitterContext, most: int
    ) -> Sequence[str]:
        """Describe sessions that may block the writers and are neither writers nor waiting."""
        waits = [str(state) for (state,) in session.query(_WAITS)]
        if not waits:
            return ()
        writers = set(self._writers(session, ledger_schema, context.sink_id))
        rows = session.query(_LOCKING_TRANSACTIONS.format(most=most + len(writers)))
        holders = [
            _describe_locking(*row)
            for row in rows
            if row[0] not in writers and row[-1] != "LOCK WAIT"
        ]
        if holders:
            return holders[:most]
        states = " and ".join(repr(state) for state in waits if state) or "a lock"
        return [
            f"{states}, whose holder has no transaction that locks rows: see {self.lists_locks}"
        ]

    def _writers(self, session: Session, ledger_schema: str, sink_id: str) -> Sequence[int]:
        """Return the connection numbers of the two-phase writers of `sink_id`."""
        prefix = catalog.literal(catalog.XaNames(ledger_schema).writers_lock(sink_id))
        return [int(row[0]) for row in session.query(_HELD_LOCKS.format(prefix=prefix, ten=_TEN))]

    @override
    def two_phase(self, schema: str) -> XaTwoPhase:
        return XaTwoPhase(schema)

    @override
    def look_at_server(self, session: Session) -> MySQLDiagnosis:
        return MySQLDiagnosis(session)

    @override
    def end_older_writers(self, session: Session, schema: str, context: CommitterContext) -> None:
        for holder in self._writers(session, schema, context.sink_id):
            self.log.info(
                "sink %s: ending the session %s of an older attempt's writer, attempt %s took over",
                context.sink_id,
                holder,
                context.attempt,
            )
            try:
                session.execute(f"KILL {holder}")
            except NameUnknown:
                continue

    @override
    def cascades_of(self, session: Session, name: TableName) -> Sequence[str]:
        schema = catalog.literal(name.schema) if name.schema else "DATABASE()"
        rows = session.query(
            "SELECT constraint_name, table_name FROM information_schema.referential_constraints "
            f"WHERE unique_constraint_schema = {schema} "
            f"AND referenced_table_name = {catalog.literal(name.name)} "
            "AND delete_rule IN ('CASCADE', 'SET NULL', 'SET DEFAULT') ORDER BY 1"
        )
        return [f"{constraint} of {table}" for constraint, table in rows]

    @override
    def require_delete(self, session: Session, table: Table) -> None:
        name = catalog.identifier(table.name)
        try:
            session.query(f"EXPLAIN DELETE FROM {name} WHERE FALSE")
        except AccessDenied as error:
            raise ConfigError(
                f"rows cannot be deleted from table {table.name}: {error}. Run: GRANT DELETE ON "
                f"{name} TO {table.grantee}"
            ) from error


def _describe_indexes(unique_keys: Sequence[tuple[str, frozenset[str]]], other_unique: bool) -> str:
    indexes = [f"{name} ({', '.join(sorted(columns))})" for name, columns in unique_keys]
    return ", ".join([*indexes, *["some over parts of columns"] * other_unique]) or "none"


MYSQL = MySQLDialect()
