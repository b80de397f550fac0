"""The split of rows by a table's partition spec: transforms of columns, for whole batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from pyiceberg.partitioning import (
    PartitionField,
    PartitionFieldValue,
    PartitionKey,
    PartitionSpec,
)
from pyiceberg.schema import Schema
from pyiceberg.transforms import parse_transform

from onceflow.core.errors import ConfigError
from onceflow.sinks.lake.rolling_files import group_rows

_TERM = re.compile(r"(\w+)\((?:(\d+)\s*,\s*)?([^()]+)\)")
# Iceberg's specification assigns partition fields ids from 1000 on, distinct from columns' ids.
_FIRST_PARTITION_ID = 1000


def split_rows(
    rows: pa.RecordBatch, spec: PartitionSpec, schema: Schema
) -> Iterator[tuple[PartitionKey | None, pa.RecordBatch]]:
    """Yield each partition with its rows, in order; the partition is None without partitions."""
    if spec.is_unpartitioned() or not rows.num_rows:
        yield None, rows
        return
    values = [_transform(rows, field, schema) for field in spec.fields]
    for row, part in group_rows(rows, values):
        key = PartitionKey(
            field_values=[
                PartitionFieldValue(field=field, value=column[row].as_py())
                for field, column in zip(spec.fields, values, strict=True)
            ],
            partition_spec=spec,
            schema=schema,
        )
        yield key, part


def parse_spec(terms: Sequence[str], schema: Schema) -> PartitionSpec:
    """Return the spec of `terms`, such as `country`, `day(at)`, `bucket(16, id)`.

    Raises:
        ConfigError: A term is not valid, or names a column or transform that does not exist.
    """
    fields: list[PartitionField] = []
    for number, term in enumerate(terms):
        match = _TERM.fullmatch(term.strip())
        name, width, column = match.groups() if match else ("identity", None, term)
        try:
            source = schema.find_field(column.strip())
            transform = parse_transform(f"{name}[{width}]" if width else name)
            accepted = transform.can_transform(source.field_type)
        except ValueError as error:
            raise ConfigError(f"partition_by names {term!r}: {error}") from error
        if not accepted:
            raise ConfigError(f"partition_by names {term!r}, and the column is {source.field_type}")
        suffix = "" if name == "identity" else f"_{name}"
        fields.append(
            PartitionField(
                source_id=source.field_id,
                field_id=_FIRST_PARTITION_ID + number,
                transform=transform,
                name=f"{source.name}{suffix}",
            )
        )
    return PartitionSpec(*fields)


def _transform(rows: pa.RecordBatch, field: PartitionField, schema: Schema) -> pa.Array:
    source = schema.find_field(field.source_id)
    name, *inner = (schema.find_column_name(field.source_id) or "").split(".")
    # A top-level name may contain a dot. Only a name that is no column of the rows is a path into a
    # struct.
    if source.name in rows.schema.names:
        name, inner = source.name, []
    column = rows.column(name)
    if inner:
        column = pc.struct_field(column, inner)
    if arrow.is_large_binary(column.type):
        # The library itself uses this type for bytes, but its `truncate` does not accept it.
        column = column.cast(pa.binary())
    transformed = cast("Any", field).transform.pyarrow_transform(source.field_type)(column)
    return transformed.combine_chunks() if isinstance(transformed, pa.ChunkedArray) else transformed
