"""Rows as Avro records: the schema that columns have, and values written by it.

Columns that may be null become unions with null whose default is null, so that they can be added
and taken away. Timestamps, dates, times and decimals have Avro's logical types.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.connectors.kafka.avro.schema import MISSING, Record, parse_avro, record_of
from onceflow.connectors.kafka.registry import NEEDED
from onceflow.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNITS = {"s": "millis", "ms": "millis", "us": "micros", "ns": "nanos"}

_SIMPLE: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (arrow.is_null, "null"),
    (arrow.is_boolean, "boolean"),
    (arrow.is_int64, "long"),
    (arrow.is_uint32, "long"),
    (arrow.is_uint64, ""),
    (arrow.is_integer, "int"),
    (arrow.is_float32, "float"),
    (arrow.is_float64, "double"),
    (arrow.is_string, "string"),
    (arrow.is_large_string, "string"),
    (arrow.is_string_view, "string"),
    (arrow.is_binary, "bytes"),
    (arrow.is_large_binary, "bytes"),
    (arrow.is_binary_view, "bytes"),
)


def avro_text(columns: pa.Schema, name: str) -> str:
    """Return the schema of records with `columns`, called `name`.

    Raises:
        ConfigError: A column has a name or a type that Avro does not have.
    """
    return json.dumps(_record(list(columns), re.sub(r"[^A-Za-z0-9_]", "_", name)))


def avro_text_of(field: pa.Field, name: str) -> str:
    """Return the schema of the values of one column, which are no records.

    Raises:
        ConfigError: Avro does not have their type.
    """
    return json.dumps(_type(field.type, re.sub(r"[^A-Za-z0-9_]", "_", name), field.name))


def _record(fields: Sequence[pa.Field], name: str) -> dict[str, Any]:
    described: list[dict[str, Any]] = []
    for field in fields:
        if not _NAME.fullmatch(field.name):
            raise ConfigError(
                f"column {field.name!r} has a name that Avro does not allow: letters, digits and _,"
                " beginning with a letter or _; rename it before the sink"
            )
        kind = _type(field.type, f"{name}_{field.name}", field.name)
        if field.nullable and kind != "null":
            described.append({"name": field.name, "type": ["null", kind], "default": None})
        else:
            described.append({"name": field.name, "type": kind})
    return {"type": "record", "name": name, "fields": described}


def _type(kind: pa.DataType, name: str, column: str) -> Any:
    if arrow.is_dictionary(kind):
        return _type(kind.value_type, name, column)
    if arrow.is_struct(kind):
        return _record([kind.field(at) for at in range(kind.num_fields)], name)
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        return {"type": "array", "items": _item(kind.value_field, name, column)}
    if arrow.is_map(kind) and arrow.is_string(kind.key_type):
        return {"type": "map", "values": _item(kind.item_field, name, column)}
    found = _logical(kind) or next((one for is_kind, one in _SIMPLE if is_kind(kind)), "")
    if not found:
        raise ConfigError(f"column {column!r} is {kind}, which Avro does not have: cast it")
    return found


def _item(field: pa.Field, name: str, column: str) -> Any:
    kind = _type(field.type, f"{name}_item", column)
    return ["null", kind] if field.nullable and kind != "null" else kind


def _logical(kind: pa.DataType) -> dict[str, Any] | None:
    if arrow.is_timestamp(kind):
        zone = "" if kind.tz else "local-"
        return {"type": "long", "logicalType": f"{zone}timestamp-{_UNITS[kind.unit]}"}
    if arrow.is_date(kind):
        return {"type": "int", "logicalType": "date"}
    if arrow.is_time32(kind):
        return {"type": "int", "logicalType": "time-millis"}
    if arrow.is_time64(kind):
        return {"type": "long", "logicalType": "time-micros"}
    if arrow.is_decimal(kind):
        digits = {"precision": kind.precision, "scale": kind.scale}
        return {"type": "bytes", "logicalType": "decimal", **digits}
    return None


class AvroValues:
    """Writes rows of some columns by one schema."""

    def __init__(self, columns: pa.Schema, text: str) -> None:
        """Prepare to write `columns` by the schema `text`.

        Raises:
            ConfigError: A column is not in the schema, or a field of it has neither column nor
                default; or fastavro is not installed.
        """
        try:
            import fastavro
        except ImportError as error:
            raise ConfigError(f"{NEEDED} ({error})") from error
        _require_same(columns, record_of(parse_avro(text), what="the subject's schema"))
        self._schema = fastavro.parse_schema(json.loads(text))
        self._write = cast("Callable[..., None]", cast("Any", fastavro).schemaless_writer)
        self._types = [_numbers(column.type) for column in columns]
        self._names = columns.names

    def encode(self, columns: Sequence[pa.Array], header: bytes) -> list[bytes]:
        """Return one record a row, behind `header`.

        Raises:
            ValueError: A value does not fit the schema, and the like; see `ENCODING_ERRORS`.
        """
        batch = pa.RecordBatch.from_arrays(
            [_as_numbers(one, kind) for one, kind in zip(columns, self._types, strict=True)],
            names=self._names,
        )
        found: list[bytes] = []
        stream = io.BytesIO()
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            stream.seek(0)
            stream.truncate()
            stream.write(header)
            self._write(stream, self._schema, row)
            found.append(stream.getvalue())
        return found


def _require_same(columns: pa.Schema, record: Record) -> None:
    fields = {member.name: member for member in record.members}
    lost = sorted(set(columns.names) - fields.keys())
    if lost:
        raise ConfigError(
            f"the subject's schema has no fields for columns {lost}: drop them before the sink, or"
            " register a version that has them"
        )
    missing = sorted(
        name
        for name, member in fields.items()
        if member.default is MISSING and name not in columns.names
    )
    if missing:
        raise ConfigError(
            f"the subject's schema needs fields {missing}, which the rows do not have: add the"
            " columns, or register a version with defaults"
        )


def _numbers(kind: pa.DataType) -> pa.DataType:
    """Return the type to which a column is cast before it is written: times become numbers."""
    if arrow.is_dictionary(kind):
        return _numbers(kind.value_type)
    if arrow.is_timestamp(kind):
        return pa.timestamp("ms" if kind.unit == "s" else kind.unit, kind.tz)
    if arrow.is_time32(kind):
        return pa.time32("ms")
    if arrow.is_time64(kind):
        return pa.time64("us")
    return pa.date32() if arrow.is_date(kind) else kind


def _as_numbers(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type != kind:
        column = column.cast(kind, safe=True)
    if arrow.is_timestamp(kind) or arrow.is_time64(kind):
        return column.view(pa.int64())
    if arrow.is_date32(kind) or arrow.is_time32(kind):
        return column.view(pa.int32())
    return column
