"""Values become columns exactly or not at all, over the edges of every type."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.core.arrow.exact_arrays import InexactValue, cast_exactly, exact_array

BOOLEANS: Any = (bool, np.bool_)
INTEGERS: Any = (int, np.integer)
EAST = timezone(timedelta(hours=5, minutes=30))
MOMENT = datetime(2020, 1, 1, 1, 2, 3, 456789)
EDGES: Sequence[Any] = [
    *(0, 1, -1, 127, 128, 255, 256, 2**24 + 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(0.0, 1.0, 99.99, -0.7, 1e300, 2.0**63, math.inf, math.nan),
    *(Decimal(1), Decimal("1.50"), Decimal("1.005"), Decimal("1E+5"), Decimal("NaN")),
    *(True, np.bool_(True), np.int64(5), np.float64(1.5), Fraction(3, 2), UUID(int=1)),
    *("", "1", "x", b"x", b"\xff", bytearray(b"q")),
    *(date(1, 1, 1), date(2020, 1, 1), date(9999, 12, 31)),
    *(datetime(2020, 1, 1), MOMENT, MOMENT.replace(tzinfo=timezone.utc)),
    *(datetime(2020, 1, 1, tzinfo=EAST), datetime.max, datetime.min),
    *(time(1, 2, 3), time(1, 2, 3, 456789), time(1, tzinfo=EAST)),
    *(timedelta(microseconds=1500), timedelta.max, timedelta(seconds=1)),
    np.datetime64("2020-01-01T01:02:03.123456789"),
    np.timedelta64(1500, "us"),
]
SCALARS: Sequence[pa.DataType] = [
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
    *(pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal256(50, 2)),
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary(1)),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us")),
    *(pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us", "UTC")),
    *(pa.timestamp("ms", "Asia/Kolkata"), pa.duration("s"), pa.duration("ms"), pa.duration("us")),
    pa.dictionary(pa.int32(), pa.int64()),
]


def nested(kind: pa.DataType) -> dict[pa.DataType, Callable[[Any], Any]]:
    """Types that hold `kind`, and what makes a value of each of one of `kind`."""
    holders: dict[pa.DataType, Callable[[Any], Any]] = {
        pa.list_(kind): lambda value: [value],
        pa.large_list(kind): lambda value: [None, value],
        pa.list_(kind, 1): lambda value: [value],
        pa.struct([("a", kind)]): lambda value: {"a": value},
        pa.map_(pa.string(), kind): lambda value: [("k", value)],
        pa.list_(pa.struct([("a", pa.list_(kind))])): lambda value: [{"a": [value]}],
    }
    return holders


def refusal_of(values: list[Any], kind: pa.DataType) -> InexactValue | None:
    """Return how a column of `values` is refused, None if it is taken."""
    try:
        exact_array(values, kind)
    except InexactValue as error:
        return error
    return None


def is_same(value: Any, read: Any, kind: pa.DataType) -> bool:
    """True if the value that was read equals the given one, apart from the documented changes."""
    is_boolean: bool = isinstance(value, BOOLEANS)
    if is_boolean and not pa.types.is_boolean(kind):
        return pa.types.is_floating(kind) and read == float(value)
    if pa.types.is_floating(kind):
        is_finite = not (math.isinf(value) or math.isnan(value))
        return math.isfinite(read) if is_finite else str(float(value)) == str(read)
    if pa.types.is_temporal(kind) and isinstance(value, INTEGERS):
        return True  # an integer is a number of the type's units, whatever Python shows of it
    if isinstance(value, datetime) and pa.types.is_date(kind):
        return value.tzinfo is None and value == datetime.combine(read, time())
    if type(value) is date and pa.types.is_timestamp(kind):
        return bool(datetime.combine(value, time()) == read)
    raw: Any = value.encode() if isinstance(value, str) else value
    if isinstance(read, (str, bytes)):
        return bytes(raw) == (read.encode() if isinstance(read, str) else read)
    return bool(value == read)


@pytest.mark.parametrize("kind", SCALARS, ids=str)
def test_a_value_is_held_exactly_or_refused(kind: pa.DataType) -> None:
    for value in EDGES:
        refusal = refusal_of([None, value], kind)
        if refusal is not None:
            assert refusal.row == 1
            assert str(refusal)
            continue
        made = exact_array([None, value], kind)
        made.validate(full=True)
        assert made.type == kind
        assert made[0].as_py() is None
        if not (pa.types.is_temporal(kind) and isinstance(value, int)):
            assert is_same(value, made[1].as_py(), kind), (value, made[1])


@pytest.mark.parametrize("kind", SCALARS, ids=str)
def test_a_value_inside_of_others_is_held_exactly_or_refused(kind: pa.DataType) -> None:
    for value in EDGES:
        alone = refusal_of([value], kind)
        for whole, holder in nested(kind).items():
            refusal = refusal_of([None, holder(value)], whole)
            assert (refusal is None) is (alone is None), (whole, value)
            assert refusal is None or refusal.row == 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from([pa.int64(), pa.uint64(), pa.int32(), pa.list_(pa.int64())]),
    st.lists(
        st.none()
        | st.integers(-(2**65), 2**65)
        | st.floats()
        | st.decimals(places=2, allow_nan=False),
        max_size=20,
    ),
)
def test_integers_of_any_python_number_are_those_numbers(
    kind: pa.DataType, numbers: list[Any]
) -> None:
    inside = pa.types.is_list(kind)
    column = [[number] for number in numbers] if inside else numbers
    refusal = refusal_of(column, kind)
    if refusal is None:
        made = exact_array(column, kind)
        assert ([one[0] for one in made.to_pylist()] if inside else made.to_pylist()) == numbers
        return
    refused = numbers[refusal.row]
    bits = 64 if inside else kind.bit_width
    low, high = (0, 2**64) if pa.types.is_uint64(kind) else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    is_whole = math.isfinite(refused) and int(refused) == refused
    assert not (is_whole and low <= refused < high and abs(refused) < 2**53), refused


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from(["s", "ms", "us"]),
    st.sampled_from([None, "UTC", "Europe/Paris"]),
    st.lists(
        st.none()
        | st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1))
        | st.datetimes(
            datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.sampled_from([timezone.utc, EAST])
        ),
        max_size=8,
    ),
)
def test_instants_keep_their_zone_and_their_last_digit(
    unit: str, zone: str | None, moments: list[Any]
) -> None:
    kind = pa.timestamp(unit, zone)
    refusal = refusal_of(moments, kind)
    if refusal is None:
        assert exact_array(moments, kind).to_pylist() == moments
        return
    refused = moments[refusal.row]
    step = {"s": 1_000_000, "ms": 1_000, "us": 1}[unit]
    assert (refused.tzinfo is None) is (zone is not None) or refused.microsecond % step


@pytest.mark.parametrize(
    ("values", "given", "kind"),
    [
        ([1.0, 99.99], pa.float64(), pa.int64()),
        ([1.0, 1e300], pa.float64(), pa.float32()),
        ([1.5, 1.005], pa.float64(), pa.decimal128(5, 2)),
        ([0, 2**53 + 1], pa.int64(), pa.float64()),
        ([Decimal(1), Decimal(2**53 + 1)], pa.decimal128(38, 0), pa.float64()),
        ([1, 5], pa.int64(), pa.bool_()),
        ([datetime(2020, 1, 1), MOMENT], pa.timestamp("us"), pa.timestamp("ms")),
        ([datetime(2020, 1, 1), MOMENT], pa.timestamp("us"), pa.date32()),
        ([[1.0], [1.9]], pa.list_(pa.float64()), pa.list_(pa.int64())),
        ([[1.0], [1e300]], pa.list_(pa.float64()), pa.list_(pa.float32())),
        (
            [{"a": 1.0}, {"a": 1e300}],
            pa.struct([("a", pa.float64())]),
            pa.struct([("a", pa.float32())]),
        ),
    ],
)
def test_a_column_is_cast_exactly_or_its_row_is_named(
    values: list[Any], given: pa.DataType, kind: pa.DataType
) -> None:
    column = pa.array(values, given)
    assert cast_exactly(column.slice(0, 1), kind).type == kind
    with pytest.raises(InexactValue) as raised:
        cast_exactly(column, kind)
    assert raised.value.row == 1


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us", "UTC"), pa.timestamp("us")),
        (pa.timestamp("us", "Europe/Paris"), pa.date32()),
        (pa.timestamp("us"), pa.time64("us")),
        (pa.struct([("a", pa.int64()), ("b", pa.int64())]), pa.struct([("a", pa.int64())])),
    ],
)
def test_a_cast_that_drops_or_makes_up_a_part_is_refused(
    given: pa.DataType, kind: pa.DataType
) -> None:
    value = {"a": 1, "b": 2} if pa.types.is_struct(given) else 1
    with pytest.raises(InexactValue):
        cast_exactly(pa.array([value], given), kind)


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint8(), pa.list_(pa.int64())], ids=str)
@pytest.mark.parametrize("value", [np.array(5.5), np.array(True), np.array(5.0)], ids=repr)
def test_an_array_without_dimensions_is_an_integer_only_if_it_holds_one(
    value: Any, kind: pa.DataType
) -> None:
    given = [value] if pa.types.is_list(kind) else value
    refusal = refusal_of([given], kind)
    assert refusal is not None
    assert "ndarray" in str(refusal)
    five = np.array(5)
    made = exact_array([[five] if pa.types.is_list(kind) else five], kind)
    assert made.to_pylist() == [[5] if pa.types.is_list(kind) else 5]


@pytest.mark.parametrize("given", [pa.int16(), pa.int64(), pa.uint64()], ids=str)
def test_an_integer_that_no_half_equals_is_refused(given: pa.DataType) -> None:
    half = pa.float16()
    assert cast_exactly(pa.array([2048, None, 2050], given), half).to_pylist() == [2048, None, 2050]
    with pytest.raises(InexactValue, match="halffloat") as refused:
        cast_exactly(pa.array([2048, 2049], given), half)
    assert refused.value.row == 1
    with pytest.raises(InexactValue, match="2049"):
        exact_array([2048, 2049], half)
    assert exact_array([2048, 2048.4, None, True], half).to_pylist() == [2048, 2048, None, 1]
    with pytest.raises(InexactValue, match="halffloat"):
        cast_exactly(pa.array([[2049]], pa.list_(given)), pa.list_(half))
