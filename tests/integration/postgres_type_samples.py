"""Values of every Arrow type for every Postgres type that takes it; shared by tests of both ways.

COPY carries inserts, arrays carry changes by key, and each has its own encoding.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
from typing import Any, cast

import psycopg
import pyarrow as pa

UTC = dt.timezone.utc
D = decimal.Decimal

TYPES = (
    "CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE DOMAIN cents AS int CHECK (VALUE >= 0); "
    "CREATE DOMAIN price AS numeric(6,2); CREATE DOMAIN net_price AS price NOT NULL DEFAULT 1"
)
"""What a database needs for `SAMPLES`."""

SAMPLES: list[tuple[str, pa.DataType, list[Any]]] = [
    ("smallint", pa.int8(), [-128, 127, None]),
    ("smallint", pa.int64(), [-32768, 32767]),
    ("smallint", pa.uint64(), [0, 32767]),
    ("integer", pa.int64(), [-(2**31), 2**31 - 1, None]),
    ("integer", pa.uint32(), [0, 2**31 - 1]),
    ("bigint", pa.int64(), [-(2**63), 2**63 - 1, None]),
    ("bigint", pa.int16(), [-5]),
    ("bigint", pa.uint64(), [2**63 - 1]),
    ("cents", pa.int64(), [0, 5, None]),
    ("real", pa.float32(), [1.5, -0.0, math.inf, None]),
    ("real", pa.float16(), [0.5]),
    ("double precision", pa.float64(), [1e308, -math.inf, None]),
    ("double precision", pa.float32(), [0.1]),
    ("double precision", pa.int32(), [2**31 - 1]),
    ("numeric", pa.decimal128(38, 10), [D("1234567890123456789012345678.0123456789"), None]),
    ("numeric", pa.decimal128(5, -2), [D("-12300")]),
    ("numeric", pa.uint64(), [2**64 - 1]),
    ("numeric", pa.int64(), [-(2**63)]),
    ("numeric", pa.decimal64(10, 3), [D("-1.250")]),
    ("numeric(10,2)", pa.decimal128(38, 18), [D("12345678.90"), D("-0.01")]),
    ("numeric(10,2)", pa.int64(), [99_999_999]),
    ("numeric(3,-2)", pa.decimal128(5, 0), [D("12300")]),
    ("numeric(3,5)", pa.decimal128(9, 5), [D("0.00123")]),
    ("price", pa.decimal128(10, 2), [D("9999.99"), None]),
    ("net_price", pa.int32(), [9999]),
    ("text", pa.string(), ["", "é€😀", None, "a\\b\tc\nd\"'"]),
    ("text", pa.large_string(), ["a", None]),
    ("text", pa.string_view(), ["a", "longer than twelve bytes", None]),
    ("varchar(3)", pa.string(), ["abc"]),
    ("char(3)", pa.string(), ["abc"]),
    ("mood", pa.string(), ["good", None, "bad"]),
    ("bytea", pa.binary(), [b"", b"\0\xff", None]),
    ("bytea", pa.large_binary(), [b"a"]),
    ("bytea", pa.binary_view(), [b"a", None]),
    ("bytea", pa.binary(3), [b"abc", None]),
    ("uuid", pa.string(), ["6ba7b810-9dad-11d1-80b4-00c04fd430c8", None]),
    ("uuid", pa.large_string(), ["6BA7B8109DAD11D180B400C04FD430C8"]),
    ("uuid", pa.binary(16), [uuid.UUID(int=7).bytes, None]),
    ("uuid", pa.uuid(), [uuid.UUID(int=2**128 - 1).bytes]),
    ("boolean", pa.bool_(), [True, False, None]),
    ("date", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    ("date", pa.date64(), [dt.date(2026, 2, 28)]),
    (
        "timestamp",
        pa.timestamp("us"),
        [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 1, 2, 3, 4)],
    ),
    ("timestamp", pa.timestamp("s"), [dt.datetime(2026, 1, 1), None]),
    ("timestamp", pa.timestamp("ns"), [dt.datetime(2026, 1, 1, 0, 0, 0, 1)]),
    ("timestamptz", pa.timestamp("ms", "UTC"), [dt.datetime(1969, 12, 31, 23, tzinfo=UTC), None]),
    ("timestamptz", pa.timestamp("us", "Asia/Tokyo"), [dt.datetime(2026, 1, 1, tzinfo=UTC)]),
    ("time", pa.time64("us"), [dt.time(23, 59, 59, 999_999), None]),
    ("time", pa.time32("s"), [dt.time(1, 2, 3)]),
    ("time", pa.time64("ns"), [dt.time(1, 2, 3, 4)]),
    ("interval", pa.duration("us"), [dt.timedelta(days=3, microseconds=1), None]),
    ("interval", pa.duration("s"), [dt.timedelta(seconds=-5)]),
    ("integer[]", pa.list_(pa.int64()), [[1, None], [], None]),
    ("text[]", pa.list_(pa.string()), [["a", None, ""], None]),
    ("double precision[]", pa.large_list(pa.float64()), [[1.5], [2.5]]),
    ("smallint[]", pa.list_(pa.int16(), 2), [[1, 2], [3, None]]),
    ("date[]", pa.list_(pa.date32()), [[dt.date(2026, 1, 1)]]),
    ("bigint", pa.null(), [None, None]),
    ("text", pa.null(), [None]),
]
"""Postgres type, Arrow type, values."""


def read(url: str) -> list[Any]:
    """Return column v of table t by n, times in UTC."""
    with psycopg.connect(url) as connection:
        connection.execute("SET timezone TO 'UTC'")
        return [row[0] for row in connection.execute("SELECT v FROM t ORDER BY n")]


def comparable(value: Any) -> object:
    """Make what psycopg and Arrow return alike, where they differ in form alone."""
    match value:
        case str():
            return value.replace("-", "").lower() if len(value) in (32, 36) else value
        case uuid.UUID():
            return value.hex
        case bytes() if len(value) == 16:
            return value.hex()
        case dt.datetime():
            return value if value.tzinfo is None else value.astimezone(UTC)
        case _:
            return cast("object", value)
