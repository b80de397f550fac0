"""Summaries of the times of records: bounded, mergeable, exact enough."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.core.protocol import record_times

NOW_MS = 1_800_000_000_000
TIMES = st.lists(
    st.tuples(
        st.integers(NOW_MS - 2 * record_times.AGE_MAX_MS, NOW_MS + 5_000), st.integers(1, 1_000)
    ),
    min_size=1,
    max_size=400,
)


def count(times: list[tuple[int, int]]) -> record_times.RecordTimes:
    counter = record_times.RecordTimesCounter()
    counter.add(times, NOW_MS)
    taken = counter.take()
    assert taken is not None
    return taken


@settings(max_examples=30)
@given(TIMES, TIMES)
def test_records_and_their_sum_stay_whole_and_times_are_off_by_half_an_interval(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    counter = record_times.RecordTimesCounter()
    counter.merge(count(first))
    counter.merge(count(second))
    merged = counter.take()
    assert merged is not None
    assert counter.take() is None, "taken once"
    assert len(merged.counts) <= record_times.INTERVALS_MAX
    exact = [(max(time, NOW_MS - record_times.AGE_MAX_MS), n) for time, n in first + second]
    assert sum(merged.counts.values()) == sum(n for _, n in exact)
    assert merged.total_ms == sum(time * n for time, n in first + second)
    visible_ms = NOW_MS + 10_000
    off_s = merged.width_ms / 2_000 + 1e-6
    made_s = [(visible_ms - time_ms) / 1000 for time_ms, _ in exact]
    for latency_s, _ in merged.list_latencies_s(visible_ms):
        assert any(abs(latency_s - exact_s) <= off_s for exact_s in made_s)


def test_what_a_checkpoint_of_five_seconds_brings_is_exact_to_16_ms() -> None:
    taken = count([(NOW_MS - 5_000 + number, 1) for number in range(5_000)])
    assert taken.width_ms == 32
    assert len(taken.counts) <= record_times.INTERVALS_MAX


def test_a_clock_that_is_ahead_makes_no_negative_latency() -> None:
    taken = count([(NOW_MS + 60_000, 3)])
    assert list(taken.list_latencies_s(NOW_MS)) == [(0.0, 3)]
    assert taken.sum_latencies_s(NOW_MS) == 0.0
