"""Tables as users name them and as servers describe them, and how columns of the stream fit in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class TableName:
    """A table's name, upper and lower case kept; how it is quoted is the dialect's."""

    schema: str | None
    """What MySQL calls a database; None for the one that the server takes by itself."""
    name: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Return the name in `table` or `schema.table`.

        Raises:
            ValueError: It is neither.
        """
        parts = text.split(".")
        if len(parts) > 2 or not all(parts):
            raise ValueError(f"table {text!r} is not 'table' or 'schema.table'")
        return cls(parts[0] if len(parts) == 2 else None, parts[-1])

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name


class ColumnType(Protocol):
    """A column's type, of which each dialect knows more."""

    @property
    def shown(self) -> str:
        """The type in the server's words, as it was declared."""
        ...


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a table."""

    name: str
    type: ColumnType
    nullable: bool
    has_default: bool
    generated: bool
    insertable: bool
    """Whether the connected user may write it."""
    updatable: bool = True
    readable: bool = True
    key_fault: str = ""
    """Why the server may take different values for equal, with what mends it; or empty."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that rows go to, as the server describes it."""

    name: TableName
    """With its schema, as the server has it."""
    columns: tuple[TableColumn, ...]
    unfit: str = ""
    """Why a transaction does not keep what it writes there, and what mends it; or empty."""
    unique_keys: tuple[tuple[str, frozenset[str]], ...] = ()
    """Every unique index by which rows can be found: its name and its columns."""
    other_unique: bool = False
    """Whether there is a unique index of another kind, over parts of columns for instance."""
    deletable: bool = True
    """Whether the connected user may delete rows, as far as that is known here."""
    grantee: str = ""
    """The connected user, as GRANT takes it."""

    def column(self, name: str) -> TableColumn | None:
        """Return the column called `name`, or None."""
        return next((column for column in self.columns if column.name == name), None)

    def index_over(self, key: Sequence[str]) -> str | None:
        """Return the unique index over exactly the columns of `key`."""
        wanted = frozenset(key)
        return next((name for name, columns in self.unique_keys if columns == wanted), None)


class ColumnFit(Protocol):
    """How one column of the stream goes into one column of a table."""

    @property
    def column(self) -> TableColumn:
        """The table's column."""
        ...

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


@dataclass(frozen=True, slots=True)
class Target:
    """One table, and how columns of the stream go into it."""

    table: Table
    fits: tuple[ColumnFit, ...]

    @property
    def name(self) -> TableName:
        """The table's name, with its schema."""
        return self.table.name

    def fits_of(self, names: Sequence[str]) -> tuple[ColumnFit, ...]:
        """Return the fits of some columns, in the order of `names`."""
        by_name = {fit.name: fit for fit in self.fits}
        return tuple(by_name[name] for name in names)
