"""The source columns that come from the schema registry if the user did not describe them.

They are the columns of a subject's latest version. Protobuf values are read as a message of that
version, even if the user describes the columns.

The driver asks the registry once, when the pipeline asks for the source's schema. The answer is
used for all attempts of this start, so the types in the operators' state stay the same. Records of
a version that is registered later are read with this version. The next start uses the columns of
the new version.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import pyarrow as pa

from onceflow.clients.kafka.registry import CompiledSchema, KeptSchema, SchemaKind, schema_kind
from onceflow.clients.kafka.settings import KEY_COLUMN
from onceflow.clients.kafka.subjects import Subject, SubjectAdvice, open_subject
from onceflow.core.errors import SourceUnavailable
from onceflow.sources.kafka.settings import KafkaSettings, ValueFormat
from onceflow.sources.kafka.value_formats import require_columns


def with_columns(settings: KafkaSettings) -> KafkaSettings:
    """Return `settings` with columns, from the registry unless the user described them.

    Raises:
        ConfigError: The subject does not exist, the registry refuses the user, or its schema has no
            columns.
        SourceUnavailable: The registry did not answer within the deadline.
    """
    if settings.asks_latest:
        settings = _with_value(settings)
    return _with_key(settings) if settings.asks_key else settings


def _with_value(settings: KafkaSettings) -> KafkaSettings:
    advice = SubjectAdvice("Give subject=, if it is another one")
    if settings.format is not ValueFormat.PROTOBUF:
        advice = SubjectAdvice(f"{advice.unknown}, or give schema=", unusable="give schema=")
    with _open(settings, settings.value_subject, settings.format.value, advice) as subject:
        kept = subject.read_latest()
        if subject.kind is SchemaKind.PROTOBUF:
            return _with_message(settings, kept)
        columns = _read_columns(settings.format, kept)
        require_columns(settings.format, columns)
    return replace(settings, columns=columns, reader_schema=CompiledSchema(kept))


def _with_message(settings: KafkaSettings, kept: KeptSchema) -> KafkaSettings:
    from onceflow.formats.protobuf.decoder import fitting_of
    from onceflow.formats.protobuf.schema import (
        columns_of_message,
        compile_schema,
        message_of,
    )

    descriptors = compile_schema(kept)
    message = message_of(descriptors, settings.message)
    columns = settings.columns if settings.columns.names else columns_of_message(message)
    fitting_of(message, columns)
    schema = CompiledSchema(kept, descriptors)
    return replace(settings, columns=columns, reader_schema=schema)


def _with_key(settings: KafkaSettings) -> KafkaSettings:
    assert settings.key_format is not None
    advice = SubjectAdvice("Give key_subject=, if it is another one")
    descriptors = b""
    with _open(settings, settings.subject_of_keys, settings.key_format.value, advice) as subject:
        kept = subject.read_latest()
        match subject.kind:
            case SchemaKind.PROTOBUF:
                from onceflow.formats.protobuf.schema import (
                    columns_of_message,
                    compile_schema,
                    message_of,
                )

                descriptors = compile_schema(kept)
                kind = pa.struct(list(columns_of_message(message_of(descriptors))))
            case SchemaKind.JSON:
                from onceflow.formats.json.schema import type_of_json_schema

                kind = type_of_json_schema(kept.text)
                require_columns(ValueFormat.JSON, pa.schema([pa.field(KEY_COLUMN, kind)]))
            case SchemaKind.AVRO:
                from onceflow.formats.avro.decoder import as_member
                from onceflow.formats.avro.schema import columns_of

                kind = columns_of(as_member(kept, KEY_COLUMN)).field(0).type
    return replace(settings, key_type=kind, key_schema=CompiledSchema(kept, descriptors))


def _open(
    settings: KafkaSettings, name: str, value_format: str, advice: SubjectAdvice
) -> AbstractContextManager[Subject]:
    kind = schema_kind(value_format)
    assert kind is not None, value_format
    return open_subject(settings, name, kind, advice=advice, unavailable=SourceUnavailable)


def _read_columns(value_format: ValueFormat, kept: KeptSchema) -> pa.Schema:
    if value_format is ValueFormat.JSON_SCHEMA:
        from onceflow.formats.json.schema import columns_of_json_schema

        return columns_of_json_schema(kept.text)
    from onceflow.formats.avro.decoder import avro_record
    from onceflow.formats.avro.schema import columns_of

    record = avro_record(kept)
    if value_format is ValueFormat.DEBEZIUM_AVRO:
        from onceflow.formats.debezium.avro import columns_of_change

        return columns_of_change(record)
    return columns_of(record)
