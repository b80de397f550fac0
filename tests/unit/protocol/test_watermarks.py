"""Watermarks: the least of what all inputs have told, never going back."""

from __future__ import annotations

import pytest

from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol.splits import Split, SplitState
from onceflow.core.protocol.watermarks import (
    IDLE,
    MAX_WATERMARK,
    NO_WATERMARK,
    SplitWatermarks,
    WatermarkMerge,
    WatermarkRule,
)


def test_the_slowest_input_says_what_event_time_is() -> None:
    merge = WatermarkMerge("ab")
    merge.on_watermark("a", 10)
    assert merge.next() is None
    merge.on_watermark("b", 7)
    assert merge.next() == 7
    assert merge.next() is None
    merge.on_watermark("b", 20)
    assert merge.next() == 10


def test_an_idle_input_holds_nobody_up_and_time_does_not_go_back_when_it_wakes() -> None:
    merge = WatermarkMerge("ab")
    merge.on_watermark("a", 10)
    merge.on_watermark("b", IDLE)
    assert merge.next() == 10
    merge.on_watermark("b", 3)
    assert merge.next() is None
    merge.on_watermark("a", 12)
    assert merge.next() is None
    merge.on_watermark("b", 11)
    assert (merge.next(), merge.current) == (11, 11)


def test_when_all_are_idle_that_is_told_and_time_stands() -> None:
    merge = WatermarkMerge("ab")
    merge.on_watermark("a", 10)
    merge.on_watermark("b", IDLE)
    merge.next()
    merge.on_watermark("a", IDLE)
    assert (merge.next(), merge.next(), merge.current) == (IDLE, None, 10)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_when_all_are_idle_time_is_where_the_latest_is_whichever_became_idle_first(
    order: str,
) -> None:
    merge = WatermarkMerge("ab")
    merge.on_watermark("a", 10)
    merge.on_watermark("b", 3)
    assert merge.next() == 3
    for one in order:
        merge.on_watermark(one, IDLE)
    assert (merge.next(), merge.next(), merge.next()) == (10, IDLE, None)
    merge.on_watermark("b", 4)
    assert (merge.next(), merge.next()) == (10, None)


def test_the_end_of_one_input_is_not_the_end_of_time_while_the_others_are_idle() -> None:
    merge = WatermarkMerge("abc")
    merge.on_watermark("a", 10)
    merge.on_watermark("b", 3)
    merge.on_watermark("a", MAX_WATERMARK)
    merge.on_watermark("b", IDLE)
    assert merge.next() is None
    merge.on_watermark("c", IDLE)
    assert (merge.next(), merge.next(), merge.next()) == (10, IDLE, None)
    merge.on_watermark("b", 12)
    assert (merge.next(), merge.next()) == (12, None)
    merge.on_watermark("b", MAX_WATERMARK)
    assert (merge.next(), merge.next()) == (IDLE, None)
    merge.on_watermark("c", MAX_WATERMARK)
    assert (merge.next(), merge.next()) == (MAX_WATERMARK, None)


def test_nothing_comes_after_the_end_of_an_input() -> None:
    merge = WatermarkMerge("a")
    merge.on_watermark("a", MAX_WATERMARK)
    with pytest.raises(InvariantViolation, match="watermark of a goes back"):
        merge.on_watermark("a", 5)


def test_the_end_of_all_inputs_is_the_end_of_time() -> None:
    merge = WatermarkMerge("ab")
    merge.on_watermark("a", MAX_WATERMARK)
    assert merge.next() is None
    merge.on_watermark("b", MAX_WATERMARK)
    assert merge.next() == MAX_WATERMARK


def test_a_watermark_that_goes_back_is_refused_with_both() -> None:
    merge = WatermarkMerge("ab")
    merge.on_watermark("a", 10)
    with pytest.raises(InvariantViolation, match="watermark of a goes back: 10 to 9"):
        merge.on_watermark("a", 9)


def splits(**event_times_ms: int | None) -> list[SplitState]:
    return [SplitState(Split(name, b""), at_ms) for name, at_ms in event_times_ms.items()]


def test_a_split_without_records_holds_up_the_others_until_it_is_idle() -> None:
    source = SplitWatermarks(splits(a=None, b=None), {None: WatermarkRule(5, 10.0)})
    source.on_rows("a", 100, now_s=0.0)
    assert source.next(0.0) is None
    source.on_rows("a", 90, now_s=5.0)
    assert source.next(9.9) is None
    source.on_rows("a", 120, now_s=9.0)
    assert source.next(10.0) == 120 - 5 - 1
    source.on_rows("b", 50, now_s=11.0)
    assert source.next(11.0) is None


def test_a_restored_source_goes_on_from_where_its_splits_were() -> None:
    source = SplitWatermarks(splits(a=None, b=None), {None: WatermarkRule(0, None)})
    source.on_rows("a", 100, now_s=0.0)
    source.on_rows("b", 70, now_s=0.0)
    assert source.next(0.0) == 69
    held = source.with_event_times([Split("a", b""), Split("b", b"")])
    assert held == tuple(splits(a=100, b=70))
    again = SplitWatermarks(held, {None: WatermarkRule(0, None)})
    assert again.next(0.0) == 69
    # With another split, of which nothing is known, nothing is told.
    more = SplitWatermarks([*held, *splits(c=None)], {None: WatermarkRule(0, None)})
    assert more.next(0.0) is None
    assert NO_WATERMARK < IDLE < 0


def test_a_split_that_has_ended_holds_up_none_of_the_others() -> None:
    watermarks = SplitWatermarks(splits(a=None, b=None), {None: WatermarkRule(0, None)})
    watermarks.on_rows("a", 100, 1.0)
    watermarks.on_rows("b", 10, 1.0)
    assert watermarks.next(1.0) == 9
    watermarks.on_ended("b")
    assert watermarks.next(1.0) == 99
    watermarks.on_ended("b")
    watermarks.on_ended("a")
    assert watermarks.next(99.0) == IDLE
    # A restore goes on from what was seen.
    held = watermarks.with_event_times([Split("a", b""), Split("b", b"")])
    assert held == tuple(splits(a=100, b=10))


def test_where_all_splits_have_ended_time_stands_for_a_job_that_goes_on() -> None:
    """The slowest may have more records then, and they are late for nothing."""
    watermarks = SplitWatermarks(splits(a=None, b=None), {None: WatermarkRule(0, 10.0)})
    watermarks.on_rows("a", 100, 1.0)
    watermarks.on_rows("b", 10, 1.0)
    assert watermarks.next(1.0) == 9
    watermarks.on_ended("a")
    watermarks.on_ended("b")
    assert [watermarks.next(now_s) for now_s in (1.0, 1.0, 99.0)] == [IDLE, None, None]


def outputs() -> SplitWatermarks:
    rules: dict[str | None, WatermarkRule] = {
        "orders": WatermarkRule(5, None),
        "customers": WatermarkRule(0, 10.0),
    }
    return SplitWatermarks(splits(a=None), rules)


def test_the_watermark_of_a_source_is_the_lowest_of_its_outputs_that_are_not_idle() -> None:
    watermarks = outputs()
    watermarks.on_rows("a", 100, 0.0, "orders")
    assert watermarks.next(0.0) is None
    watermarks.on_rows("a", 20, 0.0, "customers")
    assert watermarks.next(0.0) == 19
    watermarks.on_rows("a", 200, 9.0, "orders")
    assert watermarks.next(9.9) is None
    # The customers are idle, and delay the orders no longer.
    assert watermarks.next(10.0) == 200 - 5 - 1
    watermarks.on_ended("a")
    assert watermarks.next(99.0) == IDLE


def test_each_output_keeps_its_event_time_over_a_restart_with_other_outputs() -> None:
    watermarks = outputs()
    watermarks.on_rows("a", 100, 0.0, "orders")
    watermarks.on_rows("a", 20, 0.0, "customers")
    states = watermarks.with_event_times([Split("a", b"")])
    assert states == (SplitState(Split("a", b""), None, (("customers", 20), ("orders", 100))),)
    orders = SplitWatermarks(states, {"orders": WatermarkRule(5, None)})
    assert orders.next(0.0) == 100 - 5 - 1
    # Nothing is known about an output that is new.
    more = SplitWatermarks(
        states, {"orders": WatermarkRule(5, None), "parts": WatermarkRule(0, None)}
    )
    assert more.next(0.0) is None
    more.on_rows("a", 150, 0.0, "parts")
    assert more.next(0.0) == 100 - 5 - 1
