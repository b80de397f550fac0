"""Incremental snapshots: what is uploaded, what is named again, and what is never."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core import state
from onceflow.core.errors import StateError, StateIncompatible
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.rocksdb import database as rocksdb_database
from onceflow.core.state.stores.store_parts import KnownFiles

PAYLOAD = state.ValueStateDescriptor[bytes]("payload", bytes)
KEYS = 3000


class Job:
    def __init__(self, scratch: Path) -> None:
        self.storage = MemoryStorage()
        self.scratch = scratch
        self.stores: list[state.KeyedStateStore] = []

    def open(
        self,
        handles: tuple[state.StateHandle, ...] = (),
        *,
        groups: range = range(128),
        incremental: bool = True,
    ) -> state.KeyedStateStore:
        context = state.StateContext("op", 0, groups, 128, self.scratch / str(len(self.stores)))
        store = state.RocksDBBackend(incremental).open(context, handles, self.storage)
        self.stores.append(store)
        return store

    def put(self, store: state.KeyedStateStore, keys: range, size_bytes: int = 100) -> None:
        value = store.value_state(PAYLOAD)
        for key in keys:
            store.set_current_key(key)
            value.set(os.urandom(size_bytes))

    def snapshot(
        self, store: state.KeyedStateStore, checkpoint: int
    ) -> tuple[state.StateHandle, ...]:
        return store.snapshot(CheckpointId(checkpoint)).upload(self.storage)

    def uploaded_bytes(self) -> int:
        return sum(len(data) for data in self.storage.files.values())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for store in made.stores:
        store.close()


def shared(handles: tuple[state.StateHandle, ...]) -> set[state.StateHandle]:
    return {handle for handle in handles if handle.shared}


def test_a_snapshot_uploads_what_changed_and_names_the_rest_again(job: Job) -> None:
    store = job.open()
    job.put(store, range(KEYS))
    first = job.snapshot(store, 1)
    store.notify_completed(CheckpointId(1))
    before = job.uploaded_bytes()
    assert before > KEYS * 100
    job.put(store, range(KEYS // 100))
    second = job.snapshot(store, 2)
    assert shared(first) < shared(second)
    changed = KEYS // 100 * 100
    manifest = next(handle for handle in second if not handle.shared)
    assert job.uploaded_bytes() - before - manifest.size_bytes < 3 * changed
    assert manifest.size_bytes < 16_384


def test_without_any_change_only_the_manifest_is_uploaded(job: Job) -> None:
    store = job.open()
    job.put(store, range(100))
    first = job.snapshot(store, 1)
    store.notify_completed(CheckpointId(1))
    written = len(job.storage.written)
    second = job.snapshot(store, 2)
    assert shared(second) == shared(first)
    assert len(job.storage.written) == written + 1


@pytest.mark.parametrize("fate", ["aborted", "unknown"])
def test_files_of_a_checkpoint_that_did_not_complete_are_never_named_again(
    job: Job, fate: str
) -> None:
    store = job.open()
    job.put(store, range(100))
    first = job.snapshot(store, 1)
    if fate == "aborted":
        store.notify_aborted(CheckpointId(1))
    second = job.snapshot(store, 2)
    assert not shared(first) & shared(second)
    store.notify_completed(CheckpointId(2))
    store.notify_completed(CheckpointId(1))
    assert shared(job.snapshot(store, 3)) == shared(second)


def test_a_file_is_named_again_only_if_every_undecided_checkpoint_names_it_too(job: Job) -> None:
    store = job.open()
    job.put(store, range(100))
    first = store.snapshot(CheckpointId(1))
    second = store.snapshot(CheckpointId(2))
    handles_1 = first.upload(job.storage)
    handles_2 = second.upload(job.storage)
    store.notify_completed(CheckpointId(1))
    # Were 2 to complete next, and 1 be deleted, nothing would hold the files of 1 any more.
    handles_3 = job.snapshot(store, 3)
    assert not shared(handles_3) & shared(handles_1)
    store.notify_completed(CheckpointId(2))
    handles_4 = job.snapshot(store, 4)
    assert not shared(handles_4) & shared(handles_2)
    store.notify_completed(CheckpointId(4))
    assert shared(job.snapshot(store, 5)) == shared(handles_4)


class Retention:
    """Decides checkpoints and deletes files as the engine does, which knows only what was acked."""

    def __init__(self, job: Job) -> None:
        self._files = job.storage.files
        self.acked: dict[int, tuple[state.StateHandle, ...]] = {}
        self.completed: tuple[int, tuple[state.StateHandle, ...]] = (0, ())

    def complete(self, checkpoint: int) -> None:
        previous = self.completed[1]
        self.completed = (checkpoint, self.acked.pop(checkpoint))
        self._delete(previous)
        for late in [number for number in self.acked if number < checkpoint]:
            self.abort(late)

    def abort(self, checkpoint: int) -> None:
        self._delete(self.acked.pop(checkpoint))

    def _delete(self, handles: tuple[state.StateHandle, ...]) -> None:
        held = {h.path for known in (self.completed[1], *self.acked.values()) for h in known}
        for handle in handles:
            if handle.path not in held:
                self._files.pop(handle.path, None)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.servers) for seed in range(3, 8))]
)
def test_the_last_completed_checkpoint_can_be_restored_whatever_was_deleted_around_it(
    job: Job, seed: int
) -> None:
    """Overlapping checkpoints, upload in any order, aborts, and notifications late or left out."""
    rng = random.Random(seed)
    store = job.open()
    value = store.value_state(PAYLOAD)
    retention = Retention(job)
    model: dict[int, bytes] = {}
    expected: dict[int, dict[int, bytes]] = {}
    waiting: list[tuple[int, state.PendingKeyedSnapshot]] = []
    news: list[Callable[[], None]] = []
    for number in range(1, 41):
        for key in rng.sample(range(60), rng.choice([0, 3, 20])):
            store.set_current_key(key)
            model[key] = rng.randbytes(200)
            value.set(model[key])
        waiting.append((number, store.snapshot(CheckpointId(number))))
        expected[number] = dict(model)
        rng.shuffle(waiting)
        while waiting and rng.random() < 0.6:
            acked, pending = waiting.pop()
            handles = pending.upload(job.storage)
            retention.acked[acked] = handles
            if acked < retention.completed[0] or rng.random() < 0.2:
                retention.abort(acked)
                news.append(partial(store.notify_aborted, CheckpointId(acked)))
        if retention.acked and rng.random() < 0.6:
            decided = rng.choice(sorted(retention.acked))
            retention.complete(decided)
            news.append(partial(store.notify_completed, CheckpointId(decided)))
            restored = job.open(retention.completed[1])
            again = restored.value_state(PAYLOAD)
            for key in range(60):
                restored.set_current_key(key)
                assert again.get() == expected[decided].get(key), f"seed {seed}, {decided}"
            restored.close()
        while news and rng.random() < 0.7:
            news.pop(0)()
        if news and rng.random() < 0.1:
            news.pop()


def test_the_manifest_does_not_grow_with_the_age_of_a_job(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocksdb_database, "MANIFEST_BYTES_MAX", 4096)
    store = job.open()
    sizes: list[int] = []
    for number in range(1, 151):
        job.put(store, range(number % 7, number % 7 + 2), 10)
        handles = job.snapshot(store, number)
        store.notify_completed(CheckpointId(number))
        sizes.append(handles[0].size_bytes)
    # Without the bound: 32 KB.
    assert max(sizes) < 24_576


def test_a_restored_store_names_the_files_it_was_restored_from_again(job: Job) -> None:
    store = job.open()
    job.put(store, range(KEYS))
    first = job.snapshot(store, 1)
    restored = job.open(first)
    job.put(restored, range(10))
    before = job.uploaded_bytes()
    second = job.snapshot(restored, 2)
    assert shared(first) < shared(second)
    assert job.uploaded_bytes() - before < 20_000


def test_two_stores_restored_from_one_checkpoint_never_give_two_files_one_name(job: Job) -> None:
    store = job.open()
    job.put(store, range(100))
    first = job.snapshot(store, 1)
    names: list[str] = []
    for _ in range(2):
        attempt = job.open(first)
        job.put(attempt, range(100, 200))
        names += [handle.name for handle in shared(job.snapshot(attempt, 2)) - shared(first)]
    assert len(names) == len(set(names)) == 2


def test_after_scaling_out_the_parts_share_files_and_after_scaling_in_they_do_not(job: Job) -> None:
    whole = job.open()
    job.put(whole, range(500))
    first = job.snapshot(whole, 1)
    halves = [job.open(first, groups=groups) for groups in (range(64), range(64, 128))]
    parts = [job.snapshot(half, 2) for half in halves]
    assert shared(first) < shared(parts[0])
    assert shared(first) < shared(parts[1])
    joined = job.open((*parts[0], *parts[1]))
    third = job.snapshot(joined, 3)
    for handle in third:
        assert (handle.key_group_first, handle.key_group_last) == (0, 127)
    # Each half's own files are for its half only: who restores the other half would not get them.
    assert shared(third) & (shared(parts[0]) | shared(parts[1])) <= shared(first)
    value = joined.value_state(PAYLOAD)
    for key in range(500):
        joined.set_current_key(key)
        assert value.get() is not None


def test_a_full_snapshot_shares_nothing(job: Job) -> None:
    store = job.open(incremental=False)
    job.put(store, range(100))
    first = job.snapshot(store, 1)
    store.notify_completed(CheckpointId(1))
    second = job.snapshot(store, 2)
    assert not shared(first)
    assert not shared(second)
    assert not {handle.name for handle in first} & {handle.name for handle in second}
    incremental = job.open(second)
    assert not {h.name for h in job.snapshot(incremental, 3)} & {h.name for h in second}


def test_nothing_is_left_on_local_disk_after_upload_discard_and_close(job: Job) -> None:
    store = job.open()
    job.put(store, range(100))
    job.snapshot(store, 1)
    store.snapshot(CheckpointId(2)).discard()
    copies = [path for path in job.scratch.rglob("*copy*") if path.is_dir()]
    assert copies == []
    store.close()
    store.close()
    assert [path for path in job.scratch.rglob("*") if path.is_file()] == []


def test_closing_fails_an_upload_under_way_and_hangs_nobody(job: Job) -> None:
    store = job.open()
    job.put(store, range(100))
    pending = store.snapshot(CheckpointId(1))
    store.close()
    with pytest.raises(StateError, match="closed"):
        pending.upload(job.storage)


def test_an_unwritable_disk_is_a_state_error_that_names_the_place(job: Job) -> None:
    store = job.open()
    job.put(store, range(10))
    (home,) = job.scratch.glob("0/rocksdb-*")
    pending = store.snapshot(CheckpointId(1))
    moved = home.rename(home.with_name("moved"))
    with pytest.raises(StateError, match=f"RocksDB in {home} cannot"):
        pending.upload(job.storage)
    moved.rename(home)
    job.put(store, range(10, 20))
    restored = job.open(job.snapshot(store, 2)).value_state(PAYLOAD)
    job.stores[-1].set_current_key(3)
    assert restored.get() is not None


def test_the_heap_refuses_a_native_snapshot_and_says_what_to_do(job: Job, tmp_path: Path) -> None:
    handles = job.snapshot(job.open(), 1)
    context = state.StateContext("op", 0, range(128), 128, tmp_path)
    with pytest.raises(StateIncompatible, match=r"another backend.*restore it with that backend"):
        state.HeapBackend().open(context, handles, job.storage)
    foreign = state.StateHandle("other-backend", "p", 1, "c", 0, 127)
    with pytest.raises(StateIncompatible, match="another backend"):
        job.open((foreign,))


class Files(dict[str, state.StateHandle]):
    """Files that can be watched."""


def test_files_of_an_upload_that_ends_after_a_newer_checkpoint_are_forgotten() -> None:
    known = KnownFiles({})
    first, second, third = map(CheckpointId, (1, 2, 3))
    known.begin(first)
    known.begin(second)
    known.note_upload(second, Files())
    known.complete(second)
    late = Files()
    seen = weakref.ref(late)
    known.note_upload(first, late)
    del late
    known.begin(third)
    known.note_upload(third, Files())
    known.complete(third)
    assert seen() is None
