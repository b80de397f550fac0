"""The keys of records, and the registered schemas that a sink writes with.

The driver asks for it when the sink opens, so that a refused schema is found before a row is read.
Each writer asks again and gets the same id, because registering a known schema changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.clients.kafka.registry import KeptSchema, SchemaKind
from onceflow.clients.kafka.settings import KeyFormat
from onceflow.clients.kafka.subjects import Subject, SubjectAdvice, open_subject
from onceflow.core.arrow import kinds
from onceflow.core.arrow.instants import BEYOND_PYTHON, rows_beyond_python
from onceflow.core.errors import ConfigError, InvariantViolation, SinkError
from onceflow.formats.encoding import WrittenSchema, schema_text, value_encoder
from onceflow.formats.faulty_parts import FaultyPart, prefix_path
from onceflow.formats.json.encoder import JsonObjects, JsonValues
from onceflow.formats.registry_schemas import header_of, indexes_of
from onceflow.sinks.kafka.records import KEY
from onceflow.sinks.kafka.settings import KafkaSinkSettings, RecordFormat


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


EncodeRows: TypeAlias = Callable[[pa.RecordBatch], pa.Array]
"""The type of functions that encode rows to the bytes of each."""


def holds_bytes(kind: pa.DataType) -> bool:
    """Return True if values of `kind` are text or bytes, which can be written unchanged."""
    return kinds.is_text(kind) or kinds.is_bytes(kind)


def find_null_key(settings: KafkaSinkSettings, schema: pa.Schema) -> str | None:
    """Return the column whose null leaves a record of `schema` without a key.

    Empty if every record has a key, and None if no record has one.
    """
    names = settings.key
    if settings.format is RecordFormat.RAW:
        names = tuple(name for name in schema.names if name == KEY)
    if not names:
        return None
    # Several columns form an object or a record, which exists even if all of them are null.
    return names[0] if len(names) == 1 and schema.field(names[0]).nullable else ""


def plain_key_encoder(settings: KafkaSinkSettings, schema: pa.Schema) -> EncodeRows:
    """Return the encoder of keys that need no registry, also of raw records and missing keys.

    Raises:
        ConfigError: A column has a type that keys of the format cannot have.
    """
    if settings.format is RecordFormat.RAW:
        if KEY in schema.names:
            return lambda rows: rows.column(KEY).cast(pa.binary())
        return lambda rows: pa.nulls(rows.num_rows, pa.binary())
    match settings.key_format, settings.key:
        case _, ():
            return lambda rows: pa.nulls(rows.num_rows, pa.binary())
        case (KeyFormat.STRING | KeyFormat.RAW) as key_format, (name,):
            return _cast_encoder(name, schema.field(name).type, key_format)
        case None, (name,):
            return _single_key_encoder(name, schema.field(name).type)
        case None, names:
            objects = JsonObjects(pa.schema([schema.field(name) for name in names]))
            return lambda rows: pa.array(
                objects.encode([rows.column(name) for name in names]), pa.binary()
            )
        case key_format, names:
            raise InvariantViolation(f"no encoder for keys of {names} in format {key_format}")


def _cast_encoder(name: str, kind: pa.DataType, key_format: KeyFormat) -> EncodeRows:
    plain = kinds.to_plain_type(kind)
    if key_format is KeyFormat.RAW:
        if not holds_bytes(plain):
            raise ConfigError(
                f"key_format='raw': column {name!r} is {kind} and must be binary or text"
            )
        return lambda rows: rows.column(name).cast(pa.binary())
    if kinds.is_bytes(plain) or arrow.is_nested(plain):
        raise ConfigError(
            f"key_format='string': column {name!r} is {kind}, which cannot be written as text; give"
            " key_format='raw' for bytes, or 'json'"
        )
    # The offset of a zone in text lacks seconds, which offsets before 1900 have.
    kept = pa.timestamp(plain.unit, "UTC") if arrow.is_timestamp(plain) and plain.tz else plain
    try:
        pa.nulls(0, kept).cast(pa.string())
    except pa.ArrowNotImplementedError as error:
        raise ConfigError(
            f"key_format='string': column {name!r} is {kind}, which cannot be written as text: cast"
            " it to a string before the sink"
        ) from error
    return lambda rows: _texts(kinds.cast_rows(rows.column(name), kept)).cast(pa.binary())


def _texts(column: pa.Array) -> pa.Array:
    """Return the values of `column` as text.

    Raises:
        ValueError: A value has no text: a date or time outside of Python's range, or bytes that are
            not UTF-8 in a column of text.
    """
    if not arrow.is_duration(column.type) and rows_beyond_python(column):
        # Arrow would write "<value out of range: …>" for some values.
        raise ValueError(BEYOND_PYTHON)
    texts: pa.Array = column.cast(pa.string())
    texts.validate(full=True)
    return texts


def _single_key_encoder(name: str, kind: pa.DataType) -> EncodeRows:
    if holds_bytes(kinds.to_plain_type(kind)):
        return lambda rows: rows.column(name).cast(pa.binary())
    values = JsonValues(kind, name)
    return lambda rows: pa.array(values.encode([rows.column(name)]), pa.binary())


class RegisteredKeys:
    """The keys by a schema of the registry, encoded as values of their own subject.

    Several columns, or the fields of a struct, form a record, message or object. Any other column
    is the key itself; in Protobuf, which has only messages, it is the only field. A null is no key.
    """

    def __init__(self, settings: KafkaSinkSettings, schema: pa.Schema) -> None:
        """Choose the columns.

        Raises:
            ConfigError: A column has a type that the format does not have.
        """
        self._names, self._first = settings.key, settings.key[0]
        fields = [schema.field(name) for name in settings.key]
        self._is_struct = len(fields) == 1 and arrow.is_struct(fields[0].type)
        if self._is_struct:
            fields = list(fields[0].type)
        elif len(fields) == 1:
            fields = [fields[0].with_nullable(False)]
        self.columns = pa.schema(fields)
        records = self._is_struct or settings.key_format is KeyFormat.PROTOBUF
        self.settings = settings.of_key(alone=len(fields) == 1 and not records)
        if settings.auto_register:
            build_schema_text(self.settings, self.columns)

    def encoder(self, schema: WrittenSchema) -> EncodeRows:
        """Return the encoder of keys by `schema`.

        Raises:
            ConfigError: The columns are not its fields, or its value.
        """
        settings = self.settings
        encode = value_encoder(settings.schema_kind, self.columns, schema, alone=settings.alone)
        if len(self._names) > 1:
            return lambda rows: pa.array(
                encode([rows.column(name) for name in self._names]), pa.binary()
            )

        def keys(rows: pa.RecordBatch) -> pa.Array:
            column = rows.column(self._first)
            there = column.drop_null()
            members = (
                list(map(kinds.to_plain_column, there.flatten())) if self._is_struct else [there]
            )
            try:
                keys = pa.array(encode(members), pa.binary())
            except FaultyPart as error:
                if not self._is_struct:
                    raise
                # The path of a member begins with the name of its column.
                raise prefix_path(f"{self._first}.", error) from error
            if not column.null_count:
                return keys
            indices = iter(range(len(keys)))
            taken = [next(indices) if valid else None for valid in column.is_valid().to_pylist()]
            return keys.take(pa.array(taken, pa.int64()))

        return keys
