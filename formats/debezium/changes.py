"""The conversion of Debezium's changes to rows: a put has new columns, a delete has old ones.

    op        row      _op
    c r u     after    c, r or u: put it
    d         before   d: delete the row of its key

An update that changes a column of `primary_key=` is two rows: the old one with `d`, then the new
one.

`_op` is what the SQL sinks' `operation_column` takes. A delete may hold only the key (Postgres
sends no more unless REPLICA IDENTITY is FULL), so every column is nullable; NOT NULL is checked for
rows that are put. Tombstones, which follow deletes for Kafka's compaction, are skipped. Truncates
and messages change no single row: they are bad records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.arrow.instants import values_inside
from onceflow.core.errors import ConfigError
from onceflow.formats.fitting import Faults

OPERATION = "_op"
UPDATE = "u"
PUTS = frozenset({"c", "r", UPDATE})
DELETE = "d"
NO_AFTER = "its op inserts or updates a row, but it has no 'after'"
NO_BEFORE = (
    "its op deletes a row, but neither 'before' nor the record's key identifies the row: see the"
    " table's REPLICA IDENTITY"
)
NO_BEFORE_IN_AVRO = (
    "its op deletes a row, but it has no 'before', which identifies the row: see the table's"
    " REPLICA IDENTITY (the key of a record is not read in Avro)"
)
NO_COLUMN_IN_KEY = (
    "its op deletes a row, it has no 'before', and the record's key has none of the columns that"
    " schema= names"
)

_GEOMETRIES = (
    "0101000020e6100000000000fc83d797c1000000fc83d797c1",
    "0101000020e61000000c21e7fdff7f66401842cefbff7f5640",
    "0101000000000000fc83d797c1000000fc83d797c1",
)
"""The WKB of the geometry, geography and point that replace a value Debezium did not receive."""
_BYTES_PREFIX = "hex:"
_OTHER_OPERATIONS: Mapping[object, str] = {
    "t": "the table was truncated, but only changes of single rows can be read",
    "m": "it is a logical decoding message, but only changes of rows can be read",
    None: "it is not a Debezium envelope: its field 'op' is missing",
}


@dataclass(frozen=True, slots=True)
class DebeziumOptions:
    """The options of the source that describe how Debezium writes changes."""

    primary_key: Sequence[str] = ()
    """The columns that identify a row of the target, if they differ from the table's own key."""
    decimal_handling_mode: str | None = None
    binary_handling_mode: str | None = None

    def check(self, columns: pa.Schema) -> None:
        """Raise ConfigError if `columns` lack a column of the primary key."""
        for name in self.primary_key:
            if name not in columns.names:
                raise ConfigError(
                    f"primary_key= names {name!r}, but the columns are {', '.join(columns.names)}"
                )


def describe_unknown_key(columns: Sequence[str]) -> str:
    """Return why an update is bad that lacks the old values of the key's `columns`."""
    return (
        f"its op updates a row, and its 'before' has no {', '.join(map(repr, columns))}, which is"
        " in primary_key=: the row with the old key would stay. Set the table's REPLICA IDENTITY"
        " to FULL, or omit primary_key= if it is the table's own key"
    )


def schema_of_changes(columns: pa.Schema) -> pa.Schema:
    """Return the schema of changes to rows that have `columns`.

    Raises:
        ConfigError: A column has the name of the operation's column.
    """
    if OPERATION in columns.names:
        raise ConfigError(
            f"column {OPERATION!r} is reserved for the operation of a change; rename your column"
        )
    operation = pa.field(OPERATION, pa.string(), nullable=False)
    return pa.schema([*(column.with_nullable(True) for column in columns), operation])


def describe_other_operation(operation: object) -> str:
    """Return why a record is bad whose `operation` is neither a put nor a delete."""
    known = _OTHER_OPERATIONS.get(operation if isinstance(operation, str) else None)
    return known or f"its op is {operation!r}, which is not c, r, u or d"


def read_placeholder(placeholder: str) -> bytes:
    """Return the bytes of Debezium's `unavailable.value.placeholder`: text, or `hex:` and digits.

    Raises:
        ConfigError: The placeholder is empty, or its digits are not valid.
    """
    is_hex = placeholder.startswith(_BYTES_PREFIX)
    try:
        word = (
            bytes.fromhex(placeholder.removeprefix(_BYTES_PREFIX))
            if is_hex
            else placeholder.encode()
        )
    except ValueError:
        word = b""
    if not word:
        raise ConfigError(
            f"unavailable_value_placeholder={placeholder!r} is no value: give what Debezium's"
            " unavailable.value.placeholder is, text, or hex: and pairs of hexadecimal digits"
        )
    return word


class UnavailableValues:
    """A finder of the placeholders that Debezium writes for large values an update did not change.

    The placeholder is a word. An array of texts or of bytes has the word as its only element. An
    array of numbers has the bytes of the word; an array of UUIDs has the UUID of these bytes. An
    hstore maps the word to itself, or is the JSON of such a map. A geometry of PostGIS is a point
    that no table contains.

    Source: UnchangedToastedPlaceholder of Debezium's connector for Postgres.
    """

    def __init__(self, placeholder: str) -> None:
        """Look for `placeholder`, which is written like Debezium's `unavailable.value.placeholder`.

        Raises:
            ConfigError: It is not a valid placeholder; see `read_placeholder`.
        """
        word = read_placeholder(placeholder)
        self._text = text = word.decode(errors="replace")
        digest = hashlib.md5(word, usedforsecurity=False).digest()
        json_text = f'{{"{text}":"{text}"}}'
        self._texts = [text, json_text, str(UUID(bytes=digest, version=3))]
        self._bytes = [word, *map(bytes.fromhex, _GEOMETRIES)]
        # Java's bytes have a sign.
        self._numbers = np.frombuffer(word, np.int8)

    def note_rows(
        self, columns: Sequence[pa.Array], schema: pa.Schema, kept: Sequence[int], faults: Faults
    ) -> None:
        """Add to `faults` the rows that hold a placeholder."""
        for column, name in zip(columns, schema.names, strict=False):
            for at, is_unavailable in zip(kept, self._rows(column), strict=False):
                if is_unavailable:
                    faults.setdefault(
                        at,
                        f"column {name!r} was not sent ({self._text}): set the table's REPLICA"
                        " IDENTITY to FULL",
                    )

    def _rows(self, column: pa.Array) -> list[bool]:
        """Return for each row whether it is or contains a placeholder; empty if no row does."""
        if not self._are_in(column):
            return []
        return [self._are_in(column.slice(row, 1)) for row in range(len(column))]

    def _are_in(self, column: pa.Array) -> bool:
        """Return True if a value is the placeholder in one of its forms."""
        kind = column.type
        if arrow.is_string(kind) or arrow.is_large_string(kind):
            return pc.any(pc.is_in(column, pa.array(self._texts, kind))).as_py() is True
        if arrow.is_binary(kind) or arrow.is_large_binary(kind):
            return pc.any(pc.is_in(column, pa.array(self._bytes, kind))).as_py() is True
        return arrow.is_nested(kind) and self._holds_nested(column)

    def _holds_nested(self, column: pa.Array) -> bool:
        kind = column.type
        if arrow.is_struct(kind):
            return any(map(self._are_in, column.flatten()))
        if arrow.is_map(kind):
            # Compare the keys only: the values may be dates that Python cannot represent.
            keys = values_inside(column)[0]
            return arrow.is_string(keys.type) and pc.any(pc.equal(keys, self._text)).as_py() is True
        if not _is_number(kind.value_type):
            return self._are_in(pc.list_flatten(column))
        # Only lists as long as the placeholder can equal it, so they are compared as one matrix.
        length = len(self._numbers)
        of_length = pc.fill_null(pc.equal(pc.list_value_length(column), length), False)
        values = pc.list_flatten(column.filter(of_length)).cast(pa.float64(), safe=False)
        rows = values.to_numpy(zero_copy_only=False).reshape(-1, length)
        return bool((rows == self._numbers).all(axis=1).any())


def _is_number(kind: pa.DataType) -> bool:
    return arrow.is_integer(kind) or arrow.is_floating(kind) or arrow.is_decimal(kind)
