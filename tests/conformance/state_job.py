"""The state backends that the suites run over, and a job that runs one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core import state
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.heap.store import HeapStore
from onceflow.core.state.heap.tables import LayerLimits
from onceflow.core.state.states.operator_state import OperatorStateStore

MAX_PARALLELISM = 128


@dataclass(frozen=True, slots=True)
class LayeredHeap(state.StateBackend):
    """The heap, which writes what has changed however small the state is."""

    def open(
        self,
        context: state.StateContext,
        restored: Sequence[state.StateHandle],
        reader: state.StateReader,
    ) -> state.KeyedStateStore:
        limits = LayerLimits(entries_min=0, changed_share_max=2, layers_share_max=1_000)
        return HeapStore.open(context, restored, reader, limits)


BACKENDS: dict[str, state.StateBackend] = {
    "heap": state.HeapBackend(),
    "heap-layers": LayeredHeap(),
    "rocksdb-incremental": state.RocksDBBackend(incremental=True),
    "rocksdb-full": state.RocksDBBackend(incremental=False),
    "rocksdb-small-cache": state.RocksDBBackend(incremental=True, cache_entries=16),
}

SUITE_BACKENDS = ["heap", "rocksdb-incremental", "rocksdb-small-cache"]
"""Those that every test runs over; full snapshots differ in their upload alone."""

BALANCE = state.ValueStateDescriptor[int]("balance", int, default=0)
RECENT = state.ListStateDescriptor[str]("recent", str)
BY_DAY = state.MapStateDescriptor[str, int]("by day", str, int)
COLUMNS = (
    state.AccumulatorColumn("total", "sum", pa.int64()),
    state.AccumulatorColumn("mean", "sum", pa.float64()),
    state.AccumulatorColumn("rows", "count", pa.int64()),
    state.AccumulatorColumn("low", "min", pa.int64()),
    state.AccumulatorColumn("high", "max", pa.float64()),
)


class Job:
    """Opens stores of one backend, snapshots and restores them, and closes them all."""

    def __init__(self, backend: state.StateBackend, scratch: Path, storage: MemoryStorage) -> None:
        self.backend = backend
        self.storage = storage
        self._scratch = scratch
        self.stores: list[state.KeyedStateStore] = []
        self._checkpoint = 0

    def without_keys(self, index: int, parallelism: int) -> OperatorStateStore:
        """Return a store of what is not kept by key, which holds nothing."""
        return OperatorStateStore(
            "op",
            subtask=index,
            parallelism=parallelism,
            key_groups=self.context(index, parallelism).key_groups,
            max_parallelism=MAX_PARALLELISM,
            is_restored=False,
        )

    def context(
        self, index: int = 0, parallelism: int = 1, max_parallelism: int = MAX_PARALLELISM
    ) -> state.StateContext:
        start = -(-index * max_parallelism // parallelism)
        stop = -(-(index + 1) * max_parallelism // parallelism)
        scratch = self._scratch / str(len(self.stores))
        return state.StateContext("op", index, range(start, stop), max_parallelism, scratch)

    def open(
        self,
        handles: Sequence[state.StateHandle] = (),
        *,
        index: int = 0,
        parallelism: int = 1,
        max_parallelism: int = MAX_PARALLELISM,
        backend: state.StateBackend | None = None,
        allow_non_restored_state: bool = False,
    ) -> state.KeyedStateStore:
        context = replace(
            self.context(index, parallelism, max_parallelism),
            allow_non_restored_state=allow_non_restored_state,
        )
        mine = [handle for handle in handles if self.overlaps(handle, context.key_groups)]
        return self.adopt((backend or self.backend).open(context, mine, self.storage))

    def adopt(self, store: state.KeyedStateStore) -> state.KeyedStateStore:
        self.stores.append(store)
        return store

    @staticmethod
    def overlaps(handle: state.StateHandle, groups: range) -> bool:
        return handle.key_group_first < groups.stop and handle.key_group_last >= groups.start

    def next_checkpoint(self) -> CheckpointId:
        self._checkpoint += 1
        return CheckpointId(self._checkpoint)

    def snapshot(self, store: state.KeyedStateStore) -> tuple[state.StateHandle, ...]:
        checkpoint = self.next_checkpoint()
        handles = store.snapshot(checkpoint).upload(self.storage)
        store.notify_completed(checkpoint)
        return handles

    def close(self) -> None:
        for store in self.stores:
            store.close()


@dataclass
class States:
    """A store's states, with helpers that set the key first."""

    store: state.KeyedStateStore

    def __post_init__(self) -> None:
        self.value = self.store.value_state(BALANCE)
        self.list = self.store.list_state(RECENT)
        self.map = self.store.map_state(BY_DAY)

    def fill(self, keys: Sequence[Any], tag: str, amount: int) -> None:
        for key in keys:
            self.store.set_current_key(key)
            self.value.set(self.value.get() + amount)
            self.list.add(f"{tag}-{key}")
            self.map.put(tag, amount)

    def read(self, key: Any) -> tuple[int, list[str], dict[str, int]]:
        self.store.set_current_key(key)
        return self.value.get(), self.list.get(), dict(self.map.items())


def keys_named(count: int) -> list[str]:
    return [f"account-{number}" for number in range(count)]


def table_of(store: state.KeyedStateStore) -> state.AccumulatorTable:
    return store.accumulators("running", [pa.string()], COLUMNS)


def aggregate(
    store: state.KeyedStateStore, keys: Sequence[str], amounts: Sequence[int | None]
) -> dict[str, Any]:
    integers = pa.array(amounts, pa.int64())
    floats = integers.cast(pa.float64(), safe=False)
    values = {"total": integers, "mean": floats, "low": integers, "high": floats}
    return table_of(store).update([pa.array(keys, pa.string())], None, values)
