"""The meaning of a row for its table: an insert or change, or a delete. The same for all dialects.

Staged rows carry their operation, so that a later change of settings does not affect them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.clients.sql.tables import TableName
from onceflow.core.arrow.kinds import is_list, is_text, to_plain_column, to_plain_type
from onceflow.core.errors import ConfigError, StateCorrupt
from onceflow.core.spi.bad_rows import BadRows

_ADVICE_ON_CHANGES = (
    ". A delete that a database sends has only the columns of the table's replica identity: make"
    " these the primary_key, or make the identity FULL. Without the row, the delete is lost"
)


class WriteMode(Enum):
    """The effect of a row that is not a delete."""

    INSERT = "insert"
    """Write a new row. An existing row with the key is an error."""
    UPSERT = "upsert"
    """Write a new row, or replace the row of the same key."""
    IGNORE = "ignore"
    """Write a new row unless a row with the key exists: the first row of a key stays."""
    UPDATE = "update"
    """Replace the row of the same key; do nothing if there is none."""


OPERATIONS: Mapping[str, bool] = MappingProxyType(
    {
        **dict.fromkeys(("insert", "i", "create", "c", "r", "upsert", "update", "u"), False),
        **dict.fromkeys(("delete", "d"), True),
    }
)
"""The words of an operation column, in any case, with True for those that delete.

All others write the row as the write mode says. A change log that is replayed from its beginning
contains inserts of rows that exist and updates of rows that do not.
"""


UNCHANGED = "_unchanged"
"""The name by which sources add a column for `unchanged_column`."""


@dataclass(frozen=True, slots=True)
class Classified:
    """Rows that may be written, in the sink's schema, and the marks of those that delete."""

    rows: pa.RecordBatch
    deletes: pa.BooleanArray


@dataclass(frozen=True, slots=True)
class ChangeRules:
    """The rules by which rows become changes of tables.

    Raises:
        ConfigError: The settings contradict each other.
    """

    mode: WriteMode = WriteMode.INSERT
    primary_key: tuple[str, ...] = ()
    tombstones: bool = False
    """True if a row whose columns outside the key are all null deletes its key."""
    operation_column: str | None = None
    """The column that names the row's operation by `OPERATIONS`; it is not written."""
    table_column: str | None = None
    """The column that names the row's table; null means the default table. It is not written."""
    unchanged_column: str | None = None
    """The column that names the columns whose values a change did not send. It is not written."""

    def __post_init__(self) -> None:
        deleting = "tombstones" if self.tombstones else "operation_column"
        if self.mode is WriteMode.INSERT:
            if self.tombstones or self.operation_column:
                raise ConfigError(
                    f"{deleting} deletes rows by their key, which write_mode='insert' never looks "
                    "at; pass write_mode='upsert' (or 'ignore', 'update') with primary_key=(…)"
                )
            self._check_unchanged()
            return
        if not self.primary_key:
            raise ConfigError(
                f"write_mode={self.mode.value!r} finds rows by their key; pass primary_key=(…)"
            )
        control = {self.operation_column, self.table_column} & set(self.primary_key)
        if control:
            raise ConfigError(
                f"{', '.join(map(repr, control))} is in primary_key, and also names the operation "
                "or the table, which is not written"
            )
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise ConfigError unless rows without some of their values can be written."""
        if self.unchanged_column is None:
            return
        if self.mode not in (WriteMode.UPSERT, WriteMode.UPDATE):
            raise ConfigError(
                f"unchanged_column={self.unchanged_column!r} leaves columns of an existing row as"
                f" they are, which write_mode={self.mode.value!r} never updates; pass"
                " write_mode='upsert' or 'update' with primary_key=(…)"
            )
        if self.tombstones:
            raise ConfigError(
                "unchanged_column and tombstones=True contradict each other: a row whose values"
                " were not sent would be a delete. Omit tombstones=True, and say by"
                " operation_column= which rows are to be deleted"
            )
        if self.unchanged_column in self.primary_key:
            raise ConfigError(
                f"{self.unchanged_column!r} is in primary_key, and is unchanged_column, too, which"
                " is not written"
            )

    @property
    def control_columns(self) -> frozenset[str]:
        """The columns that are not written."""
        names = (self.operation_column, self.table_column, self.unchanged_column)
        return frozenset(name for name in names if name is not None)

    @property
    def uses_key(self) -> bool:
        """True if rows are found by key, so that they must be buffered and routed by it."""
        return self.mode is not WriteMode.INSERT

    def select_table_columns(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns of `schema` that are written to the table.

        Raises:
            ConfigError: A column that the settings name is missing or has a wrong type, or every
                row would be a tombstone.
        """
        for setting, name in (
            ("operation_column", self.operation_column),
            ("table_column", self.table_column),
        ):
            if name is not None:
                _require_text(schema, setting, name)
        if self.uses_key:
            for name in self.primary_key:
                _require_key(schema, name)
            _require_unchanged(schema, self.unchanged_column)
        control = self.control_columns
        columns = pa.schema([field for field in schema if field.name not in control])
        if self.tombstones and not set(columns.names) - set(self.primary_key):
            raise ConfigError(
                "tombstones=True deletes each row that is null in all columns outside the key, and"
                f" the rows have only the key ({', '.join(columns.names)}): every row would be a"
                " delete. Omit tombstones=True; if rows are to be deleted, say which by"
                " operation_column="
            )
        return columns

    def classify(self, batch: pa.RecordBatch, bad_rows: BadRows) -> Classified:
        """Mark the rows that delete. Rows with a null in the key or an unknown operation are bad.

        Raises:
            BadRow: There is such a row, and bad rows fail the job.
        """
        if not self.uses_key:
            return Classified(batch, _all_false(batch.num_rows))
        for name in self.primary_key:
            why = f"primary key column {name!r} is null, so no row can be found by it"
            if self.operation_column is not None:
                why += _ADVICE_ON_CHANGES
            batch = bad_rows.sift(batch, batch.column(name).is_null(), why)
        deletes = self._tombstones(batch) if self.tombstones else _all_false(batch.num_rows)
        if self.operation_column is None:
            return Classified(batch, deletes)
        operations, known = self._operations(batch.column(self.operation_column))
        # The operation column of a tombstone is null like its other columns, and may be unknown.
        accepted = pc.or_(known, deletes)
        deletes = pc.or_(operations, deletes)
        if pc.all(accepted).as_py() is False:
            deletes = deletes.filter(accepted)
            batch = bad_rows.sift(
                batch,
                pc.invert(accepted),
                f"operation column {self.operation_column!r} says none of {', '.join(OPERATIONS)}",
                shows=self.operation_column,
            )
        return Classified(batch, deletes)

    def _tombstones(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        every = _all_false(batch.num_rows, inverted=True)
        control = {self.operation_column, self.table_column, *self.primary_key}
        for name in batch.schema.names:
            if name not in control:
                every = pc.and_(every, batch.column(name).is_null())
        return every

    @staticmethod
    def _operations(column: pa.Array) -> tuple[pa.BooleanArray, pa.BooleanArray]:
        """Return the masks of deleting rows and of known operations. Looks at each word once."""
        encoded = to_plain_column(column).dictionary_encode()
        words = [str(word).strip().lower() for word in encoded.dictionary.to_pylist()]
        # True deletes, False writes, null is unknown, so one array holds both masks.
        meaning_by_word = pa.array([OPERATIONS.get(word) for word in words], pa.bool_())
        meaning = meaning_by_word.take(encoded.indices)
        return pc.fill_null(meaning, False), meaning.is_valid()


@dataclass(frozen=True, slots=True)
class StagedRules(ChangeRules):
    """The rules of staged rows, whose columns were checked and converted when they were staged."""

    @override
    def select_table_columns(self, schema: pa.Schema) -> pa.Schema:
        # All columns. An integer of the key is already a float if the table's column is a float.
        return schema


def _all_false(count: int, *, inverted: bool = False) -> pa.BooleanArray:
    return pa.repeat(pa.scalar(inverted), count)


def _require_text(schema: pa.Schema, setting: str, name: str) -> None:
    if name not in schema.names:
        raise ConfigError(
            f"{setting}={name!r} is not among the columns of the rows: {', '.join(schema.names)}"
        )
    kind = to_plain_type(schema.field(name).type)
    if not is_text(kind):
        raise ConfigError(f"{setting}={name!r} has Arrow type {kind}, and must be text")


def _require_unchanged(schema: pa.Schema, name: str | None) -> None:
    """Raise ConfigError if rows may lack values that would be written as nulls."""
    known = UNCHANGED if name is None else name
    is_there = known in schema.names and _is_list_of_texts(schema.field(known).type)
    if name is None and is_there:
        raise ConfigError(
            f"the rows have column {UNCHANGED!r}, which names columns whose values are not in the"
            " row: they would be written as nulls. If the sink has the option unchanged_column,"
            f" give unchanged_column={UNCHANGED!r}. Otherwise the sink cannot leave columns as they"
            " are: let the source send whole rows (ALTER TABLE … REPLICA IDENTITY FULL, and no"
            f" {UNCHANGED!r} in metadata=)"
        )
    if name is not None and not is_there:
        raise ConfigError(
            f"unchanged_column={name!r} must be a column of lists of texts, and the rows have the"
            f" columns {', '.join(f'{field.name}: {field.type}' for field in schema)}"
        )


def _is_list_of_texts(kind: pa.DataType) -> bool:
    return is_list(kind) and is_text(to_plain_type(kind.value_type))


def _require_key(schema: pa.Schema, name: str) -> None:
    if name not in schema.names:
        raise ConfigError(
            f"primary_key names {name!r}, and the rows have only the columns "
            f"{', '.join(schema.names)}"
        )
    kind = schema.field(name).type
    while arrow.is_dictionary(kind) or arrow.is_run_end_encoded(kind):
        kind = kind.value_type
    if arrow.is_floating(kind) or arrow.is_nested(kind) or arrow.is_null(kind):
        raise ConfigError(
            f"primary_key column {name!r} has Arrow type {kind}, whose equality is not the "
            "database's; cast it to an integer, a decimal or text"
        )


class StagedVerb(Enum):
    """The effect of a batch of staged rows."""

    PUT = "put"
    """Write the rows as the write mode says."""
    UPDATE = "update"
    """Set the columns of the rows in existing rows, and leave other columns as they are."""
    DELETE = "delete"
    """Delete the rows of the keys."""


_LABEL_VERSION = 2
"""The version of labels. The rows are converted to the types of the columns."""


@dataclass(frozen=True, slots=True)
class StagedOperation:
    """The operation on one batch of staged rows."""

    table: TableName
    """The table's name with its schema, as the server spelled it."""
    mode: WriteMode
    key: tuple[str, ...]
    verb: StagedVerb
    types: tuple[str, ...]
    """The types of the table's columns to which the rows are converted, in the server's words."""

    def to_label(self) -> str:
        """Return the label under which the rows are staged."""
        head = [self.verb.value, self.table.schema, self.table.name, self.mode.value]
        return json.dumps([_LABEL_VERSION, *head, list(self.key), list(self.types)])

    @classmethod
    def from_label(cls, label: str) -> StagedOperation:
        """Return the operation that `to_label` encoded.

        Raises:
            StateCorrupt: The label is not valid, or of another version of onceflow.
        """
        try:
            version, verb, schema, name, mode, *details = json.loads(label)
            if version == _LABEL_VERSION and verb in {known.value for known in StagedVerb}:
                key, types = details
                return cls(
                    TableName(schema, name),
                    WriteMode(mode),
                    tuple(key),
                    StagedVerb(verb),
                    tuple(types),
                )
        except (ValueError, TypeError) as error:
            raise StateCorrupt(f"rows are staged with the label {label!r}: {error}") from None
        raise StateCorrupt(
            f"rows are staged with the label {label!r} of another version of onceflow; let that "
            "version commit them"
        )
