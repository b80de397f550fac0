"""The part of a value that a format cannot hold, by its path: `order.lines[].price`.

`[]` stands for the items of a list, `.*` for the values of a map, and `.*key` for its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow.instants import values_inside
from onceflow.core.arrow.kinds import is_list, to_plain_column, to_plain_type

ENCODING_ERRORS = (pa.ArrowException, msgspec.MsgspecError, ArithmeticError, ValueError, TypeError)
"""The exception types that a conversion raises for a value that the format cannot hold."""

ITEMS = "[]"
ENTRIES = ".*"
KEYS = ".*key"

Convert: TypeAlias = Callable[[pa.Array, pa.DataType], object]
"""A function that converts values to a type. It raises one of `ENCODING_ERRORS`."""


class FaultyPart(ValueError):
    """A value that its format cannot hold, with the path of the part that is at fault."""

    def __init__(self, path: str, reason: str) -> None:
        """Name the part at `path`; `reason` says why the format cannot hold it."""
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"column {self.path!r}: {self.reason}"


def prefix_path(path: str, error: BaseException) -> FaultyPart:
    """Return `error` as the fault of the part at `path`, or of a part below it."""
    if isinstance(error, FaultyPart):
        return FaultyPart(path + error.path, error.reason)
    return FaultyPart(path, str(error))


def find_faulty_part(
    columns: Sequence[pa.Array],
    fields: Sequence[pa.Field],
    convert: Convert,
    error: BaseException,
) -> Exception:
    """Return `error` with the path of the part that made it, for a row that cannot be written.

    Args:
        columns: The columns of one row. With several rows, `error` is returned without a path:
            callers find the faulty rows first, and pass them one by one.
        fields: The names of the columns, and the types to which they are converted.
        convert: Converts a column, or a part of it.
        error: The error of the conversion. It is returned without a path if every part alone can
            be converted.
    """
    if all(len(column) == 1 for column in columns):
        for column, field in zip(columns, fields, strict=True):
            try:
                convert(column, field.type)
            except ENCODING_ERRORS as fault:
                return prefix_path(field.name, _find_inside(column, field.type, convert, fault))
    return ValueError(str(error))


def _find_inside(
    column: pa.Array, kind: pa.DataType, convert: Convert, error: Exception
) -> Exception:
    try:
        parts = list(_list_parts(to_plain_column(column), to_plain_type(kind)))
    except ENCODING_ERRORS:
        # Arrow flattens no lists of extensions below a null.
        return error
    for step, part, part_kind in parts:
        try:
            convert(part, part_kind)
        except ENCODING_ERRORS as fault:
            return prefix_path(step, _find_inside(part, part_kind, convert, fault))
    return error


def _list_parts(column: pa.Array, kind: pa.DataType) -> Iterator[tuple[str, pa.Array, pa.DataType]]:
    """Yield the parts of nested values, each with its step in a path and its type to write."""
    if arrow.is_struct(kind) and arrow.is_struct(column.type):
        for field, part in zip(kind, values_inside(column), strict=True):
            yield f".{field.name}", part, field.type
    elif arrow.is_map(kind) and arrow.is_map(column.type):
        keys, items = values_inside(column)
        yield KEYS, keys, kind.key_type
        yield ENTRIES, items, kind.item_type
    elif is_list(kind) and is_list(column.type):
        (items,) = values_inside(column)
        yield ITEMS, items, kind.value_type
