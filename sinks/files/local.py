"""A directory of this machine, or of a network file system that is mounted on all."""
# Names stay text, as in the other stores.
# ruff: noqa: PTH104, PTH108, PTH118, PTH120, PTH123, PTH202

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from typing_extensions import override

from onceflow.core.errors import ConfigError, SinkError, StorageError
from onceflow.core.storage.filesystem import Created
from onceflow.core.storage.local import LocalFileSystem
from onceflow.core.storage.posix import TRIES_MAX, make_durable_directory, sync_directory
from onceflow.sinks.files.store import RenamingStore, is_seen

_BUFFER_BYTES = 1 << 20

_NOT_ALLOWED = {
    errno.EACCES: "let the user of this process write there",
    errno.EPERM: "let the user of this process write there",
    errno.EROFS: "mount it writable, or choose another directory",
    errno.ENOTDIR: "a file stands where a directory must be: move it away",
    errno.EISDIR: "a directory stands where a file must be: move it away",
    errno.EEXIST: "a file stands where a directory must be: move it away",
    errno.ENAMETOOLONG: "choose a shorter directory or shorter partition values",
    errno.EXDEV: "a partition directory is a mount of its own: files can only be moved within one"
    " file system, so put `_onceflow` and all partitions on the same",
}
_PASSING = {
    errno.ENOSPC: "disk full: free space",
    errno.EDQUOT: "disk quota used up: free space or raise the quota",
    errno.EFBIG: "over the largest file allowed here: raise the limit (ulimit -f), or lower"
    " roll_bytes",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or partition by fewer values",
}


class LocalStore(RenamingStore):
    """Files below `root`, an absolute path."""

    def __init__(self, root: str) -> None:
        """Touch nothing yet."""
        self._root = root
        self._files = LocalFileSystem(root)
        self._made: set[str] = set()
        """Directories that this process has made durable."""

    @override
    def location(self, path: str) -> str:
        return os.path.join(self._root, path)

    @override
    def create(self, path: str) -> IO[bytes]:
        with self.named("create", path):
            self._make_parent(path)
            # Buffered, because a bare file may write less than it is given when the disk is full,
            # and Arrow does not look at how much that was.
            return open(self.location(path), "xb", buffering=_BUFFER_BYTES)

    @override
    def finish(self, file: IO[bytes], path: str) -> int:
        with self.named("write", path), file:
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    @override
    def drop(self, file: IO[bytes], path: str) -> None:
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            os.unlink(self.location(path))

    @override
    def make_names_durable(self, directory: str) -> None:
        with self.named("make durable", directory):
            sync_directory(self.location(directory))

    @override
    def write(self, path: str, data: bytes) -> None:
        with self.named("write", path):
            self._files.write(path, (data,))

    @override
    def create_if_absent(self, path: str, data: bytes) -> bool:
        with self.named("create", path):
            outcome = self._files.create_if_absent(path, data)
        return isinstance(outcome, Created) or outcome.existing == data

    @override
    def read(self, path: str) -> bytes | None:
        with self.named("read", path):
            return self._files.read(path)

    @override
    def size(self, path: str) -> int | None:
        with self.named("look at", path):
            try:
                return os.path.getsize(self.location(path))
            except FileNotFoundError:
                return None

    @override
    def list(self, directory: str) -> Sequence[str]:
        with self.named("list", directory):
            return self._files.list(directory)

    @override
    def files(self) -> Sequence[str]:
        found: list[str] = []
        with self.named("list", ""):
            for directory, below, names in os.walk(self._root):
                below[:] = [name for name in below if is_seen(name)]
                found += [os.path.join(directory, name) for name in names if is_seen(name)]
        return sorted(os.path.relpath(path, self._root) for path in found)

    @override
    def delete(self, path: str) -> None:
        with self.named("delete", path):
            self._files.delete(path)

    @override
    def unfinished(self, directory: str) -> Sequence[str]:
        with self.named("list", directory):
            return [one.name for one in self._files.list_unfinished(directory)]

    @override
    def for_each(self, call: Callable[[str], object], paths: Iterable[str]) -> None:
        for path in paths:
            call(path)

    @override
    def rename(self, source: str, target: str) -> bool:
        with self.named("move a file to", target):
            for _ in range(TRIES_MAX):
                self._make_parent(target)
                try:
                    os.rename(self.location(source), self.location(target))
                except FileNotFoundError:
                    if not os.path.lexists(self.location(source)):
                        return False
                    # Somebody has deleted the directory, empty, since it was made.
                    self._made.discard(os.path.dirname(target))
                else:
                    return True
            raise OSError(errno.ENOENT, "somebody keeps deleting its directory")

    def _make_parent(self, path: str) -> None:
        parent = os.path.dirname(path)
        if parent not in self._made:
            make_durable_directory(self.location(parent).rstrip("/"), self._root)
            self._made.add(parent)

    @override
    @contextmanager
    def named(self, action: str, path: str) -> Generator[None]:
        try:
            yield
        except (OSError, StorageError) as error:
            # What checkpoint storage says of its own directory is not true of this one.
            cause = error.__cause__ if isinstance(error, StorageError) else error
            if not isinstance(cause, OSError):
                raise SinkError(f"cannot {action} {self.location(path)}: {error}") from error
            number = cause.errno or 0
            place = f"cannot {action} {self.location(path)}: {cause.strerror or cause}"
            if number in _NOT_ALLOWED:
                raise ConfigError(f"{place}; {_NOT_ALLOWED[number]}") from error
            remedy = _PASSING.get(number, "look at the disk or mount behind it")
            raise SinkError(f"{place}; {remedy}") from error
