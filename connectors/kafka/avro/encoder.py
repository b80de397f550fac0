"""Rows as Avro records, by the schema that the registry has for them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.connectors.kafka.avro.schema import (
    MISSING,
    AvroType,
    Entries,
    Items,
    Record,
    Union,
    arrow_type,
    parse_avro,
    record_of,
    values_of,
)
from onceflow.connectors.kafka.fitting import misfit
from onceflow.connectors.kafka.schema_rules import check_fields
from onceflow.core.arrow.exact_arrays import cast_exactly
from onceflow.core.arrow.kinds import is_list, is_text, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.core.imports.extras import naming_extras

_VALUE = "value"


class AvroValues:
    """Writes rows of some columns by one schema."""

    def __init__(self, columns: pa.Schema, text: str) -> None:
        """Prepare to write `columns` by the schema `text`.

        Raises:
            ConfigError: A column is not in the schema, or of a type that its field has no place
                for; or a field has neither column nor default.
            MissingExtra: fastavro is not installed.
        """
        with naming_extras():
            import fastavro
        record = record_of(parse_avro(text), what="the subject's schema")
        fields = record.members
        check_fields(
            columns.names,
            [field.name for field in fields],
            [field.name for field in fields if field.default is MISSING],
            "the subject's schema",
        )
        self._schema = fastavro.parse_schema(json.loads(text))
        self._write = cast("Callable[..., None]", cast("Any", fastavro).schemaless_writer)
        member_types = {field.name: field.type for field in fields}
        self._fitted = [
            resolve_written_type(column.type, member_types[column.name], f"column {column.name!r}")
            for column in columns
        ]
        self._types = list(map(_numbers, self._fitted))
        self._names = columns.names

    def encode(self, columns: Sequence[pa.Array], header: bytes) -> list[bytes]:
        """Return one record a row, behind `header`.

        Raises:
            ValueError: A value does not fit the schema, and the like; see `ENCODING_ERRORS`.
        """
        # To the schema's own types first: fastavro makes 99 of 99.99 for an int, infinity of 1e39
        # for a float, and takes an instant's number for one of the schema's unit.
        fitted = map(cast_exactly, columns, self._fitted)
        batch = pa.RecordBatch.from_arrays(
            [_as_numbers(one, kind) for one, kind in zip(fitted, self._types, strict=True)],
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


def resolve_written_type(kind: pa.DataType, node: AvroType, where: str) -> pa.DataType:
    """Return the type to which values of `kind` are cast to be written as `node`.

    Raises:
        ConfigError: No value of `kind` can be written so; `where` says which column it is.
    """
    kind = to_plain_type(kind)
    fitted = _find_written_type(kind, node, where)
    if fitted is None:
        raise ConfigError(
            f"{where} is {kind}, and the subject's schema has {arrow_type(node)} there: cast the"
            " column before the sink, or register a schema with its type"
        )
    return fitted


def _find_written_type(kind: pa.DataType, node: AvroType, where: str) -> pa.DataType | None:
    if isinstance(node, Union):
        return _branch_type(kind, node, where)
    if isinstance(node, Record) and arrow.is_struct(kind):
        inside = {member.name: member.type for member in node.members}
        fields = [kind.field(at) for at in range(kind.num_fields)]
        if not inside.keys() >= {field.name for field in fields}:
            return None
        return pa.struct(
            [_refit(one, inside[one.name], f"{where}, {one.name!r}") for one in fields]
        )
    if isinstance(node, Items) and is_list(kind):
        return pa.list_(_refit(kind.value_field, node.item, where))
    if isinstance(node, Entries) and arrow.is_map(kind) and is_text(kind.key_type):
        return pa.map_(pa.string(), _refit(kind.item_field, node.value, where))
    return None if isinstance(node, Record | Items | Entries) else _find_plain_type(kind, node)


def _find_plain_type(kind: pa.DataType, node: AvroType) -> pa.DataType | None:
    fitted = arrow_type(node)
    # A double is rounded to a float, as in the results of functions.
    is_rounded = arrow.is_float64(kind) and arrow.is_float32(fitted)
    return fitted if is_rounded or misfit(kind, fitted) is None else None


def _refit(field: pa.Field, node: AvroType, where: str) -> pa.Field:
    return field.with_type(resolve_written_type(field.type, node, where))


def _branch_type(kind: pa.DataType, union: Union, where: str) -> pa.DataType:
    """Return the type of the branch that is written: the column's own, or else the first to fit."""
    branches = values_of(union)
    if arrow.is_null(kind) or not branches:
        return pa.null()
    exact = [branch for branch in branches if arrow_type(branch) == kind]
    refusal = ConfigError(f"{where} is {kind}, and the subject's schema has no such branch there")
    for branch in exact or branches:
        try:
            return resolve_written_type(kind, branch, where)
        except ConfigError as error:
            refusal = error
    raise refusal


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
