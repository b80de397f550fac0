"""The schema of the values that a sink writes, and the id that the registry has for it.

Asked for on the driver when the sink opens, so that a schema that is refused is found before a row
is read, and by each writer, which gets the same id: registering what is registered changes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from onceflow.connectors.kafka.avro.schema import avro_text, avro_text_of
from onceflow.connectors.kafka.json.schema import json_schema_text, json_schema_text_of
from onceflow.connectors.kafka.protobuf.schema import compiled, message_of, path_of, protobuf_text
from onceflow.connectors.kafka.registry import (
    KeptSchema,
    RegistryDown,
    RegistryRefusal,
    SchemaKind,
    SchemaRegistry,
    deadline,
)
from onceflow.connectors.kafka.wire import header_of, indexes_of
from onceflow.core.errors import ConfigError, SinkError
from onceflow.sinks.kafka.settings import KafkaSinkSettings, RecordFormat


@dataclass(frozen=True, slots=True)
class ValueSchema:
    """What values are written by."""

    header: bytes
    """The first bytes of each."""
    text: str
    descriptors: bytes = b""
    """What it is compiled to, in Protobuf …"""
    message: str | None = None
    """… and which of its messages values are; none: the first."""


_KINDS: Mapping[RecordFormat, SchemaKind] = {
    RecordFormat.AVRO: SchemaKind.AVRO,
    RecordFormat.PROTOBUF: SchemaKind.PROTOBUF,
    RecordFormat.JSON_SCHEMA: SchemaKind.JSON,
}


def schema_text(settings: KafkaSinkSettings, columns: pa.Schema) -> str:
    """Return the schema that `columns` have in the settings' format.

    Raises:
        ConfigError: They have none.
    """
    name = _name(settings)
    match settings.format:
        case RecordFormat.JSON_SCHEMA:
            if settings.alone:
                return json_schema_text_of(columns.field(0), name)
            return json_schema_text(columns, name)
        case RecordFormat.PROTOBUF:
            return protobuf_text(columns, name)
        case _:
            if settings.alone:
                return avro_text_of(columns.field(0), name)
            return avro_text(columns, name)


def _name(settings: KafkaSinkSettings) -> str:
    return settings.value_subject.removesuffix("-value")


def value_schema(settings: KafkaSinkSettings, columns: pa.Schema) -> ValueSchema:
    """Return what rows of `columns` are written by; asks the registry.

    With auto_register it is their own schema, registered unless it has been before; without, the
    subject's latest version.

    Raises:
        ConfigError: The registry refuses the schema or us, or has none.
        SinkError: It did not answer within the sink's deadline.
    """
    if settings.registry is None:
        raise ConfigError(f"format={settings.format.value!r} needs schema_registry=")
    registry = SchemaRegistry(settings.registry)
    try:
        if settings.format is RecordFormat.PROTOBUF:
            if settings.auto_register:
                return _protobuf_registered(settings, columns, registry)
            return _protobuf_latest(settings, registry)
        if settings.auto_register:
            return _registered(settings, schema_text(settings, columns), registry)
        latest = _latest(settings, registry)
        return ValueSchema(header_of(latest.id), latest.text)
    except RegistryDown as error:
        raise SinkError(
            f"{settings.where}: {error}. It was asked for {settings.deadline_s:g} s"
        ) from None
    except RegistryRefusal as error:
        raise _refused(settings, error) from None
    finally:
        registry.close()


def _registered(settings: KafkaSinkSettings, text: str, registry: SchemaRegistry) -> ValueSchema:
    until = deadline(settings.deadline_s)
    kind = _KINDS[settings.format]
    found = registry.registered(settings.value_subject, kind, text, until=until)
    return ValueSchema(header_of(found), text)


def _latest(settings: KafkaSinkSettings, registry: SchemaRegistry) -> KeptSchema:
    subject, kind = settings.value_subject, _KINDS[settings.format]
    latest = registry.latest(subject, until=deadline(settings.deadline_s))
    if latest.kind is not kind:
        raise ConfigError(
            f"{settings.where}: the latest version of subject {subject!r} is {latest.kind.value},"
            f" and format={settings.format.value!r}"
        )
    return latest


def _protobuf_latest(settings: KafkaSinkSettings, registry: SchemaRegistry) -> ValueSchema:
    """Return the message of the latest version that the settings name."""
    latest = _latest(settings, registry)
    with _naming_subject(settings):
        descriptors = compiled(latest)
        header = header_of(latest.id) + indexes_of(path_of(descriptors, settings.message))
    return ValueSchema(header, latest.text, descriptors, settings.message)


def _protobuf_registered(
    settings: KafkaSinkSettings, columns: pa.Schema, registry: SchemaRegistry
) -> ValueSchema:
    """Return the message of `columns`, whose fields keep the numbers of the latest version's."""
    try:
        latest: KeptSchema | None = _latest(settings, registry)
    except RegistryRefusal as error:
        if not error.unknown:
            raise
        latest = None
    with _naming_subject(settings):
        known = None if latest is None else message_of(compiled(latest), settings.message)
        text = protobuf_text(columns, _name(settings), known)
        descriptors = compiled(KeptSchema(0, SchemaKind.PROTOBUF, text))
    found = _registered(settings, text, registry)
    return ValueSchema(found.header + indexes_of((0,)), text, descriptors)


@contextmanager
def _naming_subject(settings: KafkaSinkSettings) -> Generator[None, None, None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{settings.where}: subject {settings.value_subject!r}: {error}"
        ) from None


def _refused(settings: KafkaSinkSettings, error: RegistryRefusal) -> ConfigError:
    advice = ""
    if error.incompatible:
        advice = (
            ". The rows' columns may not follow the subject's versions under its compatibility:"
            f" change them before the sink, give another {settings.subject_setting}, or register a"
            " version yourself and give auto_register=False"
        )
    elif error.unknown:
        advice = (
            f". Register a schema there, give another {settings.subject_setting}, or"
            " auto_register=True"
        )
    return ConfigError(f"{settings.where}: {error}{advice}")
