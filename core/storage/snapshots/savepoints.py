"""Savepoints in a file system: each is one directory, complete in itself, which may be moved.

    <directory>/state/<uid>@<subtask>@slot@<name>       a state file that a slot wrote
    <directory>/state/<number>-<uid>@<subtask>@<name>   a state file that the driver copied
    <directory>/staged/<sink id>/<transaction>.arrow    rows and proofs, see `staging`
    <directory>/_metadata                               two sealed lines of JSON, written last
    <directory>/_writing                                the mark: the savepoint's id, while slots
                                                        may write
    <directory>/_changing                               exists while state of DataFrames is added

Paths inside are relative to the directory, so that it may be moved, copied and renamed. A directory
without `_metadata` is incomplete and is never read as a savepoint. The job's own storage does not
reference the savepoint, and the savepoint does not reference the job's storage.

The mark shows a slot that it sees the driver's directory, and not one of the same name on its own
disk. The driver writes the mark before the barrier. It deletes the mark before the metadata exists,
and before it deletes the files of a savepoint that has failed. A slot reads the mark before it
writes, and again afterwards. If the mark is gone then, the slot deletes what it wrote. So whichever
of the two deletes last finds all files.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
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
from onceflow.core.protocol.checkpoints.decisions import SavepointTarget
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.storage.filesystems.filesystem import AlreadyExists, FileSystem
from onceflow.core.storage.layout import (
    SavepointPaths,
    SavepointStateNames,
    StateNames,
    StatePaths,
    safe_name,
)
from onceflow.core.storage.log.record_codec import seal, unseal
from onceflow.core.storage.snapshots.state_files import FileStateReader, FileStateWriter
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
        """Return True if the directory has any file."""
        return bool(self._fs.list(""))

    def prepare(self, savepoint_id: str) -> SavepointTarget:
        """Create the directory, and write its mark. This also checks that it can be written.

        Return the target with which a slot finds the directory.

        Raises:
            StorageError: The directory cannot be created, or not be written.
        """
        self._fs.make_directory("")
        self._fs.write(self._paths.mark, (savepoint_id.encode(),))
        return SavepointTarget(str(self), savepoint_id)

    def has_mark(self, savepoint_id: str) -> bool:
        """Return True if this process sees the savepoint's mark in the directory. Runs in slots.

        Raises:
            StorageError: The directory cannot be read here.
        """
        return self._fs.read(self._paths.mark) == savepoint_id.encode()

    def check_writable(self) -> None:
        """Write a file, and delete it. Runs in slots.

        Raises:
            StorageError: The directory cannot be written here.
        """
        path = self._paths.probe(uuid.uuid4().hex)
        self._fs.write(path, (b"probe",))
        self._fs.delete(path)

    def subtask_writer(
        self, uid: str, subtask: int, inline_threshold_bytes: int
    ) -> FileStateWriter:
        """Return the writer of the state of one operator's subtask. Runs in slots."""
        names = SavepointStateNames(uid, subtask)
        return FileStateWriter(self._fs, self._paths, names, inline_threshold_bytes)

    def delete_if_empty(self) -> None:
        """Delete the directories that became empty since the savepoint failed. Idempotent.

        Raises:
            StorageError: An empty directory still exists.
        """
        self._fs.delete_directory_if_empty(self._paths.state_directory)
        self._fs.delete_directory_if_empty("")

    def collect(
        self, savepoint: Savepoint, source: FileStateReader, in_target: Collection[SubtaskRef]
    ) -> Savepoint:
        """Return `savepoint` with all its state files in this directory, durably.

        The files of the subtasks `in_target` must be here already. All others are copied from
        `source`. A crash leaves files without metadata, which are not read as a savepoint.

        Raises:
            StorageError: Not all files are here. They may be deleted.
            CheckpointCorrupt: The bytes of a copied file are not those that were written.
        """

        def collect_handle(
            number: int, subtask: SubtaskRef, uid: str, handle: StateHandle
        ) -> StateHandle:
            if subtask in in_target:
                self._check_written(subtask, handle)
                return replace(handle, shared=False)
            name = f"{number:05}-{safe_name(uid)}@{subtask.index}@{safe_name(handle.name)}"
            path = self._paths.state(name)
            self._fs.write(path, source.read_verified_chunks(handle))
            return replace(handle, path=path, shared=False)

        completed = with_copied_files(savepoint.completed, collect_handle)
        return replace(savepoint, completed=completed)

    def _check_written(self, subtask: SubtaskRef, handle: StateHandle) -> None:
        """Raise StorageError unless this process sees the file that a slot wrote."""
        location = self._fs.location(self._paths.in_job(handle.path))
        if not handle.path.startswith(f"{self._paths.state_directory}/"):
            raise errors.StorageError(
                f"{subtask} names {location} as its state in the savepoint, and state is in"
                f" {self._fs.location(self._paths.state_directory)}; take another savepoint"
            )
        size_bytes = self._fs.size(handle.path)
        if size_bytes != handle.size_bytes:
            there = "is not there" if size_bytes is None else f"has {size_bytes} bytes"
            raise errors.StorageError(
                f"{subtask} has written {handle.size_bytes} bytes to {location}, and for the driver"
                f" the file {there}: check that the driver and the slots see the same directory,"
                " and take another savepoint"
            )

    def finish(self, savepoint: Savepoint) -> None:
        """Write the metadata durably: it makes the files a savepoint. All files must be here.

        A crash leaves the whole savepoint, or files without metadata.

        Raises:
            StorageError: The savepoint may be incomplete. Its files may be deleted.
        """
        data = _encode(savepoint)
        # Before the metadata, so that a savepoint never contains the mark.
        self._fs.delete(self._paths.mark)
        # The metadata is written last, and only if there is none.
        if isinstance(self._fs.create_if_absent(self._paths.metadata, data), AlreadyExists):
            raise errors.StorageError(
                f"{self} already holds another savepoint: choose another directory"
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
            what = "is not there"
            if self._fs.size(self._paths.mark) is not None:
                what = "is not finished: its job writes it now, or was killed while it did"
            elif self.is_begun():
                what = "was never finished: its _metadata is missing"
            raise errors.SavepointRefused(
                f"the savepoint {self} {what}; give the directory that was reported for the"
                " savepoint, which contains _metadata and state/"
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
                f"{location} has the right checksum, but cannot be read as a savepoint's"
                f" metadata: {error}; another program wrote it. Use another savepoint"
            ) from error

    def reader(self) -> FileStateReader:
        """Return the reader of the state files."""
        return FileStateReader(self._fs, self._paths)

    def staging(self, sink_id: str) -> FileStagingArea:
        """Return the rows that `sink_id` had staged when the savepoint was taken."""
        return FileStagingArea(self._fs, self._paths.staging_directory(sink_id), sink_id)

    def state_writer(self, unique: str, uid: str) -> SavepointStateWriter:
        """Return a writer of state files that no metadata references yet.

        `unique` is in each file name.
        """
        return SavepointStateWriter(self._fs, self._paths, unique, uid)

    def delete_state(self, unique: str) -> None:
        """Delete the state files whose names have `unique`. No metadata may reference them.

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
                f"another program is changing {self}, or was killed meanwhile:"
                f" {self._fs.location(self._paths.lock)} exists. Delete that file only when no"
                " such program runs"
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
        # Metadata first: a crash in between leaves files that are not read as a savepoint. Then the
        # mark: a slot that does not find it deletes the files that it has written since.
        self._fs.delete(self._paths.metadata)
        self._fs.delete(self._paths.mark)
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

    def copy_handle(number: int, subtask: SubtaskRef, uid: str, handle: StateHandle) -> StateHandle:
        names = StateNames(completed.attempt, completed.checkpoint, uid, subtask.index)
        path = names.private(f"{number:05}-{handle.name}")
        fs.write(paths.in_job(path), source.read_verified_chunks(handle))
        return replace(handle, path=path, shared=False)

    return with_copied_files(completed, copy_handle)


def with_copied_files(
    completed: CompletedCheckpoint,
    copy: Callable[[int, SubtaskRef, str, StateHandle], StateHandle],
) -> CompletedCheckpoint:
    """Return `completed` with each handle of a file replaced by the result of `copy`.

    `copy` gets a unique number, the subtask, the uid and the handle. It is called by several
    threads at once.
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


def _handles(completed: CompletedCheckpoint) -> Iterator[tuple[SubtaskRef, str, StateHandle]]:
    for snapshot in completed.snapshots:
        for operator in snapshot.operators:
            for handle in (*operator.keyed, *operator.raw):
                if handle.path:
                    yield snapshot.subtask, operator.uid, handle
        for rows in snapshot.in_flight:
            if rows.handle.path:
                yield snapshot.subtask, rows.chain, rows.handle


def _at_once(work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    if not items:
        return []
    with ThreadPoolExecutor(COPIES_AT_ONCE, thread_name_prefix="savepoint") as threads:
        return list(threads.map(work, items))
