"""The encoding of rows by a schema of the registry, in each schema language.

The modules of a language are imported at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa

from onceflow.clients.kafka.registry import SchemaKind

Encode: TypeAlias = Callable[[Sequence[pa.Array]], Sequence[bytes | None]]
"""A function from columns to the bytes of each row."""


@dataclass(frozen=True, slots=True)
class WrittenSchema:
    """The schema by which values are written."""

    header: bytes
    """The first bytes of each value."""
    text: str
    descriptors: bytes = b""
    """The compiled schema, in Protobuf only."""
    message: str | None = None
    """The name of the values' message, in Protobuf only. None: the first message."""


class _Values(Protocol):
    def encode(self, columns: Sequence[pa.Array], header: bytes) -> Sequence[bytes | None]: ...


def schema_text(kind: SchemaKind, columns: pa.Schema, name: str, *, alone: bool) -> str:
    """Return the text of a schema, called `name`, for rows of `columns`.

    With `alone`, the only column is the value itself rather than a field of it. A Protobuf message
    always has fields.

    Raises:
        ConfigError: The language does not allow a column's name or type.
    """
    match kind:
        case SchemaKind.AVRO:
            from onceflow.formats.avro.schema import avro_text, avro_text_of

            return avro_text_of(columns.field(0), name) if alone else avro_text(columns, name)
        case SchemaKind.JSON:
            from onceflow.formats.json.schema import json_schema_text, json_schema_text_of

            if alone:
                return json_schema_text_of(columns.field(0), name)
            return json_schema_text(columns, name)
        case SchemaKind.PROTOBUF:
            from onceflow.formats.protobuf.schema import protobuf_text

            return protobuf_text(columns, name)


def value_encoder(
    kind: SchemaKind, columns: pa.Schema, schema: WrittenSchema, *, alone: bool
) -> Encode:
    """Return a function that writes rows of `columns` by `schema`; `alone` as in `schema_text`.

    For a value that does not fit, the function raises one of `ENCODING_ERRORS`.

    Raises:
        ConfigError: The columns do not match the schema's fields or its value.
    """
    values: _Values
    match kind:
        case SchemaKind.AVRO:
            from onceflow.formats.avro.encoder import AvroValues, avro_value

            values = (avro_value if alone else AvroValues)(columns, schema.text)
        case SchemaKind.JSON:
            from onceflow.formats.json.encoder import JsonObjects, JsonValues

            first = columns.field(0)
            values = JsonValues(first.type, first.name) if alone else JsonObjects(columns)
        case SchemaKind.PROTOBUF:
            from onceflow.formats.protobuf.encoder import ProtobufValues

            values = ProtobufValues(columns, schema.descriptors, schema.message)
    return lambda arrays: values.encode(arrays, schema.header)
