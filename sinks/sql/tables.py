"""What a dialect gives of its tables: how they are looked at, made, altered and matched."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.sinks.sql.connection import ConnectionT, Endpoint
from onceflow.sinks.sql.failures import ErrorT, Failures
from onceflow.sinks.sql.ledger import Ledger
from onceflow.sinks.sql.settings import SinkSettings
from onceflow.sinks.sql.table_name import TableName
from onceflow.sinks.sql.write_mode import ChangeRules


class Table(Protocol):
    """A table as the server describes it."""

    @property
    def name(self) -> TableName:
        """With its schema, as the server has it."""
        ...

    def column(self, name: str) -> object | None:
        """Return the column called `name`, or None."""
        ...


class ColumnFit(Protocol):
    """How one column of the stream goes into one column of a table."""

    @property
    def name(self) -> str:
        """The column's name, in the batch and in the table."""
        ...

    @property
    def shown(self) -> str:
        """The table's type as an error message shows it."""
        ...

    @property
    def nullable(self) -> bool:
        """Whether the table takes nulls there."""
        ...

    def require_fitting(self, given: pa.Array) -> None:
        """Return when the column takes every value, or null, of `given`, as far as is known here.

        Raises:
            BadRow: It does not take one; names the column and the value.
        """
        ...


TableT = TypeVar("TableT", bound=Table)
FitT = TypeVar("FitT", bound=ColumnFit)


@dataclass(frozen=True, slots=True)
class Target(Generic[TableT, FitT]):
    """One table, and how columns of the stream go into it."""

    table: TableT
    fits: tuple[FitT, ...]

    @property
    def name(self) -> TableName:
        """The table's name, with its schema."""
        return self.table.name

    def fits_of(self, names: tuple[str, ...]) -> tuple[FitT, ...]:
        """Return the fits of some columns, in the order of `names`."""
        by_name = {fit.name: fit for fit in self.fits}
        return tuple(by_name[name] for name in names)


class Tables(ABC, Generic[ConnectionT, ErrorT, TableT, FitT]):
    """Looks at tables, makes and alters them. Errors of the server are its driver's own."""

    absence: ClassVar[str] = "does not exist"
    """What is known of a table that is not found."""

    def __init__(
        self,
        settings: SinkSettings[Endpoint[ConnectionT], Ledger[ConnectionT]],
        failures: Failures[ConnectionT, ErrorT],
        log: logging.Logger,
    ) -> None:
        """Look at nothing; `log` gets what is made and altered."""
        self.settings = settings
        self._failures = failures
        self._log = log

    @abstractmethod
    def found(self, connection: ConnectionT, name: TableName) -> TableT | None:
        """Return the table called `name` as the connection finds it, or None."""

    @abstractmethod
    def require_writable(self, table: TableT) -> None:
        """Return when transactions keep what they write to `table`.

        Raises:
            ConfigError: It is no table, or one of a kind that does not.
        """

    @abstractmethod
    def matched(self, table: TableT, schema: pa.Schema, rules: ChangeRules) -> tuple[FitT, ...]:
        """Return how each column of `schema` goes into `table`, in the schema's order.

        Raises:
            ConfigError: Rows of `schema` cannot be written; names every column that is at fault.
        """

    @abstractmethod
    def key_matched(self, table: TableT, schema: pa.Schema) -> tuple[FitT, ...]:
        """Return how the key columns, which are all of `schema`, are compared with the table's.

        Raises:
            ConfigError: They cannot be; names every column that is at fault.
        """

    @abstractmethod
    def one_at_a_time(self, connection: ConnectionT) -> AbstractContextManager[None]:
        """Let nobody else create or alter anything in the block; what is done in it holds after.

        Waits no longer than the settings allow.
        """

    @abstractmethod
    def execute(self, connection: ConnectionT, statement: str) -> None:
        """Carry out a statement that `creation` or `addition` made."""

    @abstractmethod
    def creation(self, name: TableName, schema: pa.Schema, primary_key: Sequence[str]) -> str:
        """Return the CREATE TABLE by which rows of `schema` fit the table as they are.

        Raises:
            ConfigError: A column has no type there, or a key column is not in the schema.
        """

    @abstractmethod
    def addition(self, name: TableName, fields: Sequence[pa.Field]) -> str:
        """Return the ALTER TABLE that adds a nullable column for each of `fields`.

        Raises:
            ConfigError: A field has no type there.
        """

    def require_place(self, connection: ConnectionT, name: TableName) -> None:
        """Return when the server knows where to create `name`.

        Raises:
            ConfigError: It does not.
        """

    def missing(self, name: TableName, schema: pa.Schema) -> ConfigError:
        """Return the error that says how to create the table."""
        rules = self.settings.rules
        key = rules.primary_key if set(rules.primary_key) <= set(schema.names) else ()
        controls = {rules.operation_column, rules.table_column}
        columns = pa.schema([field for field in schema if field.name not in controls])
        return ConfigError(
            f"table {name} {self.absence} in {self.settings.endpoint}. Pass create=True, or run: "
            f"{self.creation(name, columns, key)}"
        )

    def created(
        self, connection: ConnectionT, name: TableName, schema: pa.Schema, rules: ChangeRules
    ) -> TableT:
        """Return the table, created for rows of `schema` unless somebody just did.

        Raises:
            ConfigError: It cannot be created so, the user may not, or it is not found afterwards.
        """
        self.require_place(connection, name)
        statement = self.creation(name, rules.written(schema), rules.primary_key)
        cannot = f"table {name} cannot be created in {self.settings.endpoint}"
        with self.one_at_a_time(connection):
            if self.found(connection, name) is None:
                self._execute(connection, statement, cannot, "Run as a user who may")
                self._log.info("created table %s", name)
        table = self.found(connection, name)
        if table is None:
            raise ConfigError(
                f"table {name} was created in {self.settings.endpoint} and is not found there: "
                "grant the user INSERT on it, and write its schema before its name"
            )
        return table

    def evolved(
        self, connection: ConnectionT, table: TableT, schema: pa.Schema, rules: ChangeRules
    ) -> TableT:
        """Return the table with a nullable column for each field of `schema` that it lacked.

        Waits for whoever uses the table, as long as the lock timeout; a transaction prepared on it
        stands in the way until it is committed.

        Raises:
            ConfigError: A field has no type there, or the user may not alter the table.
        """
        cannot = (
            f"table {table.name} in {self.settings.endpoint} cannot be given the columns that it "
            "lacks"
        )
        with self.one_at_a_time(connection):
            now = self.found(connection, table.name) or table
            lacking = [one for one in rules.written(schema) if now.column(one.name) is None]
            if lacking:
                statement = self.addition(table.name, lacking)
                self._execute(connection, statement, cannot, "Run as its owner")
                names = ", ".join(field.name for field in lacking)
                self._log.info("table %s got the columns %s", table.name, names)
        return self.found(connection, table.name) or table

    def _execute(self, connection: ConnectionT, statement: str, cannot: str, advice: str) -> None:
        """Carry out `statement`.

        Raises:
            ConfigError: The user may not: says what `cannot` be done, and who is to run it.
        """
        failures = self._failures
        try:
            self.execute(connection, statement)
        except failures.errors as error:
            if not failures.is_denied(error):
                raise
            raise ConfigError(
                f"{cannot}: {failures.described(error)}. {advice}: {statement}"
            ) from error
