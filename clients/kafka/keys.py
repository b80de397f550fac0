"""The formats of the key of a Kafka record."""

from __future__ import annotations

from enum import Enum

from onceflow.clients.kafka.registry import schema_kind

KEY_COLUMN = "_key"
"""The column with a record's key.

A sink that writes this column as the key omits it from the value.
"""


class KeyFormat(Enum):
    """A format that says how columns become a record's key, and how a key becomes a column."""

    STRING = "string"
    """A text in UTF-8, from one column."""
    RAW = "raw"
    """The bytes of the key. A sink accepts one column of bytes or text."""
    AVRO = "avro"
    """A key by a schema of the registry, under the subject of the keys.

    A struct or several columns are a record; any other column is one value.
    """
    PROTOBUF = "protobuf"
    """A key by a schema of the registry; always a message."""
    JSON_SCHEMA = "json-schema"
    """A key by a schema of the registry; an object, or any other value."""

    @property
    def registered(self) -> bool:
        """True if keys begin with the id of a schema that the registry keeps."""
        return schema_kind(self.value) is not None
