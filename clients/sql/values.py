"""The conversion of Arrow columns to a table's types, and the checks of JSON documents.

Errors name the unfit value.

Postgres' jsonb and MySQL's json store the parsed document and not its text. If an object has a key
twice, both keep the last value. MySQL turns each number that is not a 64-bit integer into a double.
A document that is refused only after its rows are decided would stop all later commits, so every
document is parsed before it is sent.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any, cast

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


_INTEGER_MIN, _INTEGER_MAX = -(2**63), 2**64 - 1
_INTEGER_LETTERS_MAX = 20
"""The length of the longest 64-bit integer. Longer texts need not be parsed as integers."""
_NUMERIC_DIGITS_MAX, _NUMERIC_DIGITS_BEHIND_MAX = 131_072, 16_383
"""Source: PostgreSQL 18 documentation, 8.1.2. A number outside of these limits fails its
statement."""


class _Refused(ValueError):
    """Raised while a document is parsed; the text says why."""


def find_syntax_fault(text: str) -> str | None:
    """Return why `text` is not a JSON document, or None if it is one."""
    return _find_fault(_CHECKS_SYNTAX, text)


def find_binary_fault(text: str) -> str | None:
    """Return why Postgres' jsonb would change `text`, or None if it would not."""
    fault = _find_fault(_CHECKS_KEYS, text)
    if fault is None and "\\u" in text:
        return _find_escape_fault(text)
    return fault


def find_double_fault(text: str) -> str | None:
    """Return why MySQL's json would change `text`, or None if it would not."""
    return _find_fault(_CHECKS_KEYS_AND_NUMBERS, text)


def _find_fault(decoder: json.JSONDecoder, text: str) -> str | None:
    try:
        decoder.decode(text)
    except _Refused as fault:
        return str(fault)
    except json.JSONDecodeError as error:
        return f"it is not JSON: {error.msg} at character {error.pos}"
    except RecursionError:
        return "its arrays and objects are nested too deeply"
    return None


def _find_escape_fault(text: str) -> str | None:
    """Return why jsonb, which stores UTF-8 without NUL, cannot store an escape, or None."""
    for part in _texts_in(json.loads(text)):
        if "\0" in part:
            return "it holds \\u0000, and Postgres stores no NUL"
        if not part.isascii() and any("\ud800" <= letter <= "\udfff" for letter in part):
            return "it contains half of a surrogate pair"
    return None


def _texts_in(document: Any) -> list[str]:
    waiting, texts = [document], list[str]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            texts += part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return texts


def _require_single_keys(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _Refused(f"an object has the key {key!r} twice, but the column keeps only one")
        seen.add(key)


def _require_exact_float(text: str) -> None:
    """Raise _Refused unless the nearest double equals the number."""
    nearest = float(text)
    if nearest in (float("inf"), float("-inf")) or Decimal(repr(nearest)) != Decimal(text):
        raise _Refused(
            f"the column would store the double {nearest!r} instead of the number {text[:80]}"
        )


def _require_exact_integer(text: str) -> None:
    if len(text) > _INTEGER_LETTERS_MAX or not _INTEGER_MIN <= int(text) <= _INTEGER_MAX:
        _require_exact_float(text)


def _require_numeric(text: str) -> None:
    """Raise _Refused unless Postgres' numeric, jsonb's type of numbers, can hold the number."""
    if len(text) <= _NUMERIC_DIGITS_BEHIND_MAX and "e" not in text and "E" not in text:
        return
    try:
        number = Decimal(text)
    except InvalidOperation:  # an exponent beyond Python's limit
        raise _Refused(f"Postgres' numeric does not hold {text[:80]}") from None
    digits_behind = -cast("int", number.as_tuple().exponent)
    if number.adjusted() >= _NUMERIC_DIGITS_MAX or digits_behind > _NUMERIC_DIGITS_BEHIND_MAX:
        raise _Refused(
            f"Postgres' numeric has up to {_NUMERIC_DIGITS_MAX} digits before the point and"
            f" {_NUMERIC_DIGITS_BEHIND_MAX} after it, and cannot hold {text[:80]}"
        )


def _refuse_constant(name: str) -> None:
    raise _Refused(f"it is not JSON: {name} is not a JSON number")


_CHECKS_SYNTAX = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refuse_constant)
_CHECKS_KEYS = json.JSONDecoder(
    object_pairs_hook=_require_single_keys,
    parse_float=_require_numeric,
    parse_int=_require_numeric,
    parse_constant=_refuse_constant,
)
_CHECKS_KEYS_AND_NUMBERS = json.JSONDecoder(
    object_pairs_hook=_require_single_keys,
    parse_float=_require_exact_float,
    parse_int=_require_exact_integer,
    parse_constant=_refuse_constant,
)
