"""A snapshot holds the state as of its barrier, in every state backend."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.conformance.state_job import MAX_PARALLELISM, Job, States, keys_named
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state import StateHandle, key_group_of


def test_a_snapshot_holds_the_state_as_of_its_barrier_whatever_happens_before_its_upload(
    job: Job,
) -> None:
    states = States(job.open())
    keys = keys_named(50)
    states.fill(keys, "before", 1)
    pending = states.store.snapshot(job.next_checkpoint())
    states.fill(keys, "after", 10)
    states.store.set_current_key(keys[0])
    states.value.clear()
    states.list.clear()
    states.map.clear()
    restored = States(job.open(pending.upload(job.storage)))
    for key in keys:
        assert restored.read(key) == (1, [f"before-{key}"], {"before": 1})
    assert states.read(keys[0]) == (0, [], {})
    assert states.read(keys[1]) == (
        11, [f"before-{keys[1]}", f"after-{keys[1]}"], {"before": 1, "after": 10},
    )  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_overlapping_snapshots_each_hold_their_own_barrier(
    job: Job, order: tuple[int, ...]
) -> None:
    states = States(job.open())
    keys = keys_named(30)
    pending: list[Any] = []
    for number in range(3):
        states.fill(keys, str(number), 1)
        states.store.set_current_key(f"only in {number}")
        states.value.set(5)
        pending.append(states.store.snapshot(job.next_checkpoint()))
        states.store.set_current_key(f"only in {number}")
        states.value.clear()
    states.fill(keys, "last", 1)
    handles = {number: pending[number].upload(job.storage) for number in order}
    for number in range(3):
        restored = States(job.open(handles[number]))
        expected = [f"{n}-{keys[3]}" for n in range(number + 1)]
        assert restored.read(keys[3]) == (
            number + 1, expected, {str(n): 1 for n in range(number + 1)},
        )  # fmt: skip
        assert [restored.read(f"only in {n}")[0] for n in range(3)] == [
            5 if n == number else 0 for n in range(3)
        ]
    states.store.notify_completed(CheckpointId(3))
    assert states.read(keys[3])[0] == 4
    assert states.read("only in 1")[0] == 0


def test_many_snapshots_waiting_at_once_lose_nothing(job: Job) -> None:
    states = States(job.open())
    pending: list[Any] = []
    for number in range(9):
        states.fill(["a", f"k{number}"], str(number), 1)
        pending.append(states.store.snapshot(job.next_checkpoint()))
    for number, snapshot in enumerate(pending):
        restored = States(job.open(snapshot.upload(job.storage)))
        assert restored.read("a")[0] == number + 1
        assert [restored.read(f"k{n}")[0] for n in range(9)] == [int(n <= number) for n in range(9)]
    assert states.read("a")[0] == 9


def test_a_discarded_snapshot_leaves_the_state_and_later_snapshots_whole(job: Job) -> None:
    states = States(job.open())
    states.fill(keys_named(10), "x", 1)
    first = job.next_checkpoint()
    pending = states.store.snapshot(first)
    pending.discard()
    states.store.notify_aborted(first)
    states.fill(["account-1"], "y", 1)
    pending.discard()
    restored = States(job.open(job.snapshot(states.store)))
    assert restored.read("account-0") == (1, ["x-account-0"], {"x": 1})
    assert restored.read("account-1")[0] == 2


def test_a_failed_upload_leaves_the_state_and_later_snapshots_whole(job: Job) -> None:
    class Broken(MemoryStorage):
        def write(self, *args: Any, **kwargs: Any) -> StateHandle:
            raise OSError("disk full")

        def write_chunks(self, *args: Any, **kwargs: Any) -> StateHandle:
            raise OSError("disk full")

    states = States(job.open())
    states.fill(keys_named(10), "x", 1)
    checkpoint = job.next_checkpoint()
    with pytest.raises(OSError, match="disk full"):
        states.store.snapshot(checkpoint).upload(Broken())
    states.store.notify_aborted(checkpoint)
    states.fill(["account-1"], "y", 1)
    restored = States(job.open(job.snapshot(states.store)))
    assert restored.read("account-0")[0] == 1
    assert restored.read("account-1")[0] == 2


def test_uploads_on_another_thread_while_the_owner_goes_on_hold_their_barrier(job: Job) -> None:
    states = States(job.open())
    keys = keys_named(150)
    handles: list[tuple[int, tuple[StateHandle, ...]]] = []
    failures: list[BaseException] = []

    def upload(number: int, pending: Any) -> None:
        try:
            handles.append((number, pending.upload(job.storage)))
        except BaseException as error:
            failures.append(error)

    for number in range(4):
        states.fill(keys, str(number), 1)
        checkpoint = job.next_checkpoint()
        pending = states.store.snapshot(checkpoint)
        thread = threading.Thread(target=upload, args=(number, pending))
        thread.start()
        while thread.is_alive():
            for key in keys[:100]:
                states.store.set_current_key(key)
                states.value.set(states.value.get() + 1)
                states.map.put("scratch", 1)
        thread.join()
        for key in keys[:100]:
            states.store.set_current_key(key)
            states.value.set(number + 1)
            states.map.remove("scratch")
        states.store.notify_completed(checkpoint)
    assert failures == []
    for number, snapshot in handles:
        restored = States(job.open(snapshot))
        for key in keys[::37]:
            expected = [f"{n}-{key}" for n in range(number + 1)]
            assert restored.read(key) == (
                number + 1, expected, {str(n): 1 for n in range(number + 1)},
            )  # fmt: skip


def test_a_map_that_was_cleared_has_only_the_entries_put_since(job: Job) -> None:
    states = States(job.open())
    states.fill(["a"], "before", 1)
    job.snapshot(states.store)
    states.store.set_current_key("a")
    states.map.clear()
    states.map.put("after", 2)
    assert dict(states.map.items()) == {"after": 2}
    restored = States(job.open(job.snapshot(states.store)))
    assert restored.read("a")[2] == {"after": 2}


def test_a_subtask_between_two_others_keeps_only_its_own_key_groups(job: Job) -> None:
    keys = keys_named(60)
    whole = States(job.open())
    whole.fill(keys, "whole", 1)
    handles = job.snapshot(whole.store)
    parts: list[tuple[StateHandle, ...]] = []
    for index in range(3):
        part = States(job.open(handles, index=index, parallelism=3))
        if index != 1:
            own = job.context(index, 3).key_groups
            for key in keys:
                if key_group_of(key, MAX_PARALLELISM) in own:
                    part.store.set_current_key(key)
                    part.value.clear()
        parts.append(job.snapshot(part.store))
    # A restore begins with the files of the first one.
    together = States(job.open([*parts[1], *parts[0], *parts[2]]))
    middle = job.context(1, 3).key_groups
    for key in keys:
        assert together.read(key)[0] == (key_group_of(key, MAX_PARALLELISM) in middle)
