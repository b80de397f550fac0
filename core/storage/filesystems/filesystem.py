"""The interface of the file systems under checkpoints, staged rows and the file sink.

Each implementation guarantees, in every process that sees the files:
    read-after-write     each later call sees the effect of a returned write, create or delete
    list-after-write     a listing holds every name that existed throughout the call
    whole or nothing     a path has all the bytes that were written to it, or does not exist
    durable              content and name survive the crash of any machine once `write` or
                         `create_if_absent` has returned. Files that are filled piece by piece have
                         a separate call for each of the two.

Additional abilities are classes of their own, checked by type and never by a flag:
    `CreatesAtomically`  if several callers create one path at the same time, one succeeds
    `AdoptsFiles`        adopts a local file without copying it
    `StreamedFiles`      fills a file piece by piece, under a name that no reader looks at, and then
        `Renames`        renames it atomically, or
        `Copies`         can only copy it, whole or not at all

Paths are relative to the root, separated by "/", and never contain "..". Callers need not create
directories: they are created for the files in them. A path below a file counts as missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, ClassVar, TypeAlias

from onceflow.core.errors import StorageError


@dataclass(frozen=True, slots=True)
class Created:
    """The outcome that the path did not exist and was created by this call."""


@dataclass(frozen=True, slots=True)
class AlreadyExists:
    """The outcome that the path existed.

    The existing bytes tell an earlier try of the same caller from the file of another process.
    """

    existing: bytes


CreateOutcome: TypeAlias = Created | AlreadyExists


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A file that a killed writer left unfinished: the bytes for `target`."""

    name: str
    target: str
    """The name that the file would have got."""


class CreationUnknown(StorageError):
    """Raised if a file may or may not have been created, or may not survive a crash."""


class StorageRefused(StorageError):
    """Raised if a call fails for a persistent reason: a missing right, a wrong location."""


MISSING = (FileNotFoundError, NotADirectoryError)
"""Python's errors for a path that does not exist. The second is for a path below a file."""
REQUESTS_AT_ONCE_MAX = 16
"""The number of simultaneous requests to stores in a network: waiting needs no processor."""


class FileSystem(ABC):
    """A tree of files that driver and slots share. The module's docstring lists its guarantees.

    Any number of threads and processes may use it. If a path is missing, `read*`, `size` and
    `list*` return None or nothing. All other failures raise `StorageError`, which names the path,
    the reason and the remedy. `StorageRefused` is raised if the call will fail again until someone
    acts.
    """

    at_once_max: ClassVar[int] = 1
    """The number of files that `for_each` processes at once: several if each call waits for a
    network."""

    @abstractmethod
    def location(self, path: str) -> str:
        """Return the location of `path`, for messages and operators. Holds no secret."""

    @abstractmethod
    def create_if_absent(self, path: str, data: bytes) -> CreateOutcome:
        """Create `path` with `data`, durably, unless it exists.

        A crash leaves either the whole file or nothing. If a try raised `CreationUnknown`, the
        caller calls again with the same data to learn its outcome. Only `CreatesAtomically`
        guarantees that one of several simultaneous callers succeeds.

        Raises:
            StorageError: The path was not created by this call and never will be.
            CreationUnknown: It is unknown whether the path was created.
        """

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write the joined `chunks` to `path`, durably. Return the size.

        Replaces an existing file atomically. If this raises, no partial file stays.
        """

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return the bytes at `path`, or None if there is no such file."""

    @abstractmethod
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        """Return the bytes at `path` in chunks, or None if there is no such file."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the size of the file at `path` in bytes, or None if there is none."""

    def find_modified_time(self, path: str) -> datetime | None:
        """Return the time, by the storage's clock, at which the file at `path` was written.

        Only for people: no decision depends on it. None if there is no such file, or if the storage
        does not know the time.
        """
        del path
        return None

    @abstractmethod
    def list(self, directory: str) -> tuple[str, ...]:
        """Return the names of files and directories in `directory`, in order.

        Empty if the directory is missing. Contains each name that existed throughout the call. A
        name that was created or deleted meanwhile may be missing.
        """

    def list_unfinished(self, directory: str) -> tuple[Unfinished, ...]:
        """Return the unfinished files in `directory`, of killed writers and of running ones."""
        del directory
        return ()

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete the file at `path` if it exists. Idempotent; need not be durable."""

    def delete_quietly(self, path: str) -> None:
        """Delete a file that is no longer needed.

        Ignores StorageError, so as not to hide another error.
        """
        with suppress(StorageError):
            self.delete(path)

    @abstractmethod
    def delete_tree(self, path: str) -> None:
        """Delete directory `path` with its content if it exists. Idempotent."""

    def make_directory(self, path: str) -> None:
        """Create directory `path` and its missing parents, durably. Idempotent."""
        del path

    def delete_directory_if_empty(self, path: str) -> None:
        """Delete directory `path` if it is empty. Idempotent."""
        del path

    def for_each(self, call: Callable[[str], object], paths: Iterable[str]) -> None:
        """Call `call` with each of `paths`, in several threads if calls wait.

        Raises what `call` raises.
        """
        todo = list(paths)
        threads_max = min(len(todo), self.at_once_max)
        if threads_max < 2:
            for path in todo:
                call(path)
            return
        with ThreadPoolExecutor(threads_max) as threads:
            for _ in threads.map(call, todo):
                pass


class CreatesAtomically(FileSystem):
    """A file system whose creation is linearizable: of simultaneous creations, one succeeds.

    The decision log depends on it. Local disks, NFS and object stores with conditional put have it.
    """


class AdoptsFiles(FileSystem):
    """A file system that may share storage with the local disk."""

    @abstractmethod
    def adopt(self, path: str, source: Path) -> bool:
        """Make `path` hold the bytes of the local file `source`, durably and without copying.

        Both may share storage from then on: `source` may be deleted, but never changed. Returns
        False, without any effect, if this file cannot be adopted. Then call `write`.
        """


class StreamedFiles(FileSystem):
    """A file system whose files can be filled piece by piece before readers see them."""

    @abstractmethod
    def explain_failure(self, action: str, path: str) -> AbstractContextManager[None]:
        """Convert a failure of the block into a `StorageError` that names `path` and the remedy."""

    @abstractmethod
    def create(self, path: str) -> IO[bytes]:
        """Return a new file to write into, under a name that no one else uses."""

    @abstractmethod
    def finish(self, file: IO[bytes], path: str) -> int:
        """Close `file` and make its content durable. Return the size.

        A crash may still lose the name.
        """

    @abstractmethod
    def drop(self, file: IO[bytes], path: str) -> None:
        """Close `file` and delete it. Does not raise: a file that stays is harmless litter."""

    @abstractmethod
    def make_names_durable(self, directory: str) -> None:
        """Make the names of finished and renamed files in `directory` survive a crash."""

    @abstractmethod
    def visible_files(self) -> Sequence[str]:
        """Return each file below the root that readers of directories see, in order.

        Skips names that begin with "_" or ".", and all files below them.
        """


class Renames(StreamedFiles):
    """A file system with an atomic rename: a local disk, NFS, HDFS."""

    @abstractmethod
    def rename(self, source: str, target: str) -> bool:
        """Move a file to `target` and create its directory. Return False if `source` is missing.

        Atomic: at each moment exactly one of the two names exists, with the whole file. The new
        name is durable after `make_names_durable` of its directory.
        """


class Copies(StreamedFiles):
    """An object store: it has no rename, but an object appears whole or not at all."""

    @abstractmethod
    def copy(self, source: str, target: str) -> bool:
        """Copy `source` to `target`. Return False if `source` is missing."""


class CountedChunks:
    """Yields chunks unchanged and provides their total size afterwards."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self.size_bytes = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for chunk in self._chunks:
            self.size_bytes += memoryview(chunk).nbytes
            yield chunk


def is_visible(path: str) -> bool:
    """Return True if readers of directories see `path`, which is relative to the root."""
    return not any(name.startswith(("_", ".")) for name in path.split("/"))
