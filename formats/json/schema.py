"""The conversion between JSON Schemas and columns.

The rules are those of Kafka Connect's converter. A property that is not `required`, or may be null,
is a nullable column. `connect.type` narrows integers and floats. Formats and Connect's titles turn
text and numbers into dates and times. A property without a unique Arrow type is refused by name.

Source: JSON Schema draft 7 and 2020-12; Confluent's JSON Schema converter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import IsKind, is_bytes, is_list, is_text, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.formats.faulty_parts import ENTRIES, ITEMS
from onceflow.formats.registry_schemas import require_kind

_CONNECT: Mapping[str, pa.DataType] = {
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bytes": pa.binary(),
}
_SIMPLE: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_FORMATS: Mapping[str, pa.DataType] = {
    "date": pa.date32(),
    "date-time": pa.timestamp("us", "UTC"),
}
_DEPTH_MAX = 32
"""The maximum depth of properties. A deeper schema is assumed to contain itself."""


def columns_of_json_schema(text: str) -> pa.Schema:
    """Return the columns of objects that the schema `text` describes.

    Raises:
        ConfigError: The schema does not describe objects, or a property has no unique Arrow type.
            The message names the property.
    """
    kind = type_of_json_schema(text)
    if not pa.types.is_struct(kind):
        raise ConfigError(
            f"its JSON Schema describes values of type {kind}, and columns can only be made of"
            " objects"
        )
    return pa.schema(list(kind))


def type_of_json_schema(text: str) -> pa.DataType:
    """Return the type of the values that the schema `text` describes.

    Raises:
        ConfigError: `text` is not a schema, or a property has no unique Arrow type. The message
            names the property.
    """
    try:
        root: Any = json.loads(text)
    except ValueError:
        root = None
    if not isinstance(root, dict):
        raise ConfigError(f"its schema must be a JSON object, and is {text[:100]!r}")
    schema = cast("dict[str, Any]", root)
    kind, _ = _Types(schema).of(schema, "", 0)
    return kind


class _Types:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root

    def of(self, schema: Mapping[str, Any], path: str, depth: int) -> tuple[pa.DataType, bool]:
        """Return the type of the values that `schema` describes, and whether they may be null."""
        if depth > _DEPTH_MAX:
            raise ConfigError(f"property {path!r} contains itself, which no column can hold")
        if "$ref" in schema:
            return self.of(self._follow(str(schema["$ref"]), path), path, depth + 1)
        for choice in ("oneOf", "anyOf"):
            if choice in schema:
                return self._resolve_choice(schema[choice], path, depth)
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds = [type_name for type_name in cast("list[object]", kind) if type_name != "null"]
            if len(kinds) != 1:
                raise _refusal(path, schema)
            inner, _ = self.of({**schema, "type": kinds[0]}, path, depth)
            return inner, len(kinds) < len(cast("list[object]", kind))
        return self._to_arrow_type(str(kind), schema, path, depth), False

    def _to_arrow_type(
        self, kind: str, schema: Mapping[str, Any], path: str, depth: int
    ) -> pa.DataType:
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return self._struct(schema, path, depth)
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            value, _ = self.of(schema["additionalProperties"], f"{path}.*", depth + 1)
            return pa.map_(pa.string(), value)
        if kind == "array" and isinstance(schema.get("items"), dict):
            item, _ = self.of(schema["items"], f"{path}[]", depth + 1)
            return pa.list_(item)
        known = _CONNECT.get(str(schema.get("connect.type", "")))
        if kind == "string" and known is None:
            known = _FORMATS.get(str(schema.get("format", "")))
        if kind not in _SIMPLE:
            raise _refusal(path, schema)
        return known or _SIMPLE[kind]

    def _struct(self, schema: Mapping[str, Any], path: str, depth: int) -> pa.DataType:
        required = set(cast("list[str]", schema.get("required", ())))
        fields: list[pa.Field] = []
        for name, subschema in cast("dict[str, Any]", schema["properties"]).items():
            kind, nullable = self.of(subschema, f"{path}.{name}".lstrip("."), depth + 1)
            fields.append(pa.field(name, kind, nullable=nullable or name not in required))
        return pa.struct(fields)

    def _resolve_choice(
        self, choices: list[Any], path: str, depth: int
    ) -> tuple[pa.DataType, bool]:
        others = [choice for choice in choices if choice.get("type") != "null"]
        if len(others) != 1:
            raise _refusal(path, {"oneOf": choices})
        inner, nullable = self.of(others[0], path, depth + 1)
        return inner, nullable or len(others) < len(choices)

    def _follow(self, reference: str, path: str) -> Mapping[str, Any]:
        node: Any = self._root
        for part in filter(None, reference.removeprefix("#").split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            node = cast("dict[str, Any]", node).get(name) if isinstance(node, dict) else None
        if not reference.startswith("#") or not isinstance(node, dict):
            raise ConfigError(
                f"JSON Schema: property {path!r} has $ref {reference!r}, which is not in the same"
                " schema. Define it there: references to other documents are not supported"
            )
        return cast("dict[str, Any]", node)


def _refusal(path: str, schema: Mapping[str, Any]) -> ConfigError:
    shown = json.dumps(schema)[:100]
    return ConfigError(f"property {path!r} has no one Arrow type ({shown})")


_DRAFT = "http://json-schema.org/draft-07/schema#"
_WRITTEN: tuple[tuple[IsKind, dict[str, Any]], ...] = (
    (arrow.is_null, {"type": "null"}),
    (arrow.is_boolean, {"type": "boolean"}),
    (arrow.is_int8, {"type": "integer", "connect.type": "int8"}),
    (arrow.is_int16, {"type": "integer", "connect.type": "int16"}),
    (arrow.is_int32, {"type": "integer", "connect.type": "int32"}),
    (arrow.is_integer, {"type": "integer", "connect.type": "int64"}),
    (arrow.is_float32, {"type": "number", "connect.type": "float32"}),
    (arrow.is_floating, {"type": "number", "connect.type": "float64"}),
    (arrow.is_date, {"type": "string", "format": "date"}),
    # The format "time" has a zone.
    (arrow.is_time, {"type": "string"}),
    (arrow.is_decimal, {"type": "string"}),
    (is_text, {"type": "string"}),
    (is_bytes, {"type": "string", "connect.type": "bytes"}),
)


def json_schema_text(columns: pa.Schema, name: str) -> str:
    """Return the schema of objects with `columns`, with the title `name`.

    Raises:
        ConfigError: A column has a type that JSON does not have.
    """
    return json.dumps({"$schema": _DRAFT, "title": name, **_object_text(list(columns), "")})


def json_schema_text_of(field: pa.Field, name: str) -> str:
    """Return the schema of the values of one column, with the title `name`.

    Raises:
        ConfigError: JSON does not have their type.
    """
    return json.dumps({"$schema": _DRAFT, "title": name, **_type_text(field.type, field.name)})


def _object_text(fields: Sequence[pa.Field], path: str) -> dict[str, Any]:
    """Return the schema of objects with `fields`. Their paths in errors begin with `path`."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: _property_text(field, path + field.name) for field in fields},
        # The object is closed, because only then may columns be added and removed later.
        "additionalProperties": False,
    }
    required = [field.name for field in fields if not field.nullable]
    return {**schema, "required": required} if required else schema


def _property_text(field: pa.Field, path: str) -> dict[str, Any]:
    text = _type_text(field.type, path)
    # `oneOf` requires exactly one match, so the null of a null column must not be listed twice.
    is_choice = field.nullable and text != {"type": "null"}
    return {"oneOf": [{"type": "null"}, text]} if is_choice else text


def _type_text(kind: pa.DataType, path: str) -> dict[str, Any]:
    kind = to_plain_type(kind)
    if arrow.is_struct(kind):
        return _object_text(list(kind), f"{path}.")
    if is_list(kind):
        return {"type": "array", "items": _property_text(kind.value_field, path + ITEMS)}
    if arrow.is_map(kind):
        values = _property_text(kind.item_field, path + ENTRIES)
        return {"type": "object", "additionalProperties": values}
    if arrow.is_timestamp(kind):
        # The format has a zone; text without one has no name in JSON Schema.
        return {"type": "string", "format": "date-time"} if kind.tz else {"type": "string"}
    return require_kind(kind, _WRITTEN, path, "JSON")
