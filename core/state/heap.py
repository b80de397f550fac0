"""Keyed state in the slot's memory; every snapshot holds all of it, in the canonical form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from onceflow.core.errors import StateIncompatible
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.accumulators import AccumulatorTable
from onceflow.core.state.api import (
    KeyedStateStore,
    ListState,
    MapState,
    PendingSnapshot,
    StateContext,
    ValueState,
)
from onceflow.core.state.canonical import (
    StateContent,
    StateMeta,
    StateRows,
    is_canonical,
    read_canonical,
    write_canonical,
)
from onceflow.core.state.cells import Cells
from onceflow.core.state.descriptors import (
    AccumulatorColumn,
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)
from onceflow.core.state.entries import CurrentKey, EntryListState, EntryValueState
from onceflow.core.state.entry_rows import EntryRows, ListRows, MapRows
from onceflow.core.state.handles import StateHandle, StateReader, StateWriter
from onceflow.core.state.heap_entries import HeapEntries, HeapMapState
from onceflow.core.state.map_keys import MapKeys
from onceflow.core.state.registry import Registry, list_meta, map_meta, shape_of, value_meta
from onceflow.core.state.restored_states import RestoredStates
from onceflow.core.state.serializers import serializer_of

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class HeapSnapshot(PendingSnapshot):
    """Frozen layers and table views, to be written in the canonical form."""

    def __init__(self, context: StateContext, states: Sequence[StateContent]) -> None:
        self._context = context
        self._states: Sequence[StateContent] = states
        self.done = False
        """Set once nothing is read any more; read by the owner's thread."""

    def upload(self, writer: StateWriter) -> tuple[StateHandle, ...]:
        """Write every state; returns the handles of the parts."""
        try:
            return write_canonical(writer, self._context, self._states)
        finally:
            self.discard()

    def discard(self) -> None:
        """Let go of the frozen state."""
        self._states = ()
        self.done = True


class HeapStore(KeyedStateStore):
    """Keyed state in dicts and arrays."""

    def __init__(self, context: StateContext) -> None:
        self._context = context
        self._current = CurrentKey()
        self._registry = Registry(context)
        self._entries: dict[StateMeta, HeapEntries] = {}
        self._tables: dict[StateMeta, AccumulatorTable] = {}
        self._restored = RestoredStates(context)
        self._rows: dict[str, list[StateRows]] = {}
        self._pending: list[HeapSnapshot] = []

    @classmethod
    def open(
        cls, context: StateContext, restored: Sequence[StateHandle], reader: StateReader
    ) -> HeapStore:
        """Return a store that holds the restored rows of the context's key groups.

        Raises:
            StateIncompatible: See `StateBackend.open`.
        """
        store = cls(context)
        foreign = [handle.name for handle in restored if not is_canonical(handle)]
        if foreign:
            raise StateIncompatible(
                f"state of {context} was written by another backend ({foreign[0]}); restore it with"
                " that backend"
            )
        for meta, rows in read_canonical(reader, restored, context):
            store._restored.add(meta)
            if len(rows):
                store._rows.setdefault(meta.name, []).append(rows)
        return store

    def set_current_key(self, key: Any) -> None:
        """Make `key` the current key."""
        self._current.key = key

    def value_state(self, descriptor: ValueStateDescriptor[T]) -> ValueState[T]:
        """Return the value state of this name."""
        cells = Cells(serializer_of(descriptor.type), descriptor.name)

        def make(table: HeapEntries) -> ValueState[T]:
            return EntryValueState(table, descriptor)

        return self._state(value_meta(descriptor), EntryRows(cells), make)

    def list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]:
        """Return the list state of this name."""
        cells = Cells(serializer_of(descriptor.type), descriptor.name)

        def make(table: HeapEntries) -> ListState[T]:
            return EntryListState(table)

        return self._state(list_meta(descriptor), ListRows(cells), make)

    def map_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return the map state of this name."""
        cells = Cells(serializer_of(descriptor.type), descriptor.name)
        keys = MapKeys(descriptor.key_type, descriptor.name)

        def make(table: HeapEntries) -> MapState[K, V]:
            return HeapMapState(table, keys)

        return self._state(map_meta(descriptor), MapRows(cells), make)

    def _state(self, meta: StateMeta, codec: EntryRows, make: Callable[[HeapEntries], T]) -> T:
        state: T | None = self._registry.find(meta)
        if state is None:
            table = HeapEntries(self._current, codec.cells, codec)
            for rows in self._claim(meta)[1]:
                table.load(rows)
            self._entries[meta] = table
            state = make(table)
            self._registry.add(meta, state)
        return state

    def accumulators(
        self, name: str, key_types: Sequence[pa.DataType], columns: Sequence[AccumulatorColumn]
    ) -> AccumulatorTable:
        """Return the running aggregates of this name."""
        shape = shape_of(name, key_types, columns)
        table: AccumulatorTable | None = self._registry.find(shape.meta)
        if table is None:
            table = AccumulatorTable(shape, str(self._context), self._context.max_parallelism)
            found, chunks = self._claim(shape.meta)
            if found is not None and found != shape.meta:
                chunks = [replace(c, values=shape.carried(found, c.values)) for c in chunks]
            for rows in chunks:
                table.load(rows)
            self._tables[shape.meta] = table
            self._registry.add(shape.meta, table)
        return table

    def _claim(self, meta: StateMeta) -> tuple[StateMeta | None, list[StateRows]]:
        """Return the restored rows of a state that is asked for, which forgets them here."""
        found = self._restored.claim(meta)
        rows = self._rows.pop(meta.name, [])
        return found, rows if found is not None else []

    def opened(self) -> tuple[str, ...]:
        """Refuse or drop what nobody has asked for."""
        for meta in self._restored.opened():
            self._rows.pop(meta.name, None)
        self._registry.complete()
        return tuple(self._restored.dropped)

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze every state."""
        self._merge_if_idle()
        groups = self._context.max_parallelism
        states: list[StateContent] = []
        states += [(meta, table.freeze(groups)) for meta, table in self._entries.items()]
        states += [(meta, table.view().rows()) for meta, table in self._tables.items()]
        left = self._restored.left()
        states += [(meta, list(self._rows.get(meta.name, ()))) for meta in left]
        pending = HeapSnapshot(self._context, states)
        self._pending.append(pending)
        return pending

    def savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze every state: a heap snapshot is canonical already."""
        return self.snapshot(checkpoint)

    def notify_completed(self, checkpoint: CheckpointId) -> None:
        """Merge what the upload kept apart."""
        self._merge_if_idle()

    def notify_aborted(self, checkpoint: CheckpointId) -> None:
        """Merge what the upload kept apart."""
        self._merge_if_idle()

    def _merge_if_idle(self) -> None:
        self._pending = [pending for pending in self._pending if not pending.done]
        if not self._pending:
            for table in self._entries.values():
                table.merge()

    def close(self) -> None:
        """Let go of the state."""
        self._entries.clear()
        self._tables.clear()
        self._rows.clear()
