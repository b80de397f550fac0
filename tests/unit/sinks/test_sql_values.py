"""Arrow values fitted to a table's types, and the one that does not fit."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.clients.sql.values import fit_column
from onceflow.core.errors import BadRow
from onceflow.core.spi.bad_rows import quote_value

_NUMBERS = st.lists(st.none() | st.integers(-(2**33), 2**33), max_size=60)


@given(_NUMBERS, st.integers(0, 10))
def test_numbers_arrive_or_the_first_that_does_not_fit_is_named(
    numbers: list[int | None], skipped: int
) -> None:
    column = pa.array(numbers, pa.int64()).slice(skipped)
    expected = numbers[skipped:]
    wrong = [n for n in expected if n is not None and not -(2**31) <= n < 2**31]
    if not wrong:
        assert fit_column(column, pa.int32(), name="n", target="integer").to_pylist() == expected
        return
    row = expected.index(wrong[0])
    with pytest.raises(BadRow, match=rf"column 'n': the value {wrong[0]} \(row {row} .*integer"):
        fit_column(column, pa.int32(), name="n", target="integer")


@given(st.lists(st.none() | st.lists(st.none() | st.integers(-300, 300), max_size=5), max_size=20))
def test_value_in_a_list_is_named_by_itself(lists: list[list[int | None] | None]) -> None:
    column = pa.array(lists, pa.list_(pa.int64()))
    wrong = [n for one in lists for n in one or [] if n is not None and not -128 <= n < 128]
    wire = pa.list_(pa.int8())
    if not wrong:
        assert fit_column(column, wire, name="n", target="smallint[]").to_pylist() == lists
        return
    with pytest.raises(BadRow, match=rf"the value {wrong[0]} "):
        fit_column(column, wire, name="n", target="smallint[]")


def test_column_of_the_right_type_is_not_copied() -> None:
    column = pa.array([1, 2, 3], pa.int64())
    assert fit_column(column, pa.int64(), name="n", target="bigint") is column


def test_long_and_impossible_values_are_shown_short() -> None:
    assert len(quote_value(pa.array(["x" * 10_000]), 0)) <= 81
    beyond_python = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    assert "2147483647" in quote_value(beyond_python, 0)
