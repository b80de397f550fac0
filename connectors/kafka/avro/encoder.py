"""Rows as Avro records, by the schema that the registry has for them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.connectors.kafka.avro.schema import MISSING, Record, parse_avro, record_of
from onceflow.connectors.kafka.schema_rules import check_fields
from onceflow.core.imports.extras import naming_extras

_VALUE = "value"


class AvroValues:
    """Writes rows of some columns by one schema."""

    def __init__(self, columns: pa.Schema, text: str) -> None:
        """Prepare to write `columns` by the schema `text`.

        Raises:
            ConfigError: A column is not in the schema, or a field of it has neither column nor
                default.
            MissingExtra: fastavro is not installed.
        """
        with naming_extras():
            import fastavro
        fields = record_of(parse_avro(text), what="the subject's schema").members
        check_fields(
            columns.names,
            [field.name for field in fields],
            [field.name for field in fields if field.default is MISSING],
            "the subject's schema",
        )
        self._schema = fastavro.parse_schema(json.loads(text))
        self._write = cast("Callable[..., None]", cast("Any", fastavro).schemaless_writer)
        self._types = [_numbers(column.type) for column in columns]
        self._names = columns.names

    def encode(self, columns: Sequence[pa.Array], header: bytes) -> list[bytes]:
        """Return one record a row, behind `header`.

        Raises:
            ValueError: A value does not fit the schema, and the like; see `ENCODING_ERRORS`.
        """
        batch = pa.RecordBatch.from_arrays(
            [_as_numbers(one, kind) for one, kind in zip(columns, self._types, strict=True)],
            names=self._names,
        )
        encoded: list[bytes] = []
        stream = io.BytesIO()
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            stream.seek(0)
            stream.truncate()
            stream.write(header)
            self._write(stream, self._schema, row)
            encoded.append(stream.getvalue())
        return encoded


def avro_value(columns: pa.Schema, text: str) -> AvroValues:
    """Return what writes the only column by `text`: as the value itself, or as a record's field.

    A record of one field is the same bytes as that field.

    Raises:
        ConfigError: As `AvroValues`.
    """
    if isinstance(parse_avro(text), Record):
        return AvroValues(columns, text)
    field = {"name": _VALUE, "type": json.loads(text)}
    record = json.dumps({"type": "record", "name": "onceflow_value", "fields": [field]})
    return AvroValues(pa.schema([columns.field(0).with_name(_VALUE)]), record)


def _numbers(kind: pa.DataType) -> pa.DataType:
    """Return the type to which a column is cast before it is written: times become numbers."""
    if arrow.is_dictionary(kind):
        return _numbers(kind.value_type)
    if arrow.is_timestamp(kind):
        return pa.timestamp("ms" if kind.unit == "s" else kind.unit, kind.tz)
    if arrow.is_time32(kind):
        return pa.time32("ms")
    if arrow.is_time64(kind):
        return pa.time64("us")
    return pa.date32() if arrow.is_date(kind) else kind


def _as_numbers(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type != kind:
        column = column.cast(kind, safe=True)
    if arrow.is_timestamp(kind) or arrow.is_time64(kind):
        return column.view(pa.int64())
    if arrow.is_date32(kind) or arrow.is_time32(kind):
        return column.view(pa.int32())
    return column
