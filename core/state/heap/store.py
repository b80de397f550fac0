"""Keyed state in the slot's memory; every snapshot holds all of it, in the canonical form.

A snapshot freezes the dict of each state and puts an empty one over it, whatever its size: changes
go to the top dict, reads look there first. When no upload reads the frozen dicts any more, the
owner's thread merges the changes down.

Invariants:
    a dict below the top is not changed while a pending snapshot may read it
    at most LAYERS_MAX frozen dicts lie on each other, however many snapshots overlap
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, TypeVar

import pyarrow as pa

from onceflow.core.errors import StateIncompatible
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader, StateWriter
from onceflow.core.state.api.descriptors import (
    AccumulatorColumn,
    ListStateDescriptor,
    MapStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.state.api.stores import (
    KeyedStateStore,
    ListState,
    MapState,
    PendingKeyedSnapshot,
    ValueState,
)
from onceflow.core.state.heap.entries import (
    ABSENT,
    DELETED,
    Cells,
    CurrentKey,
    EntryListState,
    EntryRows,
    EntryTable,
    EntryValueState,
    ListRows,
    MapKeys,
    MapRows,
)
from onceflow.core.state.heap.registry import Registry, list_meta, map_meta, shape_of, value_meta
from onceflow.core.state.keys.key_codec import from_stored_map_key, to_stored_map_key
from onceflow.core.state.snapshots.canonical import (
    RestoredStates,
    StateContent,
    StateMeta,
    StateRows,
    begins_to_expire,
    is_canonical,
    read_canonical,
    write_canonical,
)
from onceflow.core.state.snapshots.expired_rows import filter_expired, stamp_value
from onceflow.core.state.types.serializers import ExpiringSerializer, serializer_of
from onceflow.core.state.types.widening import depends_on_values

K = TypeVar("K")
V = TypeVar("V")

LAYERS_MAX = 4
"""Frozen layers that a look-up may have to pass; more are merged into one."""


class HeapEntries(EntryTable):
    """Entries in dicts, the oldest at the bottom."""

    def __init__(self, current: CurrentKey, cells: Cells, codec: EntryRows) -> None:
        super().__init__(current, cells)
        self._codec = codec
        self._frozen: list[dict[Any, Any]] = []
        self._to_clean: Iterator[Any] = iter(())

    def find_older(self, key: Any) -> Any:
        """Return the entry of the frozen layers, or ABSENT."""
        for layer in reversed(self._frozen):
            entry = layer.get(key, ABSENT)
            if entry is not ABSENT:
                return ABSENT if entry is DELETED else entry
        return ABSENT

    def delete(self, key: Any) -> None:
        """Leave no entry at `key`."""
        # With a layer below, the key may be there: the deletion is written down. Without one it is
        # simply gone, and a dict without DELETED need not be filtered later.
        if self._frozen:
            self.fresh[key] = DELETED
        else:
            self.fresh.pop(key, None)

    def clean(self, count: int) -> None:
        """Look at `count` further entries; delete what of them has expired."""
        serializer = self.cells.serializer
        if not isinstance(serializer, ExpiringSerializer):
            return
        looked_at = 0
        for key in islice(self._to_clean, count):
            looked_at += 1
            entry = self.find(key)
            alive = (
                entry if entry is ABSENT else self._codec.filter_alive(entry, serializer.is_expired)
            )
            if alive is entry:
                continue
            if alive is ABSENT:
                self.delete(key)
            else:
                self.put(key, alive)
        if looked_at < count:
            # The keys as of now: a dict may not change while somebody iterates over it.
            self._to_clean = chain.from_iterable([list(d) for d in (*self._frozen, self.fresh)])

    def all(self) -> Iterator[tuple[Any, Any]]:
        """Yield every key and its value."""
        thaw = self.cells.thaw
        for key, entry in _merge_layers([*self._frozen, self.fresh]).items():
            yield key, thaw(entry)

    def load(self, rows: StateRows, reader: EntryRows) -> None:
        """Take rows of a snapshot, as `reader` reads them."""
        reader.load(rows, self.fresh)

    def freeze(self, max_parallelism: int) -> Iterable[StateRows]:
        """Return the entries as of now; they are turned into rows when they are iterated."""
        if len(self._frozen) >= LAYERS_MAX:
            # A new dict, for uploads may still read the old ones.
            self._frozen = [_merge_layers(self._frozen)]
        self._frozen.append(self.fresh)
        self.fresh = {}
        # A tuple of the layers as of now; `merge` replaces the list, and changes no dict that a
        # pending snapshot reads.
        return _FrozenRows(self._codec, tuple(self._frozen), max_parallelism)

    def merge(self) -> None:
        """Put the changes into the bottom layer; no pending snapshot may be reading."""
        if not self._frozen:
            return
        bottom, *changes = [*self._frozen, self.fresh]
        for layer in changes:
            _apply(layer, bottom)
        self._frozen = []
        self.fresh = bottom


class _FrozenRows:
    """The rows of frozen layers."""

    def __init__(
        self, codec: EntryRows, layers: tuple[dict[Any, Any], ...], max_parallelism: int
    ) -> None:
        self._codec = codec
        self._layers = layers
        self._max_parallelism = max_parallelism

    def __iter__(self) -> Iterator[StateRows]:
        entries = self._layers[0] if len(self._layers) == 1 else _merge_layers(self._layers)
        return self._codec.rows(entries, self._max_parallelism)


def _stamp(rows: StateRows, meta: StateMeta, codec: EntryRows) -> StateRows:
    """Return rows of a state that has no time to live yet, as used just now."""
    values = [
        stamp_value(value, meta.kind, codec.cells.serializer) for value in rows.values.to_pylist()
    ]
    return replace(rows, values=pa.array(values, pa.large_binary()))


def _apply(changes: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Apply a layer of changes, deletions included, to a dict of entries."""
    entries.update(changes)
    for key in [key for key, entry in changes.items() if entry is DELETED]:
        del entries[key]


def _merge_layers(layers: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    entries = dict(layers[0])
    for layer in layers[1:]:
        _apply(layer, entries)
    return entries


class HeapMapState(MapState[K, V]):
    """A map state whose entries are dicts: one in `fresh` is the owner's, others are frozen.

    Their keys are what `to_stored_map_key` returns.
    """

    def __init__(self, table: HeapEntries, keys: MapKeys) -> None:
        self._table = table
        self._keys = keys

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        entry = self._table.find(self._table.current.key)
        stored_key = to_stored_map_key(key)
        if entry is ABSENT or stored_key not in entry:
            return None
        return self._table.cells.thaw(entry[stored_key])  # type: ignore[no-any-return]

    def put(self, key: K, value: V) -> None:
        """Put `value` under `key`."""
        stored_key = self._keys.to_put(key)
        stored = self._table.cells.freeze(value)
        self._own()[stored_key] = stored

    def remove(self, key: K) -> None:
        """Forget `key`."""
        if self.contains(key):
            own = self._own()
            del own[to_stored_map_key(key)]
            if not own:
                self.clear()

    def contains(self, key: K) -> bool:
        """Tell whether `key` is there."""
        entry = self._table.find(self._table.current.key)
        return to_stored_map_key(key) in entry if entry is not ABSENT else False

    def keys(self) -> Iterator[K]:
        """Return the keys as of now."""
        entry = self._table.find(self._table.current.key)
        return iter([] if entry is ABSENT else list(map(from_stored_map_key, entry)))

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as of now."""
        entry = self._table.find(self._table.current.key)
        thaw = self._table.cells.thaw
        stored_keys: list[Any] = [] if entry is ABSENT else list(entry)
        return iter([(from_stored_map_key(one), thaw(entry[one])) for one in stored_keys])

    def clear(self) -> None:
        """Forget every entry."""
        self._table.delete(self._table.current.key)

    def _own(self) -> dict[Any, Any]:
        table, key = self._table, self._table.current.key
        own: Any = table.fresh.get(key, ABSENT)
        if own.__class__ is not dict:
            older: Any = ABSENT if own is DELETED else table.find_older(key)
            own = {} if older is ABSENT else dict(older)
            table.put(key, own)
        return own  # type: ignore[no-any-return]


T = TypeVar("T")


class HeapSnapshot(PendingKeyedSnapshot):
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
        """Release the frozen state."""
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

    def current_key(self) -> Any:
        """Return the current key."""
        return self._current.key

    def entries(self, descriptor: ValueStateDescriptor[T]) -> Iterator[tuple[Any, T]]:
        """Yield every key and its value."""
        return self._entries[value_meta(descriptor)].all()

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
            stored, chunks = self._claim(meta)
            if stored is not None and begins_to_expire(stored, meta):
                chunks = [_stamp(rows, meta, codec) for rows in chunks]
            reader = codec
            if stored is not None and depends_on_values(stored.signature, meta.signature):
                reader = type(codec)(codec.cells.to_checking())
            for rows in chunks:
                table.load(rows, reader)
            self._entries[meta] = table
            state = make(table)
            self._registry.add(meta, state)
        return state

    def accumulators(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        columns: Sequence[AccumulatorColumn],
        *,
        namespaced: bool = False,
        ttl: StateTtlConfig | None = None,
    ) -> AccumulatorTable:
        """Return the running aggregates of this name."""
        shape = shape_of(name, key_types, columns, namespaced=namespaced, ttl=ttl)
        table: AccumulatorTable | None = self._registry.find(shape.meta)
        if table is None:
            groups = self._context.max_parallelism
            table = AccumulatorTable(shape, str(self._context), groups, ttl)
            stored, chunks = self._claim(shape.meta)
            if stored is not None and stored != shape.meta:
                chunks = [replace(c, values=shape.convert_totals(stored, c.values)) for c in chunks]
            for rows in chunks:
                table.load(rows)
            self._tables[shape.meta] = table
            self._registry.add(shape.meta, table)
        return table

    def _claim(self, meta: StateMeta) -> tuple[StateMeta | None, list[StateRows]]:
        """Return the restored rows of a state that is asked for, which forgets them here."""
        stored = self._restored.claim(meta)
        rows = self._rows.pop(meta.name, [])
        return stored, rows if stored is not None else []

    def clean(self, count: int) -> None:
        """Delete what has expired of the next entries."""
        for entries in self._entries.values():
            entries.clean(count)
        for table in self._tables.values():
            table.clean(count)

    def finish_open(self) -> tuple[str, ...]:
        """Refuse or drop what nobody has asked for."""
        for meta in self._restored.drop_unclaimed():
            self._rows.pop(meta.name, None)
        self._registry.complete()
        return tuple(self._restored.dropped)

    def snapshot(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Freeze every state."""
        self._merge_if_idle()
        groups = self._context.max_parallelism
        states: list[StateContent] = []
        states += [
            (meta, filter_expired(table.freeze(groups), meta.kind, table.cells.serializer))
            for meta, table in self._entries.items()
        ]
        states += [
            (meta, table.filter_alive(table.view().rows())) for meta, table in self._tables.items()
        ]
        # What nobody has asked for yet goes along as it was restored.
        left = self._restored.list_unclaimed()
        states += [(meta, list(self._rows.get(meta.name, ()))) for meta in left]
        pending = HeapSnapshot(self._context, states)
        self._pending.append(pending)
        return pending

    def savepoint(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Freeze every state: a heap snapshot is canonical already."""
        return self.snapshot(checkpoint)

    def notify_completed(self, checkpoint: CheckpointId) -> None:
        """Merge what the upload kept apart."""
        self._merge_if_idle()

    def notify_aborted(self, checkpoint: CheckpointId) -> None:
        """Merge what the upload kept apart."""
        self._merge_if_idle()

    def _merge_if_idle(self) -> None:
        # `done` is set by the uploading thread as its last step; seen too late, the merge waits for
        # the next checkpoint.
        self._pending = [pending for pending in self._pending if not pending.done]
        if not self._pending:
            for table in self._entries.values():
                table.merge()

    def close(self) -> None:
        """Release the state."""
        self._entries.clear()
        self._tables.clear()
        self._rows.clear()
