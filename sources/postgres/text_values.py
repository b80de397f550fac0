"""The conversion of values from Postgres's text format to its binary format, each unchanged.

The stream sends values as text if a column of the table is read as text, and for types without a
binary format. The rest of the source then sees the same bytes as in the first copy. The texts are
those of a session with `TEXT_SETTINGS`, under which a text has every digit and one meaning.

Source: the output functions of PostgreSQL 18, src/backend/utils/adt.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from onceflow.clients.postgres.catalog import PostgresType

Encode: TypeAlias = Callable[[str], bytes]
"""A function that returns the binary form of a value's text."""

TEXT_SETTINGS: Mapping[str, str] = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
}
"""The settings of a session that reads texts: they do not depend on the server's own settings."""

_EPOCH = date(2000, 1, 1).toordinal()
_DAYS_1970_TO_2000 = 10_957
_DAY_US = 86_400_000_000
_INFINITE_DAYS = {"infinity": 2**31 - 1, "-infinity": -(2**31)}
_INFINITE_TIMES = {"infinity": 2**63 - 1, "-infinity": -(2**63)}
_INFINITE_INTERVALS = {
    "infinity": (2**63 - 1, 2**31 - 1, 2**31 - 1),
    "-infinity": (-(2**63), -(2**31), -(2**31)),
}
_INTERVAL = re.compile(
    r"(?:([+-]?\d+) years? ?)?(?:([+-]?\d+) mons? ?)?(?:([+-]?\d+) days? ?)?"
    r"(?:([+-]?)(\d+:\d\d:\d\d(?:\.\d+)?))?"
)
_NEGATIVE = 0x4000
_SPECIAL_NUMERICS = {"NaN": 0xC000, "Infinity": 0xD000, "-Infinity": 0xF000}
_BASE_DIGITS = 4
_NUMERIC_HEADER = struct.Struct("!HhHH")
_ARRAY_HEADER = struct.Struct("!iiI")
_ARRAY_DIMENSION = struct.Struct("!ii")
_NULL_LENGTH = b"\xff\xff\xff\xff"
# A quoted element, or one without quotes; the comma between two; or a brace.
_ARRAY_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|([{},])|([^{},"]+)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def binary_encoder(source: PostgresType) -> Encode:
    """Return the function for values of `source`, a type that has an Arrow form of its own."""
    if source.element:
        return partial(_encode_array, binary_encoder(source.element_type))
    return _ENCODERS.get(source.name, str.encode)


def _encode_whole(size_bytes: int, text: str) -> bytes:
    return int(text).to_bytes(size_bytes, "big", signed=True)


def _encode_real(text: str) -> bytes:
    # Arrow rounds once; Python would round to 64 bits before it rounds to 32.
    return struct.pack("!f", pa.scalar(text).cast(pa.float32()).as_py())


def _encode_double(text: str) -> bytes:
    return struct.pack("!d", float(text))


def _encode_boolean(text: str) -> bytes:
    return b"\1" if text == "t" else b"\0"


def _encode_jsonb(text: str) -> bytes:
    return b"\1" + text.encode()


def _encode_bytes(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("\\x"))


def _encode_uuid(text: str) -> bytes:
    return bytes.fromhex(text.replace("-", ""))


def _to_days(text: str) -> int:
    """Return the days from 2000-01-01 to a date such as `2026-11-29`; a year may be long."""
    if len(text) == len("2000-01-01"):
        return date.fromisoformat(text).toordinal() - _EPOCH
    return int(np.datetime64(text, "D").astype(np.int64)) - _DAYS_1970_TO_2000


def _era_to_days(text: str) -> int:
    """Return the days to a date that may end in BC. The year before 1 is 1 BC, which is 0."""
    if not text.endswith(" BC"):
        return _to_days(text)
    year, day = text.removesuffix(" BC").split("-", 1)
    return int(np.datetime64(f"{1 - int(year):05d}-{day}", "D").astype(np.int64)) - (
        _DAYS_1970_TO_2000
    )


def _to_microseconds(text: str) -> int:
    """Return the microseconds of a time such as `23:59:59.5`; hours may be many."""
    hours, minutes, seconds = text.split(":")
    whole, _, fraction = seconds.partition(".")
    seconds_count = (int(hours) * 60 + int(minutes)) * 60 + int(whole)
    return seconds_count * 1_000_000 + int(fraction.ljust(6, "0"))


def _encode_date(text: str) -> bytes:
    days = _INFINITE_DAYS.get(text)
    return struct.pack("!i", _era_to_days(text) if days is None else days)


def _encode_timestamp(text: str) -> bytes:
    microseconds = _INFINITE_TIMES.get(text)
    if microseconds is None:
        day, time, *era = text.split(" ")
        # The session's time zone is UTC.
        since_midnight = _to_microseconds(time.removesuffix("+00"))
        microseconds = _era_to_days(" ".join((day, *era))) * _DAY_US + since_midnight
    return struct.pack("!q", microseconds)


def _encode_time(text: str) -> bytes:
    return struct.pack("!q", _to_microseconds(text))


def _encode_interval(text: str) -> bytes:
    infinite = _INFINITE_INTERVALS.get(text)
    if infinite is not None:
        return struct.pack("!qii", *infinite)
    match = _INTERVAL.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no interval")
    years, months, days, sign, time = match.groups()
    microseconds = _to_microseconds(time) if time else 0
    return struct.pack(
        "!qii",
        -microseconds if sign == "-" else microseconds,
        int(days or 0),
        12 * int(years or 0) + int(months or 0),
    )


def _encode_numeric(text: str) -> bytes:
    special = _SPECIAL_NUMERICS.get(text)
    if special is not None:
        return _NUMERIC_HEADER.pack(0, 0, special, 0)
    whole, _, fraction = text.lstrip("-").partition(".")
    # Digits are in groups of four, counted from the point in both directions.
    whole = whole.zfill(-(-len(whole) // _BASE_DIGITS) * _BASE_DIGITS)
    padded = fraction.ljust(-(-len(fraction) // _BASE_DIGITS) * _BASE_DIGITS, "0")
    digits = whole + padded
    groups = [int(digits[at : at + _BASE_DIGITS]) for at in range(0, len(digits), _BASE_DIGITS)]
    sign = _NEGATIVE if text.startswith("-") else 0
    weight = len(whole) // _BASE_DIGITS - 1
    while groups and groups[-1] == 0:
        groups.pop()
    header = _NUMERIC_HEADER.pack(len(groups), weight, sign, len(fraction))
    return header + struct.pack(f"!{len(groups)}h", *groups)


def _encode_array(encode: Encode, text: str) -> bytes:
    """Return an array's binary form; the length of inner dimensions and element types are omitted.

    The conversion to Arrow refuses arrays of several dimensions, and reads no element type.
    """
    body = text[text.index("{") :]
    first = int(text[1 : text.index(":")]) if not text.startswith("{") else 1
    dimensions = len(body) - len(body.lstrip("{"))
    elements = _split_array(body)
    if not elements:
        return _ARRAY_HEADER.pack(0, 0, 0)
    data = [_ARRAY_HEADER.pack(dimensions, 0, 0), _ARRAY_DIMENSION.pack(len(elements), first)]
    for element in elements:
        if element is None:
            data.append(_NULL_LENGTH)
        else:
            encoded = encode(element)
            data += (struct.pack("!i", len(encoded)), encoded)
    return b"".join(data)


def _split_array(body: str) -> list[str | None]:
    """Return the elements of the text of an array, whatever its dimensions."""
    elements: list[str | None] = []
    for quoted, mark, plain in _ARRAY_TOKEN.findall(body):
        if plain:
            elements.append(None if plain == "NULL" else plain)
        elif not mark:
            elements.append(_ESCAPED.sub(r"\1", quoted))
    return elements


_ENCODERS: Mapping[str, Encode] = {
    "int2": partial(_encode_whole, 2),
    "int4": partial(_encode_whole, 4),
    "int8": partial(_encode_whole, 8),
    "float4": _encode_real,
    "float8": _encode_double,
    "numeric": _encode_numeric,
    "bool": _encode_boolean,
    "jsonb": _encode_jsonb,
    "bytea": _encode_bytes,
    "uuid": _encode_uuid,
    "date": _encode_date,
    "timestamp": _encode_timestamp,
    "timestamptz": _encode_timestamp,
    "time": _encode_time,
    "interval": _encode_interval,
}
