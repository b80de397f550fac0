"""Predicates for the kinds of Arrow types, and casts that are exact for decimals and slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.arrow.exact_decimals import cast_decimals, check_decimals, is_cast_here

_T = TypeVar("_T")

IsKind: TypeAlias = Callable[[pa.DataType], bool]


def is_text(kind: pa.DataType) -> bool:
    """Return True if values of `kind` are UTF-8 text."""
    return bool(arrow.is_string(kind) or arrow.is_large_string(kind) or arrow.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Return True if values of `kind` are bytes, of fixed or variable size."""
    return bool(
        arrow.is_binary(kind)
        or arrow.is_large_binary(kind)
        or arrow.is_binary_view(kind)
        or arrow.is_fixed_size_binary(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return True if values of `kind` are lists, but not maps."""
    return bool(arrow.is_list(kind) or arrow.is_large_list(kind) or arrow.is_fixed_size_list(kind))


def find_kind(kind: pa.DataType, table: Iterable[tuple[IsKind, _T]]) -> _T | None:
    """Return the value in `table` of the first predicate that accepts `kind`, or None."""
    return next((value for is_kind, value in table if is_kind(kind)), None)


def holds(kind: pa.DataType, is_kind: IsKind) -> bool:
    """Return True if `is_kind` is true for `kind`, or for the type of a value inside of it."""
    if is_kind(kind):
        return True
    if arrow.is_dictionary(kind):
        return holds(kind.value_type, is_kind)
    inner = (kind.field(at).type for at in range(kind.num_fields)) if arrow.is_nested(kind) else ()
    return any(holds(inner_kind, is_kind) for inner_kind in inner)


def is_finite(value: object) -> bool:
    """Return True if a Python value of a column contains no NaN and no infinity, at any depth."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(is_finite, cast("Mapping[object, object]", value).values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, cast("Iterable[object]", value)))
    return True


def to_plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the plain values, without dictionary, run ends or extension."""
    if isinstance(kind, pa.BaseExtensionType):
        return to_plain_type(kind.storage_type)
    if arrow.is_dictionary(kind) or arrow.is_run_end_encoded(kind):
        return to_plain_type(kind.value_type)
    return kind


def to_plain_column(column: pa.Array) -> pa.Array:
    """Return the plain values, without dictionary, run ends or extension."""
    while True:
        kind = column.type
        if isinstance(kind, pa.BaseExtensionType):
            column = column.storage
        elif arrow.is_dictionary(kind):
            column = column.dictionary_decode()
        elif arrow.is_run_end_encoded(kind):
            column = pc.run_end_decode(column)
        else:
            return column


def cast_rows(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return `column` as `kind`. All casts to a type that is no constant must use this function.

    If `column` is a slice of nested values, pyarrow itself casts the values of all rows, so that a
    row would be refused because of a value in another row. For decimals whose scale changes, it
    returns wrong numbers; see `exact_decimals`.

    Raises:
        ArrowInvalid: `kind` does not hold a value.
    """
    have = column.type
    if have == kind:
        return column
    if is_cast_here(have, kind):
        return cast_decimals(column, kind)
    made = _cast_own_rows(column, kind)
    if holds(have, arrow.is_decimal) or holds(kind, arrow.is_decimal):
        check_decimals(column, made)
    return made


def cast_batch(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return `rows` with the types of `schema`, which has the same columns in the same order.

    Raises:
        ValueError: A value does not fit, a column that is NOT NULL holds a null, or the names
            differ.
    """
    types = [field.type for field in schema]
    columns = [cast_rows(*pair) for pair in zip(rows.columns, types, strict=True)]
    # The types are right now, so Arrow's own cast only checks the names and looks for nulls.
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names).cast(schema)


def cast_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return `table` with the types of `schema`. Raises the errors of `cast_batch`."""
    batches = [cast_batch(batch, schema) for batch in table.to_batches()]
    if not batches:
        return table.cast(schema)
    return pa.Table.from_batches(batches, schema)


def _cast_own_rows(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if holds(column.type, _is_list_view) and not holds(kind, _is_list_view):
        column = _without_list_views(column)
    try:
        return column.cast(kind, safe=True)
    except pa.ArrowInvalid:
        if not arrow.is_nested(column.type):
            raise
    own_rows = column.take(pa.array(np.arange(len(column))))
    return own_rows.cast(kind, safe=True)


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(arrow.is_list_view(kind) or arrow.is_large_list_view(kind))


def _without_list_views(column: pa.Array) -> pa.Array:
    """Return `column` with lists in place of list views, also within structs and lists.

    pyarrow 26 itself casts the last list view behind an empty one to an empty list.

    Raises:
        ArrowNotImplementedError: A list view is within a value of another kind.
    """
    kind, nested = column.type, cast("Any", column)
    if not holds(kind, _is_list_view):
        return column
    null = column.is_null().to_numpy(zero_copy_only=False)
    if arrow.is_struct(kind):
        parts = [_without_list_views(nested.field(at)) for at in range(kind.num_fields)]
        fields = [field.with_type(part.type) for field, part in zip(kind, parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=pa.array(null))
    if not (_is_list_view(kind) or is_list(kind)):
        raise pa.ArrowNotImplementedError(f"cannot cast {kind}: a list view is within it")
    values = _without_list_views(pc.list_flatten(column))
    ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy())
    is_large = arrow.is_large_list_view(kind) or arrow.is_large_list(kind)
    width, array, make = (
        (np.int64, pa.LargeListArray, pa.large_list)
        if is_large
        else (np.int32, pa.ListArray, pa.list_)
    )
    offsets = pa.array(np.insert(ends, 0, 0).astype(width), mask=np.append(null, False))
    return array.from_arrays(offsets, values, type=make(kind.value_field.with_type(values.type)))


def to_plain_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return `batch` with columns of plain values, which each kernel supports.

    In addition to `to_plain_column`, views become large text or bytes.
    """
    if not any(_is_encoded(field.type) for field in batch.schema):
        return batch
    columns = [_without_view(to_plain_column(column)) for column in batch.columns]
    fields = [
        field.with_type(column.type) for field, column in zip(batch.schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _is_encoded(kind: pa.DataType) -> bool:
    return bool(
        isinstance(kind, pa.BaseExtensionType)
        or arrow.is_dictionary(kind)
        or arrow.is_run_end_encoded(kind)
        or arrow.is_string_view(kind)
        or arrow.is_binary_view(kind)
    )


def _without_view(column: pa.Array) -> pa.Array:
    if arrow.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if arrow.is_binary_view(column.type) else column
