"""The state backends that a user can choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.imports import naming_extras, require_package
from onceflow.core.local_files import directory_of_process
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader
from onceflow.core.state.stores.keyed_store import KeyedStateStore, StateBackend


@check_fields
@dataclass(frozen=True, slots=True)
class HeapBackend(StateBackend):
    """Keeps state in the slot's own memory, which is the fastest backend.

    If `incremental`, a snapshot of a large state uploads only the changes since the last completed
    checkpoint. Otherwise it uploads the whole state each time.
    """

    incremental: bool = True

    def open(
        self, context: StateContext, restored: Sequence[StateHandle], reader: StateReader
    ) -> KeyedStateStore:
        """Return a store in memory with the state in `restored` of the context's key groups."""
        from onceflow.core.state.heap.store import HeapStore
        from onceflow.core.state.heap.tables import LayerLimits

        limits = LayerLimits() if self.incremental else None
        return HeapStore.open(context, restored, reader, limits)


@check_fields
@dataclass(frozen=True, slots=True)
class RocksDBBackend(StateBackend):
    """Keeps state in a RocksDB on the slot's local disk, for state larger than memory.

    If `incremental`, a snapshot uploads only files that no completed checkpoint holds. Otherwise it
    uploads all files each time.
    """

    native_form: ClassVar[str] = "rocksdb"

    incremental: bool = True
    directory: str | None = None
    """The directory of the database, which should be on a local disk. Default: the slot's scratch
    directory."""
    cache_entries: int = 262_144
    """The number of entries of each state that are held in memory, in addition to RocksDB's caches.
    """
    block_cache_bytes: int = 64 << 20
    write_buffer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        require_package("rocksdict")
        if self.cache_entries < 1:
            raise ConfigError(f"cache_entries={self.cache_entries} must be 1 or more")
        for name in ("block_cache_bytes", "write_buffer_bytes"):
            if getattr(self, name) < 1 << 16:
                raise ConfigError(f"{name}={getattr(self, name)} must be {1 << 16} or more")

    def open(
        self, context: StateContext, restored: Sequence[StateHandle], reader: StateReader
    ) -> KeyedStateStore:
        """Return a store over a new database, with the state in `restored` of the key groups."""
        with naming_extras():
            from onceflow.core.state.rocksdb.database import DatabaseOptions
            from onceflow.core.state.rocksdb.store import RocksDBStore

        home = context.scratch_dir
        if self.directory:
            home = directory_of_process(Path(self.directory))
        return RocksDBStore.open(
            context,
            restored,
            reader,
            home=home,
            sizes=DatabaseOptions(self.block_cache_bytes, self.write_buffer_bytes),
            cache_entries=self.cache_entries,
            incremental=self.incremental,
        )
