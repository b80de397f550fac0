"""The schema of the values that a sink writes, and the id that the registry has for it.

Asked for on the driver when the sink opens, so that a schema that is refused is found before a row
is read, and by each writer, which gets the same id: registering what is registered changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.formats.registry import (
    RegistryDown,
    RegistryRefusal,
    SchemaKind,
    SchemaRegistry,
    deadline,
)
from onceflow.core.formats.wire import header_of
from onceflow.sinks.kafka.avro_values import avro_text
from onceflow.sinks.kafka.json_schema_values import json_schema_text
from onceflow.sinks.kafka.settings import KafkaSinkSettings, RecordFormat


@dataclass(frozen=True, slots=True)
class ValueSchema:
    """What values are written by."""

    header: bytes
    """The first bytes of each."""
    text: str


def schema_text(settings: KafkaSinkSettings, columns: pa.Schema) -> str:
    """Return the schema that `columns` have in the settings' format.

    Raises:
        ConfigError: They have none.
    """
    name = settings.value_subject.removesuffix("-value")
    if settings.format is RecordFormat.JSON_SCHEMA:
        return json_schema_text(columns, name)
    return avro_text(columns, name)


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
    kind = SchemaKind.JSON if settings.format is RecordFormat.JSON_SCHEMA else SchemaKind.AVRO
    subject, until = settings.value_subject, deadline(settings.deadline_s)
    registry = SchemaRegistry(settings.registry)
    try:
        if settings.auto_register:
            text = schema_text(settings, columns)
            found = registry.registered(subject, kind, text, until=until)
            return ValueSchema(header_of(found), text)
        latest = registry.latest(subject, until=until)
    except RegistryDown as error:
        raise SinkError(
            f"{settings.where}: {error}. It was asked for {settings.deadline_s:g} s"
        ) from None
    except RegistryRefusal as error:
        raise _refused(settings, error) from None
    finally:
        registry.close()
    if latest.kind is not kind:
        raise ConfigError(
            f"{settings.where}: the latest version of subject {subject!r} is {latest.kind.value},"
            f" and format={settings.format.value!r}"
        )
    return ValueSchema(header_of(latest.id), latest.text)


def _refused(settings: KafkaSinkSettings, error: RegistryRefusal) -> ConfigError:
    advice = ""
    if error.incompatible:
        advice = (
            ". The rows' columns may not follow the subject's versions under its compatibility:"
            " change them before the sink, give another subject=, or register a version yourself"
            " and give auto_register=False"
        )
    elif error.unknown:
        advice = ". Register a schema there, give another subject=, or auto_register=True"
    return ConfigError(f"{settings.where}: {error}{advice}")
