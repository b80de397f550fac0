"""Each use of a state that expires returns and keeps what has not expired, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.errors import StateIncompatible
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.watermarks import NO_WATERMARK
from onceflow.core.state import (
    HeapBackend,
    KeyedStates,
    KeyedStateStore,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    StateContext,
    StateHandle,
    StateTtlConfig,
    ValueState,
    ValueStateDescriptor,
)
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.heap.store import HeapStore
from onceflow.core.state.states.timers import TimerQueue, Timers

ON_READ = StateTtlConfig(10, update="on_read_and_write")
SEEN = StateTtlConfig(10, visibility="return_expired_if_not_cleaned_up")


class Expiring:
    """A state of each kind for one key, whose values live for 10 s."""

    def __init__(self, scratch: Path, ttl: StateTtlConfig) -> None:
        self.now_s = 1_000.0
        self.store = HeapStore.open(
            StateContext("op", 0, range(128), 128, scratch), (), MemoryStorage()
        )
        states = KeyedStates(self.store, StateClock(lambda: self.now_s))
        self.value: ValueState[int | None] = states.value_state(
            ValueStateDescriptor[int | None]("value", int | None, ttl=ttl)
        )
        self.elements: ListState[str] = states.list_state(ListStateDescriptor("list", str, ttl))
        self.mapped: MapState[str, int] = states.map_state(MapStateDescriptor("map", str, int, ttl))
        self.store.set_current_key("a")

    def read(self) -> tuple[int | None, list[str], dict[str, int]]:
        return self.value.get(), self.elements.get(), dict(self.mapped.items())


@pytest.fixture
def expiring(tmp_path: Path) -> Callable[[StateTtlConfig], Expiring]:
    return lambda ttl: Expiring(tmp_path, ttl)


def test_what_is_written_lives_for_its_time_and_no_longer(expiring: Any) -> None:
    states: Expiring = expiring(StateTtlConfig(10))
    states.value.set(1)
    states.elements.add("a")
    states.elements.add_all(["b", "c"])
    states.mapped.put("x", 1)
    assert states.read() == (1, ["a", "b", "c"], {"x": 1})
    states.now_s += 9.999
    assert states.read() == (1, ["a", "b", "c"], {"x": 1}), "a read is no use here"
    states.elements.add("d")
    states.mapped.put("y", 2)
    states.now_s += 0.001
    assert states.read() == (None, ["d"], {"y": 2})
    assert states.mapped.get("x") is None
    assert states.mapped.get("y") == 2
    assert states.mapped.get("z") is None
    assert [states.mapped.contains(key) for key in "xyz"] == [False, True, False]
    assert list(states.mapped.keys()) == ["y"]


def test_what_is_replaced_or_removed_is_gone_before_its_time(expiring: Any) -> None:
    states: Expiring = expiring(StateTtlConfig(10))
    states.elements.add("a")
    states.elements.update(["b", "c"])
    states.mapped.put_all({"x": 1, "y": 2, "z": 3})
    states.mapped.remove("y")
    assert states.read() == (None, ["b", "c"], {"x": 1, "z": 3})
    states.value.set(1)
    states.value.set(None)
    assert states.value.get() is None
    states.value.set(2)
    for state in (states.value, states.elements, states.mapped):
        state.clear()
    assert states.read() == (None, [], {})


def test_a_read_renews_only_what_has_not_expired(expiring: Any) -> None:
    states: Expiring = expiring(ON_READ)
    states.value.set(1)
    states.elements.add("a")
    states.mapped.put_all({"x": 1, "y": 2})
    states.now_s += 6
    states.elements.add("b")
    assert states.value.get() == 1
    assert states.mapped.get("x") == 1
    states.now_s += 4
    assert states.read() == (1, ["b"], {"x": 1})
    states.now_s += 9
    assert states.read() == (1, ["b"], {"x": 1})
    states.now_s += 10
    assert states.read() == (None, [], {})
    states.elements.add("c")
    assert states.elements.get() == ["c"]


def test_what_has_expired_is_seen_until_it_is_deleted_where_that_is_allowed(expiring: Any) -> None:
    states: Expiring = expiring(SEEN)
    states.value.set(1)
    states.elements.add("a")
    states.mapped.put("x", 1)
    states.now_s += 10
    assert states.read() == (1, ["a"], {"x": 1})
    assert states.mapped.contains("x")
    for _ in range(3):
        states.store.clean(10)
    assert states.read() == (None, [], {})


def test_a_use_that_another_machine_saw_later_is_not_set_back(expiring: Any) -> None:
    states: Expiring = expiring(ON_READ)
    states.now_s += 5
    states.value.set(1)
    # The clock never goes back in one process.
    states.now_s -= 5
    assert states.value.get() == 1
    states.now_s += 14
    assert states.value.get() == 1


@pytest.mark.parametrize("incremental", [True, False])
def test_values_that_expire_are_restored_under_a_wider_type(
    tmp_path: Path, incremental: bool
) -> None:
    """A whole number that a float cannot hold is refused, and no value is rounded."""
    storage, ttl, now_s = MemoryStorage(), StateTtlConfig(10), 1_000.0

    def open_store(*handles: StateHandle) -> tuple[KeyedStateStore, KeyedStates]:
        context = StateContext("op", 0, range(128), 128, tmp_path)
        store = HeapBackend(incremental=incremental).open(context, handles, storage)
        return store, KeyedStates(store, StateClock(lambda: now_s))

    for number, fits in ((7, True), (2**53 + 1, False)):
        store, states = open_store()
        store.set_current_key("a")
        states.value_state(ValueStateDescriptor[int]("value", int, ttl=ttl)).set(number)
        handles = store.snapshot(CheckpointId(1)).upload(storage)
        restored, states = open_store(*handles)
        wider = ValueStateDescriptor[float]("value", float, ttl=ttl)
        if fits:
            value = states.value_state(wider)
            restored.set_current_key("a")
            assert value.get() == 7.0
        else:
            with pytest.raises(StateIncompatible):
                states.value_state(wider)


def test_timers_of_each_domain_fire_once_until_they_are_deleted(tmp_path: Path) -> None:
    store = HeapStore.open(StateContext("op", 0, range(128), 128, tmp_path), (), MemoryStorage())
    timers = Timers(store, StateClock(lambda: 1_000.0))
    assert timers.current_watermark() == NO_WATERMARK
    for key in "ab":
        store.set_current_key(key)
        for at_ms in (10, 20, 20, 30):
            timers.register_event_time_timer(at_ms)
            timers.register_processing_time_timer(at_ms + 1)
    timers.delete_event_time_timer(20)
    timers.delete_processing_time_timer(11)
    assert (timers.event.next_ms, timers.processing.next_ms) == (10, 11)
    fired = [(timer.key, timer.at_ms, timer.domain) for timer in timers.event.fire_due(20)]
    assert fired == [("a", 10, "event"), ("b", 10, "event"), ("a", 20, "event")]
    assert timers.event.fired_ms == 20
    fired = [(timer.key, timer.at_ms, timer.domain) for timer in timers.processing.fire_due(21)]
    assert fired == [(key, at_ms, "processing") for key, at_ms in (("a", 11), ("a", 21), ("b", 21))]
    assert timers.processing.fired_ms == 21
    assert list(timers.event.fire_due(20)) == []
    # A restore finds the timers that are left.
    again = Timers(store, StateClock(lambda: 1_000.0))
    assert [timer.key for timer in again.event.fire_due(30)] == ["a", "b"]


def test_timers_are_taken_in_order_and_no_earlier_than_they_are_due() -> None:
    queue = TimerQueue()
    assert (queue.next_ms, queue.last_ms) == (None, None)
    for at_ms, key in ((30, "a"), (10, "b"), (20, "c"), (10, "d"), (20, "e")):
        queue.add(at_ms, key)
    assert (queue.next_ms, queue.last_ms) == (10, 30)
    assert queue.take(9, 10) == []
    assert queue.take(20, 1) == [(10, "b"), (10, "d")]
    assert queue.take(20, 10) == [(20, "c"), (20, "e")]
    assert (queue.next_ms, queue.last_ms) == (30, 30)
    assert queue.take(30, 10) == [(30, "a")]
    assert queue.next_ms is None
