"""The tables that one writer or committer writes to, each looked at when first needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

import pyarrow as pa

from onceflow.sinks.sql.connection import ConnectionT
from onceflow.sinks.sql.table_name import TableName
from onceflow.sinks.sql.tables import FitT, Tables, TableT, Target
from onceflow.sinks.sql.write_mode import ChangeRules


class Targets(Generic[ConnectionT, TableT, FitT]):
    """Remembers each table as it was when first asked for."""

    def __init__(
        self,
        tables: Tables[ConnectionT, Any, TableT, FitT],
        schema: pa.Schema,
        connected: Callable[[], ConnectionT],
        rules: ChangeRules | None = None,
    ) -> None:
        """Look at nothing yet; `connected` gives the connection to ask on.

        `rules` are the settings' own unless given.
        """
        self._tables = tables
        self._schema = schema
        self._connected = connected
        self._rules = tables.settings.rules if rules is None else rules
        self._known: dict[TableName, Target[TableT, FitT]] = {}

    def named(self, name: TableName) -> Target[TableT, FitT]:
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

    def keyed(self, name: TableName) -> Target[TableT, FitT]:
        """Return the table `name` for rows that are only keys to delete.

        Raises:
            ConfigError: There is none, or it does not have the columns.
        """
        table = self._tables.found(self._connected(), name)
        if table is None:
            raise self._tables.missing(name, self._schema)
        return Target(table, self._tables.key_matched(table, self._schema))

    def _found(self, name: TableName) -> Target[TableT, FitT]:
        tables, settings = self._tables, self._tables.settings
        table = tables.found(self._connected(), name)
        if table is None:
            table = self._found_at_rest(name)
        if table is None and settings.create:
            own = settings.endpoint.connect("onceflow creates a table")
            try:
                table = tables.created(own, name, self._schema, self._rules)
            finally:
                own.close()
        elif table is not None and settings.evolve and self._lacks_columns(table):
            own = settings.endpoint.connect("onceflow adds columns")
            try:
                table = tables.evolved(own, table, self._schema, self._rules)
            finally:
                own.close()
        if table is None:
            raise tables.missing(name, self._schema)
        tables.require_writable(table)
        return Target(table, tables.matched(table, self._schema, self._rules))

    def _found_at_rest(self, name: TableName) -> TableT | None:
        """Return the table as it is while nobody alters it: MariaDB hides one that is altered."""
        tables = self._tables
        own = tables.settings.endpoint.connect("onceflow looks for a table")
        try:
            with tables.one_at_a_time(own):
                return tables.found(own, name)
        finally:
            own.close()

    def _lacks_columns(self, table: TableT) -> bool:
        return any(table.column(field.name) is None for field in self._rules.written(self._schema))
