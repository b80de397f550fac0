"""The schema of the values that a sink writes, and its id in the registry.

The driver asks for it when the sink opens, so that a refused schema is found before a row is read.
Each writer asks again and gets the same id, because registering a known schema changes nothing.
"""

from __future__ import annotations

import pyarrow as pa

from onceflow.clients.kafka.registry import KeptSchema, SchemaKind
from onceflow.clients.kafka.subjects import Subject, SubjectAdvice, open_subject
from onceflow.core.errors import SinkError
from onceflow.formats.encoding import WrittenSchema, schema_text
from onceflow.formats.wire import header_of, indexes_of
from onceflow.sinks.kafka.settings import KafkaSinkSettings


def build_schema_text(settings: KafkaSinkSettings, columns: pa.Schema) -> str:
    """Return the schema of `columns` in the settings' format.

    Raises:
        ConfigError: The columns have no schema in this format.
    """
    return schema_text(settings.schema_kind, columns, _name(settings), alone=settings.alone)


def _name(settings: KafkaSinkSettings) -> str:
    return settings.value_subject.removesuffix("-value")


def resolve_written_schema(settings: KafkaSinkSettings, columns: pa.Schema) -> WrittenSchema:
    """Return the schema that rows of `columns` are written with; asks the registry.

    With auto_register it is the schema of `columns`, which is registered if it was not before.
    Without, it is the subject's latest version.

    Raises:
        ConfigError: The registry refuses the schema or the sink, or has no schema.
        SinkError: The registry did not reply within the sink's deadline.
    """
    setting = settings.subject_setting
    advice = SubjectAdvice(
        unknown=f"Register a schema there, give another {setting}, or auto_register=True",
        incompatible="The rows' columns may not follow the subject's versions under its"
        f" compatibility: change them before the sink, give another {setting}, or register a"
        " version yourself and give auto_register=False",
    )
    with open_subject(
        settings,
        settings.value_subject,
        settings.schema_kind,
        advice=advice,
        unavailable=SinkError,
    ) as subject:
        if settings.schema_kind is SchemaKind.PROTOBUF:
            return _resolve_message(settings, columns, subject)
        if settings.auto_register:
            text = build_schema_text(settings, columns)
            return WrittenSchema(header_of(subject.register(text)), text)
        latest = subject.read_latest()
        return WrittenSchema(header_of(latest.id), latest.text)


def _resolve_message(
    settings: KafkaSinkSettings, columns: pa.Schema, subject: Subject
) -> WrittenSchema:
    """Return the latest version's message, or that of `columns`, which keeps its field numbers."""
    from onceflow.formats.protobuf.schema import (
        compile_schema,
        message_of,
        path_of,
        protobuf_text,
    )

    if not settings.auto_register:
        latest = subject.read_latest()
        descriptors = compile_schema(latest)
        indexes = indexes_of(path_of(descriptors, settings.message))
        header = header_of(latest.id) + indexes
        return WrittenSchema(header, latest.text, descriptors, settings.message)
    known = subject.find_latest()
    message = None if known is None else message_of(compile_schema(known), settings.message)
    text = protobuf_text(columns, _name(settings), message)
    descriptors = compile_schema(KeptSchema(0, SchemaKind.PROTOBUF, text))
    return WrittenSchema(header_of(subject.register(text)) + indexes_of((0,)), text, descriptors)
