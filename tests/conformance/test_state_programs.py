"""The random programs over state backends find out what is broken: timers, and what expires."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onceflow import HeapBackend
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.states import keyed_states, timers
from onceflow.core.state.states.timers import DomainTimers, Timer, TimerQueue
from onceflow.core.state.states.ttl import Timed, TimedSerializer
from onceflow.integration.conformance import state_programs
from onceflow.integration.conformance.state_programs import StateProgram

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "1"))
PROGRAMS_MAX = 60
"""The rarest mistake needs about 5."""
STEPS = 250


class KeepsWhatHasFired(DomainTimers):
    """A timer that fires, or is deleted, stays in the state, and fires after a restore."""

    def delete(self, at_ms: int) -> bool:
        held = self._times.get()
        found = super().delete(at_ms)
        self._times.set(held)
        return found


class FiresWhatWasDeleted(DomainTimers):
    """A broken queue that fires a deleted timer."""

    def delete(self, at_ms: int) -> bool:
        super().delete(at_ms)
        return True


class ForgetsAtARestore(DomainTimers):
    """The queue is not built from what was restored."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.queue = TimerQueue()


class KeepsOneAKey(DomainTimers):
    """Another timer of a key takes the place of the one before."""

    def register(self, at_ms: int) -> None:
        self._times.clear()
        super().register(at_ms)


class EndsAfterARound(DomainTimers):
    """A timer that is registered by one, for a time that has come, waits."""

    def fire_due(self, until_ms: int) -> Iterator[Timer]:
        for at_ms, key in self.queue.take(until_ms, 1_000_000):
            self._store.set_current_key(key)
            if self.delete(at_ms):
                yield Timer(key, at_ms, self._domain)


class SetsNoKey(DomainTimers):
    """A timer fires while another key is the current one."""

    def fire_due(self, until_ms: int) -> Iterator[Timer]:
        for timer in super().fire_due(until_ms):
            self._store.set_current_key("a")
            yield timer


class LatestFirst(TimerQueue):
    """Timers fire in another order."""

    def take(self, until_ms: int, count: int) -> list[tuple[int, Any]]:
        return super().take(until_ms, count)[::-1]


class TooEarly(TimerQueue):
    """A timer fires a millisecond before its time."""

    def take(self, until_ms: int, count: int) -> list[tuple[int, Any]]:
        return super().take(until_ms + 1, count)


class FollowsTheMachine(StateClock):
    """The clock goes back with the machine's."""

    def now_ms(self) -> int:
        return int(self._wall_clock() * 1000)


class HandsOutAll(TimedSerializer):
    """A broken store that returns expired values until they are deleted."""

    def is_visible(self, stored: Timed) -> bool:
        return True


class LivesTooLong(TimedSerializer):
    """A value lives a millisecond longer."""

    def is_expired(self, stored: Timed) -> bool:
        return super().is_expired(Timed(stored.used_ms + 1, stored.stored))


class TakesNoReadingForAUse(TimedSerializer):
    """Only a write renews."""

    def renew(self, stored: Timed) -> Timed | None:
        return None


class BeginsAnew(TimedSerializer):
    """A broken store that restarts the time to live of restored values."""

    def decode(self, data: bytes) -> Timed:
        return Timed(self.clock.now_ms(), super().decode(data).stored)


class DeletesWhatLives(TimedSerializer):
    """Snapshots leave out what has not expired."""

    def are_bytes_expired(self, data: bytes) -> bool:
        return True


class CleansNoSavepoint(TimedSerializer):
    """Full snapshots hold what has expired."""

    @property
    def cleans_snapshots(self) -> bool:
        return False


BROKEN: tuple[tuple[ModuleType, type[Any]], ...] = (
    (timers, KeepsWhatHasFired),
    (timers, FiresWhatWasDeleted),
    (timers, ForgetsAtARestore),
    (timers, KeepsOneAKey),
    (timers, EndsAfterARound),
    (timers, SetsNoKey),
    (timers, LatestFirst),
    (timers, TooEarly),
    (state_programs, FollowsTheMachine),
    (keyed_states, HandsOutAll),
    (keyed_states, LivesTooLong),
    (keyed_states, TakesNoReadingForAUse),
    (keyed_states, BeginsAnew),
    (keyed_states, DeletesWhatLives),
    (keyed_states, CleansNoSavepoint),
)


@pytest.mark.parametrize(("where", "broken"), BROKEN, ids=[one.__name__ for _, one in BROKEN])
def test_a_broken_rule_of_timers_or_expiry_is_caught(
    where: ModuleType, broken: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, broken.__base__.__name__, broken)  # type: ignore[union-attr]
    programs = range(SEED, SEED + PROGRAMS_MAX)
    if not any(finds_fault(tmp_path / str(seed), seed) for seed in programs):
        pytest.fail(f"{broken.__name__} survived {PROGRAMS_MAX} programs")


def finds_fault(directory: Path, seed: int) -> bool:
    """True if the program of `seed` finds the fault."""
    program = StateProgram([HeapBackend()], directory, seed)
    try:
        program.run(STEPS)
    except AssertionError as fault:
        return f"program of seed {seed}" in str(fault)
    finally:
        program.close()
    return False
