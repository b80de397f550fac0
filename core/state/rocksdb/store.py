"""Keyed state in a RocksDB on the slot's disk, with incremental snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow as pa

from onceflow.core.local_files import naming_full_disk
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape, make_shape
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.api import descriptors
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader, StateWriter
from onceflow.core.state.rocksdb import database, snapshots
from onceflow.core.state.rocksdb.accumulators import PRELOAD_BATCH, RocksAccumulators
from onceflow.core.state.rocksdb.entries import (
    ListFormat,
    MapFormat,
    RocksEntries,
    RocksMapState,
    RowFormat,
)
from onceflow.core.state.snapshots import canonical, state_meta
from onceflow.core.state.stores.entries import (
    Cells,
    CurrentKey,
    EntryListState,
    EntryValueState,
    MapKeys,
)
from onceflow.core.state.stores.keyed_store import (
    KeyedStateStore,
    ListState,
    MapState,
    PendingKeyedSnapshot,
    ValueState,
)
from onceflow.core.state.stores.store_parts import (
    KnownFiles,
    OpenStates,
    filter_expired,
    stamp_value,
)
from onceflow.core.state.types.serializers import serializer_of
from onceflow.core.state.types.type_names import depends_on_values

CHECKED_ROWS = 64
"""The number of rows of a restored state that are decoded when it opens, to check its type."""
CHECKED_GROUPS = 1_024
"""The maximum number of key groups to search for these rows: an empty one costs some microseconds.
"""

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class RocksDBStore(KeyedStateStore):
    """Keyed state in a local database behind bounded caches."""

    def __init__(
        self,
        context: StateContext,
        database_id: str,
        restored: snapshots.RestoredDatabase,
        *,
        cache_entries: int,
        incremental: bool,
    ) -> None:
        self._cache_entries = cache_entries
        self._incremental = incremental
        self._context = context
        self._id = database_id
        self._database = restored.database
        self._restored = canonical.RestoredStates(context, restored.metas.values())
        self._metas = dict(restored.metas)
        self._files = KnownFiles(restored.files)
        self._writes = database.WriteQueue(restored.database)
        self._open_states = OpenStates(context)
        self._current = CurrentKey()
        self._freezers: list[Callable[[], Callable[[], list[database.Pair]]]] = []
        self._by_key: list[RocksEntries] = []
        self._tables: dict[str, RocksEntries] = {}
        self._maps: list[RocksMapState[Any, Any]] = []
        self._aggregates: dict[str, RocksAccumulators] = {}

    @classmethod
    def open(
        cls,
        context: StateContext,
        handles: Sequence[StateHandle],
        reader: StateReader,
        *,
        home: Path,
        sizes: database.DatabaseOptions,
        cache_entries: int,
        incremental: bool,
    ) -> RocksDBStore:
        """Return a store that holds the restored rows of the context's key groups.

        Its database is a new directory in `home`. `cache_entries` of each state are held in memory.
        If `incremental`, a snapshot shares files with completed checkpoints.

        Raises:
            StateIncompatible, CheckpointCorrupt: See `StateBackend.open`.
        """
        database_id = uuid4().hex

        def new_database(path: Path) -> database.Database:
            return database.Database(path, sizes)

        directory = home / f"rocksdb-{database_id}"
        with naming_full_disk(directory, "the state cannot be restored"):
            restored = snapshots.restore(context, handles, reader, directory, new_database)
        return cls(
            context,
            database_id,
            restored,
            cache_entries=cache_entries,
            incremental=incremental,
        )

    def set_current_key(self, key: Any) -> None:
        """Select the current key."""
        self._current.key = key

    def current_key(self) -> Any:
        """Return the current key."""
        return self._current.key

    def entries(self, descriptor: descriptors.ValueStateDescriptor[T]) -> Iterator[tuple[Any, T]]:
        """Yield each key and its value."""
        return self._tables[descriptor.name].all(self._context.key_groups)

    def prefetch(self, keys: Sequence[Any]) -> None:
        """Read missing entries of these keys at once.

        Map states read their entries only on access.
        """
        distinct = list(dict.fromkeys(keys))
        for table in self._tables.values():
            # More entries than a batch usually changes, so that the number of taken entries
            # decreases.
            table.join(2 * len(distinct))
        for table in self._by_key:
            table.prefetch(distinct)

    def value_state(self, descriptor: descriptors.ValueStateDescriptor[T]) -> ValueState[T]:
        """Return the value state of this name."""
        meta = state_meta.describe_value_state(descriptor)
        state: ValueState[T] | None = self._open_states.find(meta)
        if state is None:
            cells = Cells(serializer_of(descriptor.type), descriptor.name)
            table = self._entries(meta, RowFormat(cells))
            self._by_key.append(table)
            state = EntryValueState(table, descriptor)
            self._open_states.add(meta, state)
        return state

    def list_state(self, descriptor: descriptors.ListStateDescriptor[T]) -> ListState[T]:
        """Return the list state of this name."""
        meta = state_meta.describe_list_state(descriptor)
        state: ListState[T] | None = self._open_states.find(meta)
        if state is None:
            cells = Cells(serializer_of(descriptor.type), descriptor.name)
            table = self._entries(meta, ListFormat(cells))
            self._by_key.append(table)
            state = EntryListState(table)
            self._open_states.add(meta, state)
        return state

    def map_state(self, descriptor: descriptors.MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return the map state of this name."""
        meta = state_meta.describe_map_state(descriptor)
        state: RocksMapState[K, V] | None = self._open_states.find(meta)
        if state is None:
            cells = Cells(serializer_of(descriptor.type), descriptor.name)
            keys = MapKeys(descriptor.key_type, descriptor.name)
            state = RocksMapState(self._entries(meta, MapFormat(cells)), keys)
            self._maps.append(state)
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
    ) -> AccumulatorTable:
        """Return the running aggregates of this name."""
        shape = make_shape(
            name, key_types, columns, namespaced=namespaced, ttl=ttl, member_type=member_type
        )
        table: RocksAccumulators | None = self._open_states.find(shape.meta)
        if table is None:
            stored = self._claim(shape.meta)
            if stored is not None and stored != shape.meta:
                self._convert_totals(stored, shape)
            table = RocksAccumulators(
                shape,
                str(self._context),
                self._context.max_parallelism,
                self._writes,
                self._database,
                self._cache_entries,
                self._context.key_groups,
                ttl,
            )
            if stored is not None:
                table.preload()
            self._aggregates[name] = table
            self._freezers.append(table.freeze)
            self._open_states.add(shape.meta, table)
        return table

    def _entries(self, meta: state_meta.StateMeta, row_format: RowFormat) -> RocksEntries:
        stored = self._claim(meta)
        table = RocksEntries(
            self._current,
            meta.name,
            row_format,
            self._writes,
            self._database,
            self._cache_entries,
            self._context.max_parallelism,
            complete=stored is None,
        )
        self._freezers.append(table.freeze)
        self._tables[meta.name] = table
        if stored is not None and canonical.begins_to_expire(stored, meta):
            self._stamp(meta, row_format.cells.serializer)
        if stored is not None:
            self._check_readable(stored, meta, row_format)
        return table

    def _check_readable(
        self, stored: state_meta.StateMeta, asked: state_meta.StateMeta, row_format: RowFormat
    ) -> None:
        """Raise StateIncompatible if the state's type can no longer read its rows.

        If the new type can read only some values of the old one, all rows are read. Otherwise only
        a few are read here, and the others when their keys occur.

        Raises:
            StateIncompatible: A row does not read as the type.
        """
        prefix = database.state_prefix(asked.name)
        starts = (database.group_prefix(group) + prefix for group in self._context.key_groups)
        if depends_on_values(stored.signature, asked.signature):
            checking = type(row_format)(row_format.cells.to_checking())
            for start in starts:
                for _, value in self._database.scan(start, database.next_prefix(start)):
                    checking.unpack(value)
            return
        ranges = islice(starts, CHECKED_GROUPS)
        rows = chain.from_iterable(
            self._database.scan(start, database.next_prefix(start)) for start in ranges
        )
        for _, value in islice(rows, CHECKED_ROWS):
            row_format.unpack(value)

    def _claim(self, meta: state_meta.StateMeta) -> state_meta.StateMeta | None:
        """Return the restored description of a state.

        If the user lets the state be dropped, returns None and deletes its rows.
        """
        was_there = meta.name in self._metas
        stored = self._restored.claim(meta)
        # The user allowed the loss of this state. Its rows must be deleted before new ones are
        # written: otherwise a later snapshot would hold both under one name.
        if was_there and stored is None:
            self._delete(meta.name)
        self._metas[meta.name] = meta
        return stored

    def clean(self, count: int) -> None:
        """Delete the expired ones of the next rows."""
        for table in self._tables.values():
            table.clean(count, self._context.key_groups)
        for aggregates in self._aggregates.values():
            aggregates.clean(count)

    def finish_open(self) -> tuple[str, ...]:
        """Refuse or delete the states that were not asked for."""
        for meta in self._restored.drop_unclaimed():
            self._delete(meta.name)
            del self._metas[meta.name]
        self._open_states.complete()
        return tuple(self._restored.dropped)

    def _delete(self, name: str) -> None:
        for group in self._context.key_groups:
            start = database.group_prefix(group) + database.state_prefix(name)
            self._database.delete_range(start, database.next_prefix(start))

    def _convert_totals(self, stored: state_meta.StateMeta, shape: AccumulatorShape) -> None:
        """Write the totals again, in the layout of `shape`."""

        def convert(values: list[bytes]) -> list[bytes]:
            packed = shape.convert_totals(stored, pa.array(values, pa.large_binary()))
            return packed.to_pylist()

        self._rewrite(shape.name, convert)

    def _stamp(self, meta: state_meta.StateMeta, serializer: Any) -> None:
        """Write the rows again with now as their last use: the state now has a time to live."""
        self._rewrite(
            meta.name,
            lambda values: [stamp_value(value, meta.kind, serializer) for value in values],
        )

    def _rewrite(self, name: str, change: Callable[[list[bytes]], list[bytes]]) -> None:
        for group in self._context.key_groups:
            start = database.group_prefix(group) + database.state_prefix(name)
            rows = self._database.scan(start, database.next_prefix(start))
            while batch := list(islice(rows, PRELOAD_BATCH)):
                values = change([value for _, value in batch])
                self._database.write(
                    (key, value) for (key, _), value in zip(batch, values, strict=True)
                )

    def snapshot(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Take the dirty entries of all states. The uploading thread writes them."""
        return snapshots.RocksSnapshot(self._freeze(checkpoint), self._upload_native(checkpoint))

    def savepoint(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Take the dirty entries like `snapshot`. The upload reads all rows."""
        return snapshots.RocksSnapshot(self._freeze(checkpoint), self._upload_canonical())

    def native_savepoint(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Take the dirty entries like `snapshot`. The upload shares no files with checkpoints."""
        return snapshots.RocksSnapshot(self._freeze(checkpoint), self._upload_alone(checkpoint))

    def _freeze(self, checkpoint: CheckpointId) -> snapshots.Frozen:
        taken = [freeze() for freeze in self._freezers]
        # Below the database's own directory, so that it is on the same disk, as hard links require.
        copy = self._database.path / f"copy-{checkpoint}-{uuid4().hex}"
        # Nothing is encoded yet: the barrier waits here, and encoding takes far longer than taking.
        pending = database.PendingWrites(lambda: database.merge_pairs(taken), copy)
        self._writes.submit(pending)
        for state in self._maps:
            state.note_snapshot()
        return snapshots.Frozen(self._writes, pending)

    def _upload_native(self, checkpoint: CheckpointId) -> snapshots.Upload:
        context, files, metas = self._context, self._files, list(self._metas.values())
        incremental = self._incremental
        known = files.begin(checkpoint) if incremental else {}
        unique = snapshots.file_prefix(self._id, checkpoint)

        def upload(writer: StateWriter, copy: Path) -> tuple[StateHandle, ...]:
            handles, uploaded = snapshots.upload_copy(
                writer, context, copy, metas, known, unique, shared=incremental
            )
            files.note_upload(checkpoint, uploaded)
            return handles

        return upload

    def _upload_alone(self, checkpoint: CheckpointId) -> snapshots.Upload:
        context, metas = self._context, list(self._metas.values())
        unique = snapshots.file_prefix(self._id, checkpoint)

        def upload(writer: StateWriter, copy: Path) -> tuple[StateHandle, ...]:
            handles, _ = snapshots.upload_copy(
                writer, context, copy, metas, {}, unique, shared=False
            )
            return handles

        return upload

    def _upload_canonical(self) -> snapshots.Upload:
        context, metas = self._context, list(self._metas.values())
        serializers = {name: table.cells.serializer for name, table in self._tables.items()}
        alive = {name: table.filter_alive for name, table in self._aggregates.items()}

        def upload(writer: StateWriter, copy: Path) -> tuple[StateHandle, ...]:
            contents: list[canonical.StateContent] = []
            for meta in metas:
                rows: Iterable[canonical.StateRows] = snapshots.read_rows_of_copy(
                    copy, meta.name, context.key_groups
                )
                if meta.name in serializers:
                    rows = filter_expired(rows, meta.kind, serializers[meta.name])
                if meta.name in alive:
                    rows = alive[meta.name](rows)
                contents.append((meta, rows))
            return canonical.write_canonical(writer, context, contents)

        return upload

    def notify_completed(self, checkpoint: CheckpointId) -> None:
        """Let later snapshots reference the files of `checkpoint`."""
        self._files.complete(checkpoint)

    def notify_aborted(self, checkpoint: CheckpointId) -> None:
        """Keep later snapshots from referencing the files of `checkpoint`."""
        self._files.abort(checkpoint)

    def close(self) -> None:
        """Close and delete the local database."""
        self._writes.close()
