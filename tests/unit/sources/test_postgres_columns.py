"""Values in Postgres's binary format become Arrow values unchanged, or are refused by name."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from onceflow.clients.postgres.binary_rows import BinaryColumn, RowBuffer, split_copy_rows
from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.postgres.types import wire_of
from onceflow.sources.postgres.columns import (
    Convert,
    ValueRefused,
    converter_of,
    default_type,
    is_text_form,
)
from onceflow.sources.postgres.text_values import binary_encoder


def _numeric(weight: int, sign: int, scale: int, *digits: int) -> bytes:
    return struct.pack(f"!hhHH{len(digits)}h", len(digits), weight, sign, scale, *digits)


def _array(*elements: bytes | None, dimensions: int = 1, first: int = 1) -> bytes:
    data = struct.pack("!iiI", dimensions, 0, 23)
    for _ in range(dimensions):
        data += struct.pack("!ii", len(elements), first)
    for element in elements:
        data += (
            b"\xff\xff\xff\xff" if element is None else struct.pack("!i", len(element)) + element
        )
    return data


def _column(*values: bytes | None) -> BinaryColumn:
    """Return the values as a column of the rows of a COPY."""
    rows = [b"\0\1\xff\xff\xff\xff" if v is None else _row(v) for v in values]
    columns = split_copy_rows(RowBuffer.of(rows), 1)
    assert columns is not None
    return columns[0]


def _row(value: bytes) -> bytes:
    return b"\0\1" + struct.pack("!i", len(value)) + value


def _of(name: str, **limits: Any) -> PostgresType:
    return PostgresType(name, name, **limits)


_AMOUNT = _of("numeric", precision=10, scale=2)
_VALUES: list[tuple[PostgresType, bytes, Any]] = [
    (_of("int2"), b"\x80\x00", -(2**15)),
    (_of("int4"), b"\x7f\xff\xff\xff", 2**31 - 1),
    (_of("int8"), b"\x80" + bytes(7), -(2**63)),
    (_of("float4"), struct.pack("!f", 1.5), 1.5),
    (_of("float8"), struct.pack("!d", float("-inf")), float("-inf")),
    (_of("bool"), b"\1", True),
    (_of("bool"), b"\0", False),
    (_of("text"), "ä€😀".encode(), "ä€😀"),
    (_of("text"), b"", ""),
    (_of("bpchar", length=4), b"ab  ", "ab"),
    (_of("bpchar"), b"ab  ", "ab  "),
    (_of("enum"), b"good", "good"),
    (_of("json"), b'{"a": 1.0}', '{"a": 1.0}'),
    (_of("jsonb"), b'\1{"a": 1.0}', '{"a": 1.0}'),
    (_of("bytea"), b"\0\xff", b"\0\xff"),
    (
        _of("uuid"),
        bytes.fromhex("6ba7b8109dad11d180b400c04fd430c8"),
        "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
    ),
    (_AMOUNT, _numeric(1, 0, 2, 1, 2345, 6700), Decimal("12345.67")),
    (_AMOUNT, _numeric(-1, 0x4000, 2, 100), Decimal("-0.01")),
    (_AMOUNT, _numeric(0, 0, 0), Decimal("0.00")),
    (
        _of("numeric", precision=38, scale=2),
        _numeric(8, 0x4000, 2, 99, *[9999] * 8, 9900),
        Decimal(f"-{'9' * 34}.99"),
    ),
    (_of("numeric", precision=3, scale=-2), _numeric(1, 0, 0, 1, 2300), Decimal(12300)),
    (_of("numeric", precision=3, scale=5), _numeric(-1, 0, 5, 12, 3000), Decimal("0.00123")),
    (_of("date"), struct.pack("!i", 0), date(2000, 1, 1)),
    (_of("date"), struct.pack("!i", -730119), date(1, 1, 1)),
    (_of("timestamp"), struct.pack("!q", -1), datetime(1999, 12, 31, 23, 59, 59, 999999)),
    (_of("timestamptz"), struct.pack("!q", 0), datetime(2000, 1, 1, tzinfo=timezone.utc)),
    (_of("time"), struct.pack("!q", 86_399_999_999), time(23, 59, 59, 999999)),
    (_of("interval"), struct.pack("!qii", -5, 0, 0), timedelta(microseconds=-5)),
    (_of("_int4", element="int4"), _array(b"\0\0\0\1", None), [1, None]),
    (_of("_int4", element="int4"), struct.pack("!iiI", 0, 0, 23), []),
    (_of("_text", element="text"), _array(b"", b"a"), ["", "a"]),
]


@pytest.mark.parametrize(("source", "data", "expected"), _VALUES)
def test_a_value_is_read_unchanged(source: PostgresType, data: bytes, expected: object) -> None:
    given = default_type(source)
    assert given is not None
    assert wire_of(given, source) is not None, "the sink does not write what the source reads"
    convert = converter_of(source, given)
    assert convert is not None
    converted = convert([None, data, None])
    assert converted.type == given
    assert converted.to_pylist() == [None, expected, None]
    converted.validate(full=True)
    assert convert([]).type == given
    for values in ([None, data, None, data], [data], [None], []):
        by_column = convert(_column(*values))
        by_column.validate(full=True)
        assert by_column == convert(values)


@pytest.mark.parametrize("seed", range(20))
def test_a_column_of_decimals_equals_its_values_read_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    scale = draw.randrange(8)
    given = pa.decimal128(draw.choice((scale + 1, 18, 19, 38)), scale)
    convert = converter_of(_of("numeric"), given)
    assert convert is not None
    encode = binary_encoder(_of("numeric"))
    digits = draw.choice((1, given.precision // 2, given.precision))
    values: list[bytes | None] = [
        encode(f"{Decimal(draw.randrange(-(10**digits), 10**digits)).scaleb(-scale):f}")
        if draw.randrange(5)
        else None
        for _ in range(50)
    ]
    if draw.randrange(3) == 0:
        values[draw.randrange(50)] = encode(draw.choice(("NaN", "Infinity", "0.000000001")))
    assert _convert(convert, _column(*values)) == _convert(convert, values)


def _convert(convert: Convert, values: Sequence[bytes | None]) -> object:
    """Return the values, or the row and the text of the one that is refused."""
    try:
        return convert(values).to_pylist()
    except ValueRefused as error:
        return error.row, error.shown


@pytest.mark.parametrize(
    ("source", "data", "shown"),
    [
        (_AMOUNT, _numeric(0, 0xC000, 0), "NaN"),
        (_AMOUNT, _numeric(0, 0xD000, 0), "Infinity"),
        (_AMOUNT, _numeric(0, 0xF000, 0), "-Infinity"),
        (_of("date"), struct.pack("!i", 2**31 - 1), "infinity"),
        (_of("date"), struct.pack("!i", -(2**31)), "-infinity"),
        (_of("timestamp"), struct.pack("!q", 2**63 - 1), "infinity"),
        (_of("timestamptz"), struct.pack("!q", -(2**63)), "-infinity"),
        (_of("timestamp"), struct.pack("!q", 2**63 - 2), "after 2000"),
        (_of("time"), struct.pack("!q", 86_400_000_000), "24:00:00"),
        (_of("interval"), struct.pack("!qii", 0, 1, 0), "1 days"),
        (_of("interval"), struct.pack("!qii", 0, 0, 1), "1 months"),
        (_of("jsonb"), b"\2{}", "{}"),
        (_of("int4"), b"\0", "x00"),
        (_of("_int4", element="int4"), _array(b"\0\0\0\1", dimensions=2), "2 dimensions"),
        (_of("_int4", element="int4"), _array(b"\0\0\0\1", first=0), "index 0"),
    ],
)
def test_a_value_that_arrow_cannot_hold_is_refused(
    source: PostgresType, data: bytes, shown: str
) -> None:
    given = default_type(source)
    assert given is not None
    convert = converter_of(source, given)
    assert convert is not None
    with pytest.raises(ValueRefused) as raised:
        convert([None, data])
    assert raised.value.row == 1
    assert shown in raised.value.shown
    with pytest.raises(ValueRefused) as raised:
        convert(_column(None, data, data))
    assert raised.value.row == 1
    assert shown in raised.value.shown


def test_decimals_that_the_user_has_chosen_hold_exact_values_alone() -> None:
    convert = converter_of(_of("numeric"), pa.decimal128(5, 2))
    assert convert is not None
    assert convert([_numeric(0, 0, 1, 7, 5000)]).to_pylist() == [Decimal("7.50")]
    for data in (_numeric(0, 0, 3, 7, 5010), _numeric(1, 0, 0, 1)):
        with pytest.raises(ValueRefused):
            convert([data])


@pytest.mark.parametrize(
    "source",
    [
        *map(_of, ("numeric", "timetz", "bit", "money", "inet", "point", "xml", "tstzrange", "")),
        _of("numeric", precision=39, scale=0),
        _of("_inet", element="inet"),
        _of("_numeric", element="numeric"),
    ],
    ids=str,
)
def test_a_type_without_an_exact_arrow_type_is_read_as_its_text(source: PostgresType) -> None:
    assert default_type(source) == pa.string()
    assert is_text_form(source, pa.string())
    convert = converter_of(source, pa.string())
    assert convert is not None
    assert convert([b"{1,\xc3\xa9}", None]).to_pylist() == ["{1,é}", None]


@pytest.mark.parametrize("name", ["int8", "date", "interval", "bytea", "timestamptz"])
def test_a_type_with_an_arrow_type_is_read_as_its_text_on_request(name: str) -> None:
    assert default_type(_of(name)) != pa.string()
    assert is_text_form(_of(name), pa.string())
    assert converter_of(_of(name), pa.string()) is not None


@pytest.mark.parametrize("name", ["text", "varchar", "jsonb", "enum", "uuid"])
def test_a_type_that_is_text_in_arrow_is_read_in_binary_format(name: str) -> None:
    assert not is_text_form(_of(name), pa.string())


@pytest.mark.parametrize("name", ["regclass", "regtype", "aclitem", "pg_node_tree"])
def test_a_type_whose_text_names_an_object_of_the_database_is_not_read(name: str) -> None:
    for source in (_of(name), _of(f"_{name}", element=name)):
        assert default_type(source) is None
        assert converter_of(source, pa.string()) is None


def test_a_column_is_never_read_as_another_type() -> None:
    assert converter_of(_of("int8"), pa.int32()) is None
    assert converter_of(_of("timestamp"), pa.timestamp("us", "UTC")) is None
    assert converter_of(_of("numeric"), pa.float64()) is None
    assert converter_of(_of("_int4", element="int4"), pa.int32()) is None
