"""The dead letters: records that could not be read or written, with the reason and the origin.

They are ordinary rows: a sink of their own writes them, in the same checkpoints and by the same two
phases as all other rows. So after any crash, each is there exactly once, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import types as arrow

DEAD_LETTERS = pa.schema(
    [
        pa.field("operator", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("seen_at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)
"""The schema of the rows that a sink of dead letters takes.

`operator` is the uid of the source or sink that refused the record. `topic`, `partition` and
`offset` are null if the origin is not known. A sink knows it if its rows have columns of these
names, or of the names that `KafkaSource(include_metadata=True)` uses (`_topic` and so on). `value`
is the record that the source read, byte for byte. For a row that a sink refused, it is the row as a
JSON object.
"""

DEAD_LETTERS_TAG = "dead letters"
"""The name of their side output, which a user cannot give to another one."""

_ORIGINS = (("_topic", "_partition", "_offset"), ("topic", "partition", "offset"))


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that was refused."""

    reason: str
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    key: bytes | None = None
    value: bytes | None = None


def letters_of_rows(rows: pa.RecordBatch, reasons: Sequence[str]) -> list[DeadLetter]:
    """Return a letter for each of `rows`, with the reason at the same index of `reasons`.

    Raises:
        ValueError: The number of reasons differs from the number of rows.
    """
    origin = origin_columns(rows.schema)
    letters: list[DeadLetter] = []
    for row, reason in zip(printable_rows(rows), reasons, strict=True):
        topic, partition, offset = (row[name] for name in origin) if origin else (None, None, None)
        # `enc_hook`: a value without a JSON form must not prevent the dead letter from being
        # written.
        value = msgspec.json.encode(row, enc_hook=str)
        letters.append(DeadLetter(reason, topic, partition, offset, value=value))
    return letters


def batch_of_letters(operator: str, letters: Sequence[DeadLetter]) -> pa.RecordBatch:
    """Return `letters` of `operator` as rows of `DEAD_LETTERS`."""
    # All letters get one time, because they were refused in one call.
    now_us = time.time_ns() // 1000
    columns: list[list[Any]] = [
        [operator] * len(letters),
        [letter.reason for letter in letters],
        [letter.topic for letter in letters],
        [letter.partition for letter in letters],
        [letter.offset for letter in letters],
        [letter.key for letter in letters],
        [letter.value for letter in letters],
        [now_us] * len(letters),
    ]
    arrays = [
        pa.array(values, type=column.type)
        for values, column in zip(columns, DEAD_LETTERS, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=DEAD_LETTERS)


def origin_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that hold topic, partition and offset; empty if there are none."""
    for topic, partition, offset in _ORIGINS:
        if all(schema.get_field_index(name) >= 0 for name in (topic, partition, offset)) and (
            arrow.is_string(schema.field(topic).type)
            and arrow.is_integer(schema.field(partition).type)
            and arrow.is_integer(schema.field(offset).type)
        ):
            return topic, partition, offset
    return ()


def printable_rows(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows as Python values; a value that Python cannot hold becomes Arrow's text."""
    try:
        return rows.to_pylist()
    except (ValueError, OverflowError, ArithmeticError):
        columns = {
            name: [_value(rows.column(name), row) for row in range(rows.num_rows)]
            for name in rows.schema.names
        }
        return [
            {name: values[row] for name, values in columns.items()} for row in range(rows.num_rows)
        ]


def _value(column: pa.Array, row: int) -> Any:
    try:
        return column[row].as_py()
    except (ValueError, OverflowError, ArithmeticError):
        # Python cannot hold these dates and nanoseconds, so use the text that the array prints.
        return " ".join(str(column.slice(row, 1)).split()).strip("[] ")
