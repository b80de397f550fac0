"""Savepoints in a file system: each is one directory, complete in itself, which may be moved.

    <directory>/state/<number>-<uid>@<subtask>@<name>   a state file, in the canonical form
    <directory>/staged/<sink id>/<transaction>.arrow    rows and proofs, see `staging`
    <directory>/_metadata                               two sealed lines of JSON, written last
    <directory>/_changing                               exists while state of DataFrames is added

Paths inside are relative to the directory, so that it may be moved, copied and renamed. A directory
without `_metadata` is incomplete and is never read as a savepoint. The job's own storage does not
reference the savepoint, and the savepoint does not reference the job's storage.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa
import xxhash

from onceflow.core import errors
from onceflow.core.decoding import json_decoder
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.storage.filesystems.filesystem import AlreadyExists, FileSystem
from onceflow.core.storage.layout import SavepointPaths, StateNames, StatePaths, safe_name
from onceflow.core.storage.log.record_codec import seal, unseal
from onceflow.core.storage.snapshots.state_files import FileStateReader
from onceflow.core.storage.staging.staged_rows import FileStagingArea

FORMAT = 2
COPIES_AT_ONCE = 4
"""The number of state files that are copied or read at once."""

_REMEDY = "restore the savepoint's directory from a copy, or take another savepoint"
_T = TypeVar("_T")
_R = TypeVar("_R")


class _Metadata(msgspec.Struct, frozen=True):
    format: int
    savepoint: msgspec.Raw


class SavepointDirectory:
    """The files of one savepoint. Any thread, any process; reads nothing before the first call."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._paths = SavepointPaths()

    def __str__(self) -> str:
        return self._fs.location("").rstrip("/")

    def is_there(self) -> bool:
        """Return True if this is the directory of a finished savepoint."""
        return self._fs.size(self._paths.metadata) is not None

    def is_begun(self) -> bool:
        """Return True if there is any file in this directory."""
        return bool(self._fs.list(""))

    def prepare(self) -> None:
        """Create the directory, and thereby check that it can be written.

        Raises:
            StorageError: The directory cannot be created.
        """
        self._fs.make_directory("")

    def write(self, savepoint: Savepoint, source: FileStateReader) -> None:
        """Write `savepoint` durably, with copies of the state files that `source` reads.

        A crash leaves files without metadata, which are not read as a savepoint.

        Raises:
            StorageError: The savepoint is incomplete. Its files may be deleted.
            CheckpointCorrupt: The bytes of a state file are not those that were written.
        """

        def copy_handle(number: int, subtask: int, uid: str, handle: StateHandle) -> StateHandle:
            name = f"{number:05}-{safe_name(uid)}@{subtask}@{safe_name(handle.name)}"
            path = self._paths.state(name)
            self._fs.write(path, source.read_verified_chunks(handle))
            return replace(handle, path=path, shared=False)

        completed = with_copied_files(savepoint.completed, copy_handle)
        data = _encode(replace(savepoint, completed=completed))
        # The metadata is written last, and only if there is none: it makes the files a savepoint.
        if isinstance(self._fs.create_if_absent(self._paths.metadata, data), AlreadyExists):
            raise errors.StorageError(
                f"{self} holds another savepoint already: choose another directory"
            )

    def read(self) -> Savepoint:
        """Return the savepoint. Does not read its state files.

        Raises:
            SavepointRefused: There is no savepoint, or it was never finished.
            CheckpointCorrupt: The metadata is not what was written.
            StateIncompatible: A later version of onceflow wrote it.
        """
        data = self._fs.read(self._paths.metadata)
        if data is None:
            unfinished = "was never finished: its _metadata is missing"
            what = unfinished if self.is_begun() else "is not there"
            raise errors.SavepointRefused(
                f"the savepoint {self} {what}; name the directory that the savepoint was reported"
                " under, which holds _metadata and state/"
            )
        location = self._fs.location(self._paths.metadata)
        line, _ = unseal(data, location, _REMEDY)
        try:
            metadata = json_decoder(_Metadata).decode(line)
            if metadata.format != FORMAT:
                raise errors.StateIncompatible(
                    f"{location} has format {metadata.format}, and this version of onceflow reads"
                    f" format {FORMAT}: restore with the version that wrote it, or a later one"
                )
            return json_decoder(Savepoint).decode(metadata.savepoint)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise errors.CheckpointCorrupt(
                f"{location} has the right checksum and does not read as a savepoint's metadata:"
                f" {error}; another program wrote it. Use another savepoint"
            ) from error

    def reader(self) -> FileStateReader:
        """Return the reader of the state files."""
        return FileStateReader(self._fs, self._paths)

    def staging(self, sink_id: str) -> FileStagingArea:
        """Return the copies of the rows that `sink_id` had staged when the savepoint was taken."""
        return FileStagingArea(self._fs, self._paths.staging_directory(sink_id), sink_id)

    def state_writer(self, unique: str, uid: str) -> SavepointStateWriter:
        """Return a writer of state that no metadata references yet.

        `unique` is in each file name.
        """
        return SavepointStateWriter(self._fs, self._paths, unique, uid)

    def delete_state(self, unique: str) -> None:
        """Delete the state that writers of `unique` wrote, which no metadata references.

        Idempotent.
        """
        for name in self._fs.list(self._paths.state_directory):
            if name.startswith(f"{unique}-"):
                self._fs.delete(self._paths.state(name))

    @contextmanager
    def changing(self) -> Generator[Callable[[Savepoint], None], None, None]:
        """Lock the metadata and return a function that replaces it atomically.

        Only one process holds the lock file at a time. A crash leaves either the old or the new
        metadata, and the lock file, which keeps other processes out until someone deletes it.

        Raises:
            SavepointRefused: The lock file exists: another process holds it or was killed.
        """
        if isinstance(self._fs.create_if_absent(self._paths.lock, b""), AlreadyExists):
            raise errors.SavepointRefused(
                f"another program changes {self}, or was killed while it did:"
                f" {self._fs.location(self._paths.lock)} is there; delete it once none runs"
            )

        def replace_with(savepoint: Savepoint) -> None:
            self._fs.write(self._paths.metadata, (_encode(savepoint),))

        try:
            yield replace_with
        finally:
            self._fs.delete(self._paths.lock)

    def dispose(self) -> None:
        """Delete the savepoint, metadata first. Idempotent.

        Raises:
            StorageError: Some files still exist.
        """
        # Metadata first: a crash in between leaves files that are not read as a savepoint.
        self._fs.delete(self._paths.metadata)
        self._fs.delete_tree(self._paths.state_directory)
        self._fs.delete_tree(self._paths.staged_sinks)
        self._fs.delete_directory_if_empty("")


def _encode(savepoint: Savepoint) -> bytes:
    body = msgspec.Raw(msgspec.json.encode(savepoint))
    data, _ = seal(msgspec.json.encode(_Metadata(FORMAT, body)))
    return data


class SavepointStateWriter:
    """Writes keyed state of one operator into a savepoint's directory. One thread."""

    def __init__(self, fs: FileSystem, paths: SavepointPaths, unique: str, uid: str) -> None:
        self._fs = fs
        self._paths = paths
        self._prefix = f"{unique}-{safe_name(uid)}"
        self._written = 0

    def write(
        self, name: str, data: bytes | memoryview | pa.Buffer, *, key_groups: range | None = None
    ) -> StateHandle:
        """Write `data` durably and return its handle.

        Raises:
            StorageError: The data is not durable.
        """
        view = memoryview(data).cast("B")
        groups = key_groups if key_groups is not None else range(0)
        path = self._paths.state(f"{self._prefix}@{self._written}@{safe_name(name)}")
        self._written += 1
        self._fs.write(path, (view,))
        last = groups[-1] if groups else -1
        return StateHandle(
            name, path, view.nbytes, xxhash.xxh3_128_hexdigest(view), groups.start, last
        )

    def write_chunks(
        self,
        name: str,
        chunks: Iterable[pa.Buffer],
        *,
        shared: bool = False,
        key_groups: range | None = None,
    ) -> StateHandle:
        """Write the joined `chunks`, like `write`. A savepoint has no shared files."""
        del shared
        return self.write(name, b"".join(chunks), key_groups=key_groups)

    def write_file(
        self, name: str, path: Path, *, shared: bool, key_groups: range | None = None
    ) -> StateHandle:
        """Write a copy of the file at `path`. A savepoint has no shared files."""
        del shared
        return self.write(name, path.read_bytes(), key_groups=key_groups)


def damages(completed: CompletedCheckpoint, reader: FileStateReader) -> tuple[str, ...]:
    """Read each state file that `completed` references.

    Return the errors, one line a damaged file.
    """

    def damage(handle: StateHandle) -> str:
        try:
            for _ in reader.read_verified_chunks(handle):
                pass
        except (errors.CheckpointCorrupt, errors.StorageError) as error:
            return str(error)
        return ""

    handles = [handle for _, _, handle in _handles(completed)]
    return tuple(filter(None, _at_once(damage, handles)))


def copy_into(
    fs: FileSystem, paths: StatePaths, completed: CompletedCheckpoint, source: FileStateReader
) -> CompletedCheckpoint:
    """Copy the state files of `completed` to the paths of its own number and attempt. Return it.

    A crash leaves files that no record references; `sweep` deletes them.

    Raises:
        StorageError: Not all files are durable.
        CheckpointCorrupt: A state file is gone, or its bytes are not those that were written.
    """

    def copy_handle(number: int, subtask: int, uid: str, handle: StateHandle) -> StateHandle:
        names = StateNames(completed.attempt, completed.checkpoint, uid, subtask)
        path = names.private(f"{number:05}-{handle.name}")
        fs.write(paths.in_job(path), source.read_verified_chunks(handle))
        return replace(handle, path=path, shared=False)

    return with_copied_files(completed, copy_handle)


def with_copied_files(
    completed: CompletedCheckpoint, copy: Callable[[int, int, str, StateHandle], StateHandle]
) -> CompletedCheckpoint:
    """Return `completed` with each handle of a file replaced by the result of `copy`.

    `copy` gets a unique number, the subtask's index, the uid and the handle. It is called by
    several threads at once.
    """
    all_handles = list(_handles(completed))
    numbered = [(number, *entry) for number, entry in enumerate(all_handles)]
    # The order is that of `_handles`, which `renew` follows below: keyed, raw, rows in flight.
    copies = iter(_at_once(lambda entry: copy(*entry), numbered))

    def renew(handles: Iterable[StateHandle]) -> tuple[StateHandle, ...]:
        return tuple(next(copies) if handle.path else handle for handle in handles)

    def operator(old: OperatorSnapshot) -> OperatorSnapshot:
        # Keyed before raw, as in `_handles`. Inside the arguments of `replace` the order would be
        # hidden.
        keyed = renew(old.keyed)
        return replace(old, keyed=keyed, raw=renew(old.raw))

    def of_subtask(old: SubtaskSnapshot) -> SubtaskSnapshot:
        operators = tuple(operator(snapshot) for snapshot in old.operators)
        handles = renew(part.handle for part in old.in_flight)
        in_flight = (replace(o, handle=h) for o, h in zip(old.in_flight, handles, strict=True))
        return replace(old, operators=operators, in_flight=tuple(in_flight))

    return replace(completed, snapshots=tuple(of_subtask(old) for old in completed.snapshots))


def _handles(completed: CompletedCheckpoint) -> Iterator[tuple[int, str, StateHandle]]:
    for snapshot in completed.snapshots:
        for operator in snapshot.operators:
            for handle in (*operator.keyed, *operator.raw):
                if handle.path:
                    yield snapshot.subtask.index, operator.uid, handle
        for rows in snapshot.in_flight:
            if rows.handle.path:
                yield snapshot.subtask.index, rows.chain, rows.handle


def _at_once(work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    if not items:
        return []
    with ThreadPoolExecutor(COPIES_AT_ONCE, thread_name_prefix="savepoint") as threads:
        return list(threads.map(work, items))
