"""Finds the tables that rows go to; makes and alters them where the user asked for that."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.sinks.sql.errors import AccessDenied
from onceflow.sinks.sql.matching import additions, creation, key_matched, matched
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.settings import SqlSettings
from onceflow.sinks.sql.tables import Table, TableName, Target
from onceflow.sinks.sql.write_mode import ChangeRules


class TableResolver:
    """The tables of one writer or committer, each looked at when it is first needed."""

    def __init__(
        self,
        settings: SqlSettings,
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
        on a session of its own. A new table is locked by nobody, so that is done whatever is
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
        dialect = self._settings.dialect
        table = dialect.found(self._connected(), name)
        if table is None:
            raise missing(self._settings, name, self._schema)
        return Target(table, key_matched(dialect, table, self._schema))

    def _found(self, name: TableName) -> Target:
        settings, dialect = self._settings, self._settings.dialect
        table = dialect.found(self._connected(), name)
        if table is None:
            with settings.endpoint.connect("onceflow looks for a table") as own:
                # As it is while nobody alters it: MariaDB hides one that is altered.
                with dialect.one_at_a_time(own):
                    table = dialect.found(own, name)
                if table is None and settings.create:
                    table = created(settings, own, name, self._schema, self._rules)
        elif settings.evolve and self._lacks_columns(table):
            with settings.endpoint.connect("onceflow adds columns") as own:
                table = evolved(settings, own, table, self._schema, self._rules)
        if table is None:
            raise missing(settings, name, self._schema)
        require_writable(table)
        return Target(table, matched(dialect, table, self._schema, self._rules))

    def _lacks_columns(self, table: Table) -> bool:
        return any(table.column(field.name) is None for field in self._rules.written(self._schema))


def missing(settings: SqlSettings, name: TableName, schema: pa.Schema) -> ConfigError:
    """Return the error that says how to create the table."""
    rules = settings.rules
    key = rules.primary_key if set(rules.primary_key) <= set(schema.names) else ()
    controls = {rules.operation_column, rules.table_column}
    columns = pa.schema([field for field in schema if field.name not in controls])
    return ConfigError(
        f"table {name} {settings.dialect.absence} in {settings.endpoint}. Pass create=True, or "
        f"run: {creation(settings.dialect, name, columns, key)}"
    )


def require_writable(table: Table) -> None:
    """Return when transactions keep what they write to `table`.

    Raises:
        ConfigError: It is no table, or one of a kind that does not.
    """
    if table.unfit:
        raise ConfigError(table.unfit)


def created(
    settings: SqlSettings,
    session: Session,
    name: TableName,
    schema: pa.Schema,
    rules: ChangeRules,
) -> Table:
    """Return the table, created for rows of `schema` unless somebody just did.

    Raises:
        ConfigError: It cannot be created so, the user may not, or it is not found afterwards.
    """
    dialect = settings.dialect
    if not name.schema and not dialect.has_schema(session, None):
        raise ConfigError(
            f"table {name}: the search path names no schema in which to create it; write "
            "table='schema.table'"
        )
    statement = creation(dialect, name, rules.written(schema), rules.primary_key)
    cannot = f"table {name} cannot be created in {settings.endpoint}"
    with dialect.one_at_a_time(session):
        if dialect.found(session, name) is None:
            with _told_who_may(cannot, statement, "Run as a user who may"):
                session.execute(statement)
            dialect.log.info("created table %s", name)
    table = dialect.found(session, name)
    if table is None:
        raise ConfigError(
            f"table {name} was created in {settings.endpoint} and is not found there: "
            "grant the user INSERT on it, and write its schema before its name"
        )
    return table


def evolved(
    settings: SqlSettings, session: Session, table: Table, schema: pa.Schema, rules: ChangeRules
) -> Table:
    """Return the table with a nullable column for each field of `schema` that it lacked.

    Waits for whoever uses the table, as long as the lock timeout; a transaction prepared on it
    stands in the way until it is committed.

    Raises:
        ConfigError: A field has no type there, or the user may not alter the table.
    """
    dialect = settings.dialect
    cannot = f"table {table.name} in {settings.endpoint} cannot be given the columns that it lacks"
    with dialect.one_at_a_time(session):
        now = dialect.found(session, table.name) or table
        lacking = [one for one in rules.written(schema) if now.column(one.name) is None]
        if lacking:
            for statement in additions(dialect, table.name, lacking):
                with _told_who_may(cannot, statement, "Run as its owner"):
                    session.execute(statement)
            names = ", ".join(field.name for field in lacking)
            dialect.log.info("table %s got the columns %s", table.name, names)
    return dialect.found(session, table.name) or table


@contextmanager
def _told_who_may(cannot: str, statement: str, advice: str) -> Generator[None, None, None]:
    """Raise `ConfigError` when the user may not: what `cannot` be done, and who is to run it."""
    try:
        yield
    except AccessDenied as error:
        raise ConfigError(f"{cannot}: {error}. {advice}: {statement}") from error
