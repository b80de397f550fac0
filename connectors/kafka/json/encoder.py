"""Rows as JSON objects: what `KafkaSource(format="json")` and its like read.

Decimals become strings, so that no digit is lost; binary is base64; dates and timestamps are RFC
3339, with "Z" where the column has a time zone; maps must have string keys. JSON has no NaN and no
infinity: such a value is a bad row, never a silent null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow.instants import BEYOND_PYTHON
from onceflow.core.errors import ConfigError

_ENCODER = msgspec.json.Encoder(decimal_format="string")

_PLAIN: tuple[Callable[[pa.DataType], bool], ...] = (
    arrow.is_null,
    arrow.is_boolean,
    arrow.is_integer,
    arrow.is_floating,
    arrow.is_decimal,
    arrow.is_string,
    arrow.is_large_string,
    arrow.is_binary,
    arrow.is_large_binary,
    arrow.is_fixed_size_binary,
    arrow.is_date32,
)


class JsonObjects:
    """Turns rows of some columns into JSON objects."""

    def __init__(self, columns: pa.Schema) -> None:
        """Prepare for `columns`.

        Raises:
            ConfigError: One has a type, or a name, that JSON objects cannot hold.
        """
        doubled = sorted({name for name in columns.names if columns.names.count(name) > 1})
        if doubled:
            raise ConfigError(f"columns {doubled} are there twice; a JSON object has each once")
        self._types = [json_type(column.type, column.name) for column in columns]
        self._floats = [has_floats(kind) for kind in self._types]
        names = [f"c{index}" for index in range(len(columns))]
        self._row = msgspec.defstruct(
            "Row",
            [(name, Any) for name in names],
            rename=dict(zip(names, columns.names, strict=True)),
            gc=False,
        )

    def encode(self, columns: Sequence[pa.Array]) -> list[bytes]:
        """Return one object a row.

        Raises:
            ValueError: A value cannot be written, and the like; see `ENCODING_ERRORS`.
        """
        values = [
            json_values(column, kind, floats=floats)
            for column, kind, floats in zip(columns, self._types, self._floats, strict=True)
        ]
        return list(map(_ENCODER.encode, map(self._row, *values)))


ENCODING_ERRORS = (pa.ArrowException, msgspec.MsgspecError, ArithmeticError, ValueError, TypeError)
"""What a value that JSON cannot hold raises."""


def json_text(value: Any) -> bytes:
    """Return one value as JSON."""
    return _ENCODER.encode(value)


def json_type(kind: pa.DataType, column: str) -> pa.DataType:
    """Return the type to which a column is cast before it is written, loss refused.

    Raises:
        ConfigError: JSON has no place for it.
    """
    if arrow.is_dictionary(kind):
        return json_type(kind.value_type, column)
    if arrow.is_list(kind) or arrow.is_large_list(kind) or arrow.is_fixed_size_list(kind):
        return pa.list_(json_type(kind.value_type, column))
    if arrow.is_struct(kind):
        members = (kind.field(index) for index in range(kind.num_fields))
        return pa.struct([member.with_type(json_type(member.type, column)) for member in members])
    if arrow.is_map(kind) and arrow.is_string(kind.key_type):
        return pa.map_(pa.string(), json_type(kind.item_type, column))
    return _scalar_type(kind, column)


def _scalar_type(kind: pa.DataType, column: str) -> pa.DataType:
    if arrow.is_timestamp(kind):
        # Python's datetime ends at microseconds; nanoseconds that are not zero are refused.
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if arrow.is_time(kind):
        return pa.time64("us")
    if arrow.is_date64(kind):
        return pa.date32()
    if arrow.is_string_view(kind):
        return pa.string()
    if arrow.is_binary_view(kind):
        return pa.binary()
    if any(is_kind(kind) for is_kind in _PLAIN):
        return kind
    raise ConfigError(
        f"column {column!r} is {kind}, which JSON cannot hold here: cast it to a string before the"
        " sink, or encode the value yourself and use format='raw'"
    )


def has_floats(kind: pa.DataType) -> bool:
    """Return whether a NaN may stand somewhere in a value of `kind`."""
    if arrow.is_map(kind):
        return has_floats(kind.item_type)
    if arrow.is_list(kind):
        return has_floats(kind.value_type)
    if arrow.is_struct(kind):
        return any(has_floats(kind.field(index).type) for index in range(kind.num_fields))
    return bool(arrow.is_floating(kind))


def json_values(column: pa.Array, kind: pa.DataType, *, floats: bool) -> list[Any]:
    """Return the values of `column` as msgspec writes them.

    Raises:
        ValueError: One has no JSON, and the like; see `ENCODING_ERRORS`.
    """
    if column.type != kind:
        column = column.cast(kind, safe=True)
    try:
        values: list[Any] = column.to_pylist()
    except OverflowError as error:
        raise ValueError(f"{BEYOND_PYTHON} ({error})") from error
    if _has_maps(kind):
        values = [_with_objects(value, kind) for value in values]
    if floats and not all(map(_is_finite, values)):
        raise ValueError("a NaN or an infinity, which JSON does not have")
    return values


def _has_maps(kind: pa.DataType) -> bool:
    if arrow.is_list(kind):
        return _has_maps(kind.value_type)
    if arrow.is_struct(kind):
        return any(_has_maps(kind.field(index).type) for index in range(kind.num_fields))
    return bool(arrow.is_map(kind))


def _with_objects(value: Any, kind: pa.DataType) -> Any:
    """Return `value` with Arrow's lists of pairs as dicts."""
    if value is None:
        return None
    if arrow.is_map(kind):
        found = {key: _with_objects(item, kind.item_type) for key, item in value}
        if len(found) != len(value):
            raise ValueError("a map that has a key twice")
        return found
    if arrow.is_list(kind):
        return [_with_objects(item, kind.value_type) for item in value]
    if arrow.is_struct(kind):
        members = {kind.field(index).name: kind.field(index) for index in range(kind.num_fields)}
        return {name: _with_objects(item, members[name].type) for name, item in value.items()}
    return value


def _is_finite(value: object) -> bool:
    match value:
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_is_finite, cast("list[object]", value)))
        case dict():
            return all(map(_is_finite, cast("dict[str, object]", value).values()))
        case _:
            return True


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values of `kind` can be written as they are."""
    return bool(
        arrow.is_string(kind)
        or arrow.is_binary(kind)
        or arrow.is_large_binary(kind)
        or arrow.is_binary_view(kind)
    )
