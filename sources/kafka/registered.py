"""Columns that nobody described: those of a subject's latest version in the schema registry.

Values in Protobuf are read as a message of that version also where the columns are described.

Asked for once, on the driver, when the pipeline asks for the source's schema. It holds for all
attempts of this start, so that what operators keep does not change its type under them; a version
that is registered later is read as this one, and becomes columns at the next start.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from onceflow.connectors.kafka.avro.decoder import as_member, avro_record
from onceflow.connectors.kafka.avro.schema import Record, arrow_type, columns_of
from onceflow.connectors.kafka.json.schema import columns_of_json_schema, type_of_json_schema
from onceflow.connectors.kafka.keys import KEY_COLUMN, KeyFormat
from onceflow.connectors.kafka.protobuf.decoder import fitting_of
from onceflow.connectors.kafka.protobuf.schema import columns_of_message, compiled, message_of
from onceflow.connectors.kafka.registry import (
    KeptSchema,
    RegistryDown,
    RegistryRefusal,
    SchemaKind,
    SchemaRegistry,
    deadline,
)
from onceflow.core.errors import ConfigError, SourceUnavailable
from onceflow.sources.kafka.rows import require_columns
from onceflow.sources.kafka.settings import (
    KafkaSettings,
    ValueFormat,
)


def with_columns(settings: KafkaSettings) -> KafkaSettings:
    """Return `settings` with columns: asks the registry unless they are described.

    Raises:
        ConfigError: The subject does not exist, we are refused, or its schema has no columns.
        SourceUnavailable: The registry did not answer within the deadline.
    """
    if settings.asks_latest:
        settings = _with_value(settings)
    return _with_key(settings) if settings.asks_key else settings


def _with_value(settings: KafkaSettings) -> KafkaSettings:
    schema = _latest(settings, settings.value_subject, "subject=", ", or give schema=")
    if settings.format is ValueFormat.PROTOBUF:
        return _with_message(settings, schema)
    try:
        columns = _columns_of(settings.format, schema)
    except ConfigError as error:
        raise ConfigError(f"subject {settings.value_subject!r}: {error}; give schema=") from None
    require_columns(settings.format, columns)
    return replace(settings, columns=columns, reader_schema=schema)


def _with_key(settings: KafkaSettings) -> KafkaSettings:
    schema = _latest(settings, settings.subject_of_keys, "key_subject=")
    descriptors = b""
    try:
        match settings.key_format:
            case KeyFormat.PROTOBUF:
                descriptors = compiled(schema)
                kind = pa.struct(list(columns_of_message(message_of(descriptors, None))))
            case KeyFormat.JSON_SCHEMA:
                kind = type_of_json_schema(_json_text(schema))
                require_columns(ValueFormat.JSON, pa.schema([pa.field(KEY_COLUMN, kind)]))
            case _:
                kind = columns_of(as_member(schema, KEY_COLUMN)).field(0).type
    except ConfigError as error:
        raise ConfigError(f"subject {settings.subject_of_keys!r}: {error}") from None
    return replace(settings, key_type=kind, key_schema=schema, key_descriptors=descriptors)


def _json_text(schema: KeptSchema) -> str:
    if schema.kind is not SchemaKind.JSON:
        raise ConfigError(f"it is {schema.kind.value}, and no JSON Schema")
    return schema.text


def _with_message(settings: KafkaSettings, schema: KeptSchema) -> KafkaSettings:
    try:
        descriptors = compiled(schema)
        message = message_of(descriptors, settings.message)
        columns = settings.columns
        if not columns.names:
            columns = columns_of_message(message)
        fitting_of(message, columns)
    except ConfigError as error:
        raise ConfigError(f"subject {settings.value_subject!r}: {error}") from None
    return replace(settings, columns=columns, reader_schema=schema, reader_descriptors=descriptors)


def _columns_of(value_format: ValueFormat, schema: KeptSchema) -> pa.Schema:
    if value_format is ValueFormat.JSON_SCHEMA:
        return columns_of_json_schema(_json_text(schema))
    record = avro_record(schema)
    if value_format is ValueFormat.DEBEZIUM_AVRO:
        return _columns_of_change(record)
    return columns_of(record)


def _columns_of_change(envelope: Record) -> pa.Schema:
    """Return the columns of the rows whose changes have this envelope."""
    after = next((one for one in envelope.members if one.name == "after"), None)
    kind = None if after is None else arrow_type(after.type)
    if kind is None or not pa.types.is_struct(kind):
        raise ConfigError("it is no Debezium envelope: it has no 'after' that is a record")
    return pa.schema(list(kind))


def _latest(settings: KafkaSettings, subject: str, setting: str, other: str = "") -> KeptSchema:
    if settings.registry is None:
        raise ConfigError(f"format={settings.format.value!r} needs schema= or schema_registry=")
    registry = SchemaRegistry(settings.registry)
    try:
        return registry.latest(subject, until=deadline(settings.deadline_s))
    except RegistryRefusal as error:
        advice = f" Give {setting}, if it is another one{other}" if error.unknown else ""
        raise ConfigError(f"{error}.{advice}") from None
    except RegistryDown as error:
        raise SourceUnavailable(
            f"{error}. It was asked for {settings.deadline_s:g} s for the columns of"
            f" {settings.what}; start it, or correct schema_registry={other}"
        ) from None
    finally:
        registry.close()
