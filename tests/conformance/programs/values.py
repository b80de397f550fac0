"""Keys, values and instants from the edges of their types, and values that no column holds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa

REPEATED = datetime(2024, 11, 3, 5, 30, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
UTC = timezone.utc
KEYS: tuple[tuple[pa.DataType, Sequence[Any]], ...] = (
    (pa.string(), ["", "a", "a\0", "é", "x" * 130]),
    (pa.large_string(), ["", "b"]),
    (pa.binary(), [b"", b"\0", b"\xff" * 9]),
    (pa.binary(2), [b"\0\0", b"\xff\xff"]),
    (pa.int8(), [-128, 0, 127]),
    (pa.int64(), [-(2**63), -1, 0, 2**63 - 1]),
    (pa.uint64(), [0, 2**63, 2**64 - 1]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [date.min, date(1969, 12, 31), date.max]),
    (pa.date64(), [date.min, date(1970, 1, 1), date.max]),
    (pa.decimal128(10, 2), list(map(Decimal, ("0.00", "-0.10", "1.00", "99999999.99")))),
    (pa.decimal128(38, 0), [Decimal(0), Decimal(10**38 - 1)]),
    (pa.dictionary(pa.int32(), pa.string()), ["", "a", "b"]),
)
INSTANTS: tuple[tuple[pa.DataType, Sequence[Any]], ...] = (
    (pa.timestamp("us"), [datetime.min, datetime(1600, 1, 1), datetime(2300, 1, 1), datetime.max]),
    (pa.timestamp("s"), [datetime.min, datetime(1970, 1, 1), datetime(9999, 12, 31, 23, 59, 59)]),
    (pa.timestamp("ms", "UTC"), [REPEATED, datetime(9999, 12, 31, tzinfo=UTC)]),
    (
        pa.timestamp("us", "America/New_York"),
        [REPEATED, REPEATED + HOUR, datetime(9999, 12, 30, tzinfo=UTC)],
    ),
)  # fmt: skip
EXTRAS: tuple[tuple[pa.DataType, Sequence[Any]], ...] = (
    (pa.string(), ["", "\0", "é" * 100, None]),
    (pa.binary(), [b"", b"\0", None]),
    (pa.int64(), [-(2**63), 2**63 - 1, None]),
    (pa.uint64(), [0, 2**64 - 1]),
    (pa.float64(), [-0.0, 1e308, float("inf"), float("nan"), 5e-324, None]),
    (pa.bool_(), [True, False, None]),
    (pa.date32(), [date.min, date.max, None]),
    (pa.date64(), [date.min, date.max]),
    (pa.decimal128(38, 18), [Decimal("0.1"), Decimal("-99999999999999999999.999999999999999999")]),
    (pa.timestamp("us"), [datetime.min, datetime.max, None]),
    (pa.timestamp("us", "America/New_York"), [REPEATED, REPEATED + HOUR]),
    (
        pa.duration("us"),
        [timedelta(days=-(10**8)), timedelta(0), timedelta(microseconds=-1), None],
    ),
    (pa.time64("us"), [time.min, time.max, None]),
    (pa.time32("s"), [time.min, time(23, 59, 59)]),
    (pa.list_(pa.int64()), [[], [None, 2**63 - 1], None]),
    (pa.struct([("a", pa.string())]), [{"a": ""}, {"a": None}]),
)
INEXACT: tuple[tuple[pa.DataType, Any], ...] = (
    (pa.int64(), 99.99),
    (pa.int64(), -0.7),
    (pa.int64(), Decimal("1.5")),
    (pa.int8(), 128),
    (pa.list_(pa.int64()), [1.9]),
    (pa.float32(), 1e300),
    (pa.timestamp("ms"), datetime(2024, 1, 1, microsecond=1)),
    (pa.timestamp("us"), datetime(2024, 1, 1, tzinfo=timezone(HOUR))),
    (pa.date32(), datetime(2024, 1, 1, 12)),
    (pa.decimal128(5, 2), Decimal("0.001")),
)
"""Columns, and values that they do not hold exactly."""


def plain(value: Any) -> Any:
    """Return a value so that two are equal if they are the same, whatever zone tells them."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if isinstance(value, (list, tuple)):
        return tuple(plain(one) for one in cast("Sequence[Any]", value))
    if isinstance(value, (float, dict)):
        return repr(cast("object", value))
    return value
