"""The state of one subtask as files of checkpoint storage: written once, verified on every read.

    private   chk-<n>/a<attempt>/...   deleted with its checkpoint
    shared    shared/a<attempt>@...    later checkpoints may reference it; its name is used once
    inline    in the handle itself     if smaller than the threshold: a file costs two syncs

The checksum is xxh3-128 in hex, of the bytes that were passed to the writer, not of bytes read
back. `discard` deletes files that the coordinator gives up, `sweep` those of dead attempts (I9).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

import xxhash
from typing_extensions import Buffer

from onceflow.core.decoding import UnsafeName, resolve_stored_name
from onceflow.core.errors import CheckpointCorrupt, StorageError, require
from onceflow.core.local_files import advise_on_disk
from onceflow.core.protocol.checkpoints.snapshots import StateHandle, paths_of
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.storage.filesystems.filesystem import AdoptsFiles, FileSystem
from onceflow.core.storage.filesystems.local import CHUNK_BYTES, LocalFileSystem, write_all
from onceflow.core.storage.layout import JobPaths, SavepointStateNames, StateNames, StatePaths

T = TypeVar("T", bytes, memoryview)

HEAD_BYTES = 64 * 1024
"""The number of bytes at the start of a file that identify its content."""

_WHAT_TO_DO = (
    "restore the file from a backup of checkpoint storage, or start from an older checkpoint;"
    " rows that sinks have committed since that checkpoint will be written a second time"
)


class FileStateWriter:
    """Writes the state of one subtask, operator and checkpoint. Any thread.

    If a method returns a handle, the state is durable (I4). A crash leaves files that no record
    names.
    """

    def __init__(
        self,
        fs: FileSystem,
        paths: StatePaths,
        names: StateNames | SavepointStateNames,
        inline_threshold_bytes: int,
    ) -> None:
        self._fs = fs
        self._paths = paths
        self._names = names
        self._inline_threshold_bytes = inline_threshold_bytes
        self._lock = threading.Lock()
        self._written: set[str] = set()
        self._uploaded_bytes = 0

    @property
    def uploaded_bytes(self) -> int:
        """The number of bytes that are new in storage: written, or adopted.

        Inline state is not counted.
        """
        return self._uploaded_bytes

    def write(
        self,
        name: str,
        data: Buffer,
        *,
        key_groups: range | None = None,
    ) -> StateHandle:
        """Make `data` durable and return its handle. Small data is held inline.

        `data` is any contiguous buffer: bytes, a memoryview, an Arrow buffer.

        Raises:
            StorageError: The data is not durable; the checkpoint must be declined.
        """
        # Cast to bytes without a copy: the buffer may have items of any size.
        view = memoryview(data).cast("B")
        checksum = xxhash.xxh3_128_hexdigest(view)
        if view.nbytes < self._inline_threshold_bytes:
            return _handle(name, "", view.nbytes, checksum, key_groups, inline=bytes(view))
        path = self._new(self._names.private(name))
        self._count_upload(self._fs.write(self._paths.in_job(path), (view,)))
        return _handle(name, path, view.nbytes, checksum, key_groups)

    def write_chunks(
        self,
        name: str,
        chunks: Iterable[Buffer],
        *,
        shared: bool = False,
        key_groups: range | None = None,
    ) -> StateHandle:
        """Write the joined `chunks` like `write` and return their handle.

        They need not fit into memory.

        A shared file is never held inline, because each checkpoint's record would repeat its bytes.

        Raises:
            StorageError: The data is not durable; the checkpoint must be declined.
        """
        views = (memoryview(chunk).cast("B") for chunk in chunks)
        first, size_bytes = list[memoryview](), 0
        while not shared and size_bytes < self._inline_threshold_bytes:
            view = next(views, None)
            if view is None:
                return self.write(name, b"".join(first), key_groups=key_groups)
            first.append(view)
            size_bytes += view.nbytes
        hashed = _Hashed[memoryview](chain(first, views))
        path = self._names.private(name)
        if shared:
            path = self._names.shareable(name, uuid.uuid4().hex)
        size_bytes = self._fs.write(self._paths.in_job(self._new(path)), hashed)
        self._count_upload(size_bytes)
        return _handle(name, path, size_bytes, hashed.checksum, key_groups, shared=shared)

    def write_file(
        self, name: str, path: Path, *, shared: bool, key_groups: range | None = None
    ) -> StateHandle:
        """Make the file at `path` durable and return its handle.

        A shared file must never change again, because storage may adopt it without a copy. It may
        be deleted. A private file is copied, or held inline if it is small.

        Raises:
            StorageError: The data is not durable; the checkpoint must be declined.
        """
        if shared:
            return self._write_shared(name, path, key_groups)
        if _size_bytes(path) < self._inline_threshold_bytes:
            return self.write(name, b"".join(_local_chunks(path)), key_groups=key_groups)
        return self._copy(name, self._new(self._names.private(name)), path, key_groups)

    def abandon(self) -> None:
        """Delete each file written so far, because the checkpoint will be declined. Idempotent."""
        # A file is forgotten only once it is deleted: after a failure, the next call tries it
        # again.
        while self._written:
            path = next(iter(self._written))
            self._fs.delete(self._paths.in_job(path))
            self._written.remove(path)

    def _write_shared(self, name: str, source: Path, key_groups: range | None) -> StateHandle:
        # A random part, so that no name is used twice, whatever attempts and retries there are.
        path = self._new(self._names.shareable(name, uuid.uuid4().hex))
        in_storage = self._paths.in_job(path)
        # A hard link saves the copy if the slot's disk and storage are one file system.
        if not (isinstance(self._fs, AdoptsFiles) and self._fs.adopt(in_storage, source)):
            return self._copy(name, path, source, key_groups, shared=True)
        hashed = _Hashed(_local_chunks(source))
        size_bytes = sum(len(chunk) for chunk in hashed)
        self._count_upload(size_bytes)
        return _handle(name, path, size_bytes, hashed.checksum, key_groups, shared=True)

    def _copy(
        self,
        name: str,
        path: str,
        source: Path,
        key_groups: range | None,
        *,
        shared: bool = False,
    ) -> StateHandle:
        hashed = _Hashed(_local_chunks(source))
        size_bytes = self._fs.write(self._paths.in_job(path), hashed)
        self._count_upload(size_bytes)
        return _handle(name, path, size_bytes, hashed.checksum, key_groups, shared=shared)

    def _new(self, path: str) -> str:
        with self._lock:
            require(path not in self._written, f"state file {path} is written twice")
            self._written.add(path)
        return path

    def _count_upload(self, size_bytes: int) -> None:
        with self._lock:
            self._uploaded_bytes += size_bytes


class FileStateReader:
    """Reads the files that a `FileStateWriter` wrote, in any process. Any thread."""

    def __init__(self, fs: FileSystem, paths: StatePaths) -> None:
        self._fs = fs
        self._paths = paths

    def read(self, handle: StateHandle) -> bytes:
        """Return the bytes of `handle`.

        Raises:
            CheckpointCorrupt: The bytes are gone, or are not those that were written.
            StorageError: The bytes cannot be read now.
        """
        data = b"".join(self._chunks(handle))
        self._verify(handle, len(data), xxhash.xxh3_128_hexdigest(data))
        return data

    def head(self, handle: StateHandle) -> bytes:
        """Return the first `HEAD_BYTES` bytes of `handle`, or all if it is shorter.

        Does not verify them.

        Verifying would need all bytes.

        Raises:
            CheckpointCorrupt: The file is gone.
            StorageError: The file cannot be read now.
        """
        head = b""
        for chunk in self._chunks(handle):
            head += chunk
            if len(head) >= HEAD_BYTES:
                break
        return head

    def read_verified_chunks(self, handle: StateHandle) -> Iterator[bytes]:
        """Yield the bytes of `handle` in chunks.

        After the last chunk, raise the errors of `read`.
        """
        hashed, size_bytes = _Hashed(self._chunks(handle)), 0
        for chunk in hashed:
            size_bytes += len(chunk)
            yield chunk
        self._verify(handle, size_bytes, hashed.checksum)

    def read_to(self, handle: StateHandle, path: Path) -> None:
        """Write the bytes of `handle` to a new file at `path`. If this raises, there is no file.

        Raises:
            CheckpointCorrupt: The bytes are gone, or are not those that were written.
            StorageError: The bytes cannot be read now, or the local disk cannot be written.
        """
        try:
            with path.open("xb", buffering=0) as file:
                try:
                    self._copy_into(file.fileno(), handle)
                except BaseException:
                    # The bytes are verified only at the end, so a damaged file must be removed
                    # before it is opened.
                    path.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise StorageError(
                f"cannot restore state {handle.name} to {path}: {error.strerror};"
                f" {advise_on_disk(path.parent)}"
            ) from error

    def _copy_into(self, descriptor: int, handle: StateHandle) -> None:
        hashed = _Hashed(self._chunks(handle))
        size_bytes = sum(write_all(descriptor, chunk) for chunk in hashed)
        self._verify(handle, size_bytes, hashed.checksum)

    def _chunks(self, handle: StateHandle) -> Iterable[bytes]:
        if not handle.path:
            return (handle.inline,)
        chunks = self._fs.read_chunks(_resolve_path(self._fs, self._paths, handle))
        if chunks is None:
            raise CheckpointCorrupt(
                f"state file {self._location(handle)} ({handle.name}, {handle.size_bytes} bytes,"
                f" xxh3-128 {handle.checksum}) is gone; {_WHAT_TO_DO}"
            )
        return chunks

    def _verify(self, handle: StateHandle, size_bytes: int, checksum: str) -> None:
        if (size_bytes, checksum) != (handle.size_bytes, handle.checksum):
            raise CheckpointCorrupt(
                f"state file {self._location(handle)} ({handle.name}) is damaged: it has"
                f" {size_bytes} bytes with xxh3-128 {checksum}, but {handle.size_bytes} bytes"
                f" with {handle.checksum} were written; {_WHAT_TO_DO}"
            )

    def _location(self, handle: StateHandle) -> str:
        if not handle.path:
            return f"inside {self._paths.records}"
        return self._fs.location(self._paths.in_job(handle.path))


class _Hashed(Generic[T]):
    """Yields chunks unchanged and provides their joined checksum afterwards."""

    def __init__(self, chunks: Iterable[T]) -> None:
        self._chunks: Iterable[T] = chunks
        self._hash = xxhash.xxh3_128()

    def __iter__(self) -> Iterator[T]:
        for chunk in self._chunks:
            self._hash.update(chunk)
            yield chunk

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()


def _handle(
    name: str,
    path: str,
    size_bytes: int,
    checksum: str,
    key_groups: range | None,
    *,
    shared: bool = False,
    inline: bytes = b"",
) -> StateHandle:
    first, last = 0, -1
    if key_groups is not None:
        require(
            len(key_groups) > 0 and key_groups.step == 1,
            f"state {name}: {key_groups} is not a range of key groups",
        )
        first, last = key_groups[0], key_groups[-1]
    return StateHandle(name, path, size_bytes, checksum, first, last, shared, inline)


def _local_chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise _local_error(path, error) from error


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _local_error(path, error) from error


def _local_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read the slot's own state file {path}: {error.strerror}; check the slot's"
        " scratch directory (scratch_dir)"
    )


def _resolve_path(fs: FileSystem, paths: StatePaths, handle: StateHandle) -> str:
    """Return the path of the file of `handle`, which belongs to the job or to the savepoint.

    Raises:
        CheckpointCorrupt: The path or a symbolic link leads out of the directory of the owner.
    """
    path = paths.in_job(handle.path)
    if isinstance(fs, LocalFileSystem):
        directory = fs.location(path.removesuffix(handle.path))
        try:
            resolve_stored_name(handle.path, directory)
        except UnsafeName as error:
            raise CheckpointCorrupt(f"{paths.owner}: a state handle is invalid: {error}") from error
    return path


def discard(fs: FileSystem, paths: JobPaths, handles: Iterable[StateHandle]) -> None:
    """Delete the files of `handles`, and the directories that become empty. Idempotent.

    After a failure the other files are still deleted.

    Raises:
        StorageError: The first failure. Some files still exist; `sweep` deletes them.
    """
    # A handle without a path is inline. A file that several handles reference is deleted once.
    files = {_resolve_path(fs, paths, handle): handle for handle in handles if handle.path}
    failures: list[StorageError] = []
    for path in files:
        with _note_failure(failures):
            fs.delete(path)
    # The directory of the attempt, then that of its checkpoint, which other attempts may still use.
    private = [path for path, handle in files.items() if not handle.shared]
    for parent in {path.rpartition("/")[0] for path in private}:
        with _note_failure(failures):
            fs.delete_directory_if_empty(parent)
            fs.delete_directory_if_empty(parent.rpartition("/")[0])
    _raise_first(failures)


def sweep(
    fs: FileSystem,
    paths: JobPaths,
    view: LogView,
    attempt: AttemptId,
    *,
    spared: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Delete each state file that no checkpoint of `view` references and none will.

    Return the paths.

    Runs on the driver, at the start of `attempt` and at any time during it; `view` is the log as of
    then. May run while writers of `attempt` or of a newer attempt write. During the attempt,
    `spared` must hold the paths that the checkpoints retained at its start reference. The
    coordinator discards those, because a pending checkpoint may reference them again. Only these
    are deleted:

        files of older attempts, including probes, and
        directories of checkpoints of this attempt below its last decided checkpoint.

    The coordinator discards shared files of `attempt` itself.

    Raises:
        StorageError: The first failure, after trying each deletion; the next sweep tries again.
    """
    named = spared | paths_of(s for completed in view.completed for s in completed.snapshots)
    decided = view.completed
    # A checkpoint below the last decided one is decided, or never will be.
    over_before = decided[-1].checkpoint if decided else GENESIS
    named_directories = {path.rpartition("/")[0] for path in named}
    deleted: list[str] = []
    failures: list[StorageError] = []
    for directory in _dead_directories(fs, paths, attempt, over_before):
        if directory.removeprefix(f"{paths.job}/") not in named_directories:
            with _note_failure(failures):
                fs.delete_tree(directory)
                fs.delete_directory_if_empty(directory.rpartition("/")[0])
                deleted.append(directory)
    stray = [*_dead(fs, paths.shared, attempt), *_dead(fs, paths.probes, attempt)]
    stray = [path for path in stray if path.removeprefix(f"{paths.job}/") not in named]
    for path in stray:
        with _note_failure(failures):
            fs.delete(path)
            deleted.append(path)
    _raise_first(failures)
    return tuple(deleted)


def _dead_directories(
    fs: FileSystem, paths: JobPaths, attempt: AttemptId, over_before: CheckpointId
) -> Iterable[str]:
    for name in fs.list(paths.job):
        checkpoint = paths.checkpoint_of(name)
        if checkpoint is None:
            continue
        directory = paths.checkpoint(checkpoint)
        for inner in fs.list(directory):
            writer = paths.attempt_of(inner)
            # This driver may be fenced without knowing it, so it leaves files of newer attempts.
            if writer is None or writer > attempt:
                continue
            if writer < attempt or checkpoint < over_before:
                yield f"{directory}/{inner}"


def _dead(fs: FileSystem, directory: str, attempt: AttemptId) -> Iterable[str]:
    # The name of an unfinished file has no writer; the name of its target has.
    unfinished = fs.list_unfinished(directory)
    names = {name: name for name in fs.list(directory)}
    names.update({item.name: item.target for item in unfinished})
    for name, target in names.items():
        writer = JobPaths.writer_of(target)
        # Files without a writer in their name were not written by onceflow.
        if writer is not None and writer < attempt:
            yield f"{directory}/{name}"


@contextmanager
def _note_failure(failures: list[StorageError]) -> Generator[None]:
    """Record a failure and continue, so that the other files are still deleted."""
    try:
        yield
    except StorageError as error:
        failures.append(error)


def _raise_first(failures: list[StorageError]) -> None:
    if failures:
        raise failures[0]
