"""Python values of one column to one Arrow array, exactly or not at all.

Numbers go through `struct.pack`: it checks the range of each and costs 4 ns a value, a quarter of
`pa.array`. It knows no null; a column that has some takes the longer way.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import types

Convert: TypeAlias = Callable[[Sequence[Any]], pa.Array]

CONVERSION_ERRORS = (pa.ArrowException, ArithmeticError, ValueError, TypeError, struct.error)
"""What a value that does not fit its column raises."""

_EPOCH = dt.datetime(1970, 1, 1)
_EPOCH_UTC = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_PER_MICROSECOND = {"s": (1, 1_000_000), "ms": (1, 1000), "us": (1, 1), "ns": (1000, 1)}
"""Units in a microsecond, as a fraction."""


def converter_of(kind: pa.DataType) -> Convert:
    """Return what turns values into an array of `kind`, and raises for one that will not."""
    if types.is_timestamp(kind):
        return _timestamp_converter(kind)
    code = _pack_code(kind)
    if code is not None:
        return _packing_converter(kind, code)

    def convert(values: Sequence[Any]) -> pa.Array:
        return pa.array(values, type=kind)

    return convert


def _pack_code(kind: pa.DataType) -> str | None:
    if types.is_signed_integer(kind):
        return {8: "b", 16: "h", 32: "i", 64: "q"}[kind.bit_width]
    if types.is_unsigned_integer(kind):
        return {8: "B", 16: "H", 32: "I", 64: "Q"}[kind.bit_width]
    if types.is_float64(kind):
        return "d"
    return None


def _packing_converter(kind: pa.DataType, code: str) -> Convert:
    def convert(values: Sequence[Any]) -> pa.Array:
        count = len(values)
        try:
            packed = struct.pack(f"={count}{code}", *values)
        except struct.error:
            return pa.array(values, type=kind)
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(packed)], 0)

    return convert


def _timestamp_converter(kind: pa.DataType) -> Convert:
    numbers = _packing_converter(pa.int64(), "q")

    def convert(values: Sequence[Any]) -> pa.Array:
        found = set(map(type, values))
        found.discard(type(None))
        if found == {dt.datetime}:
            # Through microseconds: the cast refuses what a coarser unit would cut off.
            exact = pa.array(values, type=pa.timestamp("us", kind.tz))
            return exact.cast(kind, safe=True)
        if dt.datetime in found:
            values = [_in_unit(value, kind.unit) for value in values]
        return numbers(values).view(kind)

    return convert


def _in_unit(value: int | dt.datetime | None, unit: str) -> int | None:
    if not isinstance(value, dt.datetime):
        return value
    since = value - (_EPOCH if value.tzinfo is None else _EPOCH_UTC)
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    many, one = _PER_MICROSECOND[unit]
    found, rest = divmod(microseconds * many, one)
    if rest:
        raise ValueError(f"{value.isoformat()} is finer than the column's unit, {unit}")
    return found
