"""The encoding of rows as JSON objects, which `KafkaSource(format="json")` and others can read.

Decimals become strings, so that no digit is lost. Binary is base64. Dates and timestamps are RFC
3339, with "Z" if the column has a time zone. Maps must have string keys. JSON has no NaN and no
infinity: such a value makes a bad row, never a silent null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow import kinds
from onceflow.core.arrow.instants import BEYOND_PYTHON
from onceflow.core.errors import ConfigError
from onceflow.formats import faulty_parts

_ENCODER = msgspec.json.Encoder(decimal_format="string")

_AS_IT_IS: tuple[kinds.IsKind, ...] = (
    arrow.is_null,
    arrow.is_boolean,
    arrow.is_integer,
    arrow.is_floating,
    arrow.is_decimal,
    arrow.is_date32,
    kinds.is_text,
    kinds.is_bytes,
)


class JsonValues:
    """An encoder of the values of one column as JSON."""

    def __init__(self, kind: pa.DataType, column: str) -> None:
        """Prepare for values of `kind`.

        Raises:
            ConfigError: JSON cannot hold `kind`. The message names `column`.
        """
        self._kind = _json_type(kind, column)
        self._field = pa.field(column, self._kind)
        self._has_floats = kinds.holds(self._kind, arrow.is_floating)
        self._has_maps = kinds.holds(self._kind, arrow.is_map)

    def to_python(self, column: pa.Array) -> list[Any]:
        """Return the values of `column` in the form that msgspec writes.

        Raises:
            ValueError: A value has no JSON form. Also raises the others of `ENCODING_ERRORS`. If
                the column has one row, the error names the part at fault.
        """
        try:
            return self.convert(column)
        except faulty_parts.ENCODING_ERRORS as error:
            raise faulty_parts.find_faulty_part(
                [column], [self._field], _convert_part, error
            ) from error

    def convert(self, column: pa.Array) -> list[Any]:
        """Return the values of `column` like `to_python`, but with errors that name no part."""
        if column.type != self._kind:
            column = kinds.cast_rows(column, self._kind)
        try:
            values: list[Any] = column.to_pylist()
        except OverflowError as error:
            raise ValueError(f"{BEYOND_PYTHON} ({error})") from error
        if self._has_maps:
            values = [_with_objects(value, self._kind) for value in values]
        if self._has_floats and not all(map(kinds.is_finite, values)):
            raise ValueError("a NaN or an infinity, which JSON does not have")
        return values

    def encode(self, columns: Sequence[pa.Array], header: bytes = b"") -> list[bytes | None]:
        """Return one value for each row of the only column, each after `header`; None for null.

        Raises:
            ValueError: A value cannot be written. See `ENCODING_ERRORS` for further types.
        """
        (column,) = columns
        return [
            None if value is None else header + _ENCODER.encode(value)
            for value in self.to_python(column)
        ]


def _convert_part(column: pa.Array, kind: pa.DataType) -> list[Any]:
    return JsonValues(kind, "").convert(column)


class JsonObjects:
    """An encoder of rows of some columns as JSON objects."""

    def __init__(self, columns: pa.Schema) -> None:
        """Prepare for `columns`.

        Raises:
            ConfigError: JSON objects cannot hold a column's type or name.
        """
        doubled = sorted({name for name in columns.names if columns.names.count(name) > 1})
        if doubled:
            raise ConfigError(
                f"columns {doubled} occur more than once, and a JSON object has one value for each"
                " name: rename them"
            )
        self._columns = [JsonValues(column.type, column.name) for column in columns]
        names = [f"c{index}" for index in range(len(columns))]
        self._row = msgspec.defstruct(
            "Row",
            [(name, Any) for name in names],
            rename=dict(zip(names, columns.names, strict=True)),
            gc=False,
        )

    def encode(self, columns: Sequence[pa.Array], header: bytes = b"") -> list[bytes]:
        """Return one object for each row, each after `header`.

        Raises:
            ValueError: A value cannot be written. See `ENCODING_ERRORS` for further types.
        """
        values = [
            values.to_python(column) for values, column in zip(self._columns, columns, strict=True)
        ]
        objects = map(_ENCODER.encode, map(self._row, *values))
        return [header + encoded for encoded in objects] if header else list(objects)


def _json_type(kind: pa.DataType, column: str) -> pa.DataType:
    """Return the type to which a column is cast before it is written. The cast refuses loss.

    Raises:
        ConfigError: JSON cannot hold the type.
    """
    kind = kinds.to_plain_type(kind)
    if kinds.is_list(kind):
        return pa.list_(_json_type(kind.value_type, column + faulty_parts.ITEMS))
    if arrow.is_struct(kind):
        fields = [_json_type(field.type, f"{column}.{field.name}") for field in kind]
        return pa.struct(
            [field.with_type(json_type) for field, json_type in zip(kind, fields, strict=True)]
        )
    if arrow.is_map(kind) and kinds.is_text(kind.key_type):
        return pa.map_(pa.string(), _json_type(kind.item_type, column + faulty_parts.ENTRIES))
    return _scalar_type(kind, column)


def _scalar_type(kind: pa.DataType, column: str) -> pa.DataType:
    if arrow.is_timestamp(kind):
        # A Python datetime ends at microseconds, so nanoseconds other than zero are refused.
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if arrow.is_time(kind):
        return pa.time64("us")
    if arrow.is_date64(kind):
        return pa.date32()
    if any(is_kind(kind) for is_kind in _AS_IT_IS):
        return kind
    raise ConfigError(
        f"column {column!r} is {kind}, which JSON cannot hold here: cast it to a string before the"
        " sink, or encode the value yourself and use format='raw'"
    )


def _with_objects(value: Any, kind: pa.DataType) -> Any:
    """Return `value` with Arrow's lists of pairs converted to dicts."""
    if value is None:
        return None
    if arrow.is_map(kind):
        pairs = {key: _with_objects(item, kind.item_type) for key, item in value}
        if len(pairs) != len(value):
            raise ValueError("a map that has a key twice")
        return pairs
    if arrow.is_list(kind):
        return [_with_objects(item, kind.value_type) for item in value]
    if arrow.is_struct(kind):
        return {field.name: _with_objects(value[field.name], field.type) for field in kind}
    return value
