"""Pauses grow up to their longest, and nobody tries after the deadline."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from onceflow.core import backoff as module
from onceflow.core.backoff import Backoff


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses slept; the clock goes on by them and by nothing else.

    Only the module's own name is replaced: other threads of the process keep the real clock.
    """
    slept: list[float] = []

    def monotonic() -> float:
        return 1000.0 + sum(slept)

    clock = SimpleNamespace(monotonic=monotonic, sleep=slept.append)
    monkeypatch.setattr(module, "time", clock)
    return slept


def test_pauses_double_up_to_the_longest(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def longest(_low: float, high: float) -> float:
        return high

    monkeypatch.setattr(module, "JITTER", SimpleNamespace(uniform=longest))
    backoff = Backoff(until=1003.0, first_s=0.1, longest_s=1.0)
    while backoff.pause():
        pass
    assert clock == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])


def test_nobody_sleeps_past_the_deadline(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(50):
        monkeypatch.setattr(module, "JITTER", random.Random(seed))
        clock.clear()
        backoff = Backoff(until=1002.0)
        while backoff.pause():
            pass
        assert sum(clock) <= 2.0
        assert sum(clock) > 1.0, f"seed {seed}: it gave up with half of its time left"


def test_pauses_of_two_differ(clock: list[float]) -> None:
    one, other = Backoff(until=2000.0, first_s=1.0), Backoff(until=2000.0, first_s=1.0)
    assert one.pause()
    assert other.pause()
    assert clock[0] != clock[1]
    assert all(0.5 <= pause_s <= 1.0 for pause_s in clock)


def test_a_pause_leaves_the_numbers_of_a_program_with_a_seed_alone(clock: list[float]) -> None:
    random.seed(7)
    before = random.getstate()
    assert Backoff(until=2000.0).pause()
    assert random.getstate() == before
    assert len(clock) == 1


def test_a_call_has_what_is_left_and_a_moment_at_least(clock: list[float]) -> None:
    backoff = Backoff(until=1004.0)
    assert backoff.call_s(2.0) == 2.0
    clock.append(3.0)
    assert backoff.call_s(2.0) == 1.0
    clock.append(5.0)
    assert backoff.call_s(2.0) == 0.1
