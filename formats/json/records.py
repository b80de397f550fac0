"""The conversion of decoded JSON records to columns, and the description of bad records."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa

from onceflow.formats.json.columns import CONVERSION_ERRORS, Convert
from onceflow.formats.wire import TOMBSTONE

DECODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)
"""The errors of decoding a value that is not a record of the expected type."""

_PATH = re.compile(r" - at `\$\.(.+)`$", re.DOTALL)
_VALUE_LENGTH_MAX = 40
"""The maximum length of a bad value in an error."""


def fault_of(error: Exception, value: bytes | None, columns: pa.Schema) -> str:
    """Describe why `value` could not be decoded, with the column and its value."""
    if value is None:
        return f"{TOMBSTONE}, and its format needs one"
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
    kind = columns.field(name).type
    return f"column {name!r} ({kind}): {reason}, found {_describe_value(value, name)}"


def late_fault_of(
    values: Sequence[Any], columns: pa.Schema, converters: Sequence[Convert]
) -> str | None:
    """Describe which of a record's `values` does not fit its column, or return None if all do."""
    for value, column, convert in zip(values, columns, converters, strict=True):
        try:
            convert([value])
        except CONVERSION_ERRORS as error:
            return f"column {column.name!r} ({column.type}) cannot hold {_short(value)}: {error}"
    return None


def _describe_value(value: bytes, name: str) -> str:
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


def column_reader(count: int) -> Callable[[list[Any]], tuple[list[Any], ...]]:
    """Return a function from records to the lists of their fields c0, c1 and so on.

    Its source code is generated and compiled, as in dataclasses: an attribute with a literal name
    costs 9 ns, `operator.attrgetter` 18 ns.
    """
    lists = "".join(f"[record.c{index} for record in records]," for index in range(count))
    return cast(
        "Callable[[list[Any]], tuple[list[Any], ...]]",
        eval(f"lambda records: ({lists})"),  # noqa: S307 - holds nothing but the count
    )
