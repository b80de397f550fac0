"""The tables that one writer or committer writes to, each looked at when first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
import pyarrow as pa
from psycopg.rows import TupleRow

from onceflow.core.errors import ConfigError
from onceflow.sinks.postgres.catalog import TargetTable, target_table
from onceflow.sinks.postgres.connection import BoundedConnection
from onceflow.sinks.postgres.ddl import added_columns, create_statement
from onceflow.sinks.postgres.fitting import ColumnFit
from onceflow.sinks.postgres.matching import key_matched, matched, require_durable_table
from onceflow.sinks.postgres.settings import SinkSettings
from onceflow.sinks.sql import ChangeRules, TableName

_logger = logging.getLogger("onceflow.sinks.postgres")

# Taken in every transaction that creates or alters something: IF NOT EXISTS alone loses to a
# concurrent creator with a unique violation in the catalogs. The number is "onceflow" in ASCII.
_DDL_LOCK = int.from_bytes(b"onceflow", "big")


@dataclass(frozen=True, slots=True)
class Target:
    """One table, and how columns of the stream go into it."""

    name: TableName
    fits: tuple[ColumnFit, ...]

    def fits_of(self, names: tuple[str, ...]) -> tuple[ColumnFit, ...]:
        """Return the fits of some columns, in the order of `names`."""
        by_name = {fit.name: fit for fit in self.fits}
        return tuple(by_name[name] for name in names)


class Targets:
    """Remembers each table as it was when first asked for."""

    def __init__(
        self,
        settings: SinkSettings,
        schema: pa.Schema,
        connected: Callable[[], psycopg.Connection[TupleRow]],
        rules: ChangeRules | None = None,
    ) -> None:
        """Look at nothing yet; `connected` gives the connection to ask on.

        `rules` are the settings' own unless given.
        """
        self._settings = settings
        self._schema = schema
        self._connected = connected
        self._rules = settings.rules if rules is None else rules
        self._known: dict[TableName, Target] = {}

    def named(self, name: TableName) -> Target:
        """Return the table `name`, which takes rows of the schema.

        One that is missing, or lacks columns, is created or gets them when the user asked for that,
        on a connection of its own. A new table is locked by nobody, so that is done whatever is
        prepared; a crash leaves it empty.

        Raises:
            ConfigError: There is none, or it does not take the rows.
            SinkError: The server cannot be reached now.
        """
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._found(name)
        return found

    def keyed(self, name: TableName) -> Target:
        """Return the table `name` for rows that are only keys to delete.

        Raises:
            ConfigError: There is none, or it does not have the columns.
        """
        table = target_table(self._connected(), name)
        if table is None:
            raise missing_table(self._settings, name, self._schema)
        return Target(table.name, key_matched(table, self._schema))

    def _found(self, name: TableName) -> Target:
        settings = self._settings
        table = target_table(self._connected(), name)
        if table is None and settings.create:
            with settings.endpoint.connect("onceflow creates a table") as own:
                table = created_table(own, name, self._schema, self._rules)
        elif table is not None and settings.evolve and self._lacks_columns(table):
            with settings.endpoint.connect("onceflow adds columns") as own:
                table = evolved_table(own, table, self._schema, settings)
        if table is None:
            raise missing_table(settings, name, self._schema)
        require_durable_table(table)
        return Target(table.name, matched(table, self._schema, self._rules))

    def _lacks_columns(self, table: TargetTable) -> bool:
        return any(table.column(field.name) is None for field in self._rules.written(self._schema))


def missing_table(settings: SinkSettings, name: TableName, schema: pa.Schema) -> ConfigError:
    """Return the error that says how to create the table."""
    rules = settings.rules
    key = rules.primary_key if set(rules.primary_key) <= set(schema.names) else ()
    statement = create_statement(name, _without_controls(schema, rules), key)
    return ConfigError(
        f"table {name} does not exist in {settings.endpoint}. Pass create=True, or run: {statement}"
    )


def created_table(
    connection: BoundedConnection, name: TableName, schema: pa.Schema, rules: ChangeRules
) -> TargetTable:
    """Return the table, created for rows of `schema` unless somebody just did.

    Raises:
        ConfigError: It cannot be created so, or is not found afterwards.
    """
    if name.schema is None and _current_schema(connection) is None:
        raise ConfigError(
            f"table {name}: the search path names no schema in which to create it; write "
            "table='schema.table'"
        )
    statement = create_statement(name, rules.written(schema), rules.primary_key)
    with connection.transaction():
        lock_ddl(connection)
        if target_table(connection, name) is None:
            connection.execute(statement.encode())
    table = target_table(connection, name)
    if table is None:
        raise ConfigError(
            f"table {name} was created and is not found: its schema is not in the search path; "
            "write table='schema.table'"
        )
    _logger.info("created table %s", table.name)
    return table


def evolved_table(
    connection: BoundedConnection, table: TargetTable, schema: pa.Schema, settings: SinkSettings
) -> TargetTable:
    """Return the table with a nullable column for each field of `schema` that it lacked.

    Waits for whoever uses the table, as long as the lock timeout; a transaction prepared on it
    stands in the way until it is committed.

    Raises:
        ConfigError: A field has no type in Postgres.
    """
    with connection.transaction():
        lock_ddl(connection)
        connection.execute(
            "SELECT pg_catalog.set_config('lock_timeout', %s, true)",
            (str(round(settings.lock_timeout_s * 1000)),),
        )
        now = target_table(connection, table.name) or table
        lacking = [
            field for field in settings.rules.written(schema) if now.column(field.name) is None
        ]
        if lacking:
            connection.execute(added_columns(now.name, lacking).encode())
            _logger.info(
                "table %s got the columns %s", now.name, ", ".join(field.name for field in lacking)
            )
    return target_table(connection, table.name) or table


def _without_controls(schema: pa.Schema, rules: ChangeRules) -> pa.Schema:
    controls = {rules.operation_column, rules.table_column}
    return pa.schema([field for field in schema if field.name not in controls])


def lock_ddl(connection: psycopg.Connection[TupleRow]) -> None:
    """Let one at a time create or alter, until the end of the transaction."""
    connection.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (_DDL_LOCK,))


def _current_schema(connection: psycopg.Connection[TupleRow]) -> str | None:
    row = connection.execute("SELECT current_schema()::text").fetchone()
    return None if row is None else row[0]
