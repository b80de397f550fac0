"""Turns Debezium's changes into rows: a put has the new columns, a delete has the old ones.

    op        row      _op
    c r u     after    c, r or u: put it
    d         before   d: delete the row of its key

`_op` is what the SQL sinks' `operation_column` takes. A delete may hold only the key (Postgres
sends no more unless REPLICA IDENTITY is FULL), so every column is nullable; NOT NULL is checked for
rows that are put. Tombstones, which follow deletes for Kafka's compaction, are skipped. Truncates
and messages change no single row: they are bad records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.connectors.kafka.fitting import Faults
from onceflow.core.errors import ConfigError

OPERATION = "_op"
PUTS = frozenset({"c", "r", "u"})
DELETE = "d"
NO_AFTER = "its op puts a row, and it has no 'after'"
NO_BEFORE = (
    "its op deletes a row, and neither 'before' nor the record's key says which: see the table's"
    " REPLICA IDENTITY"
)
NO_BEFORE_IN_AVRO = (
    "its op deletes a row, and it has no 'before', which says which: see the table's REPLICA"
    " IDENTITY (the key of a record is not read in Avro)"
)
NO_COLUMN_IN_KEY = (
    "its op deletes a row, it has no 'before', and the record's key has none of the columns that"
    " schema= names"
)

_UNAVAILABLE = "__debezium_unavailable_value"
"""What Debezium writes for a large value of Postgres that an update has not touched.

For an array of texts or of bytes it writes one with this element; for one of numbers, the bytes of
the word as numbers; for one of UUIDs, the UUID of these bytes; for an hstore, a map from the word
to itself, or its JSON.
"""
_WORD_BYTES = _UNAVAILABLE.encode()
_UNAVAILABLE_HSTORE = f'{{"{_UNAVAILABLE}":"{_UNAVAILABLE}"}}'
_UNAVAILABLE_UUID = str(
    UUID(bytes=hashlib.md5(_WORD_BYTES, usedforsecurity=False).digest(), version=3)
)
_OTHER_OPERATIONS: Mapping[object, str] = {
    "t": "the table was truncated, and only changes of single rows can be read",
    "m": "it is a logical decoding message, and only changes of rows can be read",
    None: "it is not a Debezium envelope: its field 'op' is missing",
}


def schema_of_changes(columns: pa.Schema) -> pa.Schema:
    """Return the schema of changes to rows that have `columns`.

    Raises:
        ConfigError: One has the name of the operation's column.
    """
    if OPERATION in columns.names:
        raise ConfigError(f"column {OPERATION!r} says what a change does; name yours otherwise")
    operation = pa.field(OPERATION, pa.string(), nullable=False)
    return pa.schema([*(column.with_nullable(True) for column in columns), operation])


def describe_other_operation(operation: object) -> str:
    """Return why a record with `operation`, which is neither a put nor a delete, is bad."""
    known = _OTHER_OPERATIONS.get(operation if isinstance(operation, str) else None)
    return known or f"its op is {operation!r}, and not c, r, u or d"


def note_unavailable_values(
    columns: Sequence[pa.Array], schema: pa.Schema, kept: Sequence[int], faults: Faults
) -> None:
    """Add to `faults` the rows that hold Debezium's word for a value that it did not get."""
    for column, name in zip(columns, schema.names, strict=False):
        for at, is_unavailable in zip(kept, _unavailable_rows(column), strict=False):
            if is_unavailable:
                faults.setdefault(
                    at,
                    f"column {name!r} was not sent ({_UNAVAILABLE}): set the table's REPLICA"
                    " IDENTITY to FULL",
                )


def _unavailable_rows(column: pa.Array) -> list[bool]:
    """Return for each row whether it is, or holds, the word; an empty list when no row does."""
    if not _holds_word(column):
        return []
    return [_holds_word(column.slice(row, 1)) for row in range(len(column))]


def _holds_word(column: pa.Array) -> bool:
    """Whether a value is the word, in one of its forms."""
    kind = column.type
    if arrow.is_string(kind) or arrow.is_large_string(kind):
        words = pa.array([_UNAVAILABLE, _UNAVAILABLE_HSTORE, _UNAVAILABLE_UUID], kind)
        return pc.any(pc.is_in(column, words)).as_py() is True
    if arrow.is_binary(kind) or arrow.is_large_binary(kind):
        return pc.any(pc.equal(column, pa.scalar(_WORD_BYTES, kind))).as_py() is True
    return arrow.is_nested(kind) and _holds_nested_word(column)


def _holds_nested_word(column: pa.Array) -> bool:
    kind = column.type
    if arrow.is_struct(kind):
        return any(map(_holds_word, column.flatten()))
    if arrow.is_map(kind):
        return any(_UNAVAILABLE in dict(one) for one in column.to_pylist() if one is not None)
    if not _is_number(kind.value_type):
        return _holds_word(pc.list_flatten(column))
    # Only a list of the word's length can be the word: then all values are one matrix of numbers.
    of_length = pc.fill_null(pc.equal(pc.list_value_length(column), len(_WORD_BYTES)), False)
    values = pc.list_flatten(column.filter(of_length)).cast(pa.float64(), safe=False)
    rows = values.to_numpy(zero_copy_only=False).reshape(-1, len(_WORD_BYTES))
    return bool((rows == np.frombuffer(_WORD_BYTES, np.uint8)).all(axis=1).any())


def _is_number(kind: pa.DataType) -> bool:
    return arrow.is_integer(kind) or arrow.is_floating(kind) or arrow.is_decimal(kind)
