"""How the key of a Kafka record is written and read."""

from __future__ import annotations

from enum import Enum

from onceflow.connectors.kafka.registry import schema_kind

KEY_COLUMN = "_key"
"""The column with a record's key. A sink that writes it as the key leaves it out of the value."""


class KeyFormat(Enum):
    """How a record's key is made of columns, and a column of it."""

    STRING = "string"
    """Text in UTF-8, of one column."""
    RAW = "raw"
    """Its bytes. A sink takes one column of bytes or text."""
    AVRO = "avro"
    """By a schema of the registry, under the subject of the keys: a struct or several columns are a
    record, any other column is one value."""
    PROTOBUF = "protobuf"
    """The same; always a message."""
    JSON_SCHEMA = "json-schema"
    """The same; an object, or any other value."""

    @property
    def registered(self) -> bool:
        """Whether keys begin with the id of a schema that a registry keeps."""
        return schema_kind(self.value) is not None
