"""Checks for dates and times that Python has no values for.

A column of Arrow can hold instants far outside of the years 1 to 9999 of Python's `datetime`, and
times of day beyond a day. Functions, keys and several sinks use Python values. So a source must not
emit others: a record with such a value is a bad record.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
BEYOND_PYTHON = "a date or time outside of the years 1 to 9999, which Python does not have"
_NOT_A_TIME = -(2**63)
ERRORS = (OverflowError, ValueError, ArithmeticError)
"""The exceptions that pyarrow raises for a value that Python does not have."""


def rows_beyond_python(column: pa.Array) -> list[int]:
    """Return the rows of `column` with a date or time that Python has no value for."""
    if _all_within(column):
        return []
    return [row for row in range(len(column)) if not _all_within(column.slice(row, 1))]


def check_times_of_day(column: pa.Array) -> None:
    """Raise ValueError if a time of day has nanoseconds, which Arrow drops for Python."""
    if types.is_time64(column.type) and column.type.unit == "ns":
        ticks = column.view(pa.int64()).drop_null().to_numpy()
        finer = ticks % 1_000 != 0
        if finer.any():
            at = int(ticks[finer][0])
            raise ValueError(f"a time of day {at} ns after midnight is finer than a microsecond")
    elif types.is_nested(column.type) or types.is_dictionary(column.type):
        for inner in values_inside(column):
            check_times_of_day(inner)


def _all_within(column: pa.Array) -> bool:
    kind = column.type
    if types.is_nested(kind) or types.is_dictionary(kind):
        return all(map(_all_within, values_inside(column)))
    if types.is_time(kind):
        return _within_a_day(column)
    return not types.is_temporal(kind) or types.is_interval(kind) or _ends_within(column)


def values_inside(column: pa.Array) -> list[pa.Array]:
    """Return the parts of nested values: fields, elements, keys and items, or plain values."""
    kind = column.type
    if types.is_struct(kind):
        structs: list[pa.Array] = column.flatten()
        return structs
    if types.is_dictionary(kind):
        return [column.cast(kind.value_type)]
    if types.is_run_end_encoded(kind):
        return [pc.run_end_decode(column)]
    if types.is_map(kind):
        return [*map_entries(column)]
    return [pc.list_flatten(column)]


def map_entries(maps: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the keys and the values of all `maps`, without entries that a null map may hide."""
    # Neither a cast to lists nor a filter: Arrow refuses the cast for a null struct with required
    # members, and does not support filters for views.
    whole = cast("pa.MapArray", maps)
    ends = whole.offsets.to_numpy()
    present = maps.is_valid().to_numpy(zero_copy_only=False)
    if not np.diff(ends)[~present].any():
        # The keys and items of a slice are those of the whole array.
        first, count = int(ends[0]), int(ends[-1] - ends[0])
        return whole.keys.slice(first, count), whole.items.slice(first, count)
    rows = np.flatnonzero(present).tolist()
    # With an empty part first, because concatenating needs at least one part.
    spans = [(0, 0), *((int(ends[row]), int(ends[row + 1] - ends[row])) for row in rows)]
    keys, values = (
        pa.concat_arrays([part.slice(first, count) for first, count in spans])
        for part in (whole.keys, whole.items)
    )
    return keys, values


def _within_a_day(column: pa.Array) -> bool:
    ends = pc.min_max(column.view(pa.int32() if types.is_time32(column.type) else pa.int64()))
    first, last = ends.as_py().values()
    return first is None or 0 <= first <= last < _DAY[column.type.unit]


def _ends_within(column: pa.Array) -> bool:
    """Return True if Python has the first and the last instant, and so all in between."""
    kind = column.type
    words = column.view(pa.int32() if types.is_date32(kind) else pa.int64())
    ends = pc.min_max(words).as_py()
    if ends["min"] is None:
        return True
    if types.is_timestamp(kind) and kind.unit == "ns":
        # These are the years 1677 to 2262. Python has all but the first instant, which pandas reads
        # as missing.
        return bool(ends["min"] > _NOT_A_TIME)
    try:
        pa.array([ends["min"], ends["max"]], words.type).view(kind).to_pylist()
    except ERRORS:
        return False
    return True
