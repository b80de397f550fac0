"""Samples of values for each column type of Postgres, accepted and refused ones."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
from hypothesis import strategies as st
from tests.integration.sql.type_tables import Refused, Samples, TypeTables

UTC = dt.timezone.utc
D = decimal.Decimal

TYPES = (
    "CREATE TYPE mood AS ENUM ('good', 'bad')",
    "CREATE DOMAIN cents AS int CHECK (VALUE >= 0)",
    "CREATE DOMAIN price AS numeric(6,2)",
    "CREATE DOMAIN net_price AS price NOT NULL DEFAULT 1",
)
"""What a database needs for types that are not built in."""

_SAMPLES: Samples = [
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
    ("varchar(3)[]", pa.list_(pa.string()), [["abc", None], []]),
    ("time[]", pa.list_(pa.time64("us")), [[dt.time(23, 59, 59, 999_999), None]]),
    (
        "timestamptz[]",
        pa.list_(pa.timestamp("us", "Asia/Tokyo")),
        [[dt.datetime(2026, 1, 1, 1, 2, 3, 4, tzinfo=UTC), None], None],
    ),
    ("bigint", pa.null(), [None, None]),
    ("text", pa.null(), [None]),
    ("inet", pa.null(), [None]),
    ("bit(3)", pa.string(), ["101", None]),
    ("money", pa.large_string(), ["-$1,234.50", None]),
    ("varbit", pa.string_view(), ["", "0110"]),
    ("tsvector", pa.string(), ["'a' 'b':1"]),
    ("macaddr", pa.string(), ["08:00:2b:01:02:03"]),
]

_MISFITS: Refused = [
    ("integer", pa.array([1, 2**31, 5], pa.int64()), "2147483648"),
    ("smallint", pa.array([None, -40_000], pa.int64()), "-40000"),
    ("bigint", pa.array([2**63], pa.uint64()), "9223372036854775808"),
    ("numeric(5,2)", pa.array([D("1.005")], pa.decimal128(10, 3)), "1.005"),
    ("numeric(5,2)", pa.array([D("1000.00")], pa.decimal128(10, 2)), "1000.00"),
    ("numeric(5,2)", pa.array([1, 1000], pa.int64()), "1000"),
    ("price", pa.array([D("10000.00")], pa.decimal128(10, 2)), "10000.00"),
    ("text", pa.array(["ok", "a\0b"]), r"a\\x00b"),
    ("text", pa.array(["ok", "a\0b"], pa.string_view()), r"a\\x00b"),
    ("json", pa.array(['{"a": "\0"}'], pa.large_string()), r"\\x00"),
    ("text", pa.array(["ok", "a\0b", "c"]).dictionary_encode(), r"a\\x00b"),
    ("text[]", pa.array([["ok"], ["a\0b"]]), r"a\\x00b"),
    ("uuid", pa.array(["6ba7b810-9dad-11d1-80b4-00c04fd430c8", "no-uuid"]), "no-uuid"),
    ("uuid", pa.array(["6ba7b810 9dad 11d1 80b4 00c04fd430c"]), "6ba7b810 9dad"),
    ("date", pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32()), "2147483647"),
    ("date", pa.array([-(2**31)], pa.int32()).cast(pa.date32()), "-2147483648"),
    ("timestamp", pa.array([-(2**63)], pa.int64()).cast(pa.timestamp("us")), str(-(2**63))),
    (
        "timestamptz",
        # Would be the bits of -infinity.
        pa.array([-(2**63) + 946_684_800_000_000]).cast(pa.timestamp("us", "UTC")),
        "-9222425352054775808",
    ),
    ("timestamp", pa.array([1], pa.int64()).cast(pa.timestamp("ns")), "00:00:00.000000001"),
    ("timestamp", pa.array([2**62], pa.int64()).cast(pa.timestamp("s")), "4611686018427387904"),
    ("timestamp[]", pa.array([[-(2**63)]], pa.list_(pa.timestamp("us"))), str(-(2**63))),
    ("integer[]", pa.array([[1], [2**40]]), str(2**40)),
    ("varchar(3)", pa.array(["abcd"]), r"'abcd'.*character varying\(3\)"),
    ("char(3)", pa.array(["abcd"]), r"'abcd'.*character\(3\)"),
    ("char(3)", pa.array(["a "]), "'a '.*trailing spaces"),
    ("json", pa.array(["{"]), "'{'.*not JSON"),
    ("jsonb", pa.array(["NaN"]), "NaN.*not JSON"),
    ("jsonb", pa.array(['{"a": {"b": 1, "b": 2}}']), "the key 'b' twice"),
    ("jsonb", pa.array(["1e131072"]), "numeric.*cannot hold 1e131072"),
    ("timestamp(0)", pa.array([1], pa.timestamp("us")), "keeps 0 digits of a second"),
    ("timestamptz(3)", pa.array([999], pa.timestamp("us", "UTC")), "keeps 3 digits of a second"),
    ("time(2)", pa.array([1], pa.time32("ms")), "keeps 2 digits of a second"),
    ("interval(1)", pa.array([10], pa.duration("ms")), "keeps 1 digits of a second"),
    ("interval minute", pa.array([-61], pa.duration("s")), "keeps whole minutes"),
    ("varchar(3)[]", pa.array([["abc", "abc "]]), "over 3 letters"),
    ("char(3)[]", pa.array([["ab "]]), "trailing spaces"),
    ("jsonb[]", pa.array([['{"a": 1, "a": 2}']]), "the key 'a' twice"),
    ("timestamptz(0)[]", pa.array([[1]], pa.list_(pa.timestamp("us", "UTC"))), "keeps 0 digits"),
    ("numeric(5,2)[]", pa.array([[D("1.005")]], pa.list_(pa.decimal128(10, 3))), "1.005"),
    ("timestamp(0)[]", pa.array([[1]], pa.list_(pa.timestamp("us"))), "keeps 0 digits"),
    *(
        (shown, pa.array([text]), "it is not a text that Postgres writes")
        for shown, text in (
            ("numeric", "1e3"),
            ("numeric(5,2)", "1.005"),
            ("date", "01/02/2026"),
            ("date", "today"),
            ("timestamp(1)", "2026-11-29 10:00:00.25"),
            ("timestamptz", "2026-11-29 10:00:00"),
            ("time", "10:00"),
            ("timetz(0)", "10:00:00.5+01"),
            ("interval", "1.5 months"),
            ("interval", "-1 years 2 mons"),
            ("interval", "-3 days 04:05:06"),
            ("money", "1.005"),
            ('"char"', "ab"),
            ("name", "x" * 64),
            ("oid", "-1"),
        )
    ),
]

_REFUSED_BY_SERVER: Sequence[tuple[str, pa.Array, str, str]] = [
    ("mood", pa.array(["angry"]), "enum mood.*angry.*column v", "enum mood.*angry"),
    ("cents", pa.array([-1]), "domain cents.*cents_check", "domain cents.*cents_check"),
    (
        "text NOT NULL DEFAULT ''",
        pa.array([None], pa.string()),
        "column 'v' of type text is NOT NULL",
        "column 'v' of type text is NOT NULL",
    ),
]

_FORBIDDEN: Sequence[tuple[str, pa.DataType]] = [
    # A fraction would be rounded.
    ("integer", pa.float64()),
    # Text would have to be parsed.
    ("integer", pa.string()),
    # Numbers as text sort and compare differently.
    ("text", pa.int64()),
    # A value with more bits than the column has would be rounded.
    ("real", pa.float64()),
    ("real", pa.int32()),
    ("double precision", pa.int64()),
    # A binary fraction has no decimal text of its own: digits would have to be chosen.
    ("numeric", pa.float64()),
    # The encoder writes at most 38 digits.
    ("numeric", pa.decimal256(50, 5)),
    # A number other than 0 and 1 would change.
    ("boolean", pa.int8()),
    # The column would lose the zone, and readers would guess the instant.
    ("timestamp", pa.timestamp("us", "UTC")),
    # The session's zone would choose the instant.
    ("timestamptz", pa.timestamp("us")),
    # The time of day would be lost.
    ("date", pa.timestamp("us")),
    # Arrow has no time of day with a zone: one would have to be chosen.
    ("timetz", pa.time64("us")),
    # The encoder writes hours and smaller parts, and these columns keep none of them.
    ("interval day", pa.duration("us")),
    ("interval year to month", pa.duration("us")),
    # No encoder is known for arrays of a domain.
    ("net_price[]", pa.list_(pa.decimal128(5, 2))),
    # Only 16 bytes of fixed length, or text, are a UUID in every row.
    ("uuid", pa.binary()),
    # Text has no bytes of its own: an encoding would have to be chosen.
    ("bytea", pa.string()),
    # JSON is taken as text: a struct has several forms as JSON.
    ("jsonb", pa.struct([("a", pa.int64())])),
    ("jsonb", pa.map_(pa.string(), pa.string())),
    # Arrow's text of a duration is none of an interval.
    ("interval[]", pa.list_(pa.duration("us"))),
    # An array and a single value do not become each other.
    ("integer[]", pa.int32()),
    ("integer", pa.list_(pa.int32())),
    # Its text names a table of another database.
    ("regclass", pa.string()),
    # The server would round the text.
    ("numeric(3,-2)", pa.string()),
    ("numeric(5,2)[]", pa.string()),
    ("interval(1)", pa.string()),
]

_CREATED: Sequence[tuple[pa.DataType, str]] = [
    (pa.int8(), "smallint"),
    (pa.int16(), "smallint"),
    (pa.int32(), "integer"),
    (pa.int64(), "bigint"),
    (pa.uint8(), "smallint"),
    (pa.uint16(), "integer"),
    (pa.uint32(), "bigint"),
    (pa.uint64(), "numeric(20,0)"),
    (pa.float16(), "real"),
    (pa.float32(), "real"),
    (pa.float64(), "double precision"),
    (pa.decimal128(12, 3), "numeric(12,3)"),
    (pa.decimal128(5, -2), "numeric(7,0)"),
    (pa.bool_(), "boolean"),
    (pa.string(), "text"),
    (pa.large_string(), "text"),
    (pa.string_view(), "text"),
    (pa.dictionary(pa.int32(), pa.string()), "text"),
    (pa.binary(), "bytea"),
    (pa.binary(16), "bytea"),
    (pa.uuid(), "uuid"),
    (pa.date32(), "date"),
    (pa.timestamp("us"), "timestamp without time zone"),
    (pa.timestamp("ns", "UTC"), "timestamp with time zone"),
    (pa.time64("us"), "time without time zone"),
    (pa.duration("us"), "interval"),
    (pa.list_(pa.int32()), "integer[]"),
    (pa.list_(pa.string()), "text[]"),
    (pa.list_(pa.timestamp("us", "UTC")), "timestamp with time zone[]"),
    (pa.list_(pa.time64("us")), "time without time zone[]"),
]

_KEYS: Sequence[tuple[str, pa.Array]] = [
    ("smallint", pa.array([2, 1, 2], pa.int64())),
    ("text", pa.array(["é", "", "é"])),
    ("varchar(5)", pa.array(["b", "a", "b"], pa.string_view())),
    ("char(5)", pa.array(["b", "a", "b"])),
    ("mood", pa.array(["good", "bad", "good"], pa.dictionary(pa.int8(), pa.string()))),
    ("uuid", pa.array(["6ba7b810-9dad-11d1-80b4-00c04fd430c8"] * 3)),
    ("bytea", pa.array([b"b", b"a", b"b"])),
    ("numeric(9,3)", pa.array(["2.5", "1", "2.5"]).cast(pa.decimal128(9, 2))),
    ("date", pa.array([2, 1, 2], pa.date32())),
    ("timestamptz", pa.array([2, 1, 2], pa.timestamp("s", "UTC"))),
    ("boolean", pa.array([True, False, True])),
    ("time", pa.array([2, 1, 2], pa.time64("us"))),
    ("cents", pa.array([2, 1, 2], pa.uint8())),
]


def _comparable(value: Any) -> object:
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


POSTGRES = TypeTables(
    samples=_SAMPLES,
    # COPY carries inserts, arrays carry changes by key, and each has its own encoding.
    modes=("insert", "upsert", "ignore", "update"),
    comparable=_comparable,
    misfits=_MISFITS,
    refused_by_server=_REFUSED_BY_SERVER,
    forbidden=_FORBIDDEN,
    created=_CREATED,
    uncreated=[
        pa.struct([("a", pa.int64())]),
        pa.map_(pa.string(), pa.string()),
        # Such a table would be created, and then refuse the rows that it was created for.
        pa.list_(pa.duration("us")),
    ],
    said_of_uncreated="no Postgres type is made from",
    keys=_KEYS,
    fuzzed={
        "i8": ("bigint", st.integers(-(2**63), 2**63 - 1), pa.int64()),
        "i2": ("smallint", st.integers(-(2**15), 2**15 - 1), pa.int32()),
        "t": (
            "text",
            st.text(st.characters(codec="utf-8", exclude_characters="\0")),
            pa.string(),
        ),
        "b": ("bytea", st.binary(), pa.binary()),
        "f": ("double precision", st.floats(), pa.float64()),
        "d": ("numeric", st.decimals(-99999, 99999, places=3), pa.decimal128(20, 3)),
        "day": ("date", st.dates(), pa.date32()),
        "ts": ("timestamp", st.datetimes(), pa.timestamp("us")),
        "a": ("int[]", st.lists(st.none() | st.integers(0, 9)), pa.list_(pa.int64())),
        "tz": ("timestamptz", st.none(), pa.timestamp("us", "UTC")),
    },
    fuzzes=15,
    shown_types=(
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = '{table}'::regclass AND attnum > 0 ORDER BY attnum"
    ),
    setup=TYPES,
)
