"""The key columns of rows as the keys of records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.connectors.kafka.avro.encoder import AvroValues
from onceflow.connectors.kafka.avro.schema import Record, parse_avro
from onceflow.connectors.kafka.json.encoder import (
    JsonObjects,
    has_floats,
    is_bytes,
    json_text,
    json_type,
    json_values,
)
from onceflow.connectors.kafka.keys import KeyFormat
from onceflow.connectors.kafka.protobuf.encoder import ProtobufValues
from onceflow.core.errors import ConfigError
from onceflow.sinks.kafka.records import KEY
from onceflow.sinks.kafka.registered import ValueSchema, schema_text
from onceflow.sinks.kafka.settings import KafkaSinkSettings, RecordFormat

Encode: TypeAlias = Callable[[pa.RecordBatch], pa.Array]
"""From rows to the bytes of each."""


def plain_key_encoder(settings: KafkaSinkSettings, schema: pa.Schema) -> Encode:
    """Return what makes keys that need no registry; of raw records, and of none, too.

    Raises:
        ConfigError: A column has a type that keys of the format cannot have.
    """
    if settings.format is RecordFormat.RAW:
        if KEY in schema.names:
            return lambda rows: rows.column(KEY).cast(pa.binary())
        return lambda rows: pa.nulls(rows.num_rows, pa.binary())
    match settings.key_format, settings.key:
        case _, ():
            return lambda rows: pa.nulls(rows.num_rows, pa.binary())
        case (KeyFormat.STRING | KeyFormat.RAW) as wanted, (name,):
            return _cast_encoder(name, schema.field(name).type, wanted)
        case _, (name,):
            return _single_key_encoder(name, schema)
        case _, names:
            objects = JsonObjects(pa.schema([schema.field(name) for name in names]))
            return lambda rows: pa.array(
                objects.encode([rows.column(name) for name in names]), pa.binary()
            )


def _cast_encoder(name: str, kind: pa.DataType, wanted: KeyFormat) -> Encode:
    plain = kind.value_type if arrow.is_dictionary(kind) else kind
    has_text = is_bytes(plain) or arrow.is_large_string(plain)
    is_binary = has_text and not (
        arrow.is_string(plain) or arrow.is_large_string(plain) or arrow.is_string_view(plain)
    )
    if wanted is KeyFormat.RAW and not has_text:
        raise ConfigError(f"key_format='raw': column {name!r} is {kind} and must be binary or text")
    if wanted is KeyFormat.STRING and (is_binary or arrow.is_nested(plain)):
        raise ConfigError(f"key_format='string': column {name!r} is {kind}, which is no text")
    if wanted is KeyFormat.RAW:
        return lambda rows: rows.column(name).cast(pa.binary())
    return lambda rows: rows.column(name).cast(pa.string()).cast(pa.binary())


def _single_key_encoder(name: str, schema: pa.Schema) -> Encode:
    kind = json_type(schema.field(name).type, name)
    if is_bytes(kind) or arrow.is_large_string(kind):
        return lambda rows: rows.column(name).cast(pa.binary())
    floats = has_floats(kind)

    def encode(rows: pa.RecordBatch) -> pa.Array:
        values = json_values(rows.column(name), kind, floats=floats)
        return pa.array(
            [None if value is None else json_text(value) for value in values], pa.binary()
        )

    return encode


class RegisteredKeys:
    """Keys by a schema of the registry: as values of a subject of their own.

    Several columns, and those of a struct, are a record, message or object. Any other column is the
    key itself; in Protobuf, which has messages alone, its only field. Null is no key.
    """

    def __init__(self, settings: KafkaSinkSettings, schema: pa.Schema) -> None:
        """Choose the columns.

        Raises:
            ConfigError: One has a type that the format does not have.
        """
        self._names, self._first = settings.key, settings.key[0]
        fields = [schema.field(name) for name in settings.key]
        self._is_struct = len(fields) == 1 and arrow.is_struct(fields[0].type)
        if self._is_struct:
            fields = [fields[0].type.field(at) for at in range(fields[0].type.num_fields)]
        elif len(fields) == 1:
            fields = [fields[0].with_nullable(False)]
        self.columns = pa.schema(fields)
        records = self._is_struct or settings.key_format is KeyFormat.PROTOBUF
        self.settings = settings.of_key(alone=len(fields) == 1 and not records)
        if settings.auto_register:
            schema_text(self.settings, self.columns)

    def encoder(self, schema: ValueSchema) -> Encode:
        """Return what writes keys by `schema`.

        Raises:
            ConfigError: The columns are not its fields, or its value.
        """
        encode = self._encoder(schema)
        if len(self._names) > 1:
            return lambda rows: pa.array(
                encode([rows.column(name) for name in self._names]), pa.binary()
            )
        name = self._first

        def keys(rows: pa.RecordBatch) -> pa.Array:
            column = rows.column(name)
            there = column.drop_null()
            found = pa.array(encode(there.flatten() if self._is_struct else [there]), pa.binary())
            if not column.null_count:
                return found
            places = iter(range(len(found)))
            taken = [next(places) if valid else None for valid in column.is_valid().to_pylist()]
            return found.take(pa.array(taken, pa.int64()))

        return keys

    def _encoder(self, schema: ValueSchema) -> Callable[[Sequence[pa.Array]], list[bytes]]:
        header, columns = schema.header, self.columns
        match self.settings.format, self.settings.alone:
            case RecordFormat.PROTOBUF, _:
                messages = ProtobufValues(columns, schema.descriptors, schema.message)
                return lambda arrays: messages.encode(arrays, header)
            case RecordFormat.AVRO, alone:
                found = _avro_of(columns, schema.text) if alone else None
                records = found or AvroValues(columns, schema.text)
                return lambda arrays: records.encode(arrays, header)
            case _, True:
                return lambda arrays: [header + one for one in _documents(arrays[0], columns)]
            case _:
                objects = JsonObjects(columns)
                return lambda arrays: [header + one for one in objects.encode(arrays)]


def _documents(column: pa.Array, columns: pa.Schema) -> list[bytes]:
    kind = json_type(column.type, columns.names[0])
    return list(map(json_text, json_values(column, kind, floats=has_floats(kind))))


def _avro_of(columns: pa.Schema, text: str) -> AvroValues | None:
    """Return what writes the one column by `text`; None: that is a record's, with a field for it.

    A record of one field is the same bytes as that field.
    """
    if isinstance(parse_avro(text), Record):
        return None
    field = {"name": KEY, "type": json.loads(text)}
    record = json.dumps({"type": "record", "name": "onceflow_key", "fields": [field]})
    return AvroValues(pa.schema([columns.field(0).with_name(KEY)]), record)
