"""The JSON Schema of objects that rows of some columns become, as Connect's converter writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.errors import ConfigError

_DRAFT = "http://json-schema.org/draft-07/schema#"
_SIMPLE: tuple[tuple[Callable[[pa.DataType], bool], dict[str, Any]], ...] = (
    (arrow.is_null, {"type": "null"}),
    (arrow.is_boolean, {"type": "boolean"}),
    (arrow.is_int8, {"type": "integer", "connect.type": "int8"}),
    (arrow.is_int16, {"type": "integer", "connect.type": "int16"}),
    (arrow.is_int32, {"type": "integer", "connect.type": "int32"}),
    (arrow.is_integer, {"type": "integer", "connect.type": "int64"}),
    (arrow.is_float32, {"type": "number", "connect.type": "float32"}),
    (arrow.is_floating, {"type": "number", "connect.type": "float64"}),
    (arrow.is_date, {"type": "string", "format": "date"}),
    (arrow.is_time, {"type": "string", "format": "time"}),
    (arrow.is_decimal, {"type": "string"}),
    (arrow.is_string, {"type": "string"}),
    (arrow.is_large_string, {"type": "string"}),
    (arrow.is_string_view, {"type": "string"}),
    (arrow.is_binary, {"type": "string", "connect.type": "bytes"}),
    (arrow.is_large_binary, {"type": "string", "connect.type": "bytes"}),
    (arrow.is_binary_view, {"type": "string", "connect.type": "bytes"}),
    (arrow.is_fixed_size_binary, {"type": "string", "connect.type": "bytes"}),
)


def json_schema_text(columns: pa.Schema, name: str) -> str:
    """Return the schema of objects with `columns`, titled `name`.

    Raises:
        ConfigError: A column has a type that JSON does not have.
    """
    return json.dumps({"$schema": _DRAFT, "title": name, **_object(list(columns))})


def json_schema_text_of(field: pa.Field, name: str) -> str:
    """Return the schema of the values of one column, titled `name`.

    Raises:
        ConfigError: JSON does not have their type.
    """
    return json.dumps({"$schema": _DRAFT, "title": name, **_type(field.type, field.name)})


def _object(fields: Sequence[pa.Field]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: _property(field) for field in fields},
        # A closed object: only so may columns be added and taken away later.
        "additionalProperties": False,
    }
    required = [field.name for field in fields if not field.nullable]
    return {**found, "required": required} if required else found


def _property(field: pa.Field) -> dict[str, Any]:
    found = _type(field.type, field.name)
    return {"oneOf": [{"type": "null"}, found]} if field.nullable else found


def _type(kind: pa.DataType, column: str) -> dict[str, Any]:
    if arrow.is_dictionary(kind):
        return _type(kind.value_type, column)
    if arrow.is_struct(kind):
        return _object([kind.field(at) for at in range(kind.num_fields)])
    if arrow.is_list(kind) or arrow.is_large_list(kind) or arrow.is_fixed_size_list(kind):
        return {"type": "array", "items": _property(kind.value_field)}
    if arrow.is_map(kind):
        return {"type": "object", "additionalProperties": _property(kind.item_field)}
    if arrow.is_timestamp(kind):
        # The format has a zone; text without one has no name in JSON Schema.
        return {"type": "string", "format": "date-time"} if kind.tz else {"type": "string"}
    for is_kind, found in _SIMPLE:
        if is_kind(kind):
            return found
    raise ConfigError(f"column {column!r} is {kind}, which JSON does not have: cast it")
