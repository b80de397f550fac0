"""Rows as values of a schema of the registry, whatever language it is written in.

The modules of a language are imported by its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa

from onceflow.connectors.kafka.registry import SchemaKind

Encode: TypeAlias = Callable[[Sequence[pa.Array]], Sequence[bytes | None]]
"""Turns columns into the bytes of each row."""


@dataclass(frozen=True, slots=True)
class WrittenSchema:
    """What values are written by."""

    header: bytes
    """The first bytes of each."""
    text: str
    descriptors: bytes = b""
    """In Protobuf, what it is compiled to …"""
    message: str | None = None
    """… and which of its messages values are; None: the first."""


class _Values(Protocol):
    def encode(self, columns: Sequence[pa.Array], header: bytes) -> Sequence[bytes | None]: ...


def schema_text(kind: SchemaKind, columns: pa.Schema, name: str, *, alone: bool) -> str:
    """Return the schema of rows of `columns`, called `name`.

    Where the only column is `alone`, it is the value itself, and no field of one; a message of
    Protobuf always has fields.

    Raises:
        ConfigError: A column has a name or a type that the language does not have.
    """
    match kind:
        case SchemaKind.AVRO:
            from onceflow.connectors.kafka.avro.schema import avro_text, avro_text_of

            return avro_text_of(columns.field(0), name) if alone else avro_text(columns, name)
        case SchemaKind.JSON:
            from onceflow.connectors.kafka.json.schema import json_schema_text, json_schema_text_of

            if alone:
                return json_schema_text_of(columns.field(0), name)
            return json_schema_text(columns, name)
        case SchemaKind.PROTOBUF:
            from onceflow.connectors.kafka.protobuf.schema import protobuf_text

            return protobuf_text(columns, name)


def value_encoder(
    kind: SchemaKind, columns: pa.Schema, schema: WrittenSchema, *, alone: bool
) -> Encode:
    """Return what writes rows of `columns` by `schema`; `alone` as in `schema_text`.

    It raises one of `ENCODING_ERRORS` for a value that does not fit.

    Raises:
        ConfigError: The columns are not the schema's fields, or its value.
    """
    values: _Values
    match kind:
        case SchemaKind.AVRO:
            from onceflow.connectors.kafka.avro.encoder import AvroValues, avro_value

            values = (avro_value if alone else AvroValues)(columns, schema.text)
        case SchemaKind.JSON:
            from onceflow.connectors.kafka.json.encoder import JsonObjects, JsonValues

            first = columns.field(0)
            values = JsonValues(first.type, first.name) if alone else JsonObjects(columns)
        case SchemaKind.PROTOBUF:
            from onceflow.connectors.kafka.protobuf.encoder import ProtobufValues

            values = ProtobufValues(columns, schema.descriptors, schema.message)
    return lambda arrays: values.encode(arrays, schema.header)
