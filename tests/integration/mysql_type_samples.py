"""Values of every type that MySQL and MariaDB columns take, each with its Arrow type."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from typing import Any

import pyarrow as pa

UTC = dt.timezone.utc
D = decimal.Decimal

SAMPLES: list[tuple[str, pa.DataType, list[Any]]] = [
    ("tinyint", pa.int8(), [-128, 127, None]),
    ("tinyint", pa.int64(), [-128, 127]),
    ("tinyint(1)", pa.bool_(), [True, False, None]),
    ("tinyint unsigned", pa.uint8(), [0, 255]),
    ("smallint", pa.int16(), [-32768, 32767, None]),
    ("smallint unsigned", pa.uint16(), [0, 65535]),
    ("mediumint", pa.int32(), [-(2**23), 2**23 - 1]),
    ("mediumint unsigned", pa.int64(), [0, 2**24 - 1]),
    ("int", pa.int32(), [-(2**31), 2**31 - 1, None]),
    ("int", pa.uint64(), [0, 2**31 - 1]),
    ("int unsigned", pa.uint32(), [0, 2**32 - 1]),
    ("bigint", pa.int64(), [-(2**63), 2**63 - 1, None]),
    ("bigint unsigned", pa.uint64(), [0, 2**64 - 1, None]),
    ("bit(1)", pa.bool_(), [True, False, None]),
    ("bit(64)", pa.uint64(), [0, 2**64 - 1]),
    ("float", pa.float32(), [1.5, -2.0, 3.4028234663852886e38, None]),
    ("float", pa.float16(), [0.5]),
    ("float", pa.int16(), [-32768]),
    ("double", pa.float64(), [0.1, 1.7976931348623157e308, 5e-324, -1e22, None]),
    ("double", pa.float32(), [0.10000000149011612]),
    ("double", pa.int32(), [2**31 - 1]),
    ("double unsigned", pa.float64(), [0.25]),
    ("decimal(10,2)", pa.decimal128(38, 18), [D("12345678.90"), D("-0.01"), None]),
    ("decimal(10,2)", pa.int64(), [99_999_999]),
    ("decimal(20,0)", pa.uint64(), [2**64 - 1]),
    ("decimal(20,0)", pa.decimal128(5, -2), [D("-12300")]),
    ("decimal(65,30)", pa.decimal256(65, 30), [D("9" * 35 + "." + "9" * 30)]),
    ("decimal(38,12)", pa.decimal128(38, 12), [D("0.000000000001")]),
    ("char(3)", pa.string(), ["abc", "é€😀", None]),
    ("varchar(5)", pa.string(), ["", "a\\'\"b", "a   ", None]),
    ("varchar(9)", pa.large_string(), ["a\tb\nc\rd\0"]),
    ("tinytext", pa.string(), ["x" * 255]),
    ("text", pa.string_view(), ["a", "longer than twelve bytes 😀", None]),
    ("longtext", pa.string(), ["NULL", "\\N", "\x1a", "%s", None]),
    ("varchar(9) character set latin1", pa.string(), ["é", None]),
    ("varchar(9) character set utf8mb3", pa.string(), ["€"]),
    ("json", pa.string(), ['{"a": [1, null, "\\"\\u00e9"]}', "null", None]),
    ("enum('good','bad','it''s')", pa.string(), ["good", "it's", None]),
    ("binary(3)", pa.binary(3), [b"a\0\xff", None]),
    ("binary(3)", pa.binary(), [b"\\'\n"]),
    ("binary(16)", pa.uuid(), [uuid.UUID(int=2**128 - 1).bytes, None]),
    ("varbinary(4)", pa.binary(), [b"", b"\0\xff  ", None]),
    ("blob", pa.large_binary(), [bytes(range(256)), None]),
    ("longblob", pa.binary_view(), [b"x", None]),
    ("date", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    ("date", pa.date64(), [dt.date(2026, 2, 28)]),
    (
        "datetime(6)",
        pa.timestamp("us"),
        [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999_999), None],
    ),
    ("datetime", pa.timestamp("s"), [dt.datetime(2026, 1, 1, 12)]),
    ("datetime(3)", pa.timestamp("ns"), [dt.datetime(2026, 1, 1, 0, 0, 0, 123_000)]),
    ("datetime(6)", pa.timestamp("us", "Asia/Tokyo"), [dt.datetime(2026, 1, 1, tzinfo=UTC)]),
    (
        "timestamp(6) null",
        pa.timestamp("us", "UTC"),
        [
            dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
            dt.datetime(2038, 1, 19, 3, 14, 7, 999_999, tzinfo=UTC),
            None,
        ],
    ),
    (
        "timestamp null",
        pa.timestamp("ms", "America/New_York"),
        [dt.datetime(2026, 7, 1, 3, tzinfo=UTC)],
    ),
    ("time(6)", pa.time64("us"), [dt.time(23, 59, 59, 999_999), dt.time(0), None]),
    ("time", pa.time32("s"), [dt.time(1, 2, 3)]),
    ("time(6)", pa.time64("ns"), [dt.time(1, 2, 3, 4)]),
    ("int", pa.null(), [None, None]),
    ("blob", pa.null(), [None]),
]
