"""Between Arrow batches and the dicts that per-record functions see.

`RecordBatch.to_pylist` goes through one Arrow scalar a value; numpy's bulk conversions are several
times as fast for the types that carry most data, so they are used wherever they give equal values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa

from onceflow.core.functions import Record


def values_of(column: pa.Array) -> list[Any]:
    """Return the Python values of `column`, as `to_pylist` does."""
    column_type = column.type
    if column.null_count == 0 and (
        pa.types.is_integer(column_type) or pa.types.is_floating(column_type)
    ):
        return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
    if pa.types.is_string(column_type) or pa.types.is_large_string(column_type):
        return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
    return column.to_pylist()


def records_of(rows: pa.RecordBatch) -> list[Record]:
    """Return one dict a row, in row order."""
    names = rows.schema.names
    columns = [values_of(column) for column in rows.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def keys_of(rows: pa.RecordBatch, key: Sequence[str]) -> list[Any]:
    """Return each row's key: the value of one key column, or a tuple of several."""
    columns = [values_of(rows.column(name)) for name in key]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
