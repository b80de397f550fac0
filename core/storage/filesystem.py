"""What checkpoint storage demands of a file system; everything else is built on these calls.

Consistency demanded, in every process that sees the storage:
    read-after-write         what a returned write, create or delete did, every later call sees
    linearizable creation    of any number of `create_if_absent` of one path, one creates
    whole or nothing         a path shows all the bytes that were written to it, or does not exist
    durable                  what a returned write or create did survives the crash of any machine

A local disk, an NFS directory and an object store with conditional put can all keep these. Paths
are relative to the root, separated by "/", and never hold "..".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

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


class PublicationUnknown(StorageError):
    """Raised when a file may or may not have been created, or may not survive a crash."""


class CheckpointFileSystem(ABC):
    """A tree of files that driver and slots share; see the module for what it promises.

    Safe to use from any number of threads and processes. Every call but `read*` and `list*` of a
    missing path raises `StorageError` when it fails, naming the path, the reason and the remedy.
    """

    @abstractmethod
    def location(self, path: str) -> str:
        """Return where `path` is, for messages and operators."""

    @abstractmethod
    def make_directory(self, path: str) -> None:
        """Return when directory `path` and all above it exist, durably. Idempotent."""

    @abstractmethod
    def create_if_absent(self, path: str, data: bytes) -> CreateOutcome:
        """Make `path` hold `data`, durably, unless it exists.

        A crash leaves all of it or nothing. Calling it again with the same data is how a caller
        learns what became of a try that raised `PublicationUnknown`.

        Raises:
            StorageError: The path was not created by this call and never will be.
            PublicationUnknown: Nobody knows.
        """

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Make `path` hold the joined `chunks`, durably, creating directories; return the size.

        Replaces what was there, at once and as a whole. When it raises, nothing of it stays.
        """

    @abstractmethod
    def adopt(self, path: str, source: Path) -> bool:
        """Make `path` hold the bytes of the local file `source`, without copying; durable.

        The two may share storage from then on: `source` may be deleted, never changed. Returns
        False, and has done nothing, when the file system cannot do that: `write` it instead.
        """

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return the bytes at `path`, or None when there is no such file."""

    @abstractmethod
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        """Return the bytes at `path` piece by piece, or None when there is no such file."""

    def modified_at(self, path: str) -> datetime | None:
        """Return when the file at `path` was written, by the storage's clock, for people.

        None when there is no such file, or the storage does not tell.
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
        """Return when no file is at `path`. Idempotent; need not be durable."""

    @abstractmethod
    def delete_tree(self, path: str) -> None:
        """Return when neither directory `path` nor anything in it exists. Idempotent."""

    @abstractmethod
    def delete_directory_if_empty(self, path: str) -> bool:
        """Return whether directory `path` is gone; it stays when there is anything in it."""
