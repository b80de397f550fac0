"""The conversion of Arrow columns to a table's types, with errors that name the unfit value."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadRow
from onceflow.core.spi.bad_rows import quote_value

_FLOAT_BITS = 32
_MANTISSA_BITS_OF_DOUBLE = 53
_WIDEST_INTEGER_BITS = 64
NO_NEGATIVE_ZERO = "the column would store 0.0 instead; add 0.0 to the values before the sink"


def fit_column(column: pa.Array, wire: pa.DataType, *, name: str, target: str) -> pa.Array:
    """Return `column` as type `wire` with every value unchanged; `target` is the database's type.

    Raises:
        BadRow: A value cannot be written in that type without changing it; names the first one.
    """
    if column.type == wire:
        return column
    try:
        return cast_rows(column, wire)
    except pa.ArrowInvalid as error:
        if arrow.is_list(wire):
            # Name the single value in the error, not its list.
            fit_column(column.flatten(), wire.value_type, name=name, target=target)
        raise bad_row_at(column, _first_refused(column, wire), name=name, target=target) from error


def float_type(given: pa.DataType, *, mantissa_bits: int) -> pa.DataType | None:
    """Return the float type of 24 or 53 mantissa bits that holds all of `given`, or None."""
    if not (arrow.is_integer(given) or arrow.is_floating(given)):
        return None
    wide = mantissa_bits == _MANTISSA_BITS_OF_DOUBLE
    if arrow.is_floating(given):
        fits = wide or given.bit_width <= _FLOAT_BITS
    else:
        fits = given.bit_width < mantissa_bits
    return (pa.float64() if wide else pa.float32()) if fits else None


def decimal_digits(
    given: pa.DataType, precision: int | None, scale: int | None
) -> tuple[int, int] | None:
    """Return the digits before and after the point of values of `given`, or None for other types.

    Digits beyond the column's precision and scale are not counted. Servers round to the scale
    silently, so a value that needs rounding must be refused by the cast.
    """
    if arrow.is_integer(given):
        digits, decimals = (20 if given.bit_width == _WIDEST_INTEGER_BITS else 10), 0
    elif arrow.is_decimal(given):
        digits, decimals = given.precision - given.scale, given.scale
    else:
        return None
    if precision is not None and scale is not None:
        digits, decimals = min(digits, precision - scale), min(decimals, scale)
    return digits, decimals


def find_remainder(numbers: pa.Array, unit: int) -> pa.Array:
    """Return the remainder of each whole number divided by `unit`, with the sign of the number."""
    remainder: pa.Array = pc.subtract(numbers, pc.multiply(pc.divide(numbers, unit), unit))
    return remainder


def are_negative_zeros(floats: pa.Array) -> pa.Array:
    """Return for each value True if it is -0.0."""
    negative: pa.Array = pc.and_(pc.equal(floats, 0.0), pc.less(pc.divide(1.0, floats), 0.0))
    return negative


def bad_row_at(column: pa.Array, row: int, *, name: str, target: str, why: str = "") -> BadRow:
    """Return the error that names the value at `row` of `column`."""
    return BadRow(
        f"column {name!r}: the value {quote_value(column, row)} (row {row} of its batch) does "
        f"not fit the table's type {target}{why and f': {why}'}. Widen the column, or filter or "
        "cast the value before the sink"
    )


def _first_refused(column: pa.Array, wire: pa.DataType) -> int:
    """Return the index of the first value that a cast refuses, by halving the column.

    The error of a failed cast does not name the value.
    """
    first, count = 0, len(column)
    while count > 1:
        half = count // 2
        if _refuses(column.slice(first, half), wire):
            count = half
        else:
            first, count = first + half, count - half
    return first


def _refuses(column: pa.Array, wire: pa.DataType) -> bool:
    try:
        cast_rows(column, wire)
    except pa.ArrowInvalid:
        return True
    return False
