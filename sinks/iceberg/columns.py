"""The check that rows fit a table's columns: types as Iceberg promotes them, with field ids."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyiceberg.exceptions import ResolveError
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, promote, sanitize_column_names
from pyiceberg.types import (
    DecimalType,
    IcebergType,
    ListType,
    MapType,
    StructType,
)

from onceflow.core.arrow.nested_rows import TIMES_BEYOND_PYTHON
from onceflow.core.errors import ConfigError
from onceflow.sinks.lake.columns import TableColumns, ValueRule, to_plain_schema


def make_columns(table: str, schema: Schema, spec: PartitionSpec, rows: pa.Schema) -> TableColumns:
    """Return the conversion of rows of schema `rows` to a table of `schema`, partitioned by `spec`.

    Raises:
        ConfigError: They do not fit; names the column, both types, and the remedy.
    """
    fields = {field.name: field for field in schema.fields}
    required = [name for name, field in fields.items() if field.required]
    target = to_file_schema(schema)
    rules = list(_list_partition_rules(schema, spec))
    columns = TableColumns(table, fields.keys(), required, target, rows, rules)
    try:
        given = pyarrow_to_schema(to_plain_schema(rows), name_mapping=schema.name_mapping)
    except Exception as error:
        raise ConfigError(f"{table} cannot take the rows' columns: {error}") from error
    for field in given.fields:
        refusal = _refuse(fields[field.name].field_type, field.field_type)
        if refusal:
            raise ConfigError(
                f"{table}, column {field.name!r}: {refusal}; cast it before the sink, or change"
                " the table's column"
            )
    return columns


def _list_partition_rules(schema: Schema, spec: PartitionSpec) -> Iterator[ValueRule]:
    """Yield the rules of columns whose dates or times partition the rows."""
    for partition in spec.fields:
        column = find_source_column(schema, partition.source_id)
        yield ValueRule(
            column,
            TIMES_BEYOND_PYTHON,
            "partitions the table, and the row has a date that is not in the years 1 to 9999, which"
            " pyiceberg does not make a partition of",
        )


def find_source_column(schema: Schema, field_id: int) -> str:
    """Return the top-level column that contains, or is, the field `field_id`."""
    for field in schema.fields:
        inner = Schema(field)
        if field_id in inner.field_ids:
            return field.name
    raise ValueError(f"the table has no field {field_id}")


def to_file_schema(schema: Schema) -> pa.Schema:
    """Return the columns of data files, with field ids and with names that Avro allows."""
    target: pa.Schema = schema_to_pyarrow(sanitize_column_names(schema))
    return target


def _refuse(expected: IcebergType, given: IcebergType) -> str:
    """Return why values of type `given` do not fit a column of type `expected`; empty if they do.

    Decimals are compared when they are written: each value fits or not.
    """
    match expected, given:
        case StructType(), StructType():
            return _refuse_struct(expected, given)
        case ListType(), ListType():
            return _refuse(expected.element_type, given.element_type)
        case MapType(), MapType():
            return _refuse(expected.key_type, given.key_type) or _refuse(
                expected.value_type, given.value_type
            )
        case _:
            fits = _is_promoted(expected, given)
            return "" if fits else f"the table has {expected}, and the rows have {given}"


def _is_promoted(expected: IcebergType, given: IcebergType) -> bool:
    if given == expected or (isinstance(given, DecimalType) and isinstance(expected, DecimalType)):
        return True
    try:
        promote(given, expected)
    except ResolveError:
        return False
    return True


def _refuse_struct(expected: StructType, given: StructType) -> str:
    names = [field.name for field in expected.fields]
    if names != [field.name for field in given.fields]:
        return f"the table has the fields {names}, and the rows {[f.name for f in given.fields]}"
    pairs = zip(expected.fields, given.fields, strict=True)
    refusals = (_refuse(mine.field_type, theirs.field_type) for mine, theirs in pairs)
    return next(filter(None, refusals), "")
