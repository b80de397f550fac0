"""Snapshots of the heap as a base and layers: what they write, name again and restore."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state import (
    HeapBackend,
    KeyedStateStore,
    ListStateDescriptor,
    MapStateDescriptor,
    PendingKeyedSnapshot,
    RocksDBBackend,
    StateBackend,
    StateContext,
    StateHandle,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.state.aggregates import accumulators
from onceflow.core.state.aggregates.accumulators import REMOVED_MIN, AccumulatorTable
from onceflow.core.state.api.descriptors import AccumulatorColumn
from onceflow.core.state.heap.store import HeapStore
from onceflow.core.state.heap.tables import LayerLimits
from onceflow.core.state.readers.stored import list_pieces, read_metas_by_name

BALANCE = ValueStateDescriptor[int]("balance", int)
RECENT = ListStateDescriptor[bytes]("recent", bytes)
BY_DAY = MapStateDescriptor[str, int]("by day", str, int)
KEYS = 60
LARGE = 3000
ROWS = AccumulatorColumn("rows", "count", pa.int64())
FLAGGED = ValueStateDescriptor[int]("flagged", int)
EAGER = LayerLimits(entries_min=0, changed_share_max=2, layers_share_max=3, layer_files_max=9)
"""Layers for states of any size."""
SOME_SMALL = replace(EAGER, entries_min=12)
"""Layers, too, but a state of a few keys is in each of them as a whole."""

Contents = tuple[int | None, list[bytes], dict[str, int], int | None, int]
NOTHING: Contents = (None, [], {}, None, 0)


class States:
    """A store with a state of each kind, and a model of what is in it."""

    def __init__(self, store: KeyedStateStore) -> None:
        self.store = store
        self.balance = store.value_state(BALANCE)
        self.recent = store.list_state(RECENT)
        self.by_day = store.map_state(BY_DAY)
        self.flagged = store.value_state(FLAGGED)
        self.totals = store.accumulators("totals", [pa.int64()], [ROWS], namespaced=True)
        self.model: dict[int, Contents] = {}

    def change(self, rng: random.Random, count: int) -> None:
        for key in rng.sample(range(KEYS), count):
            self.store.set_current_key(key)
            balance, recent, by_day, flagged, total = self.model.get(key, NOTHING)
            match rng.randrange(9):
                case 6 | 7:
                    total += 1
                    self.count(key)
                case 8:
                    total = 0
                    self.forget_totals([key])
                case 0:
                    balance, recent, by_day = None, [], {}
                    self.balance.clear()
                    self.recent.clear()
                    self.by_day.clear()
                case 1 | 2:
                    balance = rng.randrange(1 << 40)
                    self.balance.set(balance)
                case 3:
                    recent = [*recent, rng.randbytes(9)]
                    self.recent.add(recent[-1])
                case 4:
                    by_day = {**by_day, f"day {rng.randrange(4)}": rng.randrange(99)}
                    self.by_day.put_all(by_day)
                case _:
                    day = f"day {rng.randrange(4)}"
                    by_day = {name: count for name, count in by_day.items() if name != day}
                    self.by_day.remove(day)
            self.model[key] = (balance, recent, by_day, flagged, total)

    def count(self, key: int) -> None:
        one = np.zeros(1, np.int64)
        self.totals.finish(self.totals.fold(one, [pa.array([key])], None, {}))

    def forget_totals(self, gone: Collection[int]) -> None:
        entries = self.totals.select(0, 1)
        keys = self.totals.keys_of(entries)[0].to_numpy()
        self.totals.remove(entries[np.isin(keys, list(gone))])
        for key in gone:
            self.model[key] = (*self.model.get(key, NOTHING)[:4], 0)

    def read_total(self, key: int) -> int:
        entries = self.totals.select(0, 1)
        keys = self.totals.keys_of(entries)[0].to_numpy()
        total = int(self.totals.numbers(0, entries[keys == key]).sum())
        assert (key in keys) == (total > 0), "a key that was removed is there, without totals"
        return total

    def flag(self, keys: Collection[int]) -> None:
        """Leave nothing in the smallest state but an entry for each of `keys`."""
        for key in range(KEYS):
            contents = self.model.get(key, NOTHING)
            flagged = key if key in keys else None
            if contents[3] != flagged:
                self.store.set_current_key(key)
                self.flagged.set(flagged)  # type: ignore[arg-type]
                self.model[key] = (*contents[:3], flagged, contents[4])

    def read(self, key: int) -> Contents:
        self.store.set_current_key(key)
        recent, by_day = self.recent.get(), dict(self.by_day.items())
        return self.balance.get(), recent, by_day, self.flagged.get(), self.read_total(key)


class Job:
    """Opens stores over one storage, and closes them."""

    def __init__(self, scratch: Path) -> None:
        self.storage = MemoryStorage(inline_bytes_max=-1)
        self._scratch = scratch
        self.stores: list[KeyedStateStore] = []

    def open(
        self,
        handles: tuple[StateHandle, ...] = (),
        *,
        groups: range = range(128),
        limits: LayerLimits | None = EAGER,
        backend: StateBackend | None = None,
    ) -> KeyedStateStore:
        context = StateContext("op", 0, groups, 128, self._scratch / str(len(self.stores)))
        mine = [
            h
            for h in handles
            if h.key_group_first < groups.stop and h.key_group_last >= groups.start
        ]
        if backend is not None:
            store = backend.open(context, mine, self.storage)
        else:
            store = HeapStore.open(context, mine, self.storage, limits)
        self.stores.append(store)
        return store

    def snapshot(self, store: KeyedStateStore, checkpoint: int) -> tuple[StateHandle, ...]:
        handles = store.snapshot(CheckpointId(checkpoint)).upload(self.storage)
        store.notify_completed(CheckpointId(checkpoint))
        return handles

    def check(
        self, handles: tuple[StateHandle, ...], model: dict[int, Contents], label: str
    ) -> None:
        """Restore `handles` and compare every key with the model."""
        restored = States(self.open(handles))
        for key in range(KEYS):
            assert restored.read(key) == model.get(key, NOTHING), f"{label}, key {key}"
        restored.store.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for store in made.stores:
        store.close()


class Retention:
    """Decides checkpoints and deletes files as the engine does, which knows only what was acked."""

    def __init__(self, job: Job) -> None:
        self._files = job.storage.files
        self.acked: dict[int, tuple[StateHandle, ...]] = {}
        self.completed: tuple[int, tuple[StateHandle, ...]] = (0, ())

    def complete(self, checkpoint: int) -> None:
        previous = self.completed[1]
        self.completed = (checkpoint, self.acked.pop(checkpoint))
        self._delete(previous)
        for late in [number for number in self.acked if number < checkpoint]:
            self.abort(late)

    def abort(self, checkpoint: int) -> None:
        self._delete(self.acked.pop(checkpoint))

    def _delete(self, handles: tuple[StateHandle, ...]) -> None:
        held = {h.path for known in (self.completed[1], *self.acked.values()) for h in known}
        for handle in handles:
            if handle.path not in held:
                self._files.pop(handle.path, None)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.servers) for seed in range(3, 8))]
)
def test_the_last_completed_checkpoint_can_be_restored_whatever_was_deleted_around_it(
    job: Job, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Overlapping checkpoints, upload in any order, aborts, and notifications late or left out."""
    rng = random.Random(seed)
    monkeypatch.setattr(accumulators, "REMOVED_MIN", rng.choice([2, 9]))
    states = States(job.open(limits=rng.choice([EAGER, SOME_SMALL])))
    store = states.store
    retention = Retention(job)
    expected: dict[int, dict[int, Contents]] = {}
    waiting: list[tuple[int, PendingKeyedSnapshot]] = []
    news: list[Callable[[], None]] = []
    layers = 0
    for number in range(2, 122, 2):
        states.change(rng, rng.choice([0, 0, 3, 20]))
        states.flag(rng.sample(range(KEYS), rng.choice([0, 0, 4])))
        if rng.random() < 0.3:
            # So many at once that the table drops their entries, and numbers the others anew.
            states.forget_totals(rng.sample(range(KEYS), KEYS // 2))
        waiting.append((number, store.snapshot(CheckpointId(number))))
        expected[number] = dict(states.model)
        states.change(rng, rng.choice([0, 5]))
        rng.shuffle(waiting)
        while waiting and rng.random() < 0.7:
            acked, pending = waiting.pop()
            if rng.random() < 0.1:
                pending.discard()
                news.append(partial(store.notify_aborted, CheckpointId(acked)))
                continue
            retention.acked[acked] = pending.upload(job.storage)
            if acked < retention.completed[0] or rng.random() < 0.2:
                retention.abort(acked)
                news.append(partial(store.notify_aborted, CheckpointId(acked)))
        if retention.acked and rng.random() < 0.6:
            decided = rng.choice(sorted(retention.acked))
            retention.complete(decided)
            news.append(partial(store.notify_completed, CheckpointId(decided)))
            handles = retention.completed[1]
            layers += any(handle.name.startswith("changes-") for handle in handles)
            job.check(handles, expected[decided], f"seed {seed}, checkpoint {decided}")
        while news and rng.random() < 0.7:
            news.pop(0)()
        if news and rng.random() < 0.1:
            news.pop()
        if rng.random() < 0.1:
            savepoint = store.savepoint(CheckpointId(number + 1)).upload(job.storage)
            assert not any(handle.shared for handle in savepoint)
            job.check(savepoint, states.model, f"seed {seed}, savepoint {number}")
            store.notify_aborted(CheckpointId(number + 1))
    for key in range(KEYS):
        assert states.read(key) == states.model.get(key, NOTHING)
    assert layers > 2


@pytest.mark.parametrize("seed", range(3))
def test_layers_are_restored_at_another_parallelism_in_rocksdb_and_as_rows(
    job: Job, seed: int
) -> None:
    rng = random.Random(seed)
    whole = States(job.open())
    whole.change(rng, 50)
    first = job.snapshot(whole.store, 1)
    halves = [States(job.open(first, groups=groups)) for groups in (range(64), range(64, 128))]
    parts: list[tuple[StateHandle, ...]] = []
    for number in range(2, 7):
        for key in rng.sample(range(KEYS), 9):
            for half in halves:
                # Only the one that owns the key has anything of it.
                balance, recent, by_day, flagged, total = half.read(key)
                if total:
                    half.count(key)
                    total += 1
                    whole.model[key] = (balance, recent, by_day, flagged, total)
                if balance is not None:
                    half.balance.set(number)
                    whole.model[key] = (number, recent, by_day, flagged, total)
                if by_day:
                    half.by_day.clear()
                    whole.model[key] = (half.balance.get(), recent, {}, flagged, total)
        parts = [job.snapshot(half.store, number) for half in halves]
    assert all(any(handle.name.startswith("changes-") for handle in part) for part in parts)
    together = (*parts[0], *parts[1])
    job.check(together, whole.model, f"seed {seed}")
    moved = States(job.open(together, backend=RocksDBBackend()))
    assert all(moved.read(key) == whole.model.get(key, NOTHING) for key in range(KEYS))
    pieces = list_pieces([(i, OperatorSnapshot("op", part)) for i, part in enumerate(parts)], 128)
    assert set(read_metas_by_name(pieces, job.storage)) == {
        "balance",
        "recent",
        "by day",
        "flagged",
        "totals",
    }
    rows = sum(len(rows) for piece in pieces for rows in piece.rows("balance", job.storage))
    assert rows == sum(balance is not None for balance, *_ in whole.model.values())


def fill(store: KeyedStateStore, keys: range) -> None:
    value = store.value_state(ValueStateDescriptor[bytes]("payload", bytes))
    for key in keys:
        store.set_current_key(key)
        value.set(random.randbytes(100))


def size_bytes(handles: tuple[StateHandle, ...]) -> int:
    return sum(handle.size_bytes for handle in handles)


def test_a_snapshot_writes_what_has_changed_and_names_the_rest_again(job: Job) -> None:
    store = job.open(limits=LayerLimits())
    fill(store, range(LARGE))
    first = job.snapshot(store, 1)
    fill(store, range(LARGE // 100))
    second = job.snapshot(store, 2)
    assert set(first) < set(second)
    assert size_bytes(first) > LARGE * 100
    # The schema and its metadata are all that is written besides the rows.
    assert size_bytes(second) - size_bytes(first) < LARGE // 100 * 100 * 1.5 + 2000


def totals_of(store: KeyedStateStore) -> AccumulatorTable:
    columns = [AccumulatorColumn("sum", "sum", pa.int64()), ROWS]
    return store.accumulators("running", [pa.string()], columns, ttl=StateTtlConfig("1 h"))


def add_one(table: AccumulatorTable, keys: range) -> None:
    names = pa.array([f"account {key}" for key in keys])
    table.update([names], None, {"sum": pa.array([1] * len(keys)), "rows": None})  # type: ignore[dict-item]


def test_of_running_totals_a_snapshot_writes_the_keys_that_have_changed(job: Job) -> None:
    store = job.open(limits=LayerLimits())
    table = totals_of(store)
    add_one(table, range(LARGE))
    job.snapshot(store, 1)
    base = job.snapshot(store, 2)
    add_one(table, range(LARGE // 100))
    add_one(table, range(LARGE, LARGE + 5))
    layered = job.snapshot(store, 3)
    assert set(base) < set(layered)
    assert size_bytes(layered) - size_bytes(base) < size_bytes(base) / 20
    add_one(table, range(LARGE))
    whole = job.snapshot(store, 4)
    assert not set(base) & set(whole)
    for handles, first, last in ((layered, 2, 1), (whole, 3, 2)):
        restored = totals_of(job.open(handles))
        names = pa.array(["account 0", f"account {LARGE - 1}", f"account {LARGE + 4}"])
        nothing = restored.update([names], None, {"sum": pa.array([0, 0, 0])})
        assert list(nothing["sum"]) == [first, last, 1]
        assert len(restored) == LARGE + 5


def test_a_base_follows_when_the_layers_are_half_of_theirs(job: Job) -> None:
    store = job.open(limits=LayerLimits())
    fill(store, range(LARGE))
    base = job.snapshot(store, 1)
    written: list[int] = []
    for number in range(2, 30):
        fill(store, range(LARGE // 10))
        handles = job.snapshot(store, number)
        written.append(size_bytes(tuple(set(handles) - set(base))))
        assert size_bytes(handles) < 1.7 * size_bytes(base)
        base = handles
    # The first has the base beneath; six more have a layer each, then a base comes again.
    assert 2 <= sum(size > LARGE * 100 for size in written) <= 5


@pytest.mark.parametrize("changed", [LARGE // 3, LARGE])
def test_a_state_of_which_most_changes_is_one_dict_and_written_as_a_whole(
    job: Job, changed: int
) -> None:
    store = job.open(limits=LayerLimits())
    fill(store, range(LARGE))
    first = job.snapshot(store, 1)
    fill(store, range(changed))
    second = job.snapshot(store, 2)
    assert not set(first) & set(second)
    assert size_bytes(second) < 1.1 * size_bytes(first)


def test_a_state_that_is_empty_now_is_restored_empty_if_nothing_else_has_changed(job: Job) -> None:
    """Timers that have fired, and windows that are over, would come out again."""
    store = job.open(limits=LayerLimits())
    fill(store, range(2 * LARGE))
    timers, windows = store.value_state(FLAGGED), windows_of(store)
    for key in range(10):
        store.set_current_key(key)
        timers.set(key)
    # So many that a table does not keep them as removed.
    keys = pa.array(range(REMOVED_MIN + 1))
    windows.finish(windows.fold(np.zeros(len(keys), np.int64), [keys], None, {}))
    job.snapshot(store, 1)
    second = job.snapshot(store, 2)
    for key in range(10):
        store.set_current_key(key)
        timers.clear()
    windows.remove(windows.select(0, 1))
    third = job.snapshot(store, 3)
    assert set(second) < set(third)
    # That they are empty is written once.
    assert job.snapshot(store, 4) == third
    restored = job.open(third)
    restored.value_state(FLAGGED)
    assert list(restored.entries(FLAGGED)) == []
    assert len(windows_of(restored)) == 0


def windows_of(store: KeyedStateStore) -> AccumulatorTable:
    return store.accumulators("windows", [pa.int64()], [ROWS], namespaced=True)


def test_a_small_state_shares_no_file(job: Job) -> None:
    store = job.open(limits=LayerLimits())
    fill(store, range(500))
    assert not any(handle.shared for handle in job.snapshot(store, 1))
    fill(store, range(5))
    assert not any(handle.shared for handle in job.snapshot(store, 2))


def test_without_incremental_snapshots_no_file_is_shared(job: Job, tmp_path: Path) -> None:
    context = StateContext("op", 0, range(128), 128, tmp_path)
    store = HeapBackend(incremental=False).open(context, (), job.storage)
    fill(store, range(LARGE))
    assert not any(handle.shared for handle in job.snapshot(store, 1))
    fill(store, range(5))
    assert not any(handle.shared for handle in job.snapshot(store, 2))


def test_a_state_that_has_become_small_builds_on_nothing_that_was_deleted(job: Job) -> None:
    store = job.open(limits=LayerLimits())
    value = store.value_state(ValueStateDescriptor[bytes]("payload", bytes))
    fill(store, range(LARGE))
    job.snapshot(store, 1)
    for key in range(LARGE - 50):
        store.set_current_key(key)
        value.clear()
    second = job.snapshot(store, 2)
    job.storage.files = {h.path: job.storage.files[h.path] for h in second}
    fill(store, range(20))
    third = job.snapshot(store, 3)
    restored = job.open(third).value_state(ValueStateDescriptor[bytes]("payload", bytes))
    for key, there in ((0, True), (19, True), (20, False), (LARGE - 1, True)):
        job.stores[-1].set_current_key(key)
        assert (restored.get() is not None) == there


def test_a_snapshot_beside_an_undecided_base_names_no_file_from_before_it(job: Job) -> None:
    """Those files are deleted as soon as the base is complete."""
    store = job.open(limits=LayerLimits())
    small = [store.value_state(ValueStateDescriptor[int](name, int)) for name in ("a", "b")]

    def set_small(number: int | None) -> None:
        for key in range(999):
            store.set_current_key(key)
            for state in small:
                state.set(number)  # type: ignore[arg-type]

    fill(store, range(1_200))
    job.snapshot(store, 1)
    set_small(1)
    second = store.snapshot(CheckpointId(2)).upload(job.storage)
    set_small(None)
    later = store.snapshot(CheckpointId(3))
    store.notify_completed(CheckpointId(2))
    job.storage.files = {h.path: job.storage.files[h.path] for h in second}
    restored = job.open(later.upload(job.storage))
    value = restored.value_state(ValueStateDescriptor[bytes]("payload", bytes))
    restored.set_current_key(1_199)
    assert value.get() is not None
