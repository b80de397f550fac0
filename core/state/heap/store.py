"""Keyed state in the slot's memory. A snapshot holds all rows, or the changed ones.

The first snapshot is a *base*: all rows, in the canonical form. A later one writes a *layer* with
the rows that have changed since the last completed checkpoint, and references that checkpoint's
files again: base and layers, in shared files. If the layers have become large compared to their
base, or many, the next snapshot is a base again. Small state is written as a whole each time, in
private files.

A layer is relative to a *completed* checkpoint, whose files stay as long as they are referenced.
Changes of undecided or failed snapshots are written again in the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import pyarrow as pa

from onceflow.core.errors import InvariantViolation, StateIncompatible
from onceflow.core.protocol.ids import GENESIS, CheckpointId
from onceflow.core.state.aggregates.accumulator_shape import make_shape
from onceflow.core.state.api import descriptors
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader, StateWriter
from onceflow.core.state.heap.tables import ChangedEntries, HeapEntries, LayerLimits
from onceflow.core.state.heap.totals import ChangedTotals, HeapTotals
from onceflow.core.state.keys.key_codec import from_stored_map_key, to_stored_map_key
from onceflow.core.state.snapshots import canonical
from onceflow.core.state.snapshots.state_meta import (
    StateMeta,
    describe_list_state,
    describe_map_state,
    describe_value_state,
)
from onceflow.core.state.stores.entries import (
    ABSENT,
    DELETED,
    Cells,
    CurrentKey,
    EntryListState,
    EntryRows,
    EntryValueState,
    ListRows,
    MapKeys,
    MapRows,
)
from onceflow.core.state.stores.keyed_store import (
    KeyedStateStore,
    ListState,
    MapState,
    PendingKeyedSnapshot,
    ValueState,
)
from onceflow.core.state.stores.store_parts import (
    FileHandles,
    KnownFiles,
    OpenStates,
    filter_expired,
    stamp_value,
)
from onceflow.core.state.types.serializers import serializer_of
from onceflow.core.state.types.type_names import depends_on_values

K = TypeVar("K")
V = TypeVar("V")


def _stamp(rows: canonical.StateRows, meta: StateMeta, codec: EntryRows) -> canonical.StateRows:
    """Return the rows of a state without a time to live so far, with now as their last use."""
    values = [
        stamp_value(value, meta.kind, codec.cells.serializer) for value in rows.values.to_pylist()
    ]
    return replace(rows, values=pa.array(values, pa.large_binary()))


class HeapMapState(MapState[K, V]):
    """A map state whose entries are dicts.

    A dict in `fresh` belongs to the owner, others are frozen.

    The keys of the dicts are results of `to_stored_map_key`.
    """

    def __init__(self, table: HeapEntries, keys: MapKeys) -> None:
        self._table = table
        self._keys = keys

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        entry = self._table.find(self._table.current.key)
        stored_key = to_stored_map_key(key)
        # `in` and not `get`, because a stored value may be None.
        if entry is ABSENT or stored_key not in entry:
            return None
        return self._table.cells.thaw(entry[stored_key])  # type: ignore[no-any-return]

    def put(self, key: K, value: V) -> None:
        """Set the value under `key`."""
        stored_key = self._keys.to_put(key)
        stored = self._table.cells.freeze(value)
        self._own()[stored_key] = stored

    def remove(self, key: K) -> None:
        """Remove `key`."""
        if self.contains(key):
            own = self._own()
            del own[to_stored_map_key(key)]
            if not own:
                self.clear()

    def contains(self, key: K) -> bool:
        """Return True if `key` exists."""
        entry = self._table.find(self._table.current.key)
        return to_stored_map_key(key) in entry if entry is not ABSENT else False

    def keys(self) -> Iterator[K]:
        """Return the keys at the time of the call."""
        entry = self._table.find(self._table.current.key)
        return iter([] if entry is ABSENT else list(map(from_stored_map_key, entry)))

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries at the time of the call."""
        entry = self._table.find(self._table.current.key)
        thaw = self._table.cells.thaw
        stored_keys: list[Any] = [] if entry is ABSENT else list(entry)
        return iter(
            [
                (from_stored_map_key(stored_key), thaw(entry[stored_key]))
                for stored_key in stored_keys
            ]
        )

    def clear(self) -> None:
        """Remove all entries."""
        self._table.delete(self._table.current.key)

    def _own(self) -> dict[Any, Any]:
        table, key = self._table, self._table.current.key
        # A snapshot may be reading a dict outside of `fresh`. So the first change after a snapshot
        # copies it, and later changes modify the copy.
        own: Any = table.fresh.get(key, ABSENT)
        if own.__class__ is not dict:
            older: Any = ABSENT if own is DELETED else table.find_older(key)
            own = {} if older is ABSENT else dict(older)
            table.put(key, own)
        return own  # type: ignore[no-any-return]


T = TypeVar("T")


class HeapSnapshot(PendingKeyedSnapshot):
    """Frozen layers and table views that wait for their upload."""

    def __init__(self, upload: Callable[[StateWriter], tuple[StateHandle, ...]]) -> None:
        self._upload: Callable[[StateWriter], tuple[StateHandle, ...]] | None = upload
        self.done = False
        """Set once the frozen state is no longer read. The owner's thread reads it."""

    def upload(self, writer: StateWriter) -> tuple[StateHandle, ...]:
        """Write the frozen state. Return the handles of all parts of the snapshot."""
        upload = self._upload
        if upload is None:
            raise InvariantViolation("a snapshot was uploaded before, or discarded")
        try:
            return upload(writer)
        finally:
            self.discard()

    def discard(self) -> None:
        """Release the frozen state."""
        # The closure holds the frozen layers. Released here, they are freed before the owner's
        # thread merges.
        self._upload = None
        self.done = True


_States: TypeAlias = list[canonical.StateContent]
_Upload: TypeAlias = Callable[[StateWriter], tuple[StateHandle, ...]]


_Changes: TypeAlias = ChangedEntries | ChangedTotals
_NO_CHANGES: Mapping[str, _Changes] = {}


def _takes_a_layer(base: FileHandles, limits: LayerLimits) -> bool:
    """Return True if another layer may be added to these files."""
    layers = [handle for handle in base.values() if canonical.is_layer(handle)]
    layer_bytes = sum(handle.size_bytes for handle in layers)
    base_bytes = sum(handle.size_bytes for handle in base.values()) - layer_bytes
    # A handle that is no shared file would be repeated in each record of the decision log.
    all_shared = bool(base) and all(handle.shared for handle in base.values())
    few = len(layers) < limits.layer_files_max
    return all_shared and few and layer_bytes <= base_bytes * limits.layers_share_max


class HeapStore(KeyedStateStore):
    """Keyed state in dicts and arrays."""

    def __init__(self, context: StateContext, limits: LayerLimits | None) -> None:
        """Set up. If `limits` is None, each snapshot holds all rows."""
        self._context = context
        self._limits = limits
        self._id = uuid4().hex
        """A random id, so that file names differ from those of any other store."""
        self._files = KnownFiles({})
        self._current = CurrentKey()
        self._open_states = OpenStates(context)
        self._entries: dict[StateMeta, HeapEntries] = {}
        self._tables: dict[StateMeta, HeapTotals] = {}
        self._restored = canonical.RestoredStates(context)
        self._rows: dict[str, list[canonical.StateRows]] = {}
        self._last_filled: dict[str, CheckpointId] = {}
        """The last snapshot for which each state had entries."""
        self._pending: list[HeapSnapshot] = []

    @classmethod
    def open(
        cls,
        context: StateContext,
        restored: Sequence[StateHandle],
        reader: StateReader,
        limits: LayerLimits | None = None,
    ) -> HeapStore:
        """Return a store that holds the restored rows of the context's key groups.

        If `limits` is None, each snapshot holds all rows.

        Raises:
            StateIncompatible: See `StateBackend.open`.
        """
        store = cls(context, limits)
        foreign = [handle.name for handle in restored if not canonical.is_canonical(handle)]
        if foreign:
            raise StateIncompatible(
                f"state of {context} was written by another backend ({foreign[0]}); restore it with"
                " that backend"
            )
        for meta, rows in canonical.read_canonical(reader, restored, context):
            store._restored.add(meta)
            if len(rows):
                store._rows.setdefault(meta.name, []).append(rows)
        return store

    def set_current_key(self, key: Any) -> None:
        """Select the current key."""
        self._current.key = key

    def current_key(self) -> Any:
        """Return the current key."""
        return self._current.key

    def entries(self, descriptor: descriptors.ValueStateDescriptor[T]) -> Iterator[tuple[Any, T]]:
        """Yield each key and its value."""
        return self._entries[describe_value_state(descriptor)].all()

    def value_state(self, descriptor: descriptors.ValueStateDescriptor[T]) -> ValueState[T]:
        """Return the value state of this name."""
        cells = Cells(serializer_of(descriptor.type), descriptor.name)

        def make(table: HeapEntries) -> ValueState[T]:
            return EntryValueState(table, descriptor)

        return self._state(describe_value_state(descriptor), EntryRows(cells), make)

    def list_state(self, descriptor: descriptors.ListStateDescriptor[T]) -> ListState[T]:
        """Return the list state of this name."""
        cells = Cells(serializer_of(descriptor.type), descriptor.name)

        def make(table: HeapEntries) -> ListState[T]:
            return EntryListState(table)

        return self._state(describe_list_state(descriptor), ListRows(cells), make)

    def map_state(self, descriptor: descriptors.MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return the map state of this name."""
        cells = Cells(serializer_of(descriptor.type), descriptor.name)
        keys = MapKeys(descriptor.key_type, descriptor.name)

        def make(table: HeapEntries) -> MapState[K, V]:
            return HeapMapState(table, keys)

        return self._state(describe_map_state(descriptor), MapRows(cells), make)

    def _state(self, meta: StateMeta, codec: EntryRows, make: Callable[[HeapEntries], T]) -> T:
        state: T | None = self._open_states.find(meta)
        if state is None:
            groups = self._context.max_parallelism
            table = HeapEntries(
                self._current, codec.cells, codec, groups, self._is_idle, self._limits
            )
            stored, chunks = self._claim(meta)
            if stored is not None and canonical.begins_to_expire(stored, meta):
                # Without a time of last use, all rows would expire at once, or never.
                chunks = [_stamp(rows, meta, codec) for rows in chunks]
            reader = codec
            if stored is not None and depends_on_values(stored.signature, meta.signature):
                # Only for reading: the state's own serializer checks the values that the job sets
                # later.
                reader = type(codec)(codec.cells.to_checking())
            for rows in chunks:
                table.load(rows, reader)
            self._entries[meta] = table
            state = make(table)
            # Registered last: a state that could not be loaded must not be found by its name.
            self._open_states.add(meta, state)
        return state

    def accumulators(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        columns: Sequence[descriptors.AccumulatorColumn],
        *,
        namespaced: bool = False,
        ttl: descriptors.StateTtlConfig | None = None,
        member_type: pa.DataType | None = None,
    ) -> HeapTotals:
        """Return the running aggregates of this name."""
        shape = make_shape(
            name, key_types, columns, namespaced=namespaced, ttl=ttl, member_type=member_type
        )
        table: HeapTotals | None = self._open_states.find(shape.meta)
        if table is None:
            groups = self._context.max_parallelism
            table = HeapTotals(shape, str(self._context), groups, self._limits, ttl)
            stored, chunks = self._claim(shape.meta)
            if stored is not None and stored != shape.meta:
                chunks = [replace(c, values=shape.convert_totals(stored, c.values)) for c in chunks]
            for rows in chunks:
                table.load(rows)
            self._tables[shape.meta] = table
            self._open_states.add(shape.meta, table)
        return table

    def _claim(self, meta: StateMeta) -> tuple[StateMeta | None, list[canonical.StateRows]]:
        """Return the restored rows of a state that is asked for, and release them here."""
        # Raises if the stored type does not fit, before the rows are released.
        stored = self._restored.claim(meta)
        rows = self._rows.pop(meta.name, [])
        return stored, rows if stored is not None else []

    def clean(self, count: int) -> None:
        """Delete the expired ones of the next entries."""
        for entries in self._entries.values():
            entries.clean(count)
        for table in self._tables.values():
            table.clean(count)

    def finish_open(self) -> tuple[str, ...]:
        """Refuse or drop the states that were not asked for."""
        for meta in self._restored.drop_unclaimed():
            self._rows.pop(meta.name, None)
        self._open_states.complete()
        return tuple(self._restored.dropped)

    def snapshot(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Freeze all states. The upload writes the changes, or all rows."""
        self._merge_if_idle()
        # Before the freeze: it determines the completed files that this snapshot may reference, and
        # the changes are relative to these.
        base = self._files.begin(checkpoint)
        self._freeze(checkpoint)
        upload = self._plan_layer(checkpoint, base) or self._plan_base(checkpoint)
        return self._add_pending(upload)

    def savepoint(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Freeze all states. The upload writes all rows, in private files."""
        self._merge_if_idle()
        self._freeze(checkpoint)
        context, states = self._context, self._list_states()
        return self._add_pending(lambda writer: canonical.write_canonical(writer, context, states))

    def _freeze(self, checkpoint: CheckpointId) -> None:
        for table in self._list_tables().values():
            table.freeze(checkpoint)
        filled = (meta.name for meta, table in self._list_tables().items() if len(table))
        self._last_filled.update(dict.fromkeys(filled, checkpoint))

    def _add_pending(
        self, upload: Callable[[StateWriter], tuple[StateHandle, ...]]
    ) -> PendingKeyedSnapshot:
        pending = HeapSnapshot(upload)
        self._pending.append(pending)
        return pending

    def _list_states(self, changes: Mapping[str, _Changes] = _NO_CHANGES) -> _States:
        """Return all states: with the rows in `changes`, or with all rows at the last freeze."""
        states: _States = []
        for meta, table in self._list_tables().items():
            if meta.name in changes:
                rows: Iterable[canonical.StateRows] = changes[meta.name].rows()
            elif isinstance(table, HeapTotals):
                rows = table.filter_alive(table.view().rows())
            else:
                rows = filter_expired(table.read_frozen(), meta.kind, table.cells.serializer)
            states.append((meta, rows))
        # States that were not asked for yet are written as they were restored.
        left = self._restored.list_unclaimed()
        return states + [(meta, list(self._rows.get(meta.name, ()))) for meta in left]

    def _plan_base(self, checkpoint: CheckpointId) -> _Upload:
        """Return an upload of all rows. Later snapshots may build on it if that pays off."""
        context, states, files = self._context, self._list_states(), self._files
        # Until this base is decided, later snapshots may not reference older files: once it is
        # complete, older files are deleted.
        files.begin_anew(checkpoint)
        # No layer can be added to small states, or to tables that do not track their changes.
        is_base = any(table.is_tracked() for table in self._list_tables().values())
        unique = f"{self._id}-{checkpoint}"

        def upload(writer: StateWriter) -> tuple[StateHandle, ...]:
            if is_base:
                handles = canonical.write_base(writer, context, states, unique)
            else:
                handles = canonical.write_canonical(writer, context, states)
            files.note_upload(checkpoint, {handle.name: handle for handle in handles})
            return handles

        return upload

    def _plan_layer(self, checkpoint: CheckpointId, base: FileHandles) -> _Upload | None:
        """Return an upload of the changes since the last completed checkpoint.

        None if a new base is better. `base` holds the files of that checkpoint that this one may
        reference.
        """
        files, since, limits = self._files, self._files.base, self._limits
        if since is None or limits is None or not files.is_complete(base):
            return None
        if not _takes_a_layer(base, limits):
            return None
        changes: dict[str, _Changes] = {}
        for meta, table in self._list_tables().items():
            changed = table.find_changes(since)
            if changed is not None:
                changes[meta.name] = changed
        written = sum(map(len, changes.values())) + self._count(leave_out=changes)
        if written > self._count() * limits.layers_share_max:
            return None
        context, states = self._context, self._list_states(changes)
        # A restore must know the states for which a layer replaces all older rows: small states,
        # and states with many changes.
        whole = {meta.name for meta, _ in states} - changes.keys()
        # Older files may hold rows of a state that is empty now. A layer without rows of the state
        # says that they are deleted.
        is_emptied = any(self._last_filled.get(name, GENESIS) >= since for name in whole)
        older = tuple(base.values())
        unique = self._id

        def upload(writer: StateWriter) -> tuple[StateHandle, ...]:
            # If nothing has changed, the files of the last completed checkpoint are the snapshot.
            handles = older
            if written or is_emptied:
                handles += canonical.write_layer(writer, context, states, whole, checkpoint, unique)
            files.note_upload(checkpoint, {handle.name: handle for handle in handles})
            return handles

        return upload

    def _count(self, leave_out: Container[str] = ()) -> int:
        """Return the approximate number of keys in the states."""
        tables = self._list_tables().items()
        return sum(len(table) for meta, table in tables if meta.name not in leave_out)

    def _list_tables(self) -> Mapping[StateMeta, HeapEntries | HeapTotals]:
        return {**self._entries, **self._tables}

    def notify_completed(self, checkpoint: CheckpointId) -> None:
        """Let later snapshots build on the files of `checkpoint`, and merge frozen layers."""
        self._files.complete(checkpoint)
        if self._files.base is not None:
            for table in self._list_tables().values():
                table.forget_changes(self._files.base)
        self._merge_if_idle()

    def notify_aborted(self, checkpoint: CheckpointId) -> None:
        """Keep later snapshots from building on `checkpoint`, and merge frozen layers."""
        self._files.abort(checkpoint)
        self._merge_if_idle()

    def _is_idle(self) -> bool:
        # The uploading thread sets `done` as its last step. If it is seen too late, the merge waits
        # for the next checkpoint.
        self._pending = [pending for pending in self._pending if not pending.done]
        return not self._pending

    def _merge_if_idle(self) -> None:
        if self._is_idle():
            for table in self._entries.values():
                table.merge()

    def close(self) -> None:
        """Release the state."""
        self._entries.clear()
        self._tables.clear()
        self._rows.clear()
