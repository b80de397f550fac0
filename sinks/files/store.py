"""What the file sink demands of a file system, whichever it is.

Paths are relative to the sink's url.

Demanded of all:
    read-after-write    what a returned call did, every later call in any process sees
    whole or nothing    `write` and `create_if_absent` show all bytes under a name, or no name
    durable             what a returned `finish` + `make_names_durable`, `write`, `create_if_absent`
                        or `rename` did survives the crash of any machine

How a finished file gets its public name is what file systems differ in: `RenamingStore` can move it
in one step that nobody sees half of, `CopyingStore` can only copy it, whole or not at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import IO

from onceflow.core.errors import ConfigError, SinkError


class Store(ABC):
    """A tree of files. Any thread, any number of processes.

    Every call that fails raises `ConfigError` (not permitted, no such bucket: it will fail again)
    or `SinkError` (it may work later), which names the place, the reason and what to do.
    """

    @abstractmethod
    def location(self, path: str) -> str:
        """Return where `path` is, for messages and operators; holds no secret."""

    @abstractmethod
    def named(self, action: str, path: str) -> AbstractContextManager[None]:
        """Turn a failure of the block into one that names `path` and what to do."""

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
        """Return when the names of finished files in `directory` survive a crash."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Make `path` hold `data`, replacing what was there as a whole."""

    @abstractmethod
    def create_if_absent(self, path: str, data: bytes) -> bool:
        """Make `path` hold `data` unless it exists; return whether this call did.

        `data` is unlike any other caller's, so a call whose reply was lost may be repeated.
        """

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return the bytes at `path`, or None when there is no such file."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the size of the file at `path` in bytes, or None when there is none."""

    @abstractmethod
    def list(self, directory: str) -> Sequence[str]:
        """Return the names in `directory` in order; a directory that is not there is empty."""

    @abstractmethod
    def files(self) -> Sequence[str]:
        """Return every file that readers of the directory see, at any depth, in order.

        Names that begin with "_" or "." are passed over, with all below them.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Return when no file is at `path`. Idempotent."""

    def delete_quietly(self, path: str) -> None:
        """Delete what nobody reads; a failure leaves litter and must not hide what came before."""
        with suppress(SinkError, ConfigError):
            self.delete(path)

    @abstractmethod
    def unfinished(self, directory: str) -> Sequence[str]:
        """Return the names of files in `directory` that a killed process was about to publish."""

    @abstractmethod
    def for_each(self, call: Callable[[str], object], paths: Iterable[str]) -> None:
        """Call `call` with each of `paths`: at once where waiting costs. Raises what it raises."""


class RenamingStore(Store):
    """A file system whose rename is one step: a local disk, NFS, HDFS."""

    @abstractmethod
    def rename(self, source: str, target: str) -> bool:
        """Move a file to `target`, making its directory; return False when `source` is not there.

        In one step: at every moment exactly one of the two names exists, and it is whole. The new
        name is durable after `make_names_durable` of its directory.
        """


class CopyingStore(Store):
    """An object store: no rename, but an object appears whole or not at all."""

    @abstractmethod
    def copy(self, source: str, target: str) -> bool:
        """Make `target` hold what `source` holds; return False when `source` is not there."""


def is_seen(path: str) -> bool:
    """Return whether readers of the directory see `path`, which is relative to it."""
    return not any(name.startswith(("_", ".")) for name in path.split("/"))
