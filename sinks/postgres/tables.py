"""How tables of Postgres are looked at, made and altered."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import psycopg
import pyarrow as pa
from psycopg.rows import TupleRow
from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.sinks.postgres.catalog import TargetTable, target_table
from onceflow.sinks.postgres.connection import BoundedConnection
from onceflow.sinks.postgres.ddl import added_columns, create_statement
from onceflow.sinks.postgres.failures import FAILURES
from onceflow.sinks.postgres.fitting import ColumnFit
from onceflow.sinks.postgres.matching import key_matched, matched, require_durable_table
from onceflow.sinks.postgres.settings import SinkSettings
from onceflow.sinks.sql import ChangeRules, TableName, Tables
from onceflow.sinks.sql.tables import Target

PostgresTarget = Target[TargetTable, ColumnFit]

# Taken in every transaction that creates or alters something: IF NOT EXISTS alone loses to a
# concurrent creator with a unique violation in the catalogs. The number is "onceflow" in ASCII.
_DDL_LOCK = int.from_bytes(b"onceflow", "big")


class PostgresTables(Tables[BoundedConnection, psycopg.Error, TargetTable, ColumnFit]):
    """Each change is a transaction of its own, so a crash leaves it done or undone."""

    absence: ClassVar[str] = "does not exist"

    def __init__(self, settings: SinkSettings, log: logging.Logger) -> None:
        super().__init__(settings, FAILURES, log)
        self._lock_timeout_s = settings.lock_timeout_s

    @override
    def found(self, connection: BoundedConnection, name: TableName) -> TargetTable | None:
        return target_table(connection, name)

    @override
    def require_writable(self, table: TargetTable) -> None:
        require_durable_table(table)

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
    def one_at_a_time(self, connection: BoundedConnection) -> Generator[None, None, None]:
        with connection.transaction():
            connection.execute(
                "SELECT pg_catalog.set_config('lock_timeout', %s, true)",
                (str(round(self._lock_timeout_s * 1000)),),
            )
            lock_ddl(connection)
            yield

    @override
    def execute(self, connection: BoundedConnection, statement: str) -> None:
        connection.execute(statement.encode())

    @override
    def creation(self, name: TableName, schema: pa.Schema, primary_key: Sequence[str]) -> str:
        return create_statement(name, schema, primary_key)

    @override
    def addition(self, name: TableName, fields: Sequence[pa.Field]) -> str:
        return added_columns(name, fields)

    @override
    def require_place(self, connection: BoundedConnection, name: TableName) -> None:
        if name.schema is None and _current_schema(connection) is None:
            raise ConfigError(
                f"table {name}: the search path names no schema in which to create it; write "
                "table='schema.table'"
            )


def lock_ddl(connection: psycopg.Connection[TupleRow]) -> None:
    """Let one at a time create or alter, until the end of the transaction."""
    connection.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (_DDL_LOCK,))


def _current_schema(connection: psycopg.Connection[TupleRow]) -> str | None:
    row = connection.execute("SELECT current_schema()::text").fetchone()
    return None if row is None else row[0]
