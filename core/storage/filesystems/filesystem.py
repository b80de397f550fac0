"""The file system under checkpoints, staged rows and the file sink: one contract for all three.

Demanded of every implementation, in every process that sees the files:
    read-after-write     what a returned write, create or delete did, every later call sees
    list-after-write     a listing holds every name that existed throughout the call
    whole or nothing     a path shows all the bytes that were written to it, or does not exist
    durable              what a returned call is said to have made durable survives the crash of any
                         machine: content and name after `write` and `create_if_absent`, each by
                         its own step for files that are filled piece by piece

What only some can do is a class of its own, asked for by type and never by a flag:
    `CreatesAtomically`  of any number of creations of one path at one moment, one wins
    `AdoptsFiles`        takes over a local file without copying it
    `StreamedFiles`      fills a file piece by piece, under a name that nobody looks at, and then
        `Renames`        shows it under another name in one step, or
        `Copies`         can only copy it, whole or not at all

Paths are relative to the root, separated by "/", and never hold "..". Nobody needs directories:
where there are any, they are made for what is written into them. A path below a file is missing.
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
    """The path did not exist before; this call made it."""


@dataclass(frozen=True, slots=True)
class AlreadyExists:
    """The path existed. Its bytes tell an earlier try of the same caller from somebody else."""

    existing: bytes


CreateOutcome: TypeAlias = Created | AlreadyExists


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a writer that was killed has left: bytes on their way to `target`."""

    name: str
    target: str
    """The name that the file would have had."""


class CreationUnknown(StorageError):
    """Raised when a file may or may not have been created, or may not survive a crash."""


class StorageRefused(StorageError):
    """Raised when a call fails for a reason that stays: a missing right, a wrong place."""


MISSING = (FileNotFoundError, NotADirectoryError)
"""Python's errors for a path that does not exist. The second is for a path below a file."""
REQUESTS_AT_ONCE_MAX = 16
"""Requests at once to stores behind a network: they wait, and need no processor."""


class FileSystem(ABC):
    """A tree of files that driver and slots share; see the module for what it promises.

    Safe to use from any number of threads and processes. Every call but `read*`, `size` and `list*`
    of a missing path raises `StorageError` when it fails, naming the path, the reason and the
    remedy: `StorageRefused` when it will fail again until somebody acts on it.
    """

    at_once_max: ClassVar[int] = 1
    """How many files `for_each` works on at a time: several where each call waits for a network."""

    @abstractmethod
    def location(self, path: str) -> str:
        """Return where `path` is, for messages and operators; holds no secret."""

    @abstractmethod
    def create_if_absent(self, path: str, data: bytes) -> CreateOutcome:
        """Make `path` hold `data`, durably, unless it exists.

        A crash leaves all of it or nothing. Calling it again with the same data is how a caller
        learns what became of a try that raised `CreationUnknown`. Whether one of several callers at
        the same moment wins, `CreatesAtomically` says.

        Raises:
            StorageError: The path was not created by this call and never will be.
            CreationUnknown: Nobody knows.
        """

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Make `path` hold the joined `chunks`, durably; return the size.

        Replaces what was there, at once and as a whole. When it raises, nothing of it stays.
        """

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return the bytes at `path`, or None when there is no such file."""

    @abstractmethod
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        """Return the bytes at `path` piece by piece, or None when there is no such file."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the size of the file at `path` in bytes, or None when there is none."""

    def find_modified_time(self, path: str) -> datetime | None:
        """Return the time, by the storage's clock, at which the file at `path` was written.

        It is shown to people; no decision rests on it. None when there is no such file, or the
        storage does not tell.
        """
        del path
        return None

    @abstractmethod
    def list(self, directory: str) -> tuple[str, ...]:
        """Return the names in `directory` in order, files and directories; missing is empty.

        Holds every name that existed throughout the call; one that came or went may be missing.
        """

    def list_unfinished(self, directory: str) -> tuple[Unfinished, ...]:
        """Return what killed or still running writers have begun in `directory`."""
        del directory
        return ()

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete the file at `path`, if there is one. Idempotent; need not be durable."""

    def delete_quietly(self, path: str) -> None:
        """Delete what nobody reads; a failure leaves litter and must not hide what came before."""
        with suppress(StorageError):
            self.delete(path)

    @abstractmethod
    def delete_tree(self, path: str) -> None:
        """Delete directory `path`, if it exists, with all that is in it. Idempotent."""

    def make_directory(self, path: str) -> None:
        """Create directory `path` and all above it that are missing, durably. Idempotent."""
        del path

    def delete_directory_if_empty(self, path: str) -> None:
        """Delete directory `path` unless there is anything in it. Idempotent."""
        del path

    def for_each(self, call: Callable[[str], object], paths: Iterable[str]) -> None:
        """Call `call` with each of `paths`: at once where waiting costs. Raises what it raises."""
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
    """Creation is linearizable: of any number of `create_if_absent` of one path, one creates.

    The decision log rests on it. Local disks, NFS and object stores with conditional put have it.
    """


class AdoptsFiles(FileSystem):
    """A file system that may share storage with the local disk."""

    @abstractmethod
    def adopt(self, path: str, source: Path) -> bool:
        """Make `path` hold the bytes of the local file `source`, without copying; durable.

        The two may share storage from then on: `source` may be deleted, never changed. Returns
        False, and has done nothing, when it cannot do that for this file: `write` it instead.
        """


class StreamedFiles(FileSystem):
    """A file system whose files can be filled piece by piece, before anybody sees them."""

    @abstractmethod
    def explain_failure(self, action: str, path: str) -> AbstractContextManager[None]:
        """Turn a failure of the block into a `StorageError` that names `path` and what to do."""

    @abstractmethod
    def create(self, path: str) -> IO[bytes]:
        """Return a new file to write into, under a name that nobody else uses."""

    @abstractmethod
    def finish(self, file: IO[bytes], path: str) -> int:
        """Close `file`, all of it durable; return its size. The name may still be lost."""

    @abstractmethod
    def drop(self, file: IO[bytes], path: str) -> None:
        """Close `file` and delete what there is of it. Never raises: what stays is litter."""

    @abstractmethod
    def make_names_durable(self, directory: str) -> None:
        """Make the names of finished and renamed files in `directory` survive a crash."""

    @abstractmethod
    def visible_files(self) -> Sequence[str]:
        """Return every file below the root that readers of directories see, in order.

        Names that begin with "_" or "." are passed over, with all below them.
        """


class Renames(StreamedFiles):
    """A file system whose rename is one step: a local disk, NFS, HDFS."""

    @abstractmethod
    def rename(self, source: str, target: str) -> bool:
        """Move a file to `target`, making its directory; return False when `source` is not there.

        In one step: at every moment exactly one of the two names exists, and it is whole. The new
        name is durable after `make_names_durable` of its directory.
        """


class Copies(StreamedFiles):
    """An object store: no rename, but an object appears whole or not at all."""

    @abstractmethod
    def copy(self, source: str, target: str) -> bool:
        """Make `target` hold what `source` holds; return False when `source` is not there."""


class CountedChunks:
    """Passes chunks on and knows their size afterwards."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self.size_bytes = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for chunk in self._chunks:
            self.size_bytes += memoryview(chunk).nbytes
            yield chunk


def is_visible(path: str) -> bool:
    """Return whether readers of directories see `path`, which is relative to the root."""
    return not any(name.startswith(("_", ".")) for name in path.split("/"))
