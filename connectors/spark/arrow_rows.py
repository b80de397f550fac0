"""The conversion of Arrow batches to the exact types that Spark demands from a data source."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas import types as spark_types
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from onceflow.core.arrow.kinds import cast_rows, holds
from onceflow.core.errors import ConfigError

_NO_VALUES_OF_ARROW = frozenset({"variant", "geometry", "geography"})
"""The types that Arrow batches hold as a struct of bytes, which only Spark can read."""
_PRECISION_MAX = 38


def spark_schema(columns: pa.Schema) -> StructType:
    """Return Spark's types of `columns`.

    Raises:
        ConfigError: Spark has no type for a column. The message names the column.
    """
    struct = StructType()
    for column in columns:
        if holds(column.type, _is_decimal_beyond_spark):
            raise ConfigError(
                f"column {column.name!r} is {column.type}, but Spark's decimals have at most"
                f" {_PRECISION_MAX} digits, and 0 or more of them after the point"
            )
        try:
            kind = spark_types.from_arrow_type(_plain(column.type), True)
        except Exception as error:  # pyspark raises errors of several kinds
            raise ConfigError(
                f"column {column.name!r} is {column.type}, for which Spark has no type: {error}"
            ) from error
        # Declare all columns nullable: Spark trusts a NOT NULL, and it would gain nothing from it.
        struct.add(column.name, kind, True)
    return struct


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark demands of batches of `schema`.

    Raises:
        ConfigError: Arrow batches cannot hold a column's type. The message names the column.
    """
    # A later Spark added the argument, and demands it if times have a zone.
    known = inspect.signature(spark_types.to_arrow_schema).parameters
    given: dict[str, Any] = {"timezone": "UTC"} if "timezone" in known else {}
    fields: list[pa.Field] = []
    for column in schema.fields:
        kind, cause = column.dataType, None
        if not _holds_octets_of_spark(kind):
            try:
                fields += spark_types.to_arrow_schema(StructType([column]), **given)
                continue
            except Exception as error:  # pyspark raises errors of several kinds
                cause = error
        raise ConfigError(
            f"column {column.name!r} is {kind.simpleString()}, a type whose values Arrow batches"
            " cannot hold; cast it to another type, such as STRING, or leave it out"
        ) from cause
    return pa.schema(fields)


def fit(batches: Iterable[pa.RecordBatch], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield `batches` with the columns of `schema`, by name, in Spark's own types.

    Raises:
        ConfigError: A column is missing, or a value does not fit the type in `schema`.
    """
    target = arrow_schema(schema)
    for batch in batches:
        if batch.schema == target:
            yield batch
            continue
        columns = [_column(batch, field) for field in target]
        yield pa.RecordBatch.from_arrays(columns, schema=target)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index < 0:
        raise ConfigError(
            f"column {field.name!r} is not among the columns that are read:"
            f" {', '.join(batch.schema.names)}"
        )
    column = batch.column(index)
    if column.type == field.type:
        return column
    try:
        return cast_rows(column, field.type)
    except pa.ArrowException as error:
        raise ConfigError(
            f"column {field.name!r} is {column.type} and cannot be read as {field.type}: {error}"
        ) from error


def _is_decimal_beyond_spark(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind)) and not (
        kind.precision <= _PRECISION_MAX and 0 <= kind.scale <= kind.precision
    )


def _holds_octets_of_spark(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_holds_octets_of_spark(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _holds_octets_of_spark(kind.elementType)
    if isinstance(kind, MapType):
        return _holds_octets_of_spark(kind.keyType) or _holds_octets_of_spark(kind.valueType)
    return kind.typeName() in _NO_VALUES_OF_ARROW


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type that Spark uses for the same values."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_unsigned_integer(kind):
        wider = {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.decimal128(20, 0)}
        return wider[kind.bit_width]
    return kind
