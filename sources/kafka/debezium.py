"""Debezium's changes of rows, as rows: the new columns of what is put, the old ones of a delete.

    op        row      _op
    c r u     after    c, r or u: put it
    d         before   d: delete the row of its key

`_op` is what the SQL sinks' `operation_column` takes. Of a deleted row nothing but the key may be
known (Postgres, unless its REPLICA IDENTITY is FULL), so every column may be null; what NOT NULL
says holds for rows that are put. Tombstones, which follow deletes for Kafka's compaction, are
passed over. Truncates and messages are no change of one row, and bad records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.errors import ConfigError
from onceflow.sources.kafka.fitting import Faults

OPERATION = "_op"
PUTS = frozenset({"c", "r", "u"})
DELETE = "d"
NO_AFTER = "its op puts a row, and it has no 'after'"
NO_BEFORE = (
    "its op deletes a row, and neither 'before' nor the record's key says which: see the table's"
    " REPLICA IDENTITY"
)

_UNAVAILABLE = "__debezium_unavailable_value"
"""What Debezium writes for a large value of Postgres that an update has not touched."""
_OTHER_OPERATIONS: Mapping[object, str] = {
    "t": "the table was truncated, which is no change of one row",
    "m": "it is a message, and no change of a row",
    None: "it is no Debezium envelope: it has no 'op'",
}


def changes_of(columns: pa.Schema) -> pa.Schema:
    """Return the columns of changes of rows with `columns`.

    Raises:
        ConfigError: One has the name of the operation's column.
    """
    if OPERATION in columns.names:
        raise ConfigError(f"column {OPERATION!r} says what a change does; name yours otherwise")
    operation = pa.field(OPERATION, pa.string(), nullable=False)
    return pa.schema([*(column.with_nullable(True) for column in columns), operation])


def other_operation(operation: object) -> str:
    """Return why a record of such an operation is bad."""
    known = _OTHER_OPERATIONS.get(operation if isinstance(operation, str) else None)
    return known or f"its op is {operation!r}, and not c, r, u or d"


def unavailable_values(
    columns: Sequence[pa.Array], schema: pa.Schema, kept: Sequence[int], faults: Faults
) -> None:
    """Tell `faults` of rows that hold Debezium's word for a value that it was not told."""
    for column, name in zip(columns, schema.names, strict=False):
        if not (arrow.is_string(column.type) or arrow.is_binary(column.type)):
            continue
        found = pc.equal(column, pa.scalar(_UNAVAILABLE, pa.string()).cast(column.type))
        if not pc.any(found).as_py():
            continue
        for at, unavailable in zip(kept, found.to_pylist(), strict=True):
            if unavailable:
                faults.setdefault(
                    at,
                    f"column {name!r} was not sent ({_UNAVAILABLE}): set the table's REPLICA"
                    " IDENTITY to FULL",
                )
