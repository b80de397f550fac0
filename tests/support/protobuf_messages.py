"""Protobuf messages of schemas that a test writes, by Protobuf's own compiler and runtime."""

from __future__ import annotations

from typing import Any

from onceflow.clients.kafka.registry import KeptSchema, NamedSchema, SchemaKind
from onceflow.formats.protobuf.schema import class_of, compile_schema, message_of


def message_class(text: str, name: str | None = None, **imported: str) -> Any:
    """Return the class of a message of the schema `text`.

    Args:
        text: The schema.
        name: Of the message; the first unless given.
        imported: Texts of what it imports, by their files' names without ".proto".
    """
    references = tuple(NamedSchema(f"{one}.proto", other) for one, other in imported.items())
    schema = KeptSchema(0, SchemaKind.PROTOBUF, text, references)
    return class_of(message_of(compile_schema(schema), name))


def framed(schema_id: int, message: Any, indexes: bytes = b"\0") -> bytes:
    """Return the value that a serializer of a registry writes of `message`."""
    value: bytes = message.SerializeToString()
    return b"\0" + schema_id.to_bytes(4, "big") + indexes + value
