"""Values of Arrow as Python has them, the same with every version of pyarrow."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows, each map in them as a dict.

    `to_pylist(maps_as_pydicts=…)` of pyarrow 20 leaves maps inside of maps as lists.
    """
    kinds = {field.name: field.type for field in batch.schema}
    return [
        {name: _of(value, kinds[name]) for name, value in row.items()} for row in batch.to_pylist()
    ]


def python_values(column: pa.Array) -> list[Any]:
    """Return the values, each map in them as a dict."""
    return [_of(value, column.type) for value in column.to_pylist()]


def _of(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(kind, pa.MapType):
        return {key: _of(one, kind.item_type) for key, one in value}
    if isinstance(kind, pa.StructType):
        return {name: _of(one, kind.field(name).type) for name, one in value.items()}
    if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return [_of(one, kind.value_type) for one in value]
    return value
