"""How tables of MySQL and MariaDB are looked at, made and altered."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import pyarrow as pa
from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.core.errors import SinkError
from onceflow.sinks.mysql.catalog import TargetTable, target_table
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.ddl import added_columns, create_statement
from onceflow.sinks.mysql.fitting import ColumnFit
from onceflow.sinks.mysql.matching import key_matched, matched, require_transactional_table
from onceflow.sinks.mysql.names import literal
from onceflow.sinks.mysql.refusals import FAILURES
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.sql import ChangeRules, TableName, Tables
from onceflow.sinks.sql.tables import Target

MySQLTarget = Target[TargetTable, ColumnFit]


class MySQLTables(Tables[Session, MySQLError, TargetTable, ColumnFit]):
    """Each statement ends the session's transaction, so it must be on a session of its own."""

    absence: ClassVar[str] = "does not exist, or may not be seen by the user,"

    def __init__(self, settings: SinkSettings, log: logging.Logger) -> None:
        super().__init__(settings, FAILURES, log)

    @override
    def found(self, connection: Session, name: TableName) -> TargetTable | None:
        return target_table(connection, name)

    @override
    def require_writable(self, table: TargetTable) -> None:
        require_transactional_table(table)

    @override
    def matched(
        self, table: TargetTable, schema: pa.Schema, rules: ChangeRules
    ) -> tuple[ColumnFit, ...]:
        return matched(table, schema, rules)

    @override
    def key_matched(self, table: TargetTable, schema: pa.Schema) -> tuple[ColumnFit, ...]:
        return key_matched(table, schema)

    @contextmanager
    @override
    def one_at_a_time(self, connection: Session) -> Generator[None, None, None]:
        with ddl_lock(connection):
            yield

    @override
    def execute(self, connection: Session, statement: str) -> None:
        connection.execute(statement)

    @override
    def creation(self, name: TableName, schema: pa.Schema, primary_key: Sequence[str]) -> str:
        return create_statement(name, schema, primary_key)

    @override
    def addition(self, name: TableName, fields: Sequence[pa.Field]) -> str:
        return added_columns(name, fields)


@contextmanager
def ddl_lock(session: Session) -> Generator[None, None, None]:
    """Let one at a time look and create, until the end of the block.

    Raises:
        SinkError: Somebody else is at it for too long.
    """
    name = literal("onceflow/ddl")
    wait_s = max(1, round(session.reply_timeout_s / 2))
    ((taken,),) = session.query(f"SELECT GET_LOCK({name}, {wait_s})")
    if taken != 1:
        raise SinkError(f"another job has been creating tables for {wait_s} s; see IS_USED_LOCK")
    try:
        yield
    finally:
        if session.open:
            session.query(f"SELECT RELEASE_LOCK({name})")
