"""Tables as users name them and servers describe them, and the conversion of columns."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.clients.sql.values import bad_row_at, fit_column
from onceflow.core.arrow.kinds import cast_rows, to_plain_column
from onceflow.core.errors import SinkError
from onceflow.core.spi.connector import Finding

# uint64 has 20 digits. Arrow casts integers only to decimals that hold all values of their type.
_ANY_INTEGER = pa.decimal128(20, 0)
_UUID_IN_ONE_FORM = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"


@dataclass(frozen=True, slots=True)
class TableName:
    """The name of a table, in its own upper and lower case. The dialect quotes it."""

    schema: str | None
    """The schema, which MySQL calls a database; None for the server's default."""
    name: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Return the name in `table` or `schema.table`.

        Raises:
            ValueError: The text has another form, or a part is in the quotes of SQL.
        """
        if re.search(r"""(^|\.)(".*"|`.*`)(\.|$)""", text):
            bare = re.sub('["`]', "", text)
            raise ValueError(
                f"table {text!r} is in quotes, which would become part of the name: write {bare};"
                " upper and lower case are kept"
            )
        parts = text.split(".")
        if len(parts) > 2 or not all(parts):
            raise ValueError(f"table {text!r} is not 'table' or 'schema.table'")
        return cls(parts[0] if len(parts) == 2 else None, parts[-1])

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name


class ColumnType(Protocol):
    """The type of a column; each dialect extends it."""

    @property
    def shown(self) -> str:
        """The type as the server shows it."""
        ...


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table."""

    name: str
    type: ColumnType
    nullable: bool
    has_default: bool
    generated: bool
    insertable: bool
    """True if the connected user may write the column."""
    updatable: bool = True
    readable: bool = True
    key_fault: str = ""
    """The reason why the server may take different values for equal, with its remedy; or empty."""
    default_fault: str = ""
    """The reason why the user gets no default in the column, with its remedy; or empty."""
    update_fault: str = ""
    """The reason why no statement may assign to it in an existing row, with its remedy; or
    empty."""

    @property
    def needs_value(self) -> bool:
        """True if an insert must contain the column, which is NOT NULL and not filled otherwise."""
        return not (self.nullable or self.has_default or self.generated)


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """The facts about a column that a writer checks before its transaction ends."""

    shown: str
    """The type, as in `ColumnType.shown`."""
    needs_value: bool
    """True if the column is NOT NULL and neither a default nor the server fills it."""
    key_fault: str = ""
    """The reason why the server may take different keys for equal, as `TableColumn.key_fault`."""


@dataclass(frozen=True, slots=True)
class CheckConstraint:
    """A CHECK constraint of a table."""

    name: str
    expression: str
    """The condition in SQL, over the bare names of columns. In SQLite, where a table has one entry
    for all its constraints, the statement that creates the table."""
    columns: frozenset[str]
    """The columns in the expression; empty in SQLite."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that rows are written to, as the server describes it."""

    name: TableName
    """The table's name with its schema, as the server spells it."""
    columns: tuple[TableColumn, ...]
    unfit: Finding | None = None
    """The reason why a transaction does not keep the rows that it writes there, or None."""
    unique_keys: tuple[tuple[str, frozenset[str]], ...] = ()
    """The unique indexes by which rows can be found, each with its name and its columns."""
    other_unique: bool = False
    """True if there is a unique index of another kind, for example over parts of columns."""
    inherited_by: str = ""
    """A table whose rows are also rows of this table, and which no unique index here covers; or
    empty."""
    rule: str = ""
    """A rule of the table with which the server refuses an INSERT that says what to do with a key
    that exists; or empty."""
    deletable: bool = True
    """False if it is known that the connected user may not delete rows."""
    grantee: str = ""
    """The connected user, in the form that GRANT accepts."""
    checks: tuple[CheckConstraint, ...] = ()
    """The CHECK constraints, as far as the dialect reads them."""

    def column(self, name: str) -> TableColumn | None:
        """Return the column called `name`, or None."""
        return next((column for column in self.columns if column.name == name), None)

    def index_over(self, key: Sequence[str]) -> str | None:
        """Return the name of the unique index over exactly the columns of `key`, or None."""
        key_columns = frozenset(key)
        return next((name for name, columns in self.unique_keys if columns == key_columns), None)


@dataclass(frozen=True, slots=True)
class ColumnFit(ABC):
    """The conversion of one column of the stream to one column of a table."""

    column: TableColumn
    wire: pa.DataType
    """The type that values are converted to; the null type if the stream announces only nulls."""
    is_key: bool = False
    """True if the column is part of the key."""

    @property
    def name(self) -> str:
        """The column's name, in the batch and in the table."""
        return self.column.name

    @property
    def shown(self) -> str:
        """The table's type as an error message shows it."""
        return self.column.type.shown

    @property
    def nullable(self) -> bool:
        """True if the column of the table accepts nulls."""
        return self.column.nullable

    def convert(self, given: pa.Array) -> pa.Array:
        """Return `given` as the wire's type, every value unchanged; nulls stay nulls.

        Checks values without the server: refuses values that the server would cut, round or pad, or
        would refuse only later.

        Raises:
            BadRow: A value cannot be stored in the column; names the column and the value.
            SinkError: The column does not accept the type of `given`.
        """
        given = to_plain_column(given)
        if given.type != self.wire and (arrow.is_null(self.wire) or not self.takes(given.type)):
            raise SinkError(
                f"column {self.name!r}: a batch has Arrow type {given.type}, which cannot be"
                f" stored in the table's type {self.shown}"
            )
        converted = self.cast(given)
        if len(converted) > converted.null_count:
            self.check(converted)
        return converted

    @abstractmethod
    def takes(self, given: pa.DataType) -> bool:
        """Return True if the column stores values of the plain type `given` unchanged."""

    @abstractmethod
    def check(self, values: pa.Array) -> None:
        """Raise BadRow, which names the value, unless the server stores all of `values` unchanged.

        `values` have the wire's type.
        """

    def cast(self, given: pa.Array) -> pa.Array:
        """Return `given`, which is decoded, as the wire's type.

        The caller calls `check` on the result.
        """
        if arrow.is_integer(given.type) and arrow.is_decimal(self.wire):
            given = cast_rows(given, _ANY_INTEGER)
        elif arrow.is_list(self.wire) and arrow.is_decimal(self.wire.value_type):
            given = _widen_integers(given)
        return fit_column(given, self.wire, name=self.name, target=self.shown)

    def refuse(self, values: pa.Array, bad: pa.Array, why: str) -> None:
        """Raise BadRow for the first bad value with the reason `why`; do nothing if there is none.

        `bad` has a boolean for each of `values`.
        """
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise bad_row_at(values, row, name=self.name, target=self.shown, why=why)

    def check_documents(self, documents: pa.Array, find_fault: Callable[[str], str | None]) -> None:
        """Raise BadRow for the first JSON document in which `find_fault` finds a fault."""
        for row, text in enumerate(documents.to_pylist()):
            fault = None if text is None else find_fault(text)
            if fault is not None:
                raise bad_row_at(documents, row, name=self.name, target=self.shown, why=fault)

    def require_one_form(self, uuids: pa.Array) -> None:
        """Raise BadRow if a key contains a UUID in another spelling than the server's.

        Two spellings of a UUID are one row of the table but two keys of the stream. Their changes
        may go to different subtasks, and the older change could be applied last.
        """
        if self.is_key:
            odd = pc.invert(pc.match_substring_regex(uuids, _UUID_IN_ONE_FORM))
            why = (
                "a UUID key must be in lower case with hyphens: convert it with"
                " str(uuid.UUID(…)) before"
            )
            self.refuse(uuids, odd, why)


def _widen_integers(lists: pa.Array) -> pa.Array:
    """Return lists of integers as lists of decimals that hold all integers.

    Other lists unchanged.
    """
    is_whole = arrow.is_integer(lists.type.value_type)
    return cast_rows(lists, pa.list_(_ANY_INTEGER)) if is_whole else lists


@dataclass(frozen=True, slots=True)
class Target:
    """A table, and the fits of the stream's columns into it."""

    table: Table
    fits: tuple[ColumnFit, ...]
    depth: int = 0
    """The length of the longest chain of foreign keys from this table to other tables."""
    refers: bool = False
    """True if a foreign key of this table may refer to rows that the same writer has written."""

    @property
    def name(self) -> TableName:
        """The table's name, with its schema."""
        return self.table.name

    def fits_of(self, names: Sequence[str]) -> tuple[ColumnFit, ...]:
        """Return the `ColumnFit` of each column of `names`, in this order."""
        by_name = {fit.name: fit for fit in self.fits}
        return tuple(by_name[name] for name in names)
