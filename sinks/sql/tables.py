"""Tables as users name them and as servers describe them, and how columns of the stream fit in."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import cast_rows, to_plain_column
from onceflow.core.errors import SinkError
from onceflow.core.spi.connector import Finding
from onceflow.sinks.sql.values import bad_row_at, fit_column

# uint64 has 20 digits; Arrow casts integers only to decimals that hold all of their type.
_ANY_INTEGER = pa.decimal128(20, 0)
_UUID_IN_ONE_FORM = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"


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
            ValueError: It is neither, or in the quotes that SQL wants around a name.
        """
        if re.search(r"""(^|\.)(".*"|`.*`)(\.|$)""", text):
            bare = re.sub('["`]', "", text)
            raise ValueError(
                f"table {text!r} is in quotes, which would be a part of its name: write {bare}, for"
                " upper and lower case are kept"
            )
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
    default_fault: str = ""
    """Why the user gets no default there, with what mends it; or empty."""
    update_fault: str = ""
    """Why no statement may assign to it in a row that is there, with what mends it; or empty."""

    @property
    def needs_value(self) -> bool:
        """True if an insert must have the column: it is NOT NULL, and nothing else fills it."""
        return not (self.nullable or self.has_default or self.generated)


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """The facts about a column that a writer checks before its transaction ends."""

    shown: str
    """The type, as `ColumnType.shown`."""
    needs_value: bool
    """True if the column is NOT NULL and neither a default nor the server fills it."""
    key_fault: str = ""
    """Why the server may take different keys for equal, as `TableColumn.key_fault`; or empty."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that rows go to, as the server describes it."""

    name: TableName
    """The table's name with its schema, as the server has it."""
    columns: tuple[TableColumn, ...]
    unfit: Finding | None = None
    """Why a transaction does not keep what it writes there."""
    unique_keys: tuple[tuple[str, frozenset[str]], ...] = ()
    """Every unique index by which rows can be found: its name and its columns."""
    other_unique: bool = False
    """Whether there is a unique index of another kind, over parts of columns for instance."""
    inherited_by: str = ""
    """A table whose rows are rows of this one, too, and which no unique index here covers."""
    deletable: bool = True
    """Whether the connected user may delete rows, as far as that is known here."""
    grantee: str = ""
    """The connected user, as GRANT takes it."""

    def column(self, name: str) -> TableColumn | None:
        """Return the column called `name`, or None."""
        return next((column for column in self.columns if column.name == name), None)

    def index_over(self, key: Sequence[str]) -> str | None:
        """Return the unique index over exactly the columns of `key`."""
        key_columns = frozenset(key)
        return next((name for name, columns in self.unique_keys if columns == key_columns), None)


@dataclass(frozen=True, slots=True)
class ColumnFit(ABC):
    """How one column of the stream goes into one column of a table."""

    column: TableColumn
    wire: pa.DataType
    """What values are converted to; the null type where only nulls are announced."""
    is_key: bool = False
    """Whether rows are found by it."""

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
        """Whether the table takes nulls there."""
        return self.column.nullable

    def convert(self, given: pa.Array) -> pa.Array:
        """Return `given` as the wire's type, every value unchanged; nulls stay nulls.

        What is known of a value without the server is checked: whatever the server would cut,
        round, pad or refuse late.

        Raises:
            BadRow: A value cannot be stored in the column; names the column and the value.
            SinkError: The type is not one that goes into the column.
        """
        given = to_plain_column(given)
        if given.type != self.wire and (arrow.is_null(self.wire) or not self.takes(given.type)):
            raise SinkError(
                f"column {self.name!r}: a batch has Arrow type {given.type}, which does not go "
                f"into the table's type {self.shown}"
            )
        converted = self.cast(given)
        if len(converted) > converted.null_count:
            self.check(converted)
        return converted

    @abstractmethod
    def takes(self, given: pa.DataType) -> bool:
        """Return whether values of the plain type `given` go into the column unchanged."""

    @abstractmethod
    def check(self, values: pa.Array) -> None:
        """Raise BadRow, which names the value, unless the server stores all of `values` unchanged.

        `values` are of the wire's type.
        """

    def cast(self, given: pa.Array) -> pa.Array:
        """Return `given`, which is decoded, as the wire's type; `check` comes after it."""
        if arrow.is_integer(given.type) and arrow.is_decimal(self.wire):
            given = cast_rows(given, _ANY_INTEGER)
        elif arrow.is_list(self.wire) and arrow.is_decimal(self.wire.value_type):
            given = _widen_integers(given)
        return fit_column(given, self.wire, name=self.name, target=self.shown)

    def refuse(self, values: pa.Array, bad: pa.Array, why: str) -> None:
        """Raise BadRow, which names the first bad value and says `why`, if there is one.

        `bad` has a boolean for each of `values`.
        """
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise bad_row_at(values, row, name=self.name, target=self.shown, why=why)

    def check_documents(self, documents: pa.Array, find_fault: Callable[[str], str | None]) -> None:
        """Raise BadRow for the first JSON document that `find_fault` finds a fault in."""
        for row, text in enumerate(documents.to_pylist()):
            fault = None if text is None else find_fault(text)
            if fault is not None:
                raise bad_row_at(documents, row, name=self.name, target=self.shown, why=fault)

    def require_one_form(self, uuids: pa.Array) -> None:
        """Raise BadRow for text in a key that spells a UUID otherwise than servers show it.

        Two spellings of a UUID are one row of the table, and two keys of the stream, which brings
        them to different subtasks: the older change could be the last one.
        """
        if self.is_key:
            odd = pc.invert(pc.match_substring_regex(uuids, _UUID_IN_ONE_FORM))
            why = "a key has one form, small letters with hyphens: use str(uuid.UUID(…)) before"
            self.refuse(uuids, odd, why)


def _widen_integers(lists: pa.Array) -> pa.Array:
    """Return lists of integers as lists of decimals that hold each of them; others as given."""
    is_whole = arrow.is_integer(lists.type.value_type)
    return cast_rows(lists, pa.list_(_ANY_INTEGER)) if is_whole else lists


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
