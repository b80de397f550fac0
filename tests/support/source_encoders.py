"""Values of the catalogue as records of Kafka, written by encoders that are not the product's.

Python's `json`, `base64` and `datetime`, fastavro, Protobuf's own runtime, and CSV by hand. An
encoder takes exact values (`tests.support.exact_values`) and the type of their column. It raises
`NotWritable` where its format has no form for a value or for a type.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, cast

import fastavro
import pyarrow as pa
from pyarrow import types as arrow
from tests.support.exact_values import Clock, Day, Instant, Local
from tests.support.protobuf_messages import message_class

_EPOCH = dt.datetime(1970, 1, 1)
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_DAY_NS = 86_400 * 10**9
_FIRST_NS, _END_NS = _FIRST_DAY * _DAY_NS, (_LAST_DAY + 1) * _DAY_NS
_ABSENT_NS = -(2**63)
"""What numpy and pandas take for a missing time, in nanoseconds."""


class NotWritable(Exception):
    """Raised for a type or a value that a format has no form for."""


def is_beyond_python(value: object) -> bool:
    """Return whether a date or time inside of `value` is outside of the years 1 to 9999."""
    match value:
        case Day(days=days):
            return not _FIRST_DAY <= days <= _LAST_DAY
        case Local(nanoseconds=number) | Instant(nanoseconds=number):
            # A column's own zone may lie in the year before or behind.
            edge = _DAY_NS if isinstance(value, Instant) else 0
            is_inside = _FIRST_NS + edge <= number < _END_NS - edge
            return not is_inside or number == _ABSENT_NS
        case list():
            return any(map(is_beyond_python, cast("list[object]", value)))
        case dict():
            return any(map(is_beyond_python, cast("dict[object, object]", value).values()))
        case _:
            return False


def is_not_finite(value: object) -> bool:
    """Return whether NaN or an infinity is inside of `value`."""
    match value:
        case float():
            return not math.isfinite(value)
        case list():
            return any(map(is_not_finite, cast("list[object]", value)))
        case dict():
            return any(map(is_not_finite, cast("dict[object, object]", value).values()))
        case _:
            return False


def _entries(value: object) -> list[tuple[str, Any]]:
    """Return the entries of a dict."""
    return list(cast("dict[str, Any]", value).items())


def _moment(nanoseconds: int, digits: int) -> str:
    """Return a moment in ISO 8601 with `digits` behind the second."""
    seconds, part = divmod(nanoseconds, 10**9)
    text = (_EPOCH + dt.timedelta(seconds=seconds)).isoformat()
    return f"{text}.{part:09d}"[: len(text) + 1 + digits].rstrip(".")


# --- JSON ---------------------------------------------------------------------------------------


def to_json(value: Any, kind: pa.DataType, *, micros: bool = False) -> Any:
    """Return `value` as `json` writes it. `micros`: times without a zone count microseconds."""
    given: Any = value
    if value is None:
        return None
    match value:
        case list():
            return [
                to_json(one, kind.value_type, micros=micros) for one in cast("Sequence[Any]", value)
            ]
        case dict() if arrow.is_map(kind):
            return {
                key: to_json(one, kind.item_type, micros=micros) for key, one in _entries(given)
            }
        case dict():
            return {
                field.name: to_json(value[field.name], field.type, micros=micros) for field in kind
            }
        case Decimal():
            return f"{value:f}"
        case bytes():
            return base64.b64encode(value).decode()
        case Day(days=days):
            is_written = not is_beyond_python(value) and not micros
            return dt.date.fromordinal(days - _FIRST_DAY + 1).isoformat() if is_written else days
        case Local(nanoseconds=number) if micros:
            return number if kind.unit == "ns" else number // 1_000
        case Local(nanoseconds=number) | Instant(nanoseconds=number):
            if is_beyond_python(value):
                return number // _NANOSECONDS[kind.unit]
            return _moment(number, _DIGITS[kind.unit]) + ("Z" if isinstance(value, Instant) else "")
        case bool() | int() | float() | str():
            return value
        case _:
            raise NotWritable(f"JSON: {value!r}")


def json_record(value: Any, kind: pa.DataType) -> bytes:
    """Return an object whose field `v` is `value`."""
    return json.dumps({"v": to_json(value, kind)}, ensure_ascii=False).encode()


def debezium_change(value: Any, kind: pa.DataType) -> bytes:
    """Return a change in Debezium's envelope without a schema."""
    payload = {"op": "c", "before": None, "after": {"v": to_json(value, kind)}}
    return json.dumps(payload).encode()


def debezium_change_beside_schema(value: Any, kind: pa.DataType) -> bytes:
    """Return a change whose schema says in which unit times count."""
    payload = {"op": "c", "before": None, "after": {"v": to_json(value, kind, micros=True)}}
    row = {"type": "struct", "field": "after", "fields": [{"field": "v", **_connect(kind)}]}
    schema = {"type": "struct", "fields": [row, {"type": "string", "field": "op"}]}
    return json.dumps({"schema": schema, "payload": payload}).encode()


def _connect(kind: pa.DataType) -> dict[str, Any]:
    """Return Kafka Connect's schema of a type, as Debezium writes it."""
    if arrow.is_struct(kind):
        fields = [{"field": field.name, **_connect(field.type)} for field in kind]
        return {"type": "struct", "fields": fields}
    if arrow.is_map(kind):
        return {"type": "map", "keys": {"type": "string"}, "values": _connect(kind.item_type)}
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        return {"type": "array", "items": _connect(kind.value_type)}
    if arrow.is_timestamp(kind) and not kind.tz:
        name = "NanoTimestamp" if kind.unit == "ns" else "MicroTimestamp"
        return {"type": "int64", "name": f"io.debezium.time.{name}"}
    if arrow.is_date(kind):
        return {"type": "int32", "name": "io.debezium.time.Date"}
    if arrow.is_binary(kind) or arrow.is_large_binary(kind):
        return {"type": "bytes"}
    return {"type": "string"}


# --- CSV ----------------------------------------------------------------------------------------


def csv_line(value: Any, kind: pa.DataType) -> bytes:
    """Return a line of two fields: a number, and `value`."""
    return b"1," + _csv_field(value, kind)


def _csv_field(value: Any, kind: pa.DataType) -> bytes:
    match value:
        case None:
            return b""
        case bool():
            return b"true" if value else b"false"
        case str() | bytes():
            octets = value.encode() if isinstance(value, str) else value
            return b'"' + octets.replace(b'"', b'""') + b'"'
        case Decimal():
            return f"{value:f}".encode()
        case int() | float():
            return repr(value).encode()
        case Day() if not is_beyond_python(value):
            return str(to_json(value, kind)).encode()
        case Local() | Instant() if not is_beyond_python(value):
            return str(to_json(value, kind)).encode()
        case Clock(nanoseconds=number):
            return _moment(number, _DIGITS[kind.unit]).split("T")[1].encode()
        case _:
            raise NotWritable(f"CSV: {value!r}")


# --- Avro ---------------------------------------------------------------------------------------

_AVRO: list[tuple[Callable[[pa.DataType], bool], Any]] = [
    (arrow.is_boolean, "boolean"),
    (arrow.is_int64, "long"),
    (arrow.is_uint64, "long"),
    (arrow.is_uint32, "long"),
    (arrow.is_integer, "int"),
    (arrow.is_float64, "double"),
    (arrow.is_floating, "float"),
    (arrow.is_string, "string"),
    (arrow.is_large_string, "string"),
    (arrow.is_string_view, "string"),
    (arrow.is_binary, "bytes"),
    (arrow.is_large_binary, "bytes"),
    (arrow.is_binary_view, "bytes"),
    (arrow.is_date32, {"type": "int", "logicalType": "date"}),
]
_AVRO_TIMES = {
    ("timestamp", "ms"): "timestamp-millis",
    ("timestamp", "us"): "timestamp-micros",
    ("timestamp", "ns"): "timestamp-nanos",
}
_INT64 = range(-(2**63), 2**63)


def avro_schema(kind: pa.DataType, name: str = "V") -> Any:
    """Return Avro's schema of values of `kind` that may be null."""
    return ["null", _avro_type(kind, name)]


def _avro_type(kind: pa.DataType, name: str) -> Any:
    if arrow.is_struct(kind):
        fields = [
            {"name": field.name, "type": avro_schema(field.type, f"{name}_{field.name}")}
            if field.nullable
            else {"name": field.name, "type": _avro_type(field.type, f"{name}_{field.name}")}
            for field in kind
        ]
        return {"type": "record", "name": name, "fields": fields}
    if arrow.is_map(kind):
        return {"type": "map", "values": avro_schema(kind.item_type, f"{name}_m")}
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        return {"type": "array", "items": avro_schema(kind.value_type, f"{name}_l")}
    if arrow.is_decimal(kind) and 0 <= kind.scale <= kind.precision:
        digits = {"precision": kind.precision, "scale": kind.scale}
        return {"type": "bytes", "logicalType": "decimal", **digits}
    if arrow.is_fixed_size_binary(kind):
        return {"type": "fixed", "name": f"{name}_f", "size": kind.byte_width}
    if arrow.is_timestamp(kind) and kind.unit != "s":
        local = "" if kind.tz else "local-"
        return {"type": "long", "logicalType": local + _AVRO_TIMES["timestamp", kind.unit]}
    if kind == pa.time32("ms"):
        return {"type": "int", "logicalType": "time-millis"}
    if kind == pa.time64("us"):
        return {"type": "long", "logicalType": "time-micros"}
    for is_kind, avro in _AVRO:
        if is_kind(kind):
            return avro
    raise NotWritable(f"Avro: {kind}")


def to_avro(value: Any, kind: pa.DataType) -> Any:
    """Return `value` as fastavro takes it: times as their numbers."""
    given: Any = value
    match value:
        case list():
            return [to_avro(one, kind.value_type) for one in cast("Sequence[Any]", value)]
        case dict() if arrow.is_map(kind):
            return {key: to_avro(one, kind.item_type) for key, one in _entries(given)}
        case dict():
            return {field.name: to_avro(value[field.name], field.type) for field in kind}
        case Day(days=days):
            return days
        case Clock(nanoseconds=number) | Local(nanoseconds=number) | Instant(nanoseconds=number):
            return number // _NANOSECONDS[kind.unit]
        case int() if value not in _INT64:
            raise NotWritable(f"Avro: {value}")
        case _:
            return value


def avro_writer(schema: Any) -> Callable[[Any], bytes]:
    """Return a function that writes values of `schema` in Avro's binary encoding."""
    # Its hints have no types.
    module: Any = fastavro
    parsed = module.parse_schema(schema)

    def write(value: Any) -> bytes:
        buffer = io.BytesIO()
        module.schemaless_writer(buffer, parsed, value)
        return buffer.getvalue()

    return write


def frame(schema_id: int, body: bytes) -> bytes:
    """Return what a serializer of a schema registry writes."""
    return b"\0" + schema_id.to_bytes(4, "big") + body


# --- Protobuf -----------------------------------------------------------------------------------

_PROTOBUF: list[tuple[Callable[[pa.DataType], bool], str]] = [
    (arrow.is_boolean, "bool"),
    (arrow.is_int32, "sint32"),
    (arrow.is_int64, "int64"),
    (arrow.is_uint32, "fixed32"),
    (arrow.is_uint64, "uint64"),
    (arrow.is_float32, "float"),
    (arrow.is_float64, "double"),
    (arrow.is_string, "string"),
    (arrow.is_binary, "bytes"),
]
_TIMESTAMP = "google.protobuf.Timestamp"


def protobuf_schema(kind: pa.DataType) -> str:
    """Return the schema of messages whose field `v` holds values of `kind`."""
    head = 'syntax = "proto3"; import "google/protobuf/timestamp.proto";'
    return f"{head} message M {{ {protobuf_field(kind, 'v', 1)} }}"


def protobuf_field(kind: pa.DataType, name: str, number: int) -> str:
    """Return the declaration of a field with values of `kind`."""
    if arrow.is_map(kind):
        return _with_message(f"map<string, {{}}> {name} = {number};", kind.item_type, name)
    if arrow.is_list(kind):
        return _with_message(f"repeated {{}} {name} = {number};", kind.value_type, name)
    return _with_message(f"optional {{}} {name} = {number};", kind, name)


def _with_message(field: str, kind: pa.DataType, name: str) -> str:
    if not arrow.is_struct(kind):
        return field.format(_protobuf_type(kind))
    members = " ".join(protobuf_field(one.type, one.name, at) for at, one in enumerate(kind, 1))
    return f"message T_{name} {{ {members} }} " + field.format(f"T_{name}")


def _protobuf_type(kind: pa.DataType) -> str:
    if kind in (pa.timestamp("us", "UTC"), pa.timestamp("ns", "UTC")):
        return _TIMESTAMP
    for is_kind, protobuf in _PROTOBUF:
        if is_kind(kind):
            return protobuf
    raise NotWritable(f"Protobuf: {kind}")


def message_writer(schema: str) -> Callable[[Any], bytes]:
    """Return a function that writes a message whose field `v` is a value; absent for null."""
    message_type = message_class(schema)

    def write(value: Any) -> bytes:
        message = message_type()
        set_field(message, "v", value)
        octets: bytes = message.SerializeToString()
        return octets

    return write


def set_field(message: Any, name: str, value: Any) -> None:
    """Set a field of a message; null leaves it absent."""
    given: Any = value
    field = message.DESCRIPTOR.fields_by_name[name]
    # Protobuf 7 has no labels, and Protobuf 5 nothing else.
    is_repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == 3
    if value is None:
        if is_repeated:
            raise NotWritable("Protobuf: a list or map that is null")
    elif is_repeated:
        _fill(getattr(message, name), value, field)
    elif isinstance(value, dict):
        inner = getattr(message, name)
        inner.SetInParent()
        for member, one in _entries(given):
            set_field(inner, member, one)
    elif isinstance(value, Instant):
        _set_timestamp(getattr(message, name), value)
    else:
        setattr(message, name, value)


def _fill(target: Any, value: Any, field: Any) -> None:
    given: Any = value
    is_map = isinstance(value, dict)
    entries = _entries(given) if is_map else [("", one) for one in cast("Sequence[Any]", given)]
    for key, one in entries:
        inside: Any = one
        if one is None or isinstance(one, list):
            raise NotWritable("Protobuf: null, or a list, inside of a list or map")
        if not isinstance(one, dict | Instant):
            if is_map:
                target[key] = one
            else:
                target.append(one)
            continue
        inner = target[key] if is_map else target.add()
        if isinstance(one, Instant):
            _set_timestamp(inner, one)
            continue
        for member, part in _entries(inside):
            set_field(inner, member, part)


def _set_timestamp(message: Any, value: Instant) -> None:
    seconds, nanos = divmod(value.nanoseconds, 10**9)
    message.seconds, message.nanos = seconds, nanos
    # Set although both may be zero: an empty message is there, too.
    message.SetInParent()
