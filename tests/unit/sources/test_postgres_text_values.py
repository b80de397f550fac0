"""A value's text becomes the bytes of its binary format: both are read as the same Arrow value."""

from __future__ import annotations

import struct
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from onceflow.clients.postgres.catalog import PostgresType
from onceflow.sources.postgres.columns import ValueRefused, converter_of, default_type
from onceflow.sources.postgres.text_values import binary_encoder


def _of(name: str, **limits: Any) -> PostgresType:
    return PostgresType(name, name, **limits)


_AMOUNT = _of("numeric", precision=10, scale=2)
_LONG = _of("numeric", precision=38, scale=10)


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (_of("int2"), "-32768", -(2**15)),
        (_of("int4"), "2147483647", 2**31 - 1),
        (_of("int8"), "-9223372036854775808", -(2**63)),
        (_of("float4"), "1e-45", 1.401298464324817e-45),
        (_of("float4"), "3.4028235e+38", 3.4028234663852886e38),
        (_of("float8"), "-Infinity", float("-inf")),
        (_of("float8"), "0.1", 0.1),
        (_of("bool"), "t", True),
        (_of("bool"), "f", False),
        (_of("text"), "ä€😀", "ä€😀"),
        (_of("bpchar", length=4), "ab  ", "ab"),
        (_of("jsonb"), '{"a": 1.0}', '{"a": 1.0}'),
        (_of("bytea"), "\\x00ff", b"\0\xff"),
        (_of("bytea"), "\\x", b""),
        (
            _of("uuid"),
            "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
            "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
        ),
        (_AMOUNT, "12345.67", Decimal("12345.67")),
        (_AMOUNT, "-0.01", Decimal("-0.01")),
        (_AMOUNT, "0.00", Decimal("0.00")),
        (_AMOUNT, "10000.00", Decimal("10000.00")),
        (_LONG, "1234567890123456789012345678.0123456789", Decimal(
            "1234567890123456789012345678.0123456789")),
        (_of("numeric", precision=3, scale=-2), "12300", Decimal(12300)),
        (_of("date"), "2000-01-01", date(2000, 1, 1)),
        (_of("date"), "0001-01-01", date(1, 1, 1)),
        (
            _of("timestamp"),
            "1999-12-31 23:59:59.999999",
            datetime(1999, 12, 31, 23, 59, 59, 999999),
        ),
        (_of("timestamp"), "0001-01-01 00:00:00", datetime(1, 1, 1)),
        (
            _of("timestamptz"),
            "2026-11-29 10:00:00.5+00",
            datetime(2026, 11, 29, 10, 0, 0, 500000, tzinfo=timezone.utc),
        ),
        (_of("time"), "23:59:59.999999", time(23, 59, 59, 999999)),
        (_of("interval"), "-05:00:00.000001", timedelta(hours=-5, microseconds=-1)),
        (_of("interval"), "100:00:00", timedelta(hours=100)),
        (_of("interval"), "00:00:00", timedelta()),
        (_of("_int4", element="int4"), "{1,NULL,-3}", [1, None, -3]),
        (_of("_int4", element="int4"), "{}", []),
        (_of("_text", element="text"), '{"",a,"NULL","a\\"b\\\\{,","é \n"}', [
            "", "a", "NULL", 'a"b\\{,', "é \n"]),
        (_of("_numeric", element="numeric", precision=5, scale=2), "{1.25}", [Decimal("1.25")]),
        (_of("_bytea", element="bytea"), '{"\\\\x00ff"}', [b"\0\xff"]),
        (_of("_timestamp", element="timestamp"), '{"2000-01-01 00:00:01"}', [
            datetime(2000, 1, 1, 0, 0, 1)]),
    ],
)  # fmt: skip
def test_a_text_is_read_as_the_same_value(
    source: PostgresType, text: str, expected: object
) -> None:
    given = default_type(source)
    assert given is not None
    convert = converter_of(source, given)
    assert convert is not None
    assert convert([binary_encoder(source)(text)]).to_pylist() == [expected]


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("4714-11-24 BC", -2_440_588),
        ("0001-12-31 BC", -719_163),
        ("0001-02-29 BC", -719_469),
        ("10000-01-01", 2_932_897),
        ("5874897-12-31", 2_145_042_905),
    ],
)
def test_a_date_outside_of_pythons_years_is_counted_by_the_calendar(text: str, days: int) -> None:
    convert = converter_of(_of("date"), pa.date32())
    assert convert is not None
    (read,) = convert([binary_encoder(_of("date"))(text)]).view(pa.int32()).to_pylist()
    assert read == days


@pytest.mark.parametrize(
    ("source", "text", "shown"),
    [
        (_AMOUNT, "NaN", "NaN"),
        (_AMOUNT, "-Infinity", "-Infinity"),
        (_AMOUNT, "1" + "0" * 131_071, "a number"),
        (_of("date"), "infinity", "infinity"),
        (_of("timestamp"), "-infinity", "-infinity"),
        (_of("timestamp"), "294276-12-31 23:59:59.999999", "after 2000"),
        (_of("time"), "24:00:00", "24:00:00"),
        (_of("interval"), "-1 years +2 mons -3 days", "-10 months -3 days"),
        (_of("interval"), "1 day 00:00:01", "0 months 1 days 1000000"),
        (_of("interval"), "infinity", "2147483647 months"),
        (_of("_int4", element="int4"), "{{1,2},{3,4}}", "2 dimensions"),
        (_of("_int4", element="int4"), "[0:1]={1,2}", "index 0"),
        (_of("_text", element="text"), '[-5:-5]={"]={x"}', "index -5"),
    ],
)
def test_a_text_without_an_arrow_value_is_refused_like_its_binary_value(
    source: PostgresType, text: str, shown: str
) -> None:
    given = default_type(source)
    assert given is not None
    convert = converter_of(source, given)
    assert convert is not None
    with pytest.raises(ValueRefused) as raised:
        convert([binary_encoder(source)(text)])
    assert shown in raised.value.shown


def test_a_double_keeps_the_sign_of_zero() -> None:
    assert binary_encoder(_of("float8"))("-0") == struct.pack("!d", -0.0)
    assert binary_encoder(_of("float4"))("-0") == struct.pack("!f", -0.0)
