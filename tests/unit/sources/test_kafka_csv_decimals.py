"""Decimals of CSV are the numbers that stand there, or bad records."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from tests.unit.sources.test_kafka_formats import faults, read, source


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (pa.decimal128(5, 2), "99999"),
        (pa.decimal128(5, 2), "1.234"),
        (pa.decimal128(38, 10), "1" * 35),
        (pa.decimal128(38, 10), "1e30"),
        (pa.decimal128(38, 10), "1e-99999999999999999999"),
        (pa.decimal256(76, 10), "1" * 70),
        (pa.decimal32(5, 2), "99999"),
        (pa.decimal64(18, 17), "12"),
        (pa.dictionary(pa.int32(), pa.decimal128(5, 2)), "99999"),
        *((pa.decimal128(5, 2), text) for text in ("NaN", "inf", "1_0", "0x1", "1e", '""', "٣")),
    ],
)
def test_a_decimal_that_its_column_does_not_hold_is_a_bad_record_of_csv(
    kind: pa.DataType, line: str
) -> None:
    described = source("csv", pa.schema([("v", kind)]), on_bad_record="dead_letter")
    for others in ([b"1", b"2"], [b"1", b"2\r"]):
        found, why = faults(described, [others[0], line.encode(), others[1]])
        assert [row["v"] for row in found] == [1, 2]
        assert list(why) == [1]
        assert "column 'v'" in why[1] or "no decimal" in why[1]


@pytest.mark.parametrize(
    ("kind", "line", "value"),
    [
        (pa.decimal128(5, 2), " 999.99 ", "999.99"),
        (pa.decimal128(5, 2), "+1.5000000000000000000000000000000000000000000", "1.5"),
        (pa.decimal128(38, 10), "-" + "9" * 28 + "." + "9" * 10, "-" + "9" * 28 + "." + "9" * 10),
        (pa.decimal128(38, 10), "1E+3", "1000"),
        (pa.decimal128(38, 38), "0." + "9" * 38, "0." + "9" * 38),
        (pa.decimal128(5, -2), "1200", "1200"),
        (pa.decimal32(9, 2), "-1234567.89", "-1234567.89"),
        (pa.decimal64(18, 0), "9" * 18, "9" * 18),
        (pa.decimal256(76, 38), "9" * 38 + "." + "1" * 38, "9" * 38 + "." + "1" * 38),
        (pa.dictionary(pa.int32(), pa.decimal128(5, 2)), "1.50", "1.50"),
    ],
)
def test_a_decimal_of_csv_is_the_number_that_stands_there(
    kind: pa.DataType, line: str, value: str
) -> None:
    described = source("csv", pa.schema([("v", kind), ("n", pa.int64())]))
    found = read(described, [line.encode() + b",1", b",2"])
    assert [row["v"] for row in found] == [Decimal(value), None]
