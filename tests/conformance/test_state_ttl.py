"""State that expires: what is handed out, what is deleted and when, and how it may be changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.conformance.state_job import BACKENDS, Job

from onceflow.core import state
from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.state.api.context import StateClock

TEN_S = state.StateTtlConfig(10)
KEYS = [f"key-{number}" for number in range(40)]


class Wall:
    """The machine's clock, as a test sets it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Expiring:
    """One state of each kind with a time to live, or without."""

    store: state.KeyedStateStore
    value: state.ValueState[int]
    elements: state.ListState[str]
    mapped: state.MapState[str, int]

    def fill(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.store.set_current_key(key)
            self.value.set(1)
            self.elements.add("x")
            self.mapped.put("x", 1)

    def read(self, key: str) -> tuple[int, list[str], dict[str, int]]:
        self.store.set_current_key(key)
        return self.value.get(), self.elements.get(), dict(self.mapped.items())


def expiring(
    job: Job,
    wall: Wall,
    ttl: state.StateTtlConfig | None = TEN_S,
    handles: Sequence[state.StateHandle] = (),
    **options: Any,
) -> Expiring:
    store = job.open(handles, **options)
    states = state.KeyedStates(store, StateClock(wall))
    found = Expiring(
        store,
        states.value_state(state.ValueStateDescriptor[int]("value", int, default=0, ttl=ttl)),
        states.list_state(state.ListStateDescriptor[str]("list", str, ttl)),
        states.map_state(state.MapStateDescriptor[str, int]("map", str, int, ttl)),
    )
    store.finish_open()
    return found


Read = tuple[int, list[str], dict[str, int]]
FULL: Read = (1, ["x"], {"x": 1})
EMPTY: Read = (0, [], {})


def test_a_value_lives_for_its_time_after_the_last_write_also_after_a_restore(job: Job) -> None:
    wall = Wall()
    first = expiring(job, wall)
    first.fill(["a", "b"])
    wall.now_s += 6
    first.fill(["b"])
    again = expiring(job, wall, handles=job.snapshot(first.store))
    wall.now_s += 4
    for states in (first, again):
        assert states.read("a") == EMPTY
        # Of what "b" holds, the list's first element is as old as "a".
        assert states.read("b") == FULL
    wall.now_s += 6
    assert again.read("b") == EMPTY


def test_a_read_is_a_use_where_that_is_asked_for(job: Job) -> None:
    wall = Wall()
    states = expiring(job, wall, state.StateTtlConfig(10, update="on_read_and_write"))
    states.fill(["a", "b"])
    for _ in range(3):
        wall.now_s += 6
        assert states.read("a") == FULL
    assert states.read("b") == EMPTY


def test_what_has_expired_is_handed_out_until_it_is_deleted_where_that_is_asked_for(
    job: Job,
) -> None:
    wall = Wall()
    states = expiring(
        job, wall, state.StateTtlConfig(10, visibility="return_expired_if_not_cleaned_up")
    )
    states.fill(KEYS)
    job.snapshot(states.store)
    wall.now_s += 11
    assert all(states.read(key) == FULL for key in KEYS)
    cleaned_away(states.store)
    assert all(states.read(key) == EMPTY for key in KEYS)


def test_a_read_of_what_has_expired_does_not_make_it_live_longer(job: Job) -> None:
    wall = Wall()
    options: dict[str, Any] = {
        "update": "on_read_and_write",
        "visibility": "return_expired_if_not_cleaned_up",
    }
    states = expiring(job, wall, state.StateTtlConfig(10, **options))
    states.fill(["a"])
    job.snapshot(states.store)
    wall.now_s += 11
    assert states.read("a") == FULL
    cleaned_away(states.store)
    assert states.read("a") == EMPTY


def cleaned_away(store: state.KeyedStateStore) -> None:
    """Look at every entry, as records that come do little by little."""
    for _ in range(200):
        store.clean(7)


def test_what_has_expired_leaves_the_backend_as_records_come(job: Job) -> None:
    wall = Wall()
    states = expiring(job, wall)
    states.fill(KEYS)
    job.snapshot(states.store)
    wall.now_s += 6
    states.fill(KEYS[:3])
    wall.now_s += 6
    cleaned_away(states.store)
    wall.now_s = 0
    # Read without a time to live, all that is stored is seen.
    seen = expiring(job, wall, state.StateTtlConfig("9 h"), job.snapshot(states.store))
    assert [key for key in KEYS if seen.read(key) != EMPTY] == KEYS[:3]
    assert seen.read(KEYS[0]) == FULL


@pytest.mark.parametrize("cleanup", [True, False])
def test_a_savepoint_leaves_out_what_has_expired_if_told_to(job: Job, cleanup: bool) -> None:
    wall = Wall()
    states = expiring(job, wall, state.StateTtlConfig(10, cleanup_full_snapshot=cleanup))
    states.fill(KEYS)
    wall.now_s += 6
    states.fill(KEYS[:2])
    wall.now_s += 6
    handles = states.store.savepoint(job.next_checkpoint()).upload(job.storage)
    for name in BACKENDS:
        seen = expiring(job, Wall(), state.StateTtlConfig("9 h"), handles, backend=BACKENDS[name])
        assert seen.read(KEYS[5]) == (EMPTY if cleanup else FULL)
        assert seen.read(KEYS[0]) == (
            (1, ["x"], {"x": 1}) if cleanup else (1, ["x", "x"], {"x": 1})
        )


def test_a_time_to_live_is_added_and_changed_on_restore_and_runs_from_then(job: Job) -> None:
    wall = Wall()
    before = expiring(job, wall, ttl=None)
    before.fill(KEYS)
    for handles in (
        job.snapshot(before.store),
        before.store.savepoint(job.next_checkpoint()).upload(job.storage),
    ):
        added = expiring(job, wall, TEN_S, handles)
        wall.now_s += 9
        assert all(added.read(key) == FULL for key in KEYS)
        longer = expiring(job, wall, state.StateTtlConfig(20), job.snapshot(added.store))
        wall.now_s += 2
        assert all(added.read(key) == EMPTY for key in KEYS)
        assert all(longer.read(key) == FULL for key in KEYS)


def test_a_time_to_live_is_not_taken_away_in_silence(job: Job) -> None:
    states = expiring(job, Wall())
    states.fill(["a"])
    handles = job.snapshot(states.store)
    with pytest.raises(StateIncompatible, match=r"'value'.*time to live cannot be removed"):
        expiring(job, Wall(), None, handles)
    dropped = expiring(job, Wall(), None, handles, allow_non_restored_state=True)
    assert dropped.read("a") == EMPTY


def test_a_clock_that_jumps_back_neither_revives_nor_ends_anything(job: Job) -> None:
    wall = Wall()
    states = expiring(job, wall)
    states.fill(["a"])
    wall.now_s += 11
    states.fill(["b"])
    wall.now_s -= 500
    assert (states.read("a"), states.read("b")) == (EMPTY, FULL)
    states.fill(["c"])
    wall.now_s += 505
    assert (states.read("b"), states.read("c")) == (FULL, FULL)
    # Another machine, whose clock is late: what was used in its future has not expired.
    wall.now_s -= 500
    other = expiring(job, wall, handles=job.snapshot(states.store))
    assert (other.read("b"), other.read("c")) == (FULL, FULL)


def test_one_name_with_two_times_to_live_is_refused(job: Job) -> None:
    states = state.KeyedStates(job.open())
    states.value_state(state.ValueStateDescriptor[int]("value", int, ttl=TEN_S))
    with pytest.raises(ConfigError, match=r"'value'.*ttl=10.*ttl='1 h'"):
        states.value_state(
            state.ValueStateDescriptor[int]("value", int, ttl=state.StateTtlConfig("1 h"))
        )


@pytest.mark.parametrize(
    "options",
    [{"ttl": 0}, {"ttl": "soon"}, {"update": "never"}, {"visibility": "x"}],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused_by_name(options: dict[str, Any]) -> None:
    ten_s: dict[str, Any] = {"ttl": 10}
    with pytest.raises(ConfigError, match=next(iter(options))):
        state.StateTtlConfig(**(ten_s | options))
