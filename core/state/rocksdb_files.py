"""Between a copy of a RocksDB on disk and the handles of a native snapshot.

A native snapshot is one *manifest* and a handle for each of the database's large files. The
manifest (MessagePack) names the handle of each file, holds the small files themselves, and says for
which key groups and states the database is.

A large file never changes and its name is never used again by the same database, so a later
snapshot of that database may name the handle again, once a completed checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from onceflow.core.errors import CheckpointCorrupt, StateCorrupt
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.api import StateContext
from onceflow.core.state.canonical import StateMeta, check_format, check_same_max_parallelism
from onceflow.core.state.handles import StateHandle, StateReader, StateWriter

FORMAT = 1
MANIFEST_PREFIX = "rocksdb-manifest"
_LARGE = ".sst"

FileHandles: TypeAlias = dict[str, StateHandle]
"""The database's name of a large file, to the handle of its copy in checkpoint storage."""


class Manifest(msgspec.Struct, frozen=True):
    """What a native snapshot says about itself."""

    format: int
    max_parallelism: int
    key_group_start: int
    key_group_stop: int
    states: tuple[tuple[str, str, str], ...]
    files: dict[str, str]
    """The database's name of a large file, to the name of its handle."""
    small_files: dict[str, bytes]

    @property
    def key_groups(self) -> range:
        """The key groups that the database holds."""
        return range(self.key_group_start, self.key_group_stop)

    def metas(self) -> list[StateMeta]:
        """Return the states that the database holds."""
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
    """Write what is not `known`; return all handles of the snapshot, and those of its large files.

    `unique` makes the names of files unlike those of any other database and checkpoint.
    """
    files: FileHandles = {}
    small: dict[str, bytes] = {}
    for path in sorted(copy.iterdir()):
        if path.suffix != _LARGE:
            small[path.name] = path.read_bytes()
        elif path.name in known:
            files[path.name] = known[path.name]
        else:
            files[path.name] = writer.write_file(
                f"{unique}-{path.name}", path, shared=shared, key_groups=context.key_groups
            )
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
    """Return what makes the names of one snapshot's files unique."""
    return f"{database_id}-{checkpoint}"


def is_manifest(handle: StateHandle) -> bool:
    """Tell whether `handle` is the manifest of a native snapshot."""
    return handle.name.startswith(MANIFEST_PREFIX)


def read_manifest(reader: StateReader, handle: StateHandle, context: StateContext) -> Manifest:
    """Return the manifest.

    Raises:
        StateIncompatible: Written with another max parallelism, or by a newer onceflow.
        StateCorrupt: The bytes pass their checksum and still are no manifest.
    """
    try:
        manifest = msgspec.msgpack.decode(reader.read(handle), type=Manifest)
    except msgspec.DecodeError as error:
        raise StateCorrupt(f"{handle.name} of {context} is no manifest: {error}") from error
    check_format(manifest.format, FORMAT, handle.name, context)
    check_same_max_parallelism(manifest.max_parallelism, context)
    return manifest


def download_copy(
    reader: StateReader, manifest: Manifest, handles: Mapping[str, StateHandle], directory: Path
) -> FileHandles:
    """Leave the manifest's database in `directory`; return the handles of its large files.

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
    for name, data in manifest.small_files.items():
        (directory / name).write_bytes(data)
    files = {name: handles[handle] for name, handle in manifest.files.items()}
    for name, handle in files.items():
        reader.read_to(handle, directory / name)
    return files
