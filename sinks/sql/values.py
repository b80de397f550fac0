"""Fits Arrow columns to a table's types, and names the value that does not fit."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.errors import BadRow

_SHOWN_LENGTH_MAX = 80


def fitted(column: pa.Array, wire: pa.DataType, *, name: str, target: str) -> pa.Array:
    """Return `column` as `wire` with every value unchanged; `target` is the database's type.

    Raises:
        BadRow: A value cannot be written in that type without changing it; names the first one.
    """
    if column.type == wire:
        return column
    try:
        return column.cast(wire, safe=True)
    except pa.ArrowInvalid as error:
        if arrow.is_list(wire):
            # The values themselves can be halved; a slice of lists keeps all of them.
            fitted(column.flatten(), wire.value_type, name=name, target=target)
        raise refused_at(column, _first_refused(column, wire), name=name, target=target) from error


def refused_at(column: pa.Array, row: int, *, name: str, target: str, why: str = "") -> BadRow:
    """Return the error that names the value at `row` of `column`."""
    return BadRow(
        f"column {name!r}: the value {quoted_value(column, row)} (row {row} of its batch) does "
        f"not fit the table's type {target}{why and f': {why}'}. Widen the column, or filter or "
        "cast the value before the sink"
    )


def quoted_value(column: pa.Array, row: int) -> str:
    """Return the value at `row` as a short text for an error message."""
    try:
        text = repr(column[row].as_py())
    except (ValueError, OverflowError):
        # Arrow holds dates and nanoseconds that Python cannot; its array prints what it holds.
        text = " ".join(str(column.slice(row, 1)).split()).strip("[] ")
    return text if len(text) <= _SHOWN_LENGTH_MAX else f"{text[:_SHOWN_LENGTH_MAX]}…"


def _first_refused(column: pa.Array, wire: pa.DataType) -> int:
    """Halve the column until one value is left: a failed cast does not say which one it was."""
    first, count = 0, len(column)
    while count > 1:
        half = count // 2
        if _refuses(column.slice(first, half), wire):
            count = half
        else:
            first, count = first + half, count - half
    return first


def _refuses(column: pa.Array, wire: pa.DataType) -> bool:
    try:
        column.cast(wire, safe=True)
    except pa.ArrowInvalid:
        return True
    return False
