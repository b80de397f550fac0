"""Arrow batches as Spark takes them from a Python data source: its own types, to the letter."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas import types as spark_types
from pyspark.sql.types import StructType

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import ConfigError


def spark_schema(columns: pa.Schema) -> StructType:
    """Return Spark's types of `columns`.

    Raises:
        ConfigError: Spark has no type for one; names it.
    """
    struct = StructType()
    for column in columns:
        try:
            kind = spark_types.from_arrow_type(_plain(column.type), True)
        except Exception as error:  # pyspark raises errors of several kinds
            raise ConfigError(
                f"column {column.name!r} is {column.type}, for which Spark has no type: {error}"
            ) from error
        # Spark trusts what is said of nulls, and nothing is gained by it.
        struct.add(column.name, kind, True)
    return struct


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark demands of batches of `schema`."""
    # The argument came with a later Spark, which demands it where times have a zone.
    known = inspect.signature(spark_types.to_arrow_schema).parameters
    given: dict[str, Any] = {"timezone": "UTC"} if "timezone" in known else {}
    return spark_types.to_arrow_schema(schema, **given)


def fit(batches: Iterable[pa.RecordBatch], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield `batches` with the columns of `schema`, by name, in Spark's own types.

    Raises:
        ConfigError: A column is not there, or a value does not fit the type that `schema` says.
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
            f"column {field.name!r} is not among those that are read:"
            f" {', '.join(batch.schema.names)}"
        )
    column = batch.column(index)
    if column.type == field.type:
        return column
    try:
        return cast_rows(column, field.type)
    except pa.ArrowException as error:
        raise ConfigError(
            f"column {field.name!r} is {column.type} and is to be read as {field.type}: {error}"
        ) from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type that Spark has for the same values."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_unsigned_integer(kind):
        wider = {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.decimal128(20, 0)}
        return wider[kind.bit_width]
    return kind
