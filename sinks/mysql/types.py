"""Which Arrow type a column is cast to before it is spelled for a column of MySQL or MariaDB.

Nothing is cast that could change a value unseen: a float does not become a decimal, nor a time
without zone an instant. An instant goes into TIMESTAMP as it is, and into DATETIME in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.sinks.mysql.catalog import TEXTS, MySQLType
from onceflow.sinks.sql.values import is_bytes, is_text

_INTEGERS: dict[str, tuple[pa.DataType, pa.DataType]] = {
    "tinyint": (pa.int8(), pa.uint8()),
    "smallint": (pa.int16(), pa.uint16()),
    "mediumint": (pa.int32(), pa.uint32()),
    "int": (pa.int32(), pa.uint32()),
    "bigint": (pa.int64(), pa.uint64()),
}
BINARIES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_DECIMAL128_PRECISION_MAX = 38


class Spelling(Enum):
    """How values are written in SQL and in files that are loaded."""

    NUMBER = "number"
    QUOTED = "quoted"
    """Text in which nothing needs escaping: decimals, dates and times."""
    TEXT = "text"
    HEX = "hex"
    BITS = "bits"


@dataclass(frozen=True, slots=True)
class Wire:
    """How a column goes over the wire."""

    type: pa.DataType
    spelling: Spelling


def wire_of(given: pa.DataType, target: MySQLType) -> Wire | None:
    """Return how a column of `given` goes into `target`; None when it cannot unchanged.

    `given` is a plain type: dictionaries, run-end encodings and extensions are decoded before.
    """
    if arrow.is_null(given):
        return Wire(pa.string(), Spelling.TEXT)
    name = target.name
    if name in TEXTS or name in ("json", "enum", "uuid"):
        return Wire(pa.large_string(), Spelling.TEXT) if is_text(given) else None
    if name in BINARIES:
        return Wire(pa.large_binary(), Spelling.HEX) if is_bytes(given) else None
    return _number_wire(given, target) or _temporal_wire(given, name)


def _number_wire(given: pa.DataType, target: MySQLType) -> Wire | None:
    name = target.name
    whole = arrow.is_integer(given) or arrow.is_boolean(given)
    if name in _INTEGERS:
        signed, unsigned = _INTEGERS[name]
        return Wire(unsigned if target.unsigned else signed, Spelling.NUMBER) if whole else None
    if name == "bit":
        return Wire(pa.uint64(), Spelling.BITS) if whole else None
    if name in ("float", "double"):
        found = _float_type(given, target)
        return None if found is None else Wire(found, Spelling.NUMBER)
    if name == "decimal":
        decimal = _decimal_type(given, target)
        return None if decimal is None else Wire(decimal, Spelling.QUOTED)
    return None


def _float_type(given: pa.DataType, target: MySQLType) -> pa.DataType | None:
    bits = given.bit_width if arrow.is_integer(given) or arrow.is_floating(given) else None
    # FLOAT(M,D) rounds to D digits in silence.
    if bits is None or target.scale is not None:
        return None
    if target.name == "double":
        # 53 bits of mantissa hold every 32-bit integer, and no 64-bit one surely.
        return pa.float64() if arrow.is_floating(given) or bits <= 32 else None
    return pa.float32() if bits <= (32 if arrow.is_floating(given) else 16) else None


def _decimal_type(given: pa.DataType, target: MySQLType) -> pa.DataType | None:
    if arrow.is_integer(given):
        digits, scale = (20 if given.bit_width == 64 else 10), 0
    elif arrow.is_decimal(given):
        # Never a negative scale: it would be spelled with an exponent.
        digits, scale = given.precision - given.scale, max(given.scale, 0)
    else:
        return None
    if target.precision is not None and target.scale is not None:
        # What needs rounding to the column's scale is refused here; the server rounds in silence.
        digits = min(digits, target.precision - target.scale)
        scale = min(scale, target.scale)
    precision = max(digits + scale, 1)
    if precision <= _DECIMAL128_PRECISION_MAX:
        return pa.decimal128(precision, scale)
    return pa.decimal256(precision, scale)


def _temporal_wire(given: pa.DataType, name: str) -> Wire | None:
    found: pa.DataType | None = None
    if name == "date" and arrow.is_date(given):
        found = pa.date32()
    elif arrow.is_timestamp(given) and (name == "datetime" or (name == "timestamp" and given.tz)):
        found = pa.timestamp("us", given.tz)
    elif name == "time" and arrow.is_time(given):
        found = pa.time64("us")
    return None if found is None else Wire(found, Spelling.QUOTED)
