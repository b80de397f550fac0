"""The snapshots of a RocksDB store: their files in storage, their upload, and their restore.

A native snapshot is one *manifest* and a handle for each of the database's large files. The
manifest (MessagePack) names the handle of each file, contains the small files themselves, and lists
the key groups and states of the database.

A large file never changes, and the same database never reuses its name. So a later snapshot of that
database may reference its handle again, once a completed checkpoint holds it.

The native snapshot that shares most key groups with the new store becomes its database unchanged;
rows of other key groups are deleted by range. The rows of the other snapshots, and of canonical
parts, are read and written into it. Only the files of the first snapshot are then known to be in a
completed checkpoint. They may be referenced again if their handles cover all key groups of the new
store.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.decoding import UnsafeName, msgpack_decoder, resolve_file_name
from onceflow.core.errors import CheckpointCorrupt, StateCorrupt, StateIncompatible
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader, StateWriter
from onceflow.core.state.rocksdb.database import (
    Database,
    Pair,
    PendingWrites,
    WriteQueue,
    group_prefix,
    next_prefix,
    scan_copy,
    split_row_key,
    state_prefix,
    to_pairs,
)
from onceflow.core.state.snapshots.canonical import (
    StateRows,
    check_format,
    check_same_max_parallelism,
    is_canonical,
    read_canonical,
)
from onceflow.core.state.snapshots.state_meta import StateMeta
from onceflow.core.state.stores.keyed_store import PendingKeyedSnapshot
from onceflow.core.state.stores.store_parts import FileHandles

FORMAT = 2
"""Format 2: decimal map keys have no trailing zeros, and instants are in their own unit."""
MANIFEST_PREFIX = "rocksdb-manifest"
_LARGE = ".sst"
FILES_AT_ONCE = 4
"""The number of files of one snapshot that are uploaded or downloaded at once."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Manifest(msgspec.Struct, frozen=True):
    """The description of a native snapshot."""

    format: int
    max_parallelism: int
    key_group_start: int
    key_group_stop: int
    states: tuple[tuple[str, str, str], ...]
    files: dict[str, str]
    """The name of each large file in the database, to the name of its handle."""
    small_files: dict[str, bytes]

    @property
    def key_groups(self) -> range:
        """The key groups of the database."""
        return range(self.key_group_start, self.key_group_stop)

    def metas(self) -> list[StateMeta]:
        """Return the states of the database."""
        return [StateMeta(name, kind, signature) for name, kind, signature in self.states]  # type: ignore[arg-type]


def upload_copy(
    writer: StateWriter,
    context: StateContext,
    copy: Path,
    metas: Sequence[StateMeta],
    known: Mapping[str, StateHandle],
    unique: str,
    *,
    shared: bool,
) -> tuple[tuple[StateHandle, ...], FileHandles]:
    """Upload the files that are not `known`. Return all handles, and those of the large files.

    `unique` makes file names differ from those of any other database and checkpoint.
    """
    paths = sorted(copy.iterdir())
    # Only table files are immutable and have unique names, so only they are shared between
    # snapshots. The others (MANIFEST, CURRENT, OPTIONS) are small, and are stored in our manifest.
    small = {path.name: path.read_bytes() for path in paths if path.suffix != _LARGE}
    large = [path for path in paths if path.suffix == _LARGE]

    def write_file(path: Path) -> StateHandle:
        # The database never writes two table files with one name, so the name identifies the
        # content.
        if path.name in known:
            return known[path.name]
        name = f"{unique}-{path.name}"
        return writer.write_file(name, path, shared=shared, key_groups=context.key_groups)

    names = [path.name for path in large]
    files: FileHandles = dict(zip(names, _call_in_parallel(write_file, large), strict=True))
    manifest = Manifest(
        FORMAT,
        context.max_parallelism,
        context.key_groups.start,
        context.key_groups.stop,
        tuple((meta.name, meta.kind, meta.signature) for meta in metas),
        {name: handle.name for name, handle in files.items()},
        small,
    )
    encoded = msgspec.msgpack.encode(manifest)
    written = writer.write(f"{MANIFEST_PREFIX}-{unique}", encoded, key_groups=context.key_groups)
    return (written, *files.values()), files


def file_prefix(database_id: str, checkpoint: CheckpointId) -> str:
    """Return the prefix that makes the names of one snapshot's files unique."""
    return f"{database_id}-{checkpoint}"


def is_manifest(handle: StateHandle) -> bool:
    """Return True if `handle` is the manifest of a native snapshot."""
    return handle.name.startswith(MANIFEST_PREFIX)


_MANIFESTS = msgpack_decoder(Manifest)


def read_manifest(reader: StateReader, handle: StateHandle, context: StateContext) -> Manifest:
    """Return the manifest.

    Raises:
        StateIncompatible: Written with another max parallelism, or by a newer onceflow.
        StateCorrupt: The bytes pass their checksum, but are no manifest.
    """
    try:
        manifest = _MANIFESTS.decode(reader.read(handle))
    except msgspec.DecodeError as error:
        raise StateCorrupt(
            f"{handle.name} of {context} cannot be read as a manifest of RocksDB files: {error};"
            " restore an older checkpoint"
        ) from error
    check_format(manifest.format, FORMAT, handle.name, context)
    check_same_max_parallelism(manifest.max_parallelism, context)
    return manifest


def download_copy(
    reader: StateReader, manifest: Manifest, handles: Mapping[str, StateHandle], directory: Path
) -> FileHandles:
    """Download the manifest's database to `directory`. Return the handles of its large files.

    Raises:
        CheckpointCorrupt: A file is damaged or missing.
    """
    missing = sorted(set(manifest.files.values()) - set(handles))
    if missing:
        raise CheckpointCorrupt(
            f"the snapshot names {len(missing)} files that are not among its handles, such as"
            f" {missing[0]}; restore an older checkpoint"
        )
    directory.mkdir(parents=True)
    try:
        for name in (*manifest.small_files, *manifest.files):
            resolve_file_name(name, directory)
    except UnsafeName as error:
        raise CheckpointCorrupt(
            f"of a snapshot of RocksDB, {error}; the manifest was not written by onceflow: restore"
            " an older checkpoint"
        ) from error
    for name, data in manifest.small_files.items():
        (directory / name).write_bytes(data)
    files = {name: handles[handle] for name, handle in manifest.files.items()}
    _call_in_parallel(lambda name: reader.read_to(files[name], directory / name), list(files))
    return files


def _call_in_parallel(call: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return the result of `call` for each of `items`, several at once: storage may be slow."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(len(items), FILES_AT_ONCE), "state-file") as threads:
        return list(threads.map(call, items))


Upload: TypeAlias = Callable[[StateWriter, Path], tuple[StateHandle, ...]]
"""A function that uploads a copy of the database and returns the handles of the snapshot."""

SCAN_ROWS = 32_768


class Frozen:
    """A snapshot's writes, and the copy of the database that includes them."""

    def __init__(self, writes: WriteQueue, pending: PendingWrites) -> None:
        self._writes = writes
        self._pending = pending

    def copy(self) -> Path:
        """Create the copy if needed, and return its path. Any thread."""
        self._writes.flush_in_background()
        return self._pending.copy

    def discard(self) -> None:
        """Delete the copy. Any thread."""
        self._writes.discard(self._pending)


class RocksSnapshot(PendingKeyedSnapshot):
    """A snapshot that is being uploaded."""

    def __init__(self, frozen: Frozen, upload: Upload) -> None:
        self._frozen = frozen
        self._upload = upload

    def upload(self, writer: StateWriter) -> tuple[StateHandle, ...]:
        """Write the dirty entries, copy the database by hard links, and upload new files."""
        try:
            return self._upload(writer, self._frozen.copy())
        finally:
            self._frozen.discard()

    def discard(self) -> None:
        """Delete the copy. The entries are still written to the database at its next write."""
        self._frozen.discard()


def read_rows_of_copy(copy: Path, name: str, key_groups: range) -> Iterator[StateRows]:
    """Yield the rows of one state in a copy of the database, key group by key group."""
    kind = pa.large_binary()
    starts = [group_prefix(group) + state_prefix(name) for group in key_groups]
    rows = scan_copy(copy, [(start, next_prefix(start)) for start in starts])
    while batch := list(islice(rows, SCAN_ROWS)):
        split = [split_row_key(key) for key, _ in batch]
        groups = np.array([group for group, _, _ in split], np.uint16)
        keys = pa.array([state_key for _, _, state_key in split], kind)
        yield StateRows(groups, keys, pa.array([value for _, value in batch], kind))


WRITE_BATCH = 131_072
"""The number of rows that a restore writes to the database at once."""
_END_OF_GROUPS = b"\xff\xff"


@dataclass(slots=True)
class RestoredDatabase:
    """A database with the restored rows, their states, and the files that storage has."""

    database: Database
    metas: dict[str, StateMeta] = field(default_factory=dict[str, StateMeta])
    files: FileHandles = field(default_factory=dict[str, StateHandle])

    def add(self, metas: Iterable[StateMeta], context: StateContext) -> None:
        """Add the states of one more snapshot."""
        for meta in metas:
            self.metas.setdefault(meta.name, meta).check_equal(meta, str(context))


def restore(
    context: StateContext,
    handles: Sequence[StateHandle],
    reader: StateReader,
    directory: Path,
    new_database: Callable[[Path], Database],
) -> RestoredDatabase:
    """Return a database in `directory` with the rows of the context's key groups.

    Raises:
        StateIncompatible: Written with another max parallelism, or by another backend and not in
            the
            canonical form.
        CheckpointCorrupt: A file is damaged or missing.
    """
    by_name = {handle.name: handle for handle in handles}
    manifests = [
        read_manifest(reader, handle, context) for handle in by_name.values() if is_manifest(handle)
    ]
    _check_kinds(by_name, manifests, context)
    sharing = [manifest for manifest in manifests if _common(manifest, context)]
    # The snapshot with most of our key groups is downloaded as files. The rows of the others are
    # copied, which is slower.
    sharing.sort(key=lambda manifest: -len(_common(manifest, context)))
    files: FileHandles = {}
    if sharing:
        files = download_copy(reader, sharing[0], by_name, directory / "db")
    restored = RestoredDatabase(new_database(directory))
    try:
        for manifest in manifests:
            restored.add(manifest.metas(), context)
        if sharing:
            # These key groups belong to another subtask now. If they stayed, the next snapshot
            # would contain them, and a later restore would find them twice.
            _clip(restored.database, sharing[0], context)
            if _covers(files.values(), context):
                restored.files = files
        for manifest in sharing[1:]:
            _copy_rows(reader, manifest, by_name, directory / "other", restored.database, context)
        canonical = [handle for handle in handles if is_canonical(handle)]
        for meta, rows in read_canonical(reader, canonical, context):
            restored.add([meta], context)
            restored.database.write(to_pairs(rows, meta.name))
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
    """Delete the rows outside of the context's key groups."""
    if manifest.key_groups.start < context.key_groups.start:
        database.delete_range(group_prefix(0), group_prefix(context.key_groups.start))
    if manifest.key_groups.stop > context.key_groups.stop:
        database.delete_range(group_prefix(context.key_groups.stop), _END_OF_GROUPS)


def _covers(handles: Iterable[StateHandle], context: StateContext) -> bool:
    """Return True if all of `handles` are shared and cover all of the context's key groups."""
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
