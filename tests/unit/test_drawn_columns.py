"""Tests that draw: a failure is told soon."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import drawn_columns


def test_a_failing_drawn_check_is_made_simpler_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drawn_columns, "_SHRINK_S", 0.05)
    failure_count = 0

    @given(numbers=st.lists(st.integers(), min_size=20, max_size=20))
    def check(numbers: list[int]) -> None:
        nonlocal failure_count
        failure_count += 1
        time.sleep(0.1)
        assert not numbers

    with pytest.raises(AssertionError):
        drawn_columns.run_drawn(check, 1)
    assert failure_count < 30, "there are some hundred simpler examples, which fail, too"
