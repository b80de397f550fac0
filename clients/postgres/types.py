"""The Arrow type whose bytes binary COPY accepts for each Postgres type, and the checks of values.

The encoder writes an Arrow type's own wire format, whatever the column is. For example the server
refuses an int64 for an int4 column as malformed. So the pair (Arrow type, Postgres type) decides to
which Arrow type a column is converted. No conversion may silently change a value: a float is not
converted to numeric, and a time without a zone not to one with a zone.

Checked are only values that Postgres would refuse late, round silently or read as infinity, whole
columns at a time. Text is searched for NUL by memchr, and int64 for bigint is not checked at all.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.sql.tables import ColumnFit, Target
from onceflow.clients.sql.values import (
    decimal_digits,
    find_binary_fault,
    find_remainder,
    find_syntax_fault,
    float_type,
)
from onceflow.core.arrow.kinds import is_bytes, is_text

DECIMAL_PRECISION_MAX = 38
"""The digits of decimal128, the widest decimal that the encoder writes."""

_MANTISSA_BITS = {"float4": 24, "float8": 53}
_INTEGERS: dict[str, pa.DataType] = {"int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64()}
TEXT_FORMS = frozenset(
    {"numeric", "money", "bit", "varbit", "timetz", "inet", "cidr", "macaddr", "macaddr8", "char"}
    | {"name", "oid", "xid", "xid8", "cid", "tid", "pg_lsn", "pg_snapshot", "txid_snapshot"}
    | {"point", "line", "lseg", "box", "path", "polygon", "circle", "tsvector", "tsquery", "xml"}
    | {"jsonpath", "int4range", "int8range", "numrange", "tsrange", "tstzrange", "daterange"}
    | {"int4multirange", "int8multirange", "nummultirange", "tsmultirange", "tstzmultirange"}
    | {"datemultirange"}
)
"""The server's types without an exact Arrow type, whose text is exact. The text of types that are
in no list names an object of this one database, such as a table, or has no input function."""
# Types of PostGIS whose output functions write 15 digits of a number at most.
_ROUNDED_TEXTS = re.compile(r"(.+\.)?box[23]d(\[\])?")
# Types that also have an Arrow type. It lacks some of their values, such as infinite dates.
_TEMPORAL = frozenset({"date", "timestamp", "timestamptz", "time", "interval"})
# The forms that the output functions write. Another text could be rounded or cut by the input
# function, or depend on the session's settings. {fraction} stands for the digits of a second.
_DAY, _TIME = r"\d{4,}-\d\d-\d\d", r"\d\d:\d\d:\d\d{fraction}"
_ZONE = r"[+-]\d\d(:\d\d){0,2}"
# Postgres writes a sign behind a negative part. Under IntervalStyle = sql_standard, the server
# applies a leading minus to all parts if no other part has a sign.
_YEARS, _MONTHS, _DAYS = r"\d+ years? ?", r"\d+ mons? ?", r"\d+ days? ?"
_CLOCK = r"\d+:\d\d:\d\d{fraction}"
_PARTS = (_YEARS, _MONTHS, _DAYS, _CLOCK)


def _interval_pattern() -> str:
    """Return the pattern of an interval. Each branch begins with another part or sign."""
    branches = ["-?infinity"]
    for at, first in enumerate(_PARTS):
        later = _PARTS[at + 1 :]
        optional = "".join(f"([+-]?{part})?" for part in later)
        behind_minus = "|".join(
            rf"[+-]{part}" + "".join(f"([+-]?{each})?" for each in later[number + 1 :])
            for number, part in enumerate(later)
        )
        branches.append(rf"\+?{first}{optional}")
        branches.append(f"-{first}({behind_minus})?" if later else f"-{first}")
    return "|".join(branches)


_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "date": rf"{_DAY}( BC)?|-?infinity",
        "timestamp": rf"{_DAY} {_TIME}( BC)?|-?infinity",
        "timestamptz": rf"{_DAY} {_TIME}{_ZONE}( BC)?|-?infinity",
        "time": _TIME,
        "timetz": _TIME + _ZONE,
        "interval": _interval_pattern(),
        "money": r"-?\$\d{1,3}(,\d{3})*\.\d\d",
        "char": r"[\x01-\x7f]?|\\[0-7]{3}",
        "name": r"[\x01-\x7f]{0,63}",
        **dict.fromkeys(("oid", "xid", "cid", "xid8"), r"\d+"),
    }
)
# The receive functions of these types read the text itself.
_TEXTS = frozenset({"text", "varchar", "bpchar", "citext", "json", "enum", "jsonb"})
# The types of array elements that the encoder announces under the right type.
_ELEMENTS = frozenset(
    {"int2", "int4", "int8", "float4", "float8", "bool", "text", "bytea", "numeric", "date"}
    | {"timestamp"}
)
# Elements whose arrays are sent as the text of an array.
_TEXT_ELEMENTS = frozenset({"varchar", "bpchar", "citext", "json", "jsonb", "uuid"})
_TEMPORAL_ELEMENTS = frozenset({"timestamptz", "time"})

# The first day and microsecond of Postgres, 4714-11-24 BC, and the day after its last, counted from
# 1970. Its last microsecond is beyond Arrow's. Source: src/include/datatype/timestamp.h, PostgreSQL
# 12 to 18.
_DAY_FIRST = -2_440_588
_DAY_END = 2_145_042_906
_MICROSECOND_FIRST = -210_866_803_200_000_000
_WHOLE_UNITS = {3_600_000_000: "whole hours", 60_000_000: "whole minutes"}
_DAY_OF_YEAR_1, _DAY_OF_YEAR_10000, _DAY_US = -719_162, 2_932_897, 86_400_000_000
_OF_DATES = "Postgres has 4714-11-24 BC to 5874897-12-31"
_IN_ARRAY = "arrays take the years 1 to 9999"
_UUID_DIGITS = "[0-9a-fA-F]{32}"


def wire_of(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    """Return the type to which `given` is converted for `target`, or None if values change.

    `given` is a plain type: dictionaries, run-end encodings and extensions are already decoded.
    """
    if arrow.is_null(given):
        return given
    if is_text(given) and takes_text_form(target):
        # Views lack some compute functions that are needed here.
        return pa.large_string() if arrow.is_string_view(given) else given
    if target.element:
        return _list_wire(given, target)
    if target.name == "uuid" and is_text(given):
        return pa.binary(16)
    return _scalar_wire(given, target)


def is_plain_text(given: pa.DataType) -> bool:
    """Return True for a text type that is no view."""
    return is_text(given) and not arrow.is_string_view(given)


def takes_text_form(target: PostgresType) -> bool:
    """Return True if a text is stored in `target` by the type's input function, unchanged.

    An empty name is a type outside of the server's own schema: a composite type, a range, an array
    of these or of enums, or an extension's type, such as hstore or geometry.
    """
    if target.has_limited_parts:
        # The input function would round or cut parts to the limits without an error.
        return False
    if target.element:
        # The input function would round elements to the limits without an error.
        limits = (target.precision, target.length)
        has_limits = limits != (None, None) or target.unit_us != 1
        return not has_limits and has_exact_text(target)
    if target.name == "interval":
        return target.unit_us == 1
    if target.name == "numeric":
        return target.scale is None or target.scale >= 0
    if not target.name:
        return has_exact_text(target)
    return target.name in TEXT_FORMS or target.name in _TEMPORAL


def has_exact_text(source: PostgresType) -> bool:
    """Return True if the input function of `source` reads the text of each value back exactly."""
    name = source.element or source.name
    known = (TEXT_FORMS, _TEMPORAL, _TEXTS, _INTEGERS, _MANTISSA_BITS, ("bool", "bytea", "uuid"))
    if not source.name:
        return _ROUNDED_TEXTS.fullmatch(source.base) is None
    return any(name in names for names in known)


def _list_wire(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    is_list = arrow.is_list(given) or arrow.is_large_list(given) or arrow.is_fixed_size_list(given)
    if not is_list:
        return None
    if target.element in _TEXT_ELEMENTS:
        return pa.list_(given.value_type) if is_plain_text(given.value_type) else None
    if target.element not in (_ELEMENTS | _TEMPORAL_ELEMENTS):
        return None
    element = _scalar_wire(given.value_type, target.element_type)
    return None if element is None else pa.list_(element)


def _scalar_wire(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    name = target.name
    if name in _TEXTS:
        # Views lack some compute functions that are needed here.
        text = pa.large_string() if arrow.is_string_view(given) else given
        return text if is_text(given) else None
    if name == "bool":
        return given if arrow.is_boolean(given) else None
    if name in ("bytea", "uuid"):
        return _bytes_wire(given, name)
    return _number_wire(given, target) or _temporal_wire(given, target)


def _number_wire(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    name = target.name
    if name in _INTEGERS:
        return _INTEGERS[name] if arrow.is_integer(given) else None
    if name in _MANTISSA_BITS:
        return float_type(given, mantissa_bits=_MANTISSA_BITS[name])
    return _numeric_wire(given, target) if name == "numeric" else None


def _bytes_wire(given: pa.DataType, name: str) -> pa.DataType | None:
    if name == "uuid":
        return given if arrow.is_fixed_size_binary(given) and given.byte_width == 16 else None
    if arrow.is_binary_view(given):
        return pa.large_binary()
    return given if is_bytes(given) else None


def _numeric_wire(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    digits = decimal_digits(given, target.precision, target.scale)
    if digits is None:
        return None
    precision = sum(digits)
    return pa.decimal128(precision, digits[1]) if 0 < precision <= DECIMAL_PRECISION_MAX else None


def _temporal_wire(given: pa.DataType, target: PostgresType) -> pa.DataType | None:
    name = target.name
    if name == "date":
        return pa.date32() if arrow.is_date(given) else None
    if name == "timestamp":
        return pa.timestamp("us") if arrow.is_timestamp(given) and given.tz is None else None
    if name == "timestamptz":
        return pa.timestamp("us", given.tz) if arrow.is_timestamp(given) and given.tz else None
    if name == "time":
        return pa.time64("us") if arrow.is_time(given) else None
    if name == "interval":
        # The encoder writes only hours and smaller parts, and `interval day` keeps none of them.
        return pa.duration("us") if arrow.is_duration(given) and target.unit_us else None
    return None


@dataclass(frozen=True, slots=True)
class PostgresFit(ColumnFit):
    """A conversion of a column of a batch to the encoder's type for its table column."""

    type: PostgresType = field(kw_only=True)
    """The type of the table's column."""

    @override
    def takes(self, given: pa.DataType) -> bool:
        return wire_of(given, self.type) is not None

    @property
    def is_text_form(self) -> bool:
        """True if values are sent as texts that the type's input function reads."""
        return is_text(self.wire) and self.type.name not in _TEXTS

    @property
    def has_binary_form(self) -> bool:
        """True if the encoder writes the values in the column's own binary format."""
        element = self.type.element
        return not self.is_text_form and (not element or element in _ELEMENTS)

    @property
    def is_read_by_server(self) -> bool:
        """True if only the server knows which of the values it accepts."""
        kind = self.type
        # Elements of uuid[] are texts, of which no form is checked here.
        is_read = kind.has_constraints or kind.name == "enum" or kind.element == "uuid"
        return is_read or self.is_text_form or (kind.is_recoded and self._has_texts)

    @property
    def _has_texts(self) -> bool:
        parts = self.wire.value_type if arrow.is_list(self.wire) else self.wire
        return is_text(parts)

    @override
    def cast(self, given: pa.Array) -> pa.Array:
        if self.type.name == "uuid" and is_text(given.type):
            return self._parse_uuids(given)
        return super(PostgresFit, self).cast(given)

    @override
    def check(self, values: pa.Array) -> None:
        if arrow.is_list(values.type):
            elements = values.flatten()
            self._check_elements(elements)
            self._check_documents(elements)
        else:
            self._check_values(values)
            if is_text(values.type):
                self._check_length(values)
                self._check_last_spaces(values)
                self._check_text_form(values)
            self._check_documents(values)

    def _check_documents(self, values: pa.Array) -> None:
        find_fault = _DOCUMENT_FAULTS.get(self.type.element or self.type.name)
        if find_fault is not None and is_text(values.type) and not self.is_text_form:
            self.check_documents(values, find_fault)

    def _check_length(self, values: pa.Array) -> None:
        limit = self.type.length
        if limit is None:
            return
        longest = pc.max(pc.binary_length(values)).as_py()
        if longest is not None and longest > limit:
            self.refuse(values, pc.greater(pc.utf8_length(values), limit), f"over {limit} letters")

    def _check_text_form(self, values: pa.Array) -> None:
        """Refuse texts that the type's input function would round, cut or read by a setting."""
        pattern = _PATTERNS.get(self.type.name)
        digits = 7 - len(str(self.type.unit_us))
        fraction = rf"(\.\d{{1,{digits}}})?" if digits else ""
        if self.type.name == "numeric":
            pattern = _numeric_pattern(self.type.precision, self.type.scale)
        if pattern is not None:
            whole = f"^({pattern.replace('{fraction}', fraction)})$"
            fits = pc.match_substring_regex(values, whole)
            self.refuse(values, pc.invert(fits), "it is not a text that Postgres writes for it")

    def _check_elements(self, elements: pa.Array) -> None:
        self._check_values(elements)
        if is_text(elements.type):
            self._check_length(elements)
            self._check_last_spaces(elements)
        # Some arrays are sent as text, and Postgres cannot read Arrow's spelling of other years.
        if arrow.is_date32(elements.type):
            days = elements.view(pa.int32())
            self._check_range(elements, days, _DAY_OF_YEAR_1, _DAY_OF_YEAR_10000, _IN_ARRAY)
        elif arrow.is_timestamp(elements.type):
            microseconds = elements.view(pa.int64())
            first, end = _DAY_OF_YEAR_1 * _DAY_US, _DAY_OF_YEAR_10000 * _DAY_US
            self._check_range(elements, microseconds, first, end, _IN_ARRAY)

    def _check_last_spaces(self, values: pa.Array) -> None:
        """Refuse trailing spaces if the server pads with spaces, or ignores them in comparisons."""
        name = self.type.element or self.type.name
        if name == "bpchar" and (self.is_key or self.type.length is not None):
            last = pc.ends_with(values, " ")
            self.refuse(values, last, "the column drops or ignores trailing spaces")

    def _check_values(self, values: pa.Array) -> None:
        if is_text(values.type):
            if _may_hold_nul(values):
                self.refuse(values, pc.match_substring(values, "\0"), "Postgres stores no NUL")
        elif arrow.is_date32(values.type):
            self._check_range(values, values.view(pa.int32()), _DAY_FIRST, _DAY_END, _OF_DATES)
        elif arrow.is_timestamp(values.type):
            microseconds = values.view(pa.int64())
            self._check_range(values, microseconds, _MICROSECOND_FIRST, None, _OF_DATES)
            self._check_unit(values)
        elif arrow.is_time64(values.type) or arrow.is_duration(values.type):
            self._check_unit(values)

    def _check_unit(self, values: pa.Array) -> None:
        """Refuse times that the server would round to fewer digits or to other fields."""
        unit = self.type.unit_us
        if unit > 1:
            remainder = find_remainder(values.view(pa.int64()), unit)
            self.refuse(values, pc.not_equal(remainder, 0), f"it keeps {_unit_in_words(unit)}")

    def _check_range(
        self, values: pa.Array, numbers: pa.Array, first: int, end: int | None, years: str
    ) -> None:
        span = pc.min_max(numbers).as_py()
        if span["min"] is not None and span["min"] < first:
            self.refuse(values, pc.less(numbers, first), years)
        if end is not None and span["max"] is not None and span["max"] >= end:
            self.refuse(values, pc.greater_equal(numbers, end), years)

    def _parse_uuids(self, given: pa.Array) -> pa.Array:
        digits = pc.replace_substring(given, "-", "")
        self.refuse(given, pc.invert(pc.match_substring_regex(digits, f"^{_UUID_DIGITS}$")), "")
        self.require_one_form(given)
        filled = pc.fill_null(digits, "0" * 32)
        octets = pa.py_buffer(binascii.unhexlify("".join(filled.to_pylist())))
        every = pa.Array.from_buffers(pa.binary(16), len(given), [None, octets])
        result: pa.Array = pc.if_else(given.is_valid(), every, pa.scalar(None, pa.binary(16)))
        return result


def _numeric_pattern(precision: int | None, scale: int | None) -> str:
    """Return the pattern of the numbers that a numeric column of these limits keeps exactly."""
    if precision is None or scale is None:
        return r"-?\d+(\.\d*)?|NaN|-?Infinity"
    whole = rf"0*\d{{1,{precision - scale}}}" if precision > scale else "0+"
    zeros = max(0, scale - precision)
    fraction = rf"0{{0,{zeros}}}|0{{{zeros}}}\d{{0,{scale - zeros}}}"
    # A column with limits cannot keep an infinite number.
    return rf"-?{whole}(\.({fraction}))?|NaN"


def _unit_in_words(unit_us: int) -> str:
    return _WHOLE_UNITS.get(unit_us) or f"{6 - len(str(unit_us)) + 1} digits of a second"


_DOCUMENT_FAULTS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {"json": find_syntax_fault, "jsonb": find_binary_fault}
)


def fits_of(target: Target, names: Sequence[str] | None = None) -> tuple[PostgresFit, ...]:
    """Return the fits of `target`, or of the columns `names` in their order."""
    fits = target.fits if names is None else target.fits_of(names)
    return tuple(fit for fit in fits if isinstance(fit, PostgresFit))


def _may_hold_nul(values: pa.Array) -> bool:
    """Return True if the bytes of `values`, including those under nulls, contain a NUL."""
    _, offsets, data = values.buffers()
    if data is None or offsets is None or not len(values):
        return False
    width = np.int64 if arrow.is_large_string(values.type) else np.int32
    bounds = np.frombuffer(memoryview(offsets), dtype=width, count=values.offset + len(values) + 1)
    first, end = int(bounds[values.offset]), int(bounds[-1])
    return b"\0" in data.slice(first, end - first).to_pybytes()
