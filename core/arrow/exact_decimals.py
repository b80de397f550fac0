"""Conversions of decimals that are exact or fail.

When Arrow changes a decimal's scale, it multiplies and divides by powers of ten without a check for
overflow: 35 digits read as decimal128(38, 10) become another number, and 9.99…9 with 76 digits
becomes 0. The same is true for its CSV reader, which does not check the precision either. The
functions here compute in 256 bits if no product can overflow, and otherwise in Python.

Invariant:
    each conversion in onceflow that changes a decimal's scale, precision or width uses this module
    (tests/unit/test_exact_conversions.py)
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.arrow.instants import values_inside

_WIDEST_DIGITS = 76
"""The maximum digits of decimal256, the widest type."""
_CAPACITY = {32: 9, 64: 18, 128: 38, 256: _WIDEST_DIGITS}
"""The maximum digits of a decimal, by its number of bits."""
_ANY_INTEGER = pa.decimal128(20)
"""A decimal type that holds every 64-bit integer."""
_ANY_WHOLE = pa.decimal256(_WIDEST_DIGITS, 0)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def decimals_from_python(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return Python decimals and integers as an array of decimal type `kind`; None becomes null.

    Raises:
        ArrowInvalid: `kind` does not hold a value exactly; names the value.
        ArrowTypeError: A value is neither a Decimal nor an integer.
    """
    bring_to_scale = _bring_to_scale(kind)
    scaled = [value if value is None else bring_to_scale(value) for value in values]
    if 0 <= kind.scale <= kind.precision:
        return pa.array(scaled, kind)
    # Arrow misreads other scales: read the unscaled integers, and relabel them as decimals.
    context = _context(_WIDEST_DIGITS)
    whole = [value if value is None else context.scaleb(value, kind.scale) for value in scaled]
    return _relabel(pa.array(whole, _same_width(kind, kind.precision, 0)), kind)


def check_python_decimal(value: Any, kind: pa.DataType) -> None:
    """Raise ArrowInvalid unless pyarrow itself converts `value` to the decimal type `kind` exactly.

    For values inside of lists, structs and maps. A value that `kind` holds is refused if it is
    written with more digits than fit into its width: pyarrow would read another number.
    """
    digits = _bring_to_scale(kind)(value).as_tuple().digits
    given = value if isinstance(value, Decimal) else Decimal(value)
    written, exponent = len(given.as_tuple().digits), cast("int", given.as_tuple().exponent)
    if max(len(digits), written + max(exponent, 0)) > _CAPACITY[kind.bit_width]:
        raise pa.ArrowInvalid(
            f"{value} is written with more digits than {kind} can be read from; give it without"
            " zeros at its end"
        )


def is_cast_here(have: pa.DataType, want: pa.DataType) -> bool:
    """Return True if `cast_decimals` converts plain values of type `have` to `want`."""
    if arrow.is_decimal(want):
        return bool(
            arrow.is_decimal(have)
            or arrow.is_integer(have)
            or arrow.is_string(have)
            or arrow.is_large_string(have)
        )
    return bool(arrow.is_decimal(have) and (arrow.is_integer(want) or arrow.is_floating(want)))


def cast_decimals(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column as an array of `kind`, from or to decimals; see `is_cast_here`.

    Text must be a number in decimal digits, with or without an exponent. Floats are rounded to the
    nearest value.

    Raises:
        ArrowInvalid: `kind` does not hold a value exactly, or a text is no number; names the value.
    """
    have = column.type
    if have == kind:
        return column
    if arrow.is_floating(kind):
        # Convert through text: Arrow's own cast multiplies, and every third result is off by one
        # step.
        return _write(column).cast(kind)
    if arrow.is_integer(kind):
        return (_rescale(column, _ANY_WHOLE) if have.scale < 0 else column).cast(kind)
    if arrow.is_decimal(have):
        return _rescale(column, kind)
    if arrow.is_integer(have):
        return _rescale(column.cast(_ANY_INTEGER), kind)
    return _parse(column, kind)


def check_decimals(before: pa.Array, after: pa.Array) -> None:
    """Raise ArrowInvalid unless `after`, cast from `before` by Arrow, holds the same decimals.

    Both may be nested. Names the value that differs.
    """
    before, after = _decode(before), _decode(after)
    have, want = before.type, after.type
    if is_cast_here(have, want):
        if not cast_decimals(before, want).equals(after):
            raise pa.ArrowInvalid(f"{want} does not hold a value of {have} exactly")
    elif arrow.is_struct(have) and arrow.is_struct(want):
        members = dict(
            zip([struct_field.name for struct_field in have], before.flatten(), strict=True)
        )
        for field, member in zip(want, after.flatten(), strict=True):
            if field.name in members:
                check_decimals(members[field.name], member)
    elif arrow.is_nested(have) and arrow.is_nested(want):
        for inner, other in zip(values_inside(before), values_inside(after), strict=False):
            check_decimals(inner, other)


def _decode(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if arrow.is_dictionary(column.type) else column


def _write(column: pa.Array) -> pa.Array:
    """Return decimals as text. Arrow does not support this for negative scales."""
    if column.type.scale >= 0:
        return column.cast(pa.string())
    return pa.array(
        [None if value is None else str(value) for value in column.to_pylist()], pa.string()
    )


def _rescale(column: pa.Array, kind: pa.DataType) -> pa.Array:
    have = column.type
    whole_digits = have.precision - have.scale
    if whole_digits <= kind.precision - kind.scale and have.scale <= kind.scale:
        # All values fit, and so do all intermediate products.
        return column.cast(kind)
    if max(whole_digits, 1) + max(have.scale, kind.scale) > _WIDEST_DIGITS or have.scale < 0:
        return decimals_from_python(column.to_pylist(), kind)
    wide = column.cast(pa.decimal256(_WIDEST_DIGITS, have.scale))
    if have.scale != kind.scale:
        wide = wide.cast(pa.decimal256(_WIDEST_DIGITS, kind.scale))
    return _narrow(wide, kind)


def _narrow(wide: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return decimals of 256 bits as `kind`, which has the same scale."""
    ends = cast("dict[str, Decimal | None]", pc.min_max(wide).as_py())
    limit = Decimal((0, (1,), kind.precision - kind.scale))
    for end in ends.values():
        if end is not None and not -limit < end < limit:
            raise pa.ArrowInvalid(f"{end} has more digits before the point than {kind} holds")
    return wide.cast(kind)


def _parse(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    length_max = pc.max(pc.binary_length(texts)).as_py() or 0
    has_exponent: Any = pc.match_substring(texts, "e", ignore_case=True)
    is_short = 0 <= kind.scale <= _WIDEST_DIGITS - length_max
    if is_short and pc.any(has_exponent).as_py() is not True:
        return _narrow(texts.cast(pa.decimal256(_WIDEST_DIGITS, kind.scale)), kind)
    return decimals_from_python(list(map(_read_number, texts.to_pylist())), kind)


def _read_number(text: str | None) -> Decimal | None:
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise pa.ArrowInvalid(f"{text!r} is not a number in decimal digits")
    try:
        return Decimal(text)
    except decimal.InvalidOperation:  # an exponent beyond Python's limits
        raise pa.ArrowInvalid(f"{text!r} is beyond what any decimal holds") from None


def _context(digits: int) -> decimal.Context:
    return decimal.Context(
        prec=digits,
        Emin=decimal.MIN_EMIN,
        Emax=decimal.MAX_EMAX,
        traps=[decimal.Inexact, decimal.InvalidOperation],
    )


@lru_cache(maxsize=1024)
def _bring_to_scale(kind: pa.DataType) -> Callable[[Any], Decimal]:
    """Return a function that returns a number with the scale of `kind`.

    The function raises ArrowInvalid for a number that `kind` does not hold.
    """
    quantize, unit = _context(kind.precision).quantize, Decimal((0, (1,), -kind.scale))

    def bring_to_scale(value: Any) -> Decimal:
        if not isinstance(value, (Decimal, int)) or isinstance(value, bool):
            raise pa.ArrowTypeError(
                f"int or Decimal object expected, got {type(value).__name__}: {value!r}"
            )
        try:
            scaled = quantize(value, unit)
        except decimal.Inexact:
            raise pa.ArrowInvalid(
                f"{value} has more digits behind the point than {kind} holds; round it first"
            ) from None
        except decimal.InvalidOperation:
            raise pa.ArrowInvalid(f"{value} is not a number that {kind} holds") from None
        return scaled

    return bring_to_scale


def _same_width(kind: pa.DataType, precision: int, scale: int) -> pa.DataType:
    makers: dict[int, Callable[[int, int], pa.DataType]] = {
        32: pa.decimal32,
        64: pa.decimal64,
        128: pa.decimal128,
        256: pa.decimal256,
    }
    return makers[kind.bit_width](precision, scale)


def _relabel(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the unscaled integers of `column` as decimals of `kind`, without a copy."""
    return pa.Array.from_buffers(
        kind, len(column), column.buffers(), column.null_count, column.offset
    )
