"""Why a record is bad, in words that let somebody find and mend it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa
from confluent_kafka import Message

from onceflow.core.errors import BadRecord
from onceflow.sources.kafka.columns import CONVERSION_ERRORS, Convert
from onceflow.sources.kafka.texts import excerpt

_PATH = re.compile(r" - at `\$\.(.+)`$", re.DOTALL)
_VALUE_LENGTH_MAX = 40


def bad_record(message: Message, fault: str) -> BadRecord:
    """Return the error that names where `message` lies and its `fault`."""
    return BadRecord(
        f"{message.topic()}-{message.partition()} offset {message.offset()}: {fault}. The value"
        f" starts {excerpt(message.value())}. Correct the schema or the producer, or leave such"
        " records out with on_bad_record='drop'"
    )


def fault_of(error: Exception, value: bytes | None, columns: pa.Schema) -> str:
    """Say why `value` could not be decoded, with the column and what stands in it."""
    if value is None:
        return "it has no value (a tombstone), and format 'json' needs one"
    reason = str(error)
    path = _PATH.search(reason)
    if path is None:
        return reason
    name = next(
        (
            column.name
            for column in columns
            if path[1] == column.name or path[1].startswith((f"{column.name}.", f"{column.name}["))
        ),
        None,
    )
    if name is None:
        return reason
    return f"column {name!r} ({columns.field(name).type}): {reason}, found {_found(value, name)}"


def late_fault_of(
    values: Sequence[Any], columns: pa.Schema, converters: Sequence[Convert]
) -> str | None:
    """Say which of a record's `values` does not fit its column, or None when all do."""
    for value, column, convert in zip(values, columns, converters, strict=True):
        try:
            convert([value])
        except CONVERSION_ERRORS as error:
            return f"column {column.name!r} ({column.type}) cannot hold {_short(value)}: {error}"
    return None


def _found(value: bytes, name: str) -> str:
    try:
        decoded = cast("object", msgspec.json.decode(value))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "it unreadable"
    if isinstance(decoded, dict):
        return _short(cast("dict[str, object]", decoded).get(name))
    return _short(decoded)


def _short(value: object) -> str:
    shown = str(value) if not isinstance(value, str) else repr(value)
    return f"{shown[:_VALUE_LENGTH_MAX]}…" if len(shown) > _VALUE_LENGTH_MAX else shown
