"""Timers are kept as keyed state, in every state backend."""

from __future__ import annotations

import re

import pytest
from tests.conformance.state_job import BALANCE, MAX_PARALLELISM, Job

from onceflow.core import state
from onceflow.core.errors import BadStateValue
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.state.rocksdb.database import Database

KEYS = [f"key-{number}" for number in range(30)]


def timers_of(store: state.KeyedStateStore) -> state.Timers:
    return state.KeyedStates(store).timers()


def fired(timers: state.Timers, until_ms: int) -> list[tuple[int, str]]:
    return [(timer.at_ms, timer.key) for timer in timers.event.fire_due(until_ms)]


def test_timers_move_with_their_keys_and_fire_once(job: Job) -> None:
    store = job.open()
    timers = timers_of(store)
    for number, key in enumerate(KEYS):
        store.set_current_key(key)
        for at_ms in (number, 100, 200 + number, 100):
            timers.register_event_time_timer(at_ms)
        timers.delete_event_time_timer(200)
    early = fired(timers, 99)
    assert early == [(number, key) for number, key in enumerate(KEYS)]
    for handles in (
        job.snapshot(store),
        store.savepoint(job.next_checkpoint()).upload(job.storage),
    ):
        late = fired_by_all(job, handles, 3)
        assert sorted(late) == sorted(
            [(100, key) for key in KEYS]
            + [(200 + number, key) for number, key in enumerate(KEYS) if number]
        )
    assert len(fired(timers, 100)) == len(KEYS)
    assert fired(timers, 100) == []


def fired_by_all(
    job: Job, handles: tuple[state.StateHandle, ...], parallelism: int
) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for index in range(parallelism):
        mine = job.context(index, parallelism).key_groups
        store = job.open(handles, index=index, parallelism=parallelism)
        timers = timers_of(store)
        # Halfway there is a snapshot: what has fired before it is not in it.
        first = fired(timers, 150)
        again = job.open(job.snapshot(store), index=index, parallelism=parallelism)
        rest = fired(timers_of(again), 1_000)
        assert fired(timers, 1_000) == rest
        assert all(state.key_group_of(key, MAX_PARALLELISM) in mine for _, key in first + rest)
        found += first + rest
    return found


def test_a_timer_that_is_deleted_and_registered_again_fires_once(job: Job) -> None:
    store = job.open()
    timers = timers_of(store)
    store.set_current_key("a")
    for _ in range(3):
        timers.register_event_time_timer(5)
        timers.delete_event_time_timer(5)
    timers.register_event_time_timer(5)
    assert fired(timers, 5) == [(5, "a")]


def test_a_timer_that_registers_the_next_ends_at_the_end_of_time(job: Job) -> None:
    store = job.open()
    timers = timers_of(store)
    store.set_current_key("a")
    timers.register_event_time_timer(10)
    seen: list[int] = []
    for until_ms in (30, MAX_WATERMARK):
        for timer in timers.event.fire_due(until_ms):
            seen.append(timer.at_ms)
            timers.register_event_time_timer(timer.at_ms + 10)
    assert seen == [10, 20, 30, 40]


@pytest.mark.parametrize("at_ms", [1.5, None, True, 1 << 63], ids=str)
def test_a_time_that_is_none_is_refused_by_name(job: Job, at_ms: int) -> None:
    store = job.open()
    timers = timers_of(store)
    store.set_current_key("a")
    with pytest.raises(
        BadStateValue, match=f"{at_ms!r} is not a valid time for a timer in processing time"
    ):
        timers.register_processing_time_timer(at_ms)


@pytest.mark.parametrize("at_ms", [1 << 63, (1 << 63) - 1, -1 << 63], ids=str)
def test_a_time_at_the_ends_of_64_bits_is_refused_with_the_nearest_that_is_taken(
    job: Job, at_ms: int
) -> None:
    """Other engines take their largest number for the end of the input."""
    store = job.open()
    timers = timers_of(store)
    store.set_current_key("a")
    with pytest.raises(BadStateValue) as caught:
        timers.register_event_time_timer(at_ms)
    bounds = re.search(r"from (-\d+) to (\d+)$", str(caught.value))
    assert bounds is not None
    for bound in map(int, bounds.groups()):
        timers.register_event_time_timer(bound)
    times = [at_ms for at_ms, _ in fired(timers, MAX_WATERMARK)]
    assert times == [-(1 << 63) + 1, (1 << 63) - 2]


def test_the_values_of_all_keys_are_found_changed_ones_too(job: Job) -> None:
    descriptor = state.ValueStateDescriptor[int]("value", int)
    store = job.open()
    value = store.value_state(descriptor)
    for number, key in enumerate(KEYS):
        store.set_current_key(key)
        value.set(number)
    restored = job.open(job.snapshot(store))
    again = restored.value_state(descriptor)
    for states, held in ((store, value), (restored, again)):
        for key in KEYS[:3]:
            states.set_current_key(key)
            held.set(-1)
        states.set_current_key(KEYS[3])
        held.clear()
        expected = {key: number for number, key in enumerate(KEYS) if number != 3}
        expected.update(dict.fromkeys(KEYS[:3], -1))
        assert dict(states.entries(descriptor)) == expected


@pytest.mark.parametrize("backend", ["rocksdb-small-cache"], indirect=True)
def test_pending_timers_are_not_read_for_records_that_use_none(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    get_many = Database.get_many

    def counting(database: Database, keys: list[bytes]) -> list[bytes | None]:
        read.extend(keys)
        return get_many(database, keys)

    def timers_read() -> int:
        count = sum(b"event-timers" in key for key in read)
        read.clear()
        return count

    monkeypatch.setattr(Database, "get_many", counting)
    states = state.KeyedStates(job.open())
    balance, timers = states.value_state(BALANCE), states.timers()
    store = job.stores[0]
    waiting = [f"waits-{number}" for number in range(100)]
    for number, key in enumerate(waiting):
        store.set_current_key(key)
        timers.register_event_time_timer(1_000 + number)
    for batch in range(20):
        keys = [f"account-{batch}-{number}" for number in range(8)]
        store.prefetch(keys)
        for key in keys:
            store.set_current_key(key)
            balance.set(balance.get() + 1)
        if batch == 5:
            timers_read()
    assert timers_read() == 0
    # They are read again once a batch has used them.
    for start in (0, 8):
        store.prefetch(waiting[start : start + 8])
        for key in waiting[start : start + 8]:
            store.set_current_key(key)
            timers.delete_event_time_timer(1_000 + int(key[6:]))
    assert timers_read() == 8
    assert [key for _, key in fired(timers, 2_000)] == waiting[16:]
