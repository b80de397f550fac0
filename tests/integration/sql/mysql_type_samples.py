"""Samples of values for each column type of MySQL and MariaDB, accepted and refused ones."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import json
import math
import uuid
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from tests.integration.sql.type_tables import Refused, Samples, TypeTables

UTC = dt.timezone.utc
D = decimal.Decimal

_NEGATIVE_ZERO = -0.0
"""A value that MariaDB does not have."""

_SAMPLES: Samples = [
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
    ("double", pa.float64(), [_NEGATIVE_ZERO, 1.0]),
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

_MISFITS: Refused = [
    ("int", pa.array([1, 2**31, 5], pa.int64()), "2147483648"),
    ("tinyint", pa.array([None, -129], pa.int64()), "-129"),
    ("mediumint", pa.array([2**23], pa.int64()), "8388608"),
    ("mediumint unsigned", pa.array([-1], pa.int64()), "-1"),
    ("int unsigned", pa.array([-1], pa.int64()), "-1"),
    ("bigint", pa.array([2**63], pa.uint64()), "9223372036854775808"),
    ("bigint unsigned", pa.array([-1], pa.int64()), "-1"),
    ("bit(3)", pa.array([8], pa.int64()), "8"),
    ("decimal(5,2)", pa.array([D("1.005")], pa.decimal128(10, 3)), "1.005"),
    ("decimal(5,2)", pa.array([D("1000.00")], pa.decimal128(10, 2)), "1000.00"),
    ("decimal(5,2)", pa.array([1, 1000], pa.int64()), "1000"),
    ("decimal(5,2) unsigned", pa.array([D("-0.01")], pa.decimal128(5, 2)), "-0.01"),
    ("float", pa.array([math.inf], pa.float32()), "inf"),
    ("double", pa.array([1.0, math.nan]), "nan"),
    ("double", pa.array([-math.inf]), "-inf"),
    ("double unsigned", pa.array([-0.5]), "-0.5"),
    ("varchar(3)", pa.array(["abc", "abcd"]), "abcd"),
    ("varchar(3)", pa.array(["abc "]), "abc "),
    ("char(3)", pa.array(["a "]), "a "),
    ("tinytext", pa.array(["é" * 128]), "é"),
    ("varchar(9) character set utf8mb3", pa.array(["€", "😀"]), "😀"),
    ("varchar(9) character set ascii", pa.array(["é"]), "é"),
    ("varchar(9) collate utf8mb4_bin not null", pa.array(["a", None]), "null|None"),
    ("enum('good','bad')", pa.array(["good", "Good"]), "Good"),
    ("enum('good','bad')", pa.array([""]), "''"),
    ("binary(3)", pa.array([b"ab"]), "b'ab'"),
    ("varbinary(3)", pa.array([b"abc", b"abcd"]), "b'abcd'"),
    ("date", pa.array([-719_163], pa.int32()).cast(pa.date32()), "0000-12-31|-719163"),
    ("date", pa.array([2_932_897], pa.int32()).cast(pa.date32()), "10000-01-01|2932897"),
    ("datetime(6)", pa.array([-(2**62)], pa.int64()).cast(pa.timestamp("us")), str(-(2**62))),
    ("datetime", pa.array([1], pa.int64()).cast(pa.timestamp("us")), "1970, 1, 1, 0, 0, 0, 1"),
    ("datetime(6)", pa.array([1], pa.int64()).cast(pa.timestamp("ns")), "00:00:00.000000001"),
    ("timestamp null", pa.array([0], pa.int64()).cast(pa.timestamp("us", "UTC")), "1970, 1, 1"),
    (
        "timestamp(6) null",
        pa.array([2_147_483_648], pa.int64()).cast(pa.timestamp("s", "UTC")),
        "2038, 1, 19, 3, 14, 8",
    ),
    ("time", pa.array([dt.time(0, 0, 0, 5)], pa.time64("us")), "5"),
]
_FORBIDDEN: Sequence[tuple[str, pa.DataType]] = [
    # A fraction would be rounded.
    ("int", pa.float64()),
    # Text would have to be parsed.
    ("int", pa.string()),
    # Numbers as text sort and compare differently.
    ("text", pa.int64()),
    # A value with more bits than the column has would be rounded.
    ("float", pa.float64()),
    ("float", pa.int32()),
    # FLOAT(M,D) silently rounds to D digits.
    ("float(7,2)", pa.float32()),
    # An integer above 2^53 would be rounded.
    ("double", pa.int64()),
    # A binary fraction has no decimal text of its own: digits would have to be chosen.
    ("decimal(10,2)", pa.float64()),
    # The session's zone would choose the instant.
    ("timestamp null", pa.timestamp("us")),
    # The time of day would be lost.
    ("date", pa.timestamp("us")),
    # TIME is taken as a time of day, not as a duration.
    ("time", pa.duration("us")),
    # The server changes years below 100, and 0.
    ("year", pa.int16()),
    # The server sorts the members of a set, and drops repeated ones.
    ("set('a','b')", pa.string()),
    # Text has no bytes of its own, and bytes have no text: an encoding would be chosen.
    ("blob", pa.string()),
    ("text", pa.binary()),
    # JSON is taken as text: a struct has several forms as JSON.
    ("json", pa.struct([("a", pa.int64())])),
    ("json", pa.map_(pa.string(), pa.string())),
    # MySQL has no arrays.
    ("int", pa.list_(pa.int32())),
    # Text would be parsed by rules of the server.
    ("point", pa.string()),
]

_CREATED: Sequence[tuple[pa.DataType, str]] = [
    (pa.int8(), "tinyint"),
    (pa.int16(), "smallint"),
    (pa.int32(), "int"),
    (pa.int64(), "bigint"),
    (pa.uint8(), "tinyint unsigned"),
    (pa.uint16(), "smallint unsigned"),
    (pa.uint32(), "int unsigned"),
    (pa.uint64(), "bigint unsigned"),
    (pa.float16(), "float"),
    (pa.float32(), "float"),
    (pa.float64(), "double"),
    (pa.decimal128(12, 3), "decimal(12,3)"),
    (pa.decimal128(5, -2), "decimal(7,0)"),
    (pa.decimal256(65, 30), "decimal(65,30)"),
    (pa.bool_(), "tinyint(1)"),
    (pa.string(), "longtext"),
    (pa.large_string(), "longtext"),
    (pa.string_view(), "longtext"),
    (pa.dictionary(pa.int32(), pa.string()), "longtext"),
    (pa.binary(), "longblob"),
    (pa.binary(16), "binary(16)"),
    (pa.binary(300), "longblob"),
    (pa.uuid(), "binary(16)"),
    (pa.date32(), "date"),
    (pa.date64(), "date"),
    (pa.timestamp("us"), "datetime(6)"),
    (pa.timestamp("ns", "UTC"), "timestamp(6)"),
    (pa.time64("us"), "time(6)"),
]

_KEYS: Sequence[tuple[str, pa.Array]] = [
    ("smallint", pa.array([2, 1, 2], pa.int64())),
    ("bigint unsigned", pa.array([2**64 - 1, 1, 2**64 - 1], pa.uint64())),
    ("varchar(5) collate utf8mb4_bin", pa.array(["é", "", "é"])),
    ("varchar(5) collate utf8mb4_bin", pa.array(["b", "B", "b"], pa.string_view())),
    ("char(5) collate utf8mb4_bin", pa.array(["b", "a", "b"])),
    ("binary(16)", pa.array([b"a" * 16, b"A" * 16, b"a" * 16], pa.binary(16))),
    ("varbinary(5)", pa.array([b"b", b"a", b"b"])),
    ("decimal(9,3)", pa.array(["2.5", "1", "2.5"]).cast(pa.decimal128(9, 2))),
    ("date", pa.array([2, 1, 2], pa.date32())),
    ("datetime(6)", pa.array([2, 1, 2], pa.timestamp("us"))),
    ("timestamp", pa.array([2, 1, 2], pa.timestamp("s", "UTC"))),
    ("tinyint(1)", pa.array([True, False, True])),
    ("time(6)", pa.array([2, 1, 2], pa.time64("us"))),
    ("time(3)", pa.array([2, 1, 2], pa.time32("ms"))),
    ("time", pa.array([2, 1, 2], pa.time32("s"))),
]

_FINITE = st.floats(allow_nan=False, allow_infinity=False).map(lambda one: one + 0.0)


def _comparable(value: Any) -> object:
    """Make what PyMySQL and Arrow return alike, where they differ in form alone."""
    match value:
        case bool():
            return int(value)
        case bytes():
            # BIT comes as the bytes of a number.
            return value.lstrip(b"\0").hex()
        case uuid.UUID():
            return value.bytes.hex()
        case dt.timedelta():
            return (dt.datetime.min + value).time()
        case dt.datetime():
            return value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        case str() if value.startswith(("{", "null")):
            return ("json", json.loads(value))
        case float():
            return decimal.Decimal(repr(value))
        case _:
            return value


MYSQL = TypeTables(
    samples=_SAMPLES,
    modes=("insert", "upsert"),
    comparable=_comparable,
    misfits=_MISFITS,
    refused_by_server=[
        ("json", pa.array(["[1]", "{"]), "JSON", "JSON"),
        ("varchar(9) character set latin1", pa.array(["日"]), "column.*v", "column.*v"),
        ("int check (v > 0)", pa.array([1, -1]), "t_chk_1", "t_chk_1"),
    ],
    forbidden=_FORBIDDEN,
    created=_CREATED,
    uncreated=[pa.duration("us"), pa.list_(pa.int64()), pa.decimal256(70, 2)],
    said_of_uncreated="no type is made from",
    keys=_KEYS,
    fuzzed={
        "i8": ("BIGINT", st.integers(-(2**63), 2**63 - 1), pa.int64()),
        "u8": ("BIGINT UNSIGNED", st.integers(0, 2**64 - 1), pa.uint64()),
        "t": ("LONGTEXT", st.text(st.characters(codec="utf-8")), pa.string()),
        "b": ("LONGBLOB", st.binary(), pa.binary()),
        "f": ("DOUBLE", _FINITE.filter(bool), pa.float64()),
        "d": ("DECIMAL(20,3)", st.decimals(-99999, 99999, places=3), pa.decimal128(20, 3)),
        "day": ("DATE", st.dates(dt.date(1, 1, 1)), pa.date32()),
        "ts": ("DATETIME(6)", st.datetimes(), pa.timestamp("us")),
    },
    fuzzes=15,
    shown_types=(
        "SELECT column_type FROM information_schema.columns WHERE table_schema = DATABASE() "
        "AND table_name = '{table}' ORDER BY ordinal_position"
    ),
    setup=("ALTER DATABASE CHARACTER SET utf8mb4",),
    # FLOAT is shown in six digits, and BIT as bytes.
    expressions={"float": "v + 0e0", "bit(1)": "v + 0", "bit(64)": "v + 0"},
)
MARIADB = dataclasses.replace(
    MYSQL,
    samples=[sample for sample in _SAMPLES if sample[2][0] is not _NEGATIVE_ZERO],
    misfits=[*_MISFITS, ("double", pa.array([-0.0]), "-0.0")],
    refused_by_server=[
        ("json", pa.array(["[1]", "{"]), "json_valid", "CONSTRAINT `t.v`"),
        ("varchar(9) character set latin1", pa.array(["日"]), "column.*v", "column.*v"),
        ("int check (v > 0)", pa.array([1, -1]), "CONSTRAINT", "CONSTRAINT"),
    ],
)
