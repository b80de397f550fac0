"""Restores a RocksDB store from snapshots of any number of old subtasks.

The native snapshot that shares most key groups with the new store becomes its database as it
stands; what lies outside is deleted by range. The rows of the others, and of canonical parts, are
read and written into it. Only then are the files of the first one known to be in a completed
checkpoint; they may be named again if their handles are for all of the new store's key groups.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from onceflow.core.errors import StateIncompatible
from onceflow.core.state.api import StateContext
from onceflow.core.state.canonical import StateMeta, is_canonical, read_canonical
from onceflow.core.state.handles import StateHandle, StateReader
from onceflow.core.state.rocksdb_database import Database, scan_copy
from onceflow.core.state.rocksdb_files import (
    FileHandles,
    Manifest,
    download_copy,
    is_manifest,
    read_manifest,
)
from onceflow.core.state.rocksdb_rows import Pair, group_prefix, pairs_of

WRITE_BATCH = 131_072
_END_OF_GROUPS = b"\xff\xff"


@dataclass(slots=True)
class Restored:
    """A database that holds the restored rows, their states, and the files that storage has."""

    database: Database
    metas: dict[str, StateMeta] = field(default_factory=dict[str, StateMeta])
    files: FileHandles = field(default_factory=dict[str, StateHandle])

    def add(self, metas: Iterable[StateMeta], context: StateContext) -> None:
        """Take note of the states of one more snapshot."""
        for meta in metas:
            self.metas.setdefault(meta.name, meta).check(meta, str(context))


def restore(
    context: StateContext,
    handles: Sequence[StateHandle],
    reader: StateReader,
    directory: Path,
    new_database: Callable[[Path], Database],
) -> Restored:
    """Return a database in `directory` with the rows of the context's key groups.

    Raises:
        StateIncompatible: Written with another max parallelism, or by another backend and not in
            the canonical form.
        CheckpointCorrupt: A file is damaged or missing.
    """
    by_name = {handle.name: handle for handle in handles}
    manifests = [
        read_manifest(reader, handle, context) for handle in by_name.values() if is_manifest(handle)
    ]
    _check_kinds(by_name, manifests, context)
    sharing = [manifest for manifest in manifests if _common(manifest, context)]
    sharing.sort(key=lambda manifest: -len(_common(manifest, context)))
    files: FileHandles = {}
    if sharing:
        files = download_copy(reader, sharing[0], by_name, directory / "db")
    restored = Restored(new_database(directory))
    try:
        for manifest in manifests:
            restored.add(manifest.metas(), context)
        if sharing:
            _clip(restored.database, sharing[0], context)
            if _covers(files.values(), context):
                restored.files = files
        for manifest in sharing[1:]:
            _copy_rows(reader, manifest, by_name, directory / "other", restored.database, context)
        canonical = [handle for handle in handles if is_canonical(handle)]
        for meta, rows in read_canonical(reader, canonical, context):
            restored.add([meta], context)
            restored.database.write(pairs_of(rows, meta.name))
    except BaseException:
        restored.database.close()
        raise
    return restored


def _check_kinds(
    by_name: dict[str, StateHandle], manifests: Sequence[Manifest], context: StateContext
) -> None:
    if manifests:
        return
    foreign = [name for name, handle in by_name.items() if not is_canonical(handle)]
    if foreign:
        raise StateIncompatible(
            f"state of {context} was written by another backend ({foreign[0]}); restore it with"
            " that backend"
        )


def _common(manifest: Manifest, context: StateContext) -> range:
    mine, its = context.key_groups, manifest.key_groups
    return range(max(mine.start, its.start), min(mine.stop, its.stop))


def _clip(database: Database, manifest: Manifest, context: StateContext) -> None:
    """Delete what lies outside of the context's key groups."""
    if manifest.key_groups.start < context.key_groups.start:
        database.delete_range(group_prefix(0), group_prefix(context.key_groups.start))
    if manifest.key_groups.stop > context.key_groups.stop:
        database.delete_range(group_prefix(context.key_groups.stop), _END_OF_GROUPS)


def _covers(handles: Iterable[StateHandle], context: StateContext) -> bool:
    """Tell whether all of `handles` are for all of the context's key groups, and shared."""
    groups = context.key_groups
    return all(
        handle.shared
        and handle.key_group_first <= groups.start
        and handle.key_group_last >= groups.stop - 1
        for handle in handles
    )


def _copy_rows(
    reader: StateReader,
    manifest: Manifest,
    by_name: dict[str, StateHandle],
    directory: Path,
    into: Database,
    context: StateContext,
) -> None:
    common = _common(manifest, context)
    try:
        download_copy(reader, manifest, by_name, directory)
        rows = scan_copy(directory, [(group_prefix(common.start), group_prefix(common.stop))])
        while batch := list[Pair](islice(rows, WRITE_BATCH)):
            into.write(batch)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
