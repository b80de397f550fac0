"""A snapshot in the canonical form is parts of bounded size, of which none is read by guess."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.errors import StateIncompatible
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state import (
    HeapBackend,
    KeyedStateStore,
    MapStateDescriptor,
    StateContext,
    StateHandle,
    ValueStateDescriptor,
)
from onceflow.core.state.snapshots import canonical

NUMBER = ValueStateDescriptor[int]("number", int)
BY_DAY = MapStateDescriptor[str, int]("by day", str, int)


def open_store(scratch: Path, storage: MemoryStorage, *handles: StateHandle) -> KeyedStateStore:
    context = StateContext("op", 0, range(128), 128, scratch)
    return HeapBackend().open(context, handles, storage)


def write(scratch: Path, storage: MemoryStorage) -> tuple[StateHandle, ...]:
    store = open_store(scratch, storage)
    number, by_day = store.value_state(NUMBER), store.map_state(BY_DAY)
    for key in range(50):
        store.set_current_key(key)
        number.set(key)
        by_day.put("today", key)
    return store.snapshot(CheckpointId(1)).upload(storage)


def test_a_state_that_is_larger_than_a_part_is_written_in_several_and_restored_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    (whole,) = write(tmp_path, storage)
    monkeypatch.setattr(canonical, "PART_BYTES", 1)
    handles = write(tmp_path, storage)
    assert len(handles) > 2
    assert [handle.name for handle in handles] == sorted({handle.name for handle in handles})
    assert max(handle.size_bytes for handle in handles) < whole.size_bytes
    restored = open_store(tmp_path, storage, *reversed(handles))
    number, by_day = restored.value_state(NUMBER), restored.map_state(BY_DAY)
    for key in range(50):
        restored.set_current_key(key)
        assert (number.get(), dict(by_day.items())) == (key, {"today": key})


def test_a_part_of_another_format_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    with monkeypatch.context() as later:
        later.setattr(canonical, "FORMAT", canonical.FORMAT + 1)
        handles = write(tmp_path, storage)
    with pytest.raises(StateIncompatible, match=handles[0].name):
        open_store(tmp_path, storage, *handles)
