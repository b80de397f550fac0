"""Decimals change their scale, width and form exactly or not at all, by Python's own integers."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Context, Decimal
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.core.arrow.exact_arrays import InexactValue, cast_exactly, exact_array
from onceflow.core.arrow.exact_decimals import cast_decimals, decimals_from_python
from onceflow.core.arrow.kinds import cast_batch, cast_rows, cast_table

_EXACT = Context(prec=400)
_WIDTHS = ((pa.decimal32, 9), (pa.decimal64, 18), (pa.decimal128, 38), (pa.decimal256, 76))
KINDS = [
    make(precision, scale)
    for make, most in _WIDTHS
    for precision in (1, most // 2, most - 1, most)
    for scale in (0, 1, precision // 2, precision, -2)
]
ONES = Decimal("1" * 35)
WIDE = pa.decimal128(38, 10)
"""35 digits before the point do not fit, and Arrow makes 7096988475839026925404484556 of them."""


def to_unscaled(value: Decimal, kind: pa.DataType) -> int | None:
    """Return the whole number that `kind` stores for `value`; None if it does not hold it."""
    scaled = _EXACT.scaleb(value, kind.scale)
    is_held = scaled == scaled.to_integral_value() and abs(int(scaled)) < 10**kind.precision
    return int(scaled) if is_held else None


def column_of(value: Decimal, kind: pa.DataType) -> pa.Array:
    """Return a column of one decimal, by its bytes."""
    number = to_unscaled(value, kind)
    assert number is not None
    words = number.to_bytes(kind.bit_width // 8, "little", signed=True)
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(words)])


def draw(kind: pa.DataType, rng: random.Random) -> Decimal:
    """Return a decimal that `kind` holds: nines, or any digits, and often as many as there are."""
    count = rng.choice([kind.precision, rng.randint(1, kind.precision)])
    number = rng.choice([10**count - 1, rng.randrange(10**count)])
    return _EXACT.scaleb(Decimal(number * rng.choice([1, -1])), -kind.scale)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_every_way_to_a_decimal_gives_the_same_number_or_an_error(seed: int) -> None:
    rng = random.Random(seed)
    held = 0
    for _ in range(150):
        have, want = rng.choice(KINDS), rng.choice(KINDS)
        value = draw(rng.choice([have, want]), rng)
        if to_unscaled(value, have) is None:
            continue
        column = column_of(value, have)
        ways: list[Callable[[], pa.Array]] = [
            partial(cast_decimals, column, want),
            partial(cast_exactly, column, want),
            partial(decimals_from_python, [value], want),
            partial(cast_decimals, pa.array([f"{value:f}"]), want),
            partial(cast_decimals, pa.array([str(value)]), want),
        ]
        is_held = to_unscaled(value, want) is not None
        held += is_held
        for number, way in enumerate(ways):
            if is_held:
                assert way().equals(column_of(value, want)), (number, value, have, want)
                continue
            with pytest.raises((pa.ArrowInvalid, InexactValue)):
                way()
    assert held > 20


@pytest.mark.parametrize(
    ("values", "have", "want"),
    [
        ([[ONES]], pa.list_(pa.decimal128(38)), pa.list_(WIDE)),
        ([{"a": ONES}], pa.struct([("a", pa.decimal128(38))]), pa.struct([("a", WIDE)])),
        ([[("k", ONES)]], pa.map_(pa.string(), pa.decimal128(38)), pa.map_(pa.string(), WIDE)),
        ([[{"a": ONES}]], pa.list_(pa.struct([("a", pa.decimal128(38))])),
         pa.list_(pa.struct([("a", WIDE)]))),
        ([[str(ONES)]], pa.list_(pa.string()), pa.list_(WIDE)),
    ],
)  # fmt: skip
def test_a_decimal_inside_of_a_value_is_not_altered_by_a_cast(
    values: list[object], have: pa.DataType, want: pa.DataType
) -> None:
    column = pa.array(values, have)
    with pytest.raises(pa.ArrowInvalid):
        cast_rows(column, want)
    rows = pa.RecordBatch.from_arrays([column], names=["v"])
    target = pa.schema([("v", want)])
    with pytest.raises(pa.ArrowInvalid):
        cast_batch(rows, target)
    with pytest.raises(pa.ArrowInvalid):
        cast_table(pa.Table.from_batches([rows]), target)


def test_a_scale_beyond_the_precision_holds_zero_and_small_numbers() -> None:
    values = [Decimal(0), Decimal("0.00999"), Decimal("-0.00001"), None]
    assert decimals_from_python(values, pa.decimal128(3, 5)).to_pylist() == values


def test_a_decimal_in_a_dictionary_is_not_altered_by_a_cast() -> None:
    column = pa.array([ONES], pa.decimal128(38)).dictionary_encode()
    with pytest.raises(pa.ArrowInvalid):
        cast_rows(column, WIDE)


def test_values_of_python_that_arrow_misreads_are_exact_or_refused_inside_of_others_too() -> None:
    # Arrow reads 76 digits into 128 bits without a check: 9.99…9 becomes 0.
    nines, kind = Decimal("9." + "9" * 75), pa.decimal128(37, 36)
    zeros = Decimal("1.5" + "0" * 74)
    for values, shape in (
        (nines, kind),
        ([nines], pa.list_(kind)),
        ({"a": nines}, pa.struct([("a", kind)])),
        ({"k": nines}, pa.map_(pa.string(), kind)),
    ):
        with pytest.raises(InexactValue):
            exact_array([values], shape)
    assert exact_array([zeros], kind).to_pylist() == [Decimal("1.5")]
    with pytest.raises(InexactValue, match="written with more digits"):
        exact_array([[zeros]], pa.list_(kind))
    assert exact_array([[Decimal("1.50")]], pa.list_(kind)).to_pylist() == [[Decimal("1.5")]]


def test_a_decimal_becomes_the_nearest_float_and_no_other_integer() -> None:
    column = pa.array([Decimal("3.4207960"), None, Decimal("-0.0000001")], pa.decimal128(8, 7))
    assert cast_rows(column, pa.float64()).to_pylist() == [3.420796, None, -1e-7]
    large = column_of(Decimal("4.52498333455112137E+19"), pa.decimal64(18, -2))
    with pytest.raises(pa.ArrowInvalid):
        cast_rows(large, pa.int64())
    assert cast_rows(column_of(Decimal(1200), pa.decimal64(18, -2)), pa.int64())[0].as_py() == 1200


def test_an_integer_fits_a_decimal_if_its_digits_do() -> None:
    integers = pa.array([999, -999, None], pa.int64())
    decimals = cast_rows(integers, pa.decimal128(5, 2))
    assert decimals.to_pylist() == [Decimal(999), Decimal(-999), None]
    with pytest.raises(pa.ArrowInvalid, match="1000.* has more digits before the point"):
        cast_rows(pa.array([1, 1000]), pa.decimal128(5, 2))
