"""Which Arrow type has the bytes that binary COPY wants for a Postgres type.

The encoder writes an Arrow type's own wire format, whatever the column is: int64 sent to int4 is
refused by the server as malformed. So the pair (Arrow type, Postgres type) decides to which Arrow
type a column is cast first. Nothing is cast that could change a value unseen: a float does not
become numeric, nor a time without zone one with a zone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.sinks.postgres.catalog import PostgresType
from onceflow.sinks.sql.values import is_text

DECIMAL_PRECISION_MAX = 38
"""Of decimal128, the widest that the encoder writes."""

_INTEGERS: dict[str, pa.DataType] = {"int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64()}
# Their receive functions take the text itself.
_TEXTS = frozenset({"text", "varchar", "bpchar", "citext", "json", "enum", "jsonb"})
# Types whose array elements the encoder announces under the right type.
_ELEMENTS = frozenset(
    {"int2", "int4", "int8", "float4", "float8", "bool", "text", "bytea", "numeric", "date"}
    | {"timestamp"}
)


@dataclass(frozen=True, slots=True)
class Wire:
    """How a column goes over the wire."""

    type: pa.DataType
    """What the encoder is given."""
    uuid_text: bool = False
    """The column is text and must be parsed into 16 bytes."""
    jsonb: bool = False
    """The encoder must write jsonb's version byte before each text."""


def wire_of(given: pa.DataType, target: PostgresType) -> Wire | None:
    """Return how a column of `given` goes into `target`; None when it cannot unchanged.

    `given` is a plain type: dictionaries, run-end encodings and extensions are decoded before.
    """
    if arrow.is_null(given):
        # Only nulls come, and a null has no bytes: any type that the encoder knows will do.
        return Wire(pa.int64())
    if target.element:
        return _list_wire(given, target)
    scalar = _scalar_wire(given, target)
    if scalar is not None:
        return Wire(scalar, jsonb=target.name == "jsonb")
    if target.name == "uuid" and is_text(given):
        return Wire(pa.binary(16), uuid_text=True)
    return None


def _list_wire(given: pa.DataType, target: PostgresType) -> Wire | None:
    is_list = arrow.is_list(given) or arrow.is_large_list(given) or arrow.is_fixed_size_list(given)
    if not is_list or target.element not in _ELEMENTS:
        return None
    element = _scalar_wire(given.value_type, PostgresType(target.element, target.shown))
    return None if element is None else Wire(pa.list_(element))


def _scalar_wire(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    name = target.name
    if name in _TEXTS:
        # Views have fewer compute functions than they need here.
        text = pa.large_string() if arrow.is_string_view(given) else given
        return text if is_text(given) else None
    if name == "bool":
        return given if arrow.is_boolean(given) else None
    if name in ("bytea", "uuid"):
        return _bytes_wire(given, name)
    return _number_wire(given, target) or _temporal_wire(given, name)


def _number_wire(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    name = target.name
    if name in _INTEGERS:
        return _INTEGERS[name] if arrow.is_integer(given) else None
    if name in ("float4", "float8"):
        return _float_wire(given, name)
    return _numeric_wire(given, target) if name == "numeric" else None


def _float_wire(given: pa.DataType, name: str) -> pa.DataType | None:
    bits = given.bit_width if arrow.is_integer(given) or arrow.is_floating(given) else None
    if bits is None:
        return None
    if name == "float8":
        # 53 bits of mantissa hold every 32-bit integer, and no 64-bit one surely.
        return pa.float64() if arrow.is_floating(given) or bits <= 32 else None
    return pa.float32() if bits <= (32 if arrow.is_floating(given) else 16) else None


def _bytes_wire(given: pa.DataType, name: str) -> pa.DataType | None:
    if name == "uuid":
        return given if arrow.is_fixed_size_binary(given) and given.byte_width == 16 else None
    if arrow.is_binary_view(given):
        return pa.large_binary()
    is_bytes = arrow.is_binary(given) or arrow.is_large_binary(given)
    return given if is_bytes or arrow.is_fixed_size_binary(given) else None


def _numeric_wire(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    if arrow.is_integer(given):
        digits, scale = (20 if given.bit_width == 64 else 10), 0
    elif arrow.is_decimal(given):
        digits, scale = given.precision - given.scale, given.scale
    else:
        return None
    if target.precision is not None and target.scale is not None:
        # Postgres rounds to the column's scale in silence, so what needs rounding is refused here.
        digits = min(digits, target.precision - target.scale)
        scale = min(scale, target.scale)
    precision = digits + scale
    return pa.decimal128(precision, scale) if 0 < precision <= DECIMAL_PRECISION_MAX else None


def _temporal_wire(given: pa.DataType, name: str) -> pa.DataType | None:
    if name == "date":
        return pa.date32() if arrow.is_date(given) else None
    if name == "timestamp":
        return pa.timestamp("us") if arrow.is_timestamp(given) and given.tz is None else None
    if name == "timestamptz":
        return pa.timestamp("us", given.tz) if arrow.is_timestamp(given) and given.tz else None
    if name == "time":
        return pa.time64("us") if arrow.is_time(given) else None
    if name == "interval":
        return pa.duration("us") if arrow.is_duration(given) else None
    return None
