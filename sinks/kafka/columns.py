"""Which columns rows must have to become records, and of which types."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.errors import ConfigError
from onceflow.sinks.kafka.records import HEADERS, KEY, VALUE
from onceflow.sinks.kafka.settings import KafkaSinkSettings, RecordFormat

RAW_COLUMNS = (KEY, VALUE, HEADERS)
"""What `format="raw"` writes; Spark's names."""
ORIGIN_COLUMNS = ("topic", "partition", "offset", "timestamp", "timestampType")
"""What a raw Kafka source says besides; not written, and no mistake."""


def require_columns(settings: KafkaSinkSettings, schema: pa.Schema) -> None:
    """Return when rows of `schema` have what the settings speak of.

    Raises:
        ConfigError: A column is missing or has a type that its purpose cannot have.
    """
    if settings.topic_column is not None:
        _require(schema, settings.topic_column, "topic_column", arrow.is_string, "a string")
    if settings.partition_column is not None:
        _require(
            schema, settings.partition_column, "partition_column", arrow.is_integer, "an integer"
        )
    if settings.headers_column is not None:
        _require(schema, settings.headers_column, "headers", _is_headers, _HEADERS_WANTED)
    for name in settings.key:
        _require(schema, name, "key", lambda _: True, "")
    if settings.format is RecordFormat.RAW:
        _require_raw(settings, schema)


_HEADERS_WANTED = "a list of structs (key: string, value: binary or string), or a map of those"


def _require_raw(settings: KafkaSinkSettings, schema: pa.Schema) -> None:
    if settings.key:
        raise ConfigError("format='raw' takes the key from the column 'key'; leave key= away")
    _require(schema, VALUE, "format='raw'", is_bytes, "binary or string")
    if KEY in schema.names:
        _require(schema, KEY, "format='raw'", is_bytes, "binary or string")
    if HEADERS in schema.names:
        _require(schema, HEADERS, "format='raw'", _is_headers, _HEADERS_WANTED)
    used = {settings.topic_column, settings.partition_column, settings.headers_column}
    lost = sorted(set(schema.names) - {*RAW_COLUMNS, *ORIGIN_COLUMNS} - used)
    if lost:
        raise ConfigError(
            f"format='raw' writes the columns {', '.join(RAW_COLUMNS)}, and columns {lost} would be"
            " lost: drop them before the sink, or use format='json'"
        )


def _require(
    schema: pa.Schema, name: str, setting: str, fits: Callable[[pa.DataType], bool], wanted: str
) -> None:
    if name not in schema.names:
        raise ConfigError(f"{setting}: the rows have no column {name!r}, only {schema.names}")
    kind = schema.field(name).type
    while arrow.is_dictionary(kind):
        kind = kind.value_type
    if arrow.is_large_string(kind) or arrow.is_string_view(kind):
        kind = pa.string()
    if not fits(kind):
        raise ConfigError(f"{setting}: column {name!r} is {kind} and must be {wanted}")


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values of `kind` can be written as they are."""
    return bool(
        arrow.is_string(kind)
        or arrow.is_binary(kind)
        or arrow.is_large_binary(kind)
        or arrow.is_binary_view(kind)
    )


def _is_headers(kind: pa.DataType) -> bool:
    if arrow.is_map(kind):
        return bool(arrow.is_string(kind.key_type) and is_bytes(kind.item_type))
    if not arrow.is_list(kind) or not arrow.is_struct(kind.value_type):
        return False
    members = [kind.value_type.field(index) for index in range(kind.value_type.num_fields)]
    return [member.name for member in members] == ["key", "value"] and all(
        is_bytes(member.type) for member in members
    )
