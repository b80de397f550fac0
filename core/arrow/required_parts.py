"""Conversions of nested values to a target's type, whose parts may be required or renamed.

A part is required in `struct<a: int32 not null>` and in `list<item: string not null>`.

Below a null parent a part has no value, but Arrow stores an arbitrary value there, often a null.
Parquet writers refuse such a null in a required part, although no reader can see it, so it is
replaced by a value. They also convert values that no reader can see, and fail if one does not fit,
so these are replaced by nulls. A visible null in a required part is an error of the row.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow import nested_rows
from onceflow.core.arrow.kinds import holds, is_bytes, is_list, is_text


def has_required_parts(kind: pa.DataType) -> bool:
    """Return True if a part of a value of `kind`, at any depth, may not be null."""
    return any(not part.nullable or has_required_parts(part.type) for part in _list_parts(kind))


def to_optional_parts(kind: pa.DataType, given: pa.DataType) -> pa.DataType:
    """Return `kind` with optional parts, which have the names of the parts of `given`.

    A cast finds the fields of a struct by their names, and fills missing fields with nulls. Keys of
    maps stay required.
    """
    names = [part.name for part in _list_parts(given)]
    parts = [
        pa.field(name, to_optional_parts(part.type, inner.type))
        for name, part, inner in zip(names, _list_parts(kind), _list_parts(given), strict=False)
    ]
    if len(parts) != kind.num_fields and not arrow.is_map(kind):
        return kind
    if arrow.is_map(kind):
        return pa.map_(
            parts[0].with_nullable(False), parts[1], keys_sorted=cast("Any", kind).keys_sorted
        )
    return _with_parts(kind, parts) if parts else kind


def complete_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return `column` as `kind`, with a value for each required part below a null parent.

    `column` has the type `kind`, or the same type with optional parts and other names.

    Raises:
        ArrowInvalid: A required part is null although its parent is not.
    """
    completed, incomplete = _complete(column, kind)
    if incomplete.any():
        raise pa.ArrowInvalid(f"a part of a value is null, and the type is {kind}")
    return completed


def hide_values(column: pa.Array) -> pa.Array:
    """Return `column` with nulls for all parts below a null parent."""
    own_rows = nested_rows.take_rows(column, np.arange(len(column)))
    every = np.ones(len(column), np.bool_)
    return _complete_part(own_rows, pa.field("", column.type), every)[0]


def find_incomplete_rows(column: pa.Array) -> nested_rows.Rows:
    """Return for each row True if a required part is null although its parent is not."""
    return _complete(column, column.type)[1]


def _complete(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, nested_rows.Rows]:
    complete = np.zeros(len(column), np.bool_)
    if column.type == kind and not (_can_be_incomplete(kind) and _has_nulls(column)):
        return column, complete
    # Copy the rows, because a slice of nested values contains parts of other rows.
    own_rows = nested_rows.take_rows(column, np.arange(len(column)))
    return _complete_part(own_rows, pa.field("", kind), np.ones(len(column), np.bool_))


def _can_be_incomplete(kind: pa.DataType) -> bool:
    """Return True if Parquet writers may fail for a null in values of `kind`."""
    return has_required_parts(kind) or holds(kind, _is_converted)


def _is_converted(kind: pa.DataType) -> bool:
    """Return True if writers convert each value of `kind`, even below a null parent."""
    return arrow.is_dictionary(kind) or (arrow.is_timestamp(kind) and kind.unit == "s")


def _complete_part(
    column: pa.Array, field: pa.Field, is_visible: nested_rows.Rows
) -> tuple[pa.Array, nested_rows.Rows]:
    """Return `column` converted to the type of `field`, and the rows that lack a required part.

    `is_visible` is True for each row whose parents all have a value.
    """
    has_value = nested_rows.to_numpy(column.is_valid())
    incomplete = np.zeros(len(column), np.bool_)
    if not field.nullable and column.null_count:
        incomplete = is_visible & ~has_value
        column = _fill_nulls(column)
    parts = _list_parts(field.type)
    if not parts:
        return _drop_nulls_of_dictionary(column), incomplete
    is_visible = is_visible & has_value
    if arrow.is_struct(field.type):
        completed: list[pa.Array] = []
        for given, part in zip(nested_rows.list_parts(column), parts, strict=True):
            inner, lacking = _complete_part(_hide_values(given, has_value), part, is_visible)
            completed.append(inner)
            incomplete |= lacking
        rebuilt = pa.StructArray.from_arrays(completed, fields=parts, mask=_find_nulls(column))
        return rebuilt, incomplete
    row_of_element = np.repeat(np.arange(len(column)), nested_rows.read_lengths(column))
    elements: list[pa.Array] = []
    for elements_given, part in zip(nested_rows.list_parts(column), parts, strict=True):
        inner, lacking = _complete_part(elements_given, part, is_visible[row_of_element])
        elements.append(inner)
        incomplete[row_of_element[lacking]] = True
    offsets = None if arrow.is_fixed_size_list(field.type) else cast("Any", column).offsets
    return make_lists(offsets, elements, field.type, _find_nulls(column)), incomplete


def _hide_values(part: pa.Array, parent_has_value: nested_rows.Rows) -> pa.Array:
    """Return `part` with nulls below a null parent."""
    if parent_has_value.all() or arrow.is_null(part.type):
        return part
    try:
        return part.take(pa.array(np.arange(len(part)), mask=~parent_has_value))
    except pa.ArrowNotImplementedError:
        # For views of text and bytes.
        positions = np.where(parent_has_value, np.arange(len(part)), len(part))
        return nested_rows.take_rows(pa.concat_arrays([part, pa.nulls(1, part.type)]), positions)


def _drop_nulls_of_dictionary(column: pa.Array) -> pa.Array:
    """Return `column` with plain nulls: Parquet has no nulls inside of a dictionary."""
    if not arrow.is_dictionary(column.type) or not cast("Any", column).dictionary.null_count:
        return column
    return column.dictionary_decode().dictionary_encode().cast(column.type)


def make_lists(
    offsets: pa.Array | None,
    elements: list[pa.Array],
    kind: pa.DataType,
    nulls: pa.BooleanArray | None,
) -> pa.Array:
    """Return lists or maps of type `kind` with these `elements`; for maps, keys and values.

    `offsets` is None for lists of a fixed size.
    """
    rebuilt: Any
    if arrow.is_fixed_size_list(kind):
        rebuilt = pa.FixedSizeListArray.from_arrays(elements[0], type=kind, mask=nulls)
    elif arrow.is_map(kind):
        rebuilt = pa.MapArray.from_arrays(offsets, *elements, type=kind, mask=nulls)
    elif arrow.is_large_list(kind):
        rebuilt = pa.LargeListArray.from_arrays(offsets, elements[0], type=kind, mask=nulls)
    else:
        rebuilt = pa.ListArray.from_arrays(offsets, elements[0], type=kind, mask=nulls)
    return cast("pa.Array", rebuilt)


def _fill_nulls(column: pa.Array) -> pa.Array:
    """Return `column` with an arbitrary value in place of each null."""
    if arrow.is_dictionary(column.type):
        return _fill_nulls(column.dictionary_decode()).dictionary_encode().cast(column.type)
    positions = np.where(
        nested_rows.to_numpy(column.is_valid()), np.arange(len(column)), len(column)
    )
    return nested_rows.take_rows(pa.concat_arrays([column, _make_value(column.type)]), positions)


def _make_value(kind: pa.DataType) -> pa.Array:
    """Return an array with one value of `kind`: zero, or an empty value."""
    parts = _list_parts(kind)
    made: pa.Array
    if isinstance(kind, pa.BaseExtensionType):
        made = pa.ExtensionArray.from_storage(kind, _make_value(kind.storage_type))
    elif arrow.is_struct(kind):
        values = [_make_value(part.type) for part in parts]
        made = pa.StructArray.from_arrays(values, fields=parts)
    elif arrow.is_fixed_size_list(kind):
        elements = pa.concat_arrays([_make_value(kind.value_type)] * kind.list_size)
        made = pa.FixedSizeListArray.from_arrays(elements, type=kind)
    elif parts:
        offsets = pa.array([0, 0], pa.int64() if arrow.is_large_list(kind) else pa.int32())
        made = make_lists(offsets, [pa.nulls(0, part.type) for part in parts], kind, None)
    elif arrow.is_nested(kind):  # a view of a list
        made = pa.array([[]], kind)
    else:
        made = _make_simple_value(kind)
    return made


def _make_simple_value(kind: pa.DataType) -> pa.Array:
    if arrow.is_null(kind):
        return pa.nulls(1)
    if arrow.is_dictionary(kind):
        return _make_value(kind.value_type).dictionary_encode().cast(kind)
    if is_text(kind):
        return pa.array([""], kind)
    if is_bytes(kind) and not arrow.is_fixed_size_binary(kind):
        return pa.array([b""], kind)
    zero = pa.py_buffer(bytes(max(1, kind.bit_width // 8)))
    return pa.Array.from_buffers(kind, 1, [None, zero])


def _has_nulls(column: pa.Array) -> bool:
    """Return True if there may be a null anywhere in `column`."""
    if column.null_count:
        return True
    kind = column.type
    if arrow.is_dictionary(kind):
        return bool(cast("Any", column).dictionary.null_count)
    return any(map(_has_nulls, nested_rows.list_parts(column)))


def _find_nulls(column: pa.Array) -> pa.BooleanArray | None:
    return column.is_null() if column.null_count else None


def _list_parts(kind: pa.DataType) -> list[pa.Field]:
    """Return the fields of a struct, the element of a list, or the key and the value of a map."""
    if arrow.is_struct(kind):
        return [kind.field(index) for index in range(kind.num_fields)]
    if arrow.is_map(kind):
        return [cast("Any", kind).key_field, kind.item_field]
    return [kind.value_field] if is_list(kind) else []


def _with_parts(kind: pa.DataType, parts: list[pa.Field]) -> pa.DataType:
    if arrow.is_struct(kind):
        return pa.struct(parts)
    if arrow.is_fixed_size_list(kind):
        return pa.list_(parts[0], kind.list_size)
    return pa.large_list(parts[0]) if arrow.is_large_list(kind) else pa.list_(parts[0])
