"""Readers of what the Kafka sink writes by schemas of a registry, which are not the product's.

Protobuf's own compiler and runtime, jsonschema and fastavro. A reader takes the bytes of a value or
a key, its schema, and the Arrow type of its column, and returns exact values
(`tests.support.exact_values`).
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import re
import tempfile
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import fastavro
import pyarrow as pa
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pyarrow import types as arrow
from tests.support.exact_values import Clock, Day, Instant, Local

from onceflow.core.arrow.kinds import is_bytes, is_list, to_plain_type

CONTEXT = SerializationContext("out", MessageField.VALUE)
_HEADER_BYTES = 5
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:\.\d{1,9})?)(Z?)")
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_EPOCH = date(1970, 1, 1).toordinal()
_DAY_NS = 86_400 * 10**9


def read_clock(text: str) -> int:
    """Return the nanoseconds since midnight."""
    match = _CLOCK.fullmatch(text)
    assert match, text
    hours, minutes, seconds, fraction = match.groups()
    whole = (int(hours) * 60 + int(minutes)) * 60 + int(seconds)
    return whole * 10**9 + int((fraction or "").ljust(9, "0"))


def read_moment(text: str) -> Local | Instant:
    """Return a timestamp in its exact form."""
    match = _MOMENT.fullmatch(text)
    assert match, text
    days = date.fromisoformat(match[1]).toordinal() - _EPOCH
    nanoseconds = days * _DAY_NS + read_clock(match[2])
    return (Instant if match[3] else Local)(nanoseconds)


def read_day(text: str) -> Day:
    """Return a date in its exact form."""
    return Day(date.fromisoformat(text).toordinal() - _EPOCH)


def read_text(text: str, kind: pa.DataType) -> object:
    """Return the decimal, date or time of a column of `kind` that `text` stands for."""
    if arrow.is_decimal(kind):
        return Decimal(text)
    if arrow.is_date(kind):
        return read_day(text)
    if arrow.is_time(kind):
        return Clock(read_clock(text))
    return read_moment(text) if arrow.is_timestamp(kind) else text


# --- Protobuf -----------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def compiled_message(text: str) -> Any:
    """Return the class of the first message of the schema `text`."""
    # Without types of its own.
    tools: Any = importlib.import_module("grpc_tools")
    compiler: Any = importlib.import_module("grpc_tools.protoc")
    built_in = Path(str(tools.__file__)).parent / "_proto"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "row.proto").write_text(text, "utf-8")
        output = directory / "row.descriptors"
        includes = [f"-I{directory}", f"-I{built_in}"]
        told = ["", *includes, "--include_imports", f"--descriptor_set_out={output}", "row.proto"]
        assert compiler.main(told) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file
    pool: Any = descriptor_pool.DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    first = files[-1].message_type[0].name
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(first))


def protobuf_reader(text: str) -> Callable[[bytes], Any]:
    """Return Confluent's deserializer of the first message of the schema `text`."""
    make: Any = ProtobufDeserializer
    deserialize = make(compiled_message(text), {"use.deprecated.format": False})
    return lambda octets: deserialize(octets, CONTEXT)


def read_field(message: Any, name: str, kind: pa.DataType) -> object:
    """Return a field of a message as a value of a column of `kind`; None where it is absent."""
    kind = to_plain_type(kind)
    value = getattr(message, name)
    if is_list(kind):
        return [_read_single(one, kind.value_type) for one in value]
    if arrow.is_map(kind):
        return {key: _read_single(value[key], kind.item_type) for key in value}
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.has_presence and not message.HasField(name):
        return None
    return _read_single(value, kind)


def _read_single(value: Any, kind: pa.DataType) -> object:
    kind = to_plain_type(kind)
    if arrow.is_struct(kind):
        return {one.name: read_field(value, one.name, one.type) for one in kind}
    if arrow.is_timestamp(kind) and kind.tz:
        return Instant(value.seconds * 10**9 + value.nanos)
    return read_text(value, kind) if isinstance(value, str) else value


# --- JSON Schema --------------------------------------------------------------------------------

_RFC_3339_DAY = r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])"
_RFC_3339_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:\d\d)"
# Without types of its own.
_jsonschema: Any = importlib.import_module("jsonschema")
_CHECKER: Any = _jsonschema.FormatChecker(formats=())
for _name, _pattern in (
    ("date", _RFC_3339_DAY),
    ("time", _RFC_3339_TIME),
    ("date-time", f"{_RFC_3339_DAY}T{_RFC_3339_TIME}"),
):
    _CHECKER.checks(_name)(re.compile(_pattern).fullmatch)


def json_schema_reader(text: str) -> Callable[[bytes], Any]:
    """Return Confluent's deserializer of documents that fit the schema `text` and its formats."""
    make: Any = JSONDeserializer
    # Without checks of its own, which do not include formats.
    deserialize = make(text, conf={"validate": False})
    strict: Any = _jsonschema.Draft7Validator(json.loads(text), format_checker=_CHECKER)

    def read(octets: bytes) -> Any:
        misfit = next(strict.iter_errors(json.loads(octets[_HEADER_BYTES:])), None)
        assert misfit is None, misfit
        return deserialize(octets, CONTEXT)

    return read


def read_document(value: Any, kind: pa.DataType) -> object:
    """Return what `json` read as a value of a column of `kind`."""
    kind = to_plain_type(kind)
    if value is None:
        return None
    if is_list(kind):
        return [read_document(one, kind.value_type) for one in value]
    if arrow.is_map(kind):
        return {key: read_document(one, kind.item_type) for key, one in value.items()}
    if arrow.is_struct(kind):
        assert value.keys() == {one.name for one in kind}
        return {one.name: read_document(value[one.name], one.type) for one in kind}
    if is_bytes(kind):
        return base64.b64decode(value, validate=True)
    if arrow.is_floating(kind):
        # JSON has one kind of numbers.
        return float(value)
    return read_text(value, kind) if isinstance(value, str) else value


# --- Avro ---------------------------------------------------------------------------------------


def avro_reader(text: str) -> Callable[[bytes], Any]:
    """Return fastavro's reader by the schema `text`; dates, times and decimals stay as stored."""
    # Its hints have no types.
    module: Any = fastavro
    parsed = module.parse_schema(_without_logical_types(json.loads(text)))

    def read(octets: bytes) -> Any:
        stream = io.BytesIO(octets[_HEADER_BYTES:])
        value = module.schemaless_reader(stream, parsed, None)
        assert not stream.read(), "bytes are left"
        return value

    return read


def _without_logical_types(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_logical_types(part) for part in [*cast("Any", node)]]
    if isinstance(node, dict):
        kept = cast("dict[str, Any]", node).items()
        return {key: _without_logical_types(part) for key, part in kept if key != "logicalType"}
    return node


def read_stored(value: Any, kind: pa.DataType, node: Any) -> object:
    """Return what a stored value of the schema `node` means in a column of `kind`."""
    kind = to_plain_type(kind)
    if value is None:
        return None
    if isinstance(node, list):
        (node,) = [part for part in [*cast("Any", node)] if part != "null"]
    if is_list(kind):
        return [read_stored(one, kind.value_type, node["items"]) for one in value]
    if arrow.is_map(kind):
        entries = value.items()
        return {key: read_stored(one, kind.item_type, node["values"]) for key, one in entries}
    if arrow.is_struct(kind):
        types = {one["name"]: one["type"] for one in node["fields"]}
        return {one.name: read_stored(value[one.name], one.type, types[one.name]) for one in kind}
    schema = cast("dict[str, Any]", node) if isinstance(node, dict) else {}
    logical = str(schema.get("logicalType", ""))
    if arrow.is_decimal(kind):
        unscaled = int.from_bytes(value, "big", signed=True)
        digits = tuple(map(int, str(abs(unscaled))))
        return Decimal((int(unscaled < 0), digits, -int(schema.get("scale", 0))))
    if arrow.is_date(kind):
        assert logical == "date"
        return Day(value)
    unit = {"millis": 10**6, "micros": 10**3, "nanos": 1}.get(logical.rpartition("-")[2], 0)
    if arrow.is_time(kind):
        assert logical.startswith("time-")
        return Clock(value * unit)
    if arrow.is_timestamp(kind):
        assert logical.startswith("timestamp-" if kind.tz else "local-timestamp-")
        return (Instant if kind.tz else Local)(value * unit)
    return value
