"""Functions that find and take rows of nested columns, by traits of values at any depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import IsKind, holds, is_list, to_plain_column, to_plain_type

Rows: TypeAlias = NDArray[np.bool_]
"""A mask with one value a row: True if the row has the trait."""


@dataclass(frozen=True)
class ValueTrait:
    """A property that some values of certain types have, such as a null inside a list."""

    is_kind: IsKind
    """A function that returns True if values of a type can have the trait."""
    find: Callable[[pa.Array], Rows]
    """A function that returns the rows of an array of such a type that have the trait. Its result
    for null rows is ignored."""


_DAYS_OF_PYTHON = (-719_162, 2_932_896)
"""The dates 0001-01-01 and 9999-12-31, as days since 1970-01-01."""
_DAY_S = 86_400
_TICKS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_UTC = frozenset({None, "UTC", "Z", "+00:00", "Etc/UTC"})


def list_parts(column: pa.Array) -> list[pa.Array]:
    """Return the fields of structs, the elements of lists, or the keys and values of maps.

    The fields of a struct are as long as `column`. Other parts have the length of all elements.
    """
    kind, nested = column.type, cast("Any", column)
    if arrow.is_struct(kind):
        return [nested.field(index) for index in range(kind.num_fields)]
    if arrow.is_map(kind):
        return [nested.keys, nested.items]
    return [nested.values] if is_list(kind) else []


def find_rows(column: pa.Array, trait: ValueTrait) -> Rows:
    """Return for each row True if its value, or a visible part of it, has `trait`."""
    count = len(column)
    rows: Rows = np.zeros(count, np.bool_)
    if not count or not holds(to_plain_type(column.type), trait.is_kind):
        return rows
    column = to_plain_column(column)
    kind = column.type
    if trait.is_kind(kind):
        rows = trait.find(column)
    if arrow.is_struct(kind):
        for part in list_parts(column):
            rows = rows | find_rows(part, trait)
    elif is_list(kind) or arrow.is_map(kind):
        # Taken rows have no elements below null lists, and their offsets begin at 0.
        own = take_rows(column, np.arange(count))
        row_of_element = np.repeat(np.arange(count), read_lengths(own))
        for part in list_parts(own):
            rows[row_of_element[find_rows(part, trait)]] = True
    is_valid: Rows = to_numpy(column.is_valid())
    return rows & is_valid


def _is_date_or_timestamp(kind: pa.DataType) -> bool:
    return arrow.is_date(kind) or arrow.is_timestamp(kind)


def _find_times_beyond_python(column: pa.Array) -> Rows:
    first, last = _DAYS_OF_PYTHON
    kind = column.type
    if arrow.is_date32(kind):
        return _find_words_beyond(column, first, last)
    # A timestamp with a zone is shown in local time, which differs from UTC by at most a day.
    margin = 0 if arrow.is_date(kind) or kind.tz in _UTC else 1
    ticks = _DAY_S * _TICKS_PER_S["ms" if arrow.is_date(kind) else kind.unit]
    return _find_words_beyond(column, (first + margin) * ticks, (last + 1 - margin) * ticks - 1)


TIMES_BEYOND_PYTHON = ValueTrait(_is_date_or_timestamp, _find_times_beyond_python)
"""Dates and timestamps before the year 1 or after the year 9999."""


def _find_words_beyond(column: pa.Array, lowest: int, highest: int) -> Rows:
    width = pa.int32() if column.type.bit_width == 32 else pa.int64()
    words = to_numpy(column.view(width).fill_null(0))
    return np.logical_or(words < lowest, words > highest)


def read_lengths(column: pa.Array) -> NDArray[np.int64]:
    """Return the number of elements of each list or map of `column`."""
    if arrow.is_fixed_size_list(column.type):
        return np.full(len(column), column.type.list_size, np.int64)
    return np.diff(to_numpy(cast("Any", column).offsets)).astype(np.int64)


def take_rows(column: pa.Array, positions: NDArray[np.int64]) -> pa.Array:
    """Return the rows at `positions`; supports all types."""
    try:
        return column.take(pa.array(positions))
    except pa.ArrowNotImplementedError:
        pass
    kind, plain = column.type, _without_views(column.type)
    try:
        # Concatenated slices of views have the buffers of all views once for each slice, and the
        # next call would multiply them again.
        if plain != kind:
            return column.cast(plain).take(pa.array(positions)).cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        pass
    return _join_slices(column, positions)


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with large text and bytes in place of views, at any depth."""
    if arrow.is_string_view(kind):
        return pa.large_string()
    if arrow.is_binary_view(kind):
        return pa.large_binary()
    if arrow.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if arrow.is_map(kind):
        item = kind.item_field.with_type(_without_views(kind.item_type))
        return pa.map_(_without_views(kind.key_type), item)
    if not is_list(kind):
        return kind
    element = kind.value_field.with_type(_without_views(kind.value_type))
    size = kind.list_size if arrow.is_fixed_size_list(kind) else -1
    return pa.large_list(element) if arrow.is_large_list(kind) else pa.list_(element, size)


def _join_slices(column: pa.Array, positions: NDArray[np.int64]) -> pa.Array:
    # For run-end encoded values, also inside of others.
    none = [column.slice(0, 0)]
    return pa.concat_arrays(none + [column.slice(position, 1) for position in positions.tolist()])


def take_batch(batch: pa.RecordBatch, positions: NDArray[np.int64]) -> pa.RecordBatch:
    """Return the rows at `positions`; supports all types."""
    try:
        return batch.take(pa.array(positions))
    except pa.ArrowNotImplementedError:
        columns = [take_rows(column, positions) for column in batch.columns]
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def filter_batch(batch: pa.RecordBatch, chosen: pa.BooleanArray) -> pa.RecordBatch:
    """Return the rows for which `chosen` is True; supports all types."""
    try:
        return batch.filter(chosen)
    except pa.ArrowNotImplementedError:
        return take_batch(batch, _find_true(chosen))


def filter_rows(column: pa.Array, chosen: pa.BooleanArray) -> pa.Array:
    """Return the rows for which `chosen` is True; supports all types."""
    try:
        return column.filter(chosen)
    except pa.ArrowNotImplementedError:
        return take_rows(column, _find_true(chosen))


def _find_true(chosen: pa.BooleanArray) -> NDArray[np.int64]:
    return np.flatnonzero(to_numpy(chosen.fill_null(False)))


def to_numpy(column: pa.Array) -> NDArray[Any]:
    """Return the values of `column` as a numpy array."""
    return column.to_numpy(zero_copy_only=False)
