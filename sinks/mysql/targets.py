"""The tables that one writer or committer writes to, each looked at when first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pymysql.err import MySQLError

from onceflow.core.errors import ConfigError, SinkError
from onceflow.sinks.mysql.catalog import TargetTable, target_table
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.ddl import added_columns, create_statement
from onceflow.sinks.mysql.failures import DENIED, code, described
from onceflow.sinks.mysql.fitting import ColumnFit
from onceflow.sinks.mysql.matching import key_matched, matched, require_transactional_table
from onceflow.sinks.mysql.names import literal
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.sql import ChangeRules, TableName

_logger = logging.getLogger("onceflow.sinks.mysql")


@dataclass(frozen=True, slots=True)
class Target:
    """One table, and how columns of the stream go into it."""

    table: TargetTable
    fits: tuple[ColumnFit, ...]

    @property
    def name(self) -> TableName:
        """The table's name, with its database."""
        return self.table.name

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
        connected: Callable[[], Session],
        rules: ChangeRules | None = None,
    ) -> None:
        """Look at nothing yet; `connected` gives the session to ask on.

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
        on a connection of its own: DDL would end the transaction. A crash leaves a new table empty.

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
        return Target(table, key_matched(table, self._schema))

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
        require_transactional_table(table)
        return Target(table, matched(table, self._schema, self._rules))

    def _lacks_columns(self, table: TargetTable) -> bool:
        return any(table.column(field.name) is None for field in self._rules.written(self._schema))


def missing_table(settings: SinkSettings, name: TableName, schema: pa.Schema) -> ConfigError:
    """Return the error that says how to create the table."""
    rules = settings.rules
    key = rules.primary_key if set(rules.primary_key) <= set(schema.names) else ()
    controls = {rules.operation_column, rules.table_column}
    columns = pa.schema([field for field in schema if field.name not in controls])
    return ConfigError(
        f"table {name} does not exist in {settings.endpoint}, or the user may not see it. Pass "
        f"create=True, or run: {create_statement(name, columns, key)}"
    )


def created_table(
    session: Session, name: TableName, schema: pa.Schema, rules: ChangeRules
) -> TargetTable:
    """Return the table, created for rows of `schema` unless somebody just did.

    Raises:
        ConfigError: It cannot be created so, or the user may not.
    """
    statement = create_statement(name, rules.written(schema), rules.primary_key)
    with ddl_lock(session):
        if target_table(session, name) is None:
            try:
                session.execute(statement)
            except MySQLError as error:
                if code(error) in DENIED:
                    raise ConfigError(
                        f"table {name} cannot be created: {described(error)}. Run it as a user who "
                        f"may: {statement}"
                    ) from error
                raise
            _logger.info("created table %s", name)
        table = target_table(session, name)
    if table is None:
        raise ConfigError(f"table {name} was created, and the user may not see it; GRANT it INSERT")
    return table


def evolved_table(
    session: Session, table: TargetTable, schema: pa.Schema, settings: SinkSettings
) -> TargetTable:
    """Return the table with a nullable column for each field of `schema` that it lacked.

    Waits for whoever uses the table, as long as the lock timeout; a transaction prepared on it
    stands in the way until it is committed.

    Raises:
        ConfigError: A field has no type there.
    """
    with ddl_lock(session):
        now = target_table(session, table.name) or table
        lacking = [
            field for field in settings.rules.written(schema) if now.column(field.name) is None
        ]
        if lacking:
            session.execute(added_columns(now.name, lacking))
            _logger.info(
                "table %s got the columns %s", now.name, ", ".join(field.name for field in lacking)
            )
        return target_table(session, table.name) or table


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
