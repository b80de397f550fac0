"""Tests the contract of state backends on each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.state_job import (
    BACKENDS,
    BALANCE,
    COLUMNS,
    MAX_PARALLELISM,
    Job,
    States,
    aggregate,
    keys_named,
)
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core import state
from onceflow.core.errors import CheckpointCorrupt, ConfigError, StateIncompatible
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.storage import FileSystemStorage


def test_each_key_has_its_own_value_list_and_map(job: Job) -> None:
    states = States(job.open())
    states.fill(["a", "b"], "x", 2)
    states.fill(["a"], "y", 3)
    assert states.read("a") == (5, ["x-a", "y-a"], {"x": 2, "y": 3})
    assert states.read("b") == (2, ["x-b"], {"x": 2})
    assert states.read("c") == (0, [], {})


def test_cleared_state_reads_as_if_it_never_was_also_after_a_restore(job: Job) -> None:
    states = States(job.open())
    states.fill(keys_named(20), "x", 1)
    job.snapshot(states.store)
    for key in keys_named(20)[::2]:
        states.store.set_current_key(key)
        states.value.clear()
        states.list.clear()
        states.map.clear()
    for again in (states, States(job.open(job.snapshot(states.store)))):
        assert again.read("account-0") == (0, [], {})
        assert again.read("account-1") == (1, ["x-account-1"], {"x": 1})


def test_setting_none_clears_and_the_default_comes_back(job: Job) -> None:
    states = States(job.open())
    states.store.set_current_key("a")
    states.value.set(7)
    states.value.set(None)  # type: ignore[arg-type]
    assert states.value.get() == 0
    plain = states.store.value_state(state.ValueStateDescriptor[Any]("plain"))
    assert plain.get() is None


def test_map_entries_are_found_removed_and_listed_one_by_one(job: Job) -> None:
    store = job.open()
    mapped = store.map_state(state.MapStateDescriptor[tuple[str, int], float]("m", Any, float))
    store.set_current_key(1)
    for number in range(10):
        mapped.put(("k", number), float(number))
    mapped.remove(("k", 3))
    mapped.remove(("k", 99))
    store.set_current_key(2)
    mapped.put(("k", 3), 0.5)
    restored = job.open(job.snapshot(store))
    for each in (store, restored):
        again = each.map_state(state.MapStateDescriptor[tuple[str, int], float]("m", Any, float))
        each.set_current_key(1)
        assert sorted(again.keys()) == [("k", n) for n in range(10) if n != 3]
        assert again.get(("k", 4)) == 4.0
        assert again.get(("k", 3)) is None
        assert not again.contains(("k", 3))
        each.set_current_key(2)
        assert list(again.items()) == [(("k", 3), 0.5)]


def test_a_map_may_be_changed_while_its_items_are_read(job: Job) -> None:
    states = States(job.open())
    states.store.set_current_key("a")
    for number in range(10):
        states.map.put(str(number), number)
    for key in states.map.keys():  # noqa: SIM118
        states.map.remove(key)
        states.map.put(f"new {key}", 0)
    assert sorted(states.map.keys()) == sorted(f"new {n}" for n in range(10))


def test_a_value_changed_in_place_changes_neither_state_nor_snapshot(job: Job) -> None:
    store = job.open()
    descriptor = state.ValueStateDescriptor[list[int]]("value", list[int], default=[0])
    value = store.value_state(descriptor)
    elements = store.list_state(
        state.ListStateDescriptor[dict[str, int]]("elements", dict[str, int])
    )
    mapped = store.map_state(state.MapStateDescriptor[str, list[int]]("mapped", str, list[int]))
    store.set_current_key("a")
    value.get().append(99)
    assert value.get() == [0]
    mine, element, entry = [1, 2], {"n": 1}, [5]
    value.set(mine)
    elements.add(element)
    mapped.put("e", entry)
    pending = store.snapshot(job.next_checkpoint())
    for changed in (mine, entry, value.get(), mapped.get("e") or []):
        changed.append(77)
    element["n"] = 77
    elements.get()[0]["n"] = 77
    restored = job.open(pending.upload(job.storage))
    for each in (store, restored):
        each.set_current_key("a")
        assert each.value_state(descriptor).get() == [1, 2]
        list_descriptor = state.ListStateDescriptor[dict[str, int]]("elements", dict[str, int])
        assert each.list_state(list_descriptor).get() == [{"n": 1}]
        map_descriptor = state.MapStateDescriptor[str, list[int]]("mapped", str, list[int])
        assert each.map_state(map_descriptor).get("e") == [5]


@pytest.mark.parametrize(("old", "new"), [(1, 1), (2, 4), (4, 2), (2, 2), (3, 5), (5, 3), (1, 7)])
def test_after_rescaling_every_key_is_in_its_own_range_and_only_there(
    job: Job, old: int, new: int
) -> None:
    keys = keys_named(120)
    handles: list[state.StateHandle] = []
    for index in range(old):
        store = job.open(index=index, parallelism=old)
        groups = job.context(index, old).key_groups
        mine = [key for key in keys if state.key_group_of(key, MAX_PARALLELISM) in groups]
        states = States(store)
        states.fill(mine, "x", 1)
        if index % 2:  # not every subtask has asked for every state
            store.set_current_key("odd")
            store.value_state(state.ValueStateDescriptor[int]("only in odd ones", int))
        aggregate(store, mine, [1] * len(mine))
        job.snapshot(store)
        states.fill(mine, "y", 2)
        handles += job.snapshot(store)
    for index in range(new):
        groups = job.context(index, new).key_groups
        store = job.open(handles, index=index, parallelism=new)
        states = States(store)
        inside = [key for key in keys if state.key_group_of(key, MAX_PARALLELISM) in groups]
        outside = [key for key in keys if key not in set(inside)]
        for key in inside:
            assert states.read(key) == (3, [f"x-{key}", f"y-{key}"], {"x": 1, "y": 2})
        assert all(states.read(key) == (0, [], {}) for key in outside)
        assert aggregate(store, inside, [5] * len(inside))["total"].tolist() == [6] * len(inside)
        # Once more, so that what the new store writes does not depend on what it was opened from.
        again = States(job.open(job.snapshot(store), index=index, parallelism=new))
        assert all(again.read(key)[0] == 3 for key in inside)


def test_rescaling_there_and_back_keeps_every_key(job: Job) -> None:
    keys = keys_named(90)
    handles: list[state.StateHandle] = []
    for step, parallelism in enumerate([1, 3, 2, 4, 1, 2]):
        written: list[state.StateHandle] = []
        for index in range(parallelism):
            groups = job.context(index, parallelism).key_groups
            states = States(job.open(handles, index=index, parallelism=parallelism))
            mine = [key for key in keys if state.key_group_of(key, MAX_PARALLELISM) in groups]
            assert all(states.read(key)[0] == step for key in mine)
            states.fill(mine, str(step), 1)
            written += job.snapshot(states.store)
        handles = written


def test_state_that_nobody_asks_for_survives_snapshot_and_restore(job: Job) -> None:
    states = States(job.open())
    states.fill(keys_named(40), "x", 4)
    aggregate(states.store, ["a"], [3])
    quiet = job.open(job.snapshot(states.store))
    moved = States(job.open(job.snapshot(quiet)))
    assert moved.read("account-7") == (4, ["x-account-7"], {"x": 4})
    assert aggregate(moved.store, ["a"], [1])["total"].tolist() == [4]


def test_prefetching_changes_nothing_that_is_read(job: Job) -> None:
    states = States(job.open())
    keys = keys_named(60)
    states.fill(keys[:40], "x", 1)
    restored = States(job.open(job.snapshot(states.store)))
    for step, each in enumerate((states, restored)):
        for start in (0, 5, 30):
            batch = keys[start : start + 30]
            each.store.prefetch([*batch, *batch, batch[0]])
            each.fill(batch[:4], f"{step}.{start}", 1)
            each.store.prefetch(batch)
        each.store.prefetch([])
        assert each.read(keys[0])[0] == 2
        assert each.read(keys[7])[0] == 2
        assert each.read(keys[20]) == (1, [f"x-{keys[20]}"], {"x": 1})
        assert each.read(keys[32]) == (
            2,
            [f"x-{keys[32]}", f"{step}.30-{keys[32]}"],
            {"x": 1, f"{step}.30": 1},
        )
        assert each.read(keys[59]) == (0, [], {})


def test_an_empty_store_can_be_snapshotted_and_restored(job: Job) -> None:
    first = job.open()
    handles = job.snapshot(first)
    assert handles
    states = States(job.open(handles))
    assert states.read("a") == (0, [], {})
    asked = States(job.open(job.snapshot(states.store)))
    assert asked.read("a") == (0, [], {})


def test_restoring_with_another_type_or_kind_is_refused_by_name(job: Job) -> None:
    states = States(job.open())
    states.fill(["a"], "x", 1)
    aggregate(states.store, ["a"], [3])
    handles = job.snapshot(states.store)
    restored = job.open(handles)
    with pytest.raises(StateIncompatible, match=r"'balance'.*msgpack/1:int.*msgpack/1:str"):
        restored.value_state(state.ValueStateDescriptor[str]("balance", str))
    with pytest.raises(StateIncompatible, match=r"'recent'.*list .*str.*value .*str"):
        restored.value_state(state.ValueStateDescriptor[str]("recent", str))
    with pytest.raises(StateIncompatible, match=r"'by day'.*str -> msgpack/1:int.*int -> "):
        restored.map_state(state.MapStateDescriptor[int, int]("by day", int, int))
    with pytest.raises(StateIncompatible, match="'running'"):
        restored.accumulators("running", [pa.int64()], COLUMNS)
    with pytest.raises(StateIncompatible, match="'running'"):
        restored.accumulators("running", [pa.string()], COLUMNS[:1])
    assert States(restored).read("a")[0] == 1


def test_one_name_for_two_states_of_one_store_is_refused(job: Job) -> None:
    store = job.open()
    assert store.value_state(BALANCE) is store.value_state(BALANCE)
    with pytest.raises(ConfigError, match="'balance'"):
        store.list_state(state.ListStateDescriptor[int]("balance", int))


def test_another_max_parallelism_is_refused_with_both_numbers(job: Job) -> None:
    states = States(job.open())
    states.fill(["a"], "x", 1)
    handles = job.snapshot(states.store)
    with pytest.raises(StateIncompatible, match=r"max parallelism 128.*with 256"):
        job.open(handles, max_parallelism=256)


@pytest.mark.parametrize("target", list(BACKENDS))
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_savepoint_is_restored_by_every_backend(job: Job, target: str, parallelism: int) -> None:
    states = States(job.open())
    keys = keys_named(100)
    states.fill(keys, "x", 1)
    aggregate(states.store, keys, list(range(100)))
    pending = states.store.savepoint(job.next_checkpoint())
    states.fill(keys, "y", 1)
    aggregate(states.store, keys, [1] * 100)
    handles = pending.upload(job.storage)
    assert not any(handle.shared for handle in handles)
    seen = 0
    for index in range(parallelism):
        groups = job.context(index, parallelism).key_groups
        store = job.open(handles, index=index, parallelism=parallelism, backend=BACKENDS[target])
        for number, key in enumerate(keys):
            if state.key_group_of(key, MAX_PARALLELISM) in groups:
                assert States(store).read(key) == (1, [f"x-{key}"], {"x": 1})
                assert aggregate(store, [key], [0])["total"].tolist() == [number]
                seen += 1
    assert seen == 100


def test_damaged_and_missing_files_are_refused(job: Job) -> None:
    states = States(job.open())
    states.fill(keys_named(100), "x", 1)
    handles = job.snapshot(states.store)
    for path in sorted(job.storage.files):
        data = job.storage.files[path]
        job.storage.files[path] = data[:-1] + bytes([data[-1] ^ 1])
        with pytest.raises(CheckpointCorrupt):
            job.open(handles)
        del job.storage.files[path]
        with pytest.raises(CheckpointCorrupt):
            job.open(handles)
        job.storage.files[path] = data
    assert States(job.open(handles)).read("account-5")[0] == 1


def test_state_outlives_attempts_and_rescales_in_checkpoint_storage(
    backend: state.StateBackend, tmp_path: Path
) -> None:
    job = Job(backend, tmp_path / "scratch", MemoryStorage())
    storage = FileSystemStorage(str(tmp_path / "storage")).open("ledger")
    keys = keys_named(60)
    handles: list[state.StateHandle] = []
    for attempt, parallelism in enumerate([2, 2, 1, 3], start=1):
        for index in range(parallelism):
            context = job.context(index, parallelism)
            mine = [h for h in handles if job.overlaps(h, context.key_groups)]
            job.adopt(backend.open(context, mine, storage.reader()))
        stores = job.stores[-parallelism:]
        for round_ in range(3):
            checkpoint = CheckpointId(10 * attempt + round_)
            written: list[state.StateHandle] = []
            for index, store in enumerate(stores):
                groups = job.context(index, parallelism).key_groups
                states = States(store)
                inside = [key for key in keys if state.key_group_of(key, MAX_PARALLELISM) in groups]
                assert all(states.read(key)[0] == 3 * (attempt - 1) + round_ for key in inside)
                states.fill(inside, f"{attempt}.{round_}", 1)
                writer = storage.writer(AttemptId(attempt), checkpoint, "op", index)
                written += store.snapshot(checkpoint).upload(writer)
                store.notify_completed(checkpoint)
            named = {handle.path for handle in written}
            storage.discard(handle for handle in handles if handle.path not in named)
            handles = written
        for store in stores:
            store.close()
    left = [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    assert left == []


class History:
    """A store driven at random beside a model of plain dicts."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.rng = random.Random(seed)
        self.states = States(job.open())
        self.model: dict[int, tuple[int, list[str], dict[str, int]]] = {}

    def change(self, key: int) -> None:
        rng, states = self.rng, self.states
        states.store.set_current_key(key)
        value, items, mapped = self.model.get(key, (0, [], {}))
        match rng.choice(["set", "unset", "add", "add", "empty", "put", "put", "remove"]):
            case "set":
                value = rng.randrange(100)
                states.value.set(value)
            case "unset":
                value = 0
                states.value.clear()
            case "add":
                items = [*items, str(rng.random())]
                states.list.add(items[-1])
            case "empty":
                items = []
                states.list.clear()
            case "put":
                mapped = {**mapped, str(rng.randrange(5)): rng.randrange(9)}
                for name, amount in mapped.items():
                    states.map.put(name, amount)
            case _:
                gone = str(rng.randrange(5))
                mapped = {name: amount for name, amount in mapped.items() if name != gone}
                states.map.remove(gone)
        self.model[key] = (value, items, mapped)
        assert states.read(key) == self.model[key]

    def snapshot(self) -> Callable[[], None]:
        """Take a snapshot; return what finishes it, one way or the other."""
        checkpoint = self.job.next_checkpoint()
        pending = self.states.store.snapshot(checkpoint)
        expected = dict(self.model)

        def finish() -> None:
            if self.rng.random() < 0.2:
                pending.discard()
                self.states.store.notify_aborted(checkpoint)
                return
            handles = pending.upload(self.job.storage)
            self.states.store.notify_completed(checkpoint)
            restored = States(self.job.open(handles))
            for key in range(12):
                assert restored.read(key) == expected.get(key, (0, [], {}))

        return finish


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_read_and_restore_like_plain_dicts(job: Job, seed: int) -> None:
    history = History(job, seed)
    waiting: list[Callable[[], None]] = []
    for _ in range(300):
        history.change(history.rng.randrange(12))
        if history.rng.random() < 0.04:
            waiting.append(history.snapshot())
        while waiting and history.rng.random() < 0.05:
            waiting.pop(0)()
    for finish in waiting:
        finish()
    for key in range(12):
        assert history.states.read(key) == history.model.get(key, (0, [], {}))
