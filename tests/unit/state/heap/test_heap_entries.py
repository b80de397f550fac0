"""The entries of a state on the heap: their layers, and the clean-up of expired ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state import (
    KeyedStates,
    MapStateDescriptor,
    StateContext,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.heap.store import HeapStore
from onceflow.core.state.heap.tables import HeapEntries, LayerLimits
from onceflow.core.state.stores.entries import ABSENT, DELETED, Cells, CurrentKey, EntryRows
from onceflow.core.state.types.serializers import MsgpackSerializer

LIMITS = LayerLimits(entries_min=10, changed_share_max=0.5)


class Table:
    """Entries of whole numbers, and whether a snapshot is reading them."""

    def __init__(self, keys: range) -> None:
        cells = Cells(MsgpackSerializer(int), "numbers")
        self.is_idle = True
        self.entries = HeapEntries(
            CurrentKey(), cells, EntryRows(cells), 128, lambda: self.is_idle, LIMITS
        )
        self.put(keys)

    def put(self, keys: range) -> None:
        for key in keys:
            self.entries.put(key, key)

    def freeze(self, checkpoint: int) -> None:
        self.entries.freeze(CheckpointId(checkpoint))

    def find_changes(self, base: int) -> set[int] | None:
        found = self.entries.find_changes(CheckpointId(base))
        return None if found is None else set(found.entries)

    def keys(self) -> list[int]:
        return sorted(key for key, _ in self.entries.all())


def test_the_changes_since_a_checkpoint_are_those_of_later_ones_alone() -> None:
    table = Table(range(20))
    assert not table.entries.is_tracked()
    assert table.find_changes(1) is None
    for checkpoint in (1, 2, 3):
        table.freeze(checkpoint)
        table.put(range(checkpoint, checkpoint + 1))
    table.freeze(4)
    assert table.entries.is_tracked()
    assert table.find_changes(0) is None
    assert table.find_changes(1) == {1, 2, 3}
    assert table.find_changes(2) == {2, 3}
    assert table.find_changes(3) == {3}
    assert table.find_changes(4) == set()
    table.entries.delete(2)
    table.put(range(3, 4))
    table.freeze(5)
    found = table.entries.find_changes(CheckpointId(2))
    assert found is not None
    assert found.entries == {2: DELETED, 3: 3}
    assert len(found) == 2
    assert table.keys() == [0, 1, *range(3, 20)]


def test_a_state_of_which_much_has_changed_is_one_dict_again() -> None:
    table = Table(range(20))
    table.freeze(1)
    table.put(range(5))
    assert len(table.entries) == 25, "a change counts twice until it is merged"
    table.entries.merge()
    assert table.entries.is_tracked()
    table.put(range(5, 10))
    table.entries.delete(19)
    table.entries.merge()
    assert not table.entries.is_tracked()
    assert len(table.entries) == 19
    assert table.entries.fresh_max == sys.maxsize
    assert table.keys() == list(range(19))
    table.entries.delete(18)
    assert table.entries.find(18) is ABSENT
    assert len(table.entries) == 18
    table.freeze(2)
    assert table.find_changes(1) is None
    assert table.find_changes(2) == set()


def test_too_many_changes_are_folded_at_once_unless_a_snapshot_reads() -> None:
    table = Table(range(20))
    table.freeze(1)
    assert table.entries.fresh_max == 10
    table.is_idle = False
    table.put(range(11))
    assert table.entries.is_tracked()
    table.is_idle = True
    table.entries.merge()
    assert not table.entries.is_tracked()
    table.freeze(2)
    table.put(range(11))
    assert not table.entries.is_tracked()
    assert len(table.entries) == 20


@pytest.mark.parametrize("count", [1, 3, 4, 100])
def test_expired_entries_behind_living_ones_are_deleted_in_small_steps(
    tmp_path: Path, count: int
) -> None:
    now_s = 1_000.0
    store = HeapStore.open(StateContext("op", 0, range(128), 128, tmp_path), (), MemoryStorage())
    states = KeyedStates(store, StateClock(lambda: now_s))
    ttl = StateTtlConfig(10)
    descriptor = ValueStateDescriptor[int]("value", int, default=0, ttl=ttl)
    value = states.value_state(descriptor)
    days = states.map_state(MapStateDescriptor[str, int]("days", str, int, ttl))
    for key in range(8):
        store.set_current_key(key)
        value.set(1)
    days.put("old", 1)
    now_s += 6
    for key in range(4):
        store.set_current_key(key)
        value.set(2)
    store.set_current_key(7)
    days.put("new", 1)

    def kept() -> int:
        return len(next(iter(store._entries.values())))  # pyright: ignore[reportPrivateUsage]

    for left in (8, 4, 0):
        for _ in range(20):
            store.clean(count)
        assert kept() == left
        now_s += 6
    assert list(days.keys()) == []
