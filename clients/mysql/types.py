"""The Arrow type to which a column is converted for MySQL or MariaDB, and the checks of values.

No conversion may silently change a value: a float is not converted to a decimal, and a time without
a zone not to an instant. An instant goes into TIMESTAMP unchanged, and into DATETIME in UTC. The
checks refuse values that the server would cut, round, pad, replace by a default or refuse late.
They check whole columns at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.clients.mysql.catalog import CHARSET, TEXTS, MySQLType
from onceflow.clients.sql.tables import ColumnFit, Target
from onceflow.clients.sql.values import (
    NO_NEGATIVE_ZERO,
    are_negative_zeros,
    decimal_digits,
    find_double_fault,
    find_remainder,
    float_type,
)
from onceflow.core.arrow.kinds import cast_rows, is_bytes, is_text

_INTEGERS: dict[str, tuple[pa.DataType, pa.DataType]] = {
    "tinyint": (pa.int8(), pa.uint8()),
    "smallint": (pa.int16(), pa.uint16()),
    "mediumint": (pa.int32(), pa.uint32()),
    "int": (pa.int32(), pa.uint32()),
    "bigint": (pa.int64(), pa.uint64()),
}
_MANTISSA_BITS = {"float": 24, "double": 53}
BINARIES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_DECIMAL128_PRECISION_MAX = 38

# Days and microseconds from 1970. MySQL uses year 0 for invalid dates.
_DAY_FIRST, _DAY_LAST = -719_162, 2_932_896
_MICROSECOND_FIRST, _MICROSECOND_LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
# 0 is the zero date, and seconds have 32 bits. MariaDB 11.5 allows later instants, which are not
# used here.
_INSTANT_FIRST, _INSTANT_LAST = 1_000_000, 2_147_483_647_999_999
_MEDIUMINT: Mapping[bool, tuple[int, int]] = MappingProxyType(
    {True: (0, 2**24 - 1), False: (-(2**23), 2**23 - 1)}
)
_WITHOUT_WIDE = frozenset({"utf8mb3", "utf8"})
CHECKED_CHARSETS = frozenset({"", CHARSET, "ascii"}) | _WITHOUT_WIDE
"""The charsets whose characters are known here; another one is the server's to judge."""
_MICROSECOND_DIGITS = 6
_UUID = "^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}$"


class Spelling(Enum):
    """The form of values in SQL and in loaded files."""

    NUMBER = "number"
    QUOTED = "quoted"
    """A text in which nothing needs escaping: decimals, dates and times."""
    TEXT = "text"
    HEX = "hex"
    BITS = "bits"


def spelling_of(wire: pa.DataType, target: MySQLType) -> Spelling:
    """Return the spelling of values of `wire`, which `wire_of` returned, for `target`."""
    if arrow.is_large_string(wire):
        return Spelling.TEXT
    if arrow.is_large_binary(wire):
        return Spelling.HEX
    if arrow.is_integer(wire) or arrow.is_floating(wire):
        return Spelling.BITS if target.name == "bit" else Spelling.NUMBER
    return Spelling.QUOTED


def wire_of(given: pa.DataType, target: MySQLType) -> pa.DataType | None:
    """Return the type to which `given` is converted for `target`, or None if values change.

    `given` is a plain type: dictionaries, run-end encodings and extensions are already decoded.
    """
    if arrow.is_null(given):
        return given
    name = target.name
    if name in TEXTS or name in ("json", "enum", "uuid"):
        return pa.large_string() if is_text(given) else None
    if name in BINARIES:
        return pa.large_binary() if is_bytes(given) else None
    return _number_wire(given, target) or _temporal_wire(given, name)


def _number_wire(given: pa.DataType, target: MySQLType) -> pa.DataType | None:
    name = target.name
    whole = arrow.is_integer(given) or arrow.is_boolean(given)
    if name in _INTEGERS:
        signed, unsigned = _INTEGERS[name]
        return (unsigned if target.unsigned else signed) if whole else None
    if name == "bit":
        return pa.uint64() if whole else None
    if name in _MANTISSA_BITS:
        # FLOAT(M,D) silently rounds to D digits.
        rounds = target.scale is not None
        return None if rounds else float_type(given, mantissa_bits=_MANTISSA_BITS[name])
    return _decimal_type(given, target) if name == "decimal" else None


def _decimal_type(given: pa.DataType, target: MySQLType) -> pa.DataType | None:
    decimal = decimal_digits(given, target.precision, target.scale)
    if decimal is None:
        return None
    # The scale is not negative, because such a decimal would be formatted with an exponent.
    digits, scale = decimal[0], max(decimal[1], 0)
    # Arrow cannot make a zero of a type with fewer digits than its scale.
    precision = max(digits + scale, scale, 1)
    if precision <= _DECIMAL128_PRECISION_MAX:
        return pa.decimal128(precision, scale)
    return pa.decimal256(precision, scale)


def _temporal_wire(given: pa.DataType, name: str) -> pa.DataType | None:
    if name == "date" and arrow.is_date(given):
        return pa.date32()
    if arrow.is_timestamp(given) and (name == "datetime" or (name == "timestamp" and given.tz)):
        return pa.timestamp("us", given.tz)
    return pa.time64("us") if name == "time" and arrow.is_time(given) else None


@dataclass(frozen=True, slots=True)
class MySQLFit(ColumnFit):
    """A conversion of a column of a batch to the form that is written for its table column."""

    type: MySQLType = field(kw_only=True)
    """The type of the table's column."""

    @property
    def spelling(self) -> Spelling:
        """The form in which the values are written."""
        return spelling_of(self.wire, self.type)

    @override
    def takes(self, given: pa.DataType) -> bool:
        return wire_of(given, self.type) is not None

    @override
    def check(self, values: pa.Array) -> None:
        checked = _CHECKS.get(self.type.name)
        if checked is not None:
            checked(self, values)

    def check_decimal(self, values: pa.Array) -> None:
        """Refuse negative values if the column is UNSIGNED."""
        if self.type.unsigned:
            self.refuse(values, pc.less(values, pa.scalar(Decimal(0), values.type)), "below zero")

    def check_float(self, values: pa.Array) -> None:
        """Refuse NaN, infinity, and negative values that the column cannot store."""
        self.refuse(values, pc.invert(pc.is_finite(values)), "it stores neither NaN nor infinity")
        if not self.type.has_negative_zero:
            self.refuse(values, are_negative_zeros(values), NO_NEGATIVE_ZERO)
        if self.type.unsigned:
            self.refuse(values, pc.less(values, 0), "below zero")

    def check_mediumint(self, values: pa.Array) -> None:
        """Refuse values of more than 24 bits."""
        self._check_range(values, values, *_MEDIUMINT[self.type.unsigned])

    def check_bits(self, values: pa.Array) -> None:
        """Refuse values with more bits than the column."""
        bits = self.type.precision or 1
        self._check_range(values, values, 0, 2**bits - 1)

    def check_date(self, values: pa.Array) -> None:
        """Refuse days outside the years 1 to 9999."""
        self._check_range(values, values.view(pa.int32()), _DAY_FIRST, _DAY_LAST)

    def check_datetime(self, values: pa.Array) -> None:
        """Refuse times outside the years 1 to 9999, and times that the server would round."""
        self._check_range(values, values.view(pa.int64()), _MICROSECOND_FIRST, _MICROSECOND_LAST)
        self._check_fraction(values)

    def check_timestamp(self, values: pa.Array) -> None:
        """Refuse instants outside 1970 to 2038, and instants that the server would round."""
        self._check_range(values, values.view(pa.int64()), _INSTANT_FIRST, _INSTANT_LAST)
        self._check_fraction(values)

    def check_time(self, values: pa.Array) -> None:
        """Refuse times of day that the server would round."""
        self._check_fraction(values)

    def check_text(self, values: pa.Array) -> None:
        """Refuse texts that are too long, would lose last spaces, or are outside the charset."""
        kind = self.type
        lengths = pc.binary_length(values)
        longest = pc.max(lengths).as_py()
        if kind.length is not None and longest > kind.length:
            over = pc.greater(pc.utf8_length(values), kind.length)
            self.refuse(values, over, f"over {kind.length} letters")
        if kind.octets is not None and longest > kind.octets:
            self.refuse(values, pc.greater(lengths, kind.octets), f"over {kind.octets} bytes")
        if kind.name == "char" or (self.is_key and _pads(kind.collation)):
            last = pc.ends_with(values, " ")
            self.refuse(values, last, "the column drops or ignores trailing spaces")
        if kind.charset in _WITHOUT_WIDE:
            wide = pc.match_substring_regex(values, "[\\x{10000}-\\x{10FFFF}]")
            self.refuse(values, wide, f"{kind.charset} has only characters of up to 3 bytes")
        elif kind.charset == "ascii":
            self.refuse(values, pc.invert(pc.string_is_ascii(values)), "its charset is ascii")

    def check_enum(self, values: pa.Array) -> None:
        """Refuse texts that are not exactly a member."""
        members = pa.array(list(self.type.members), values.type)
        foreign = pc.and_(pc.invert(pc.is_in(values, members)), values.is_valid())
        self.refuse(values, foreign, "it equals none of the members of the type")

    def check_uuid(self, values: pa.Array) -> None:
        """Refuse texts that are not a UUID.

        If the column is part of a key, also refuse UUIDs in another spelling than the server's.
        """
        self.refuse(
            values,
            pc.invert(pc.match_substring_regex(values, _UUID)),
            "it is not a UUID, such as 123e4567-e89b-12d3-a456-426614174000",
        )
        self.require_one_form(values)

    def check_json(self, values: pa.Array) -> None:
        """Refuse texts that are no JSON, and documents that lose a key or digits when parsed."""
        self.check_documents(values, find_double_fault)

    def check_bytes(self, values: pa.Array) -> None:
        """Refuse values that are too long, or would be padded."""
        limit = self.type.length
        if limit is None:
            return
        lengths = pc.binary_length(values)
        if self.type.name == "binary":
            self.refuse(values, pc.not_equal(lengths, limit), f"it must have {limit} bytes")
        self.refuse(values, pc.greater(lengths, limit), f"over {limit} bytes")

    def _check_fraction(self, values: pa.Array) -> None:
        digits = self.type.fraction_digits
        if digits >= _MICROSECOND_DIGITS:
            return
        unit = 10 ** (_MICROSECOND_DIGITS - digits)
        remainder = find_remainder(values.view(pa.int64()), unit)
        self.refuse(
            values, pc.not_equal(remainder, 0), f"the column keeps {digits} digits of a second"
        )

    def _check_range(self, values: pa.Array, numbers: pa.Array, first: int, last: int) -> None:
        span = pc.min_max(numbers).as_py()
        if span["min"] < first or span["max"] > last:
            low = pc.less(numbers, pa.scalar(first, numbers.type))
            # Compare in a wider type: a bound may be beyond the range of the type itself.
            wide = pa.decimal128(20)
            high = pc.greater(cast_rows(numbers, wide), pa.scalar(last, wide))
            self.refuse(values, pc.or_(low, high), "out of its range")


def fits_of(target: Target, names: Sequence[str] | None = None) -> tuple[MySQLFit, ...]:
    """Return the fits of `target`, or of the columns `names` in their order."""
    fits = target.fits if names is None else target.fits_of(names)
    return tuple(fit for fit in fits if isinstance(fit, MySQLFit))


def _pads(collation: str) -> bool:
    """Return True if a collation ignores trailing spaces in comparisons."""
    return not ("_nopad_" in collation or "_0900_" in collation or collation == "binary")


_CHECKS: Mapping[str, Callable[[MySQLFit, pa.Array], None]] = MappingProxyType(
    {
        **dict.fromkeys(sorted(TEXTS), MySQLFit.check_text),
        **dict.fromkeys(
            ("binary", "varbinary", "tinyblob", "blob", "mediumblob"), MySQLFit.check_bytes
        ),
        "float": MySQLFit.check_float,
        "double": MySQLFit.check_float,
        "decimal": MySQLFit.check_decimal,
        "mediumint": MySQLFit.check_mediumint,
        "bit": MySQLFit.check_bits,
        "date": MySQLFit.check_date,
        "datetime": MySQLFit.check_datetime,
        "timestamp": MySQLFit.check_timestamp,
        "time": MySQLFit.check_time,
        "enum": MySQLFit.check_enum,
        "json": MySQLFit.check_json,
        "uuid": MySQLFit.check_uuid,
    }
)
