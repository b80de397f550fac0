"""Restart strategies: when the next attempt starts, and when none does."""

from __future__ import annotations

import pickle
import random

import pytest

from onceflow.core.protocol import restart

RNG = random.Random(1)


def delays(
    strategy: restart.RestartStrategy, failures: int, *, apart_s: float = 0.0
) -> list[float | None]:
    """The delay after each failure; None where the job was given up."""
    tracker = strategy.tracker(random.Random(1))
    found: list[float | None] = []
    for at in range(failures):
        decision = tracker.on_failure(at * apart_s)
        found.append(decision.delay_s if isinstance(decision, restart.RestartAfter) else None)
    return found


def test_no_restart_gives_up_at_the_first_failure() -> None:
    assert delays(restart.NoRestart(), 1) == [None]


def test_fixed_delay_restarts_as_often_as_told() -> None:
    assert delays(restart.FixedDelay(attempts=2, delay_s=3.0), 4) == [3.0, 3.0, None, None]


def test_exponential_delay_grows_to_its_maximum() -> None:
    strategy = restart.ExponentialDelay(multiplier=2.0, max_delay_s=6.0, jitter=0.0)
    assert delays(strategy, 5) == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_jitter_stays_within_its_share_and_differs_by_seed() -> None:
    strategy = restart.ExponentialDelay(multiplier=1.0, jitter=0.2)
    first = delays(strategy, 50)
    assert all(delay is not None and 0.8 <= delay <= 1.2 for delay in first)
    assert len(set(first)) > 10
    assert delays(strategy, 50) == first


def test_exponential_delay_starts_over_after_running_long_enough() -> None:
    tracker = restart.ExponentialDelay(multiplier=2.0, jitter=0.0, reset_after_s=100.0).tracker(RNG)
    assert tracker.on_failure(0.0) == restart.RestartAfter(1.0)
    tracker.on_running(1.0)
    assert tracker.on_failure(50.0) == restart.RestartAfter(2.0)
    tracker.on_running(52.0)
    assert tracker.on_failure(152.0) == restart.RestartAfter(1.0)


def test_time_spent_down_does_not_count_as_running() -> None:
    tracker = restart.ExponentialDelay(multiplier=2.0, jitter=0.0, reset_after_s=100.0).tracker(RNG)
    tracker.on_running(0.0)
    assert tracker.on_failure(1.0) == restart.RestartAfter(1.0)
    assert tracker.on_failure(5000.0) == restart.RestartAfter(2.0)


def test_exponential_delay_gives_up_after_its_attempts_since_the_last_reset() -> None:
    strategy = restart.ExponentialDelay(jitter=0.0, attempts=2, reset_after_s=10.0)
    tracker = strategy.tracker(RNG)
    for now_s in (0.0, 1.0):
        assert isinstance(tracker.on_failure(now_s), restart.RestartAfter)
    tracker.on_running(2.0)
    assert isinstance(tracker.on_failure(20.0), restart.RestartAfter)
    assert isinstance(tracker.on_failure(21.0), restart.RestartAfter)
    given_up = tracker.on_failure(22.0)
    assert isinstance(given_up, restart.GiveUp)
    assert "2 restarts allowed" in given_up.reason


def test_failure_rate_gives_up_on_too_many_within_the_interval_only() -> None:
    strategy = restart.FailureRate(failures=2, interval_s=10.0, delay_s=1.0)
    assert delays(strategy, 3, apart_s=4.0) == [1.0, 1.0, None]
    assert delays(strategy, 30, apart_s=6.0) == [1.0] * 30


def test_failure_rate_of_none_allows_none() -> None:
    assert delays(restart.FailureRate(failures=0), 1) == [None]


def test_trackers_of_one_strategy_do_not_share_counts() -> None:
    strategy = restart.FixedDelay(attempts=1)
    for _ in range(3):
        assert isinstance(strategy.tracker(RNG).on_failure(0.0), restart.RestartAfter)


@pytest.mark.parametrize(
    "strategy",
    [restart.NoRestart(), restart.FixedDelay(), restart.ExponentialDelay(), restart.FailureRate()],
)
def test_strategies_survive_pickling(strategy: restart.RestartStrategy) -> None:
    assert pickle.loads(pickle.dumps(strategy)) == strategy


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (restart.FixedDelay, {"attempts": -1}),
        (restart.FixedDelay, {"delay_s": -1.0}),
        (restart.ExponentialDelay, {"initial_delay_s": 0.0}),
        (restart.ExponentialDelay, {"multiplier": 0.9}),
        (restart.ExponentialDelay, {"max_delay_s": 0.5}),
        (restart.ExponentialDelay, {"jitter": 1.1}),
        (restart.ExponentialDelay, {"reset_after_s": 0.0}),
        (restart.ExponentialDelay, {"attempts": -1}),
        (restart.FailureRate, {"failures": -1}),
        (restart.FailureRate, {"interval_s": 0.0}),
        (restart.FailureRate, {"delay_s": -0.1}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(
    kind: type[restart.FixedDelay | restart.ExponentialDelay | restart.FailureRate],
    wrong: dict[str, float],
) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        kind(**wrong)  # type: ignore[arg-type]


def test_the_same_mistake_is_tried_as_often_as_told_whatever_fails_in_between() -> None:
    tracker = restart.ExponentialDelay(jitter=0.0, same_mistakes=3).tracker(RNG)
    for mistake in ("a", "b", "", "a", "b", ""):
        assert isinstance(tracker.on_failure(0.0, mistake), restart.RestartAfter), mistake
    given_up = tracker.on_failure(0.0, "a")
    assert isinstance(given_up, restart.GiveUp)
    assert "in the same way 3 times" in given_up.reason


def test_other_failures_and_mistakes_that_may_repeat_are_tried_for_ever() -> None:
    tracker = restart.ExponentialDelay().tracker(RNG)
    assert all(isinstance(tracker.on_failure(0.0), restart.RestartAfter) for _ in range(1000))
    tracker = restart.ExponentialDelay(same_mistakes=None).tracker(RNG)
    assert all(isinstance(tracker.on_failure(0.0, "a"), restart.RestartAfter) for _ in range(1000))


def test_mistakes_are_forgotten_after_running_long_enough() -> None:
    tracker = restart.ExponentialDelay(reset_after_s=100.0, same_mistakes=2).tracker(RNG)
    tracker.on_failure(0.0, "a")
    tracker.on_running(1.0)
    assert isinstance(tracker.on_failure(101.0, "a"), restart.RestartAfter)
    assert isinstance(tracker.on_failure(101.0, "a"), restart.GiveUp)
