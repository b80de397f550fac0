"""Checkpoint storage in which a single call fails, and all others work."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from onceflow.core.errors import OnceflowError, StorageError
from onceflow.core.protocol import committables
from onceflow.core.spi import Committer
from onceflow.core.storage import FileSystemStorage
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE, LocalFileSystem, Modes
from onceflow.core.storage.storage import JobStorage

_T = TypeVar("_T")
_CHANGES = {"create", "write", "delete"}


class Calls:
    """Counts calls. Call number `fails` fails: before it has done its work, or after."""

    def __init__(self, fails: int = 0, *, after: bool = False) -> None:
        self.count = 0
        self._fails = fails
        self._after = after

    def next(self) -> tuple[bool, bool]:
        """Return whether this call fails before its work, and whether it fails after its work."""
        self.count += 1
        fails = self.count == self._fails
        return fails and not self._after, fails and self._after


def ask_twice(ask: Callable[[], _T]) -> _T:
    """Return what `ask` returns, which may fail once."""
    try:
        return ask()
    except OnceflowError:
        return ask()


def commit(committer: Committer, committable: committables.Committable) -> None:
    """Ask until it is committed: after a single failure, within a few tries."""
    outcomes: list[committables.CommitOutcome] = []
    for _ in range(4):
        outcomes.append(committer.commit(committable))
        if isinstance(outcomes[-1], committables.Committed | committables.AlreadyCommitted):
            return
        assert isinstance(outcomes[-1], committables.RetryLater | committables.Unknown), outcomes
    raise AssertionError(outcomes)


class FailingOnce(filesystem.CreatesAtomically):
    """The files of another file system, with calls that fail as `_fails` says."""

    def __init__(self, files: filesystem.CreatesAtomically) -> None:
        self._files = files

    @abstractmethod
    def _fails(self, call: str, path: str) -> tuple[bool, bool]:
        """Return whether this call fails before its work, and whether it fails after its work."""

    def _run(self, call: str, path: str, work: Callable[[], _T]) -> _T:
        before, after = self._fails(call, path)
        # A look has no effect after which its answer could be lost.
        if before or (after and call not in _CHANGES):
            raise StorageError(f"{call} {path}: storage does not answer for a moment")
        result = work()
        if after:
            lost = filesystem.CreationUnknown if call == "create" else StorageError
            raise lost(f"{call} {path}: the answer of storage was lost")
        return result

    @override
    def location(self, path: str) -> str:
        return self._files.location(path)

    @override
    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        return self._run("create", path, lambda: self._files.create_if_absent(path, data))

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        try:
            return self._run("write", path, lambda: self._files.write(path, chunks))
        except StorageError:
            # As every file system does: when a write raises, nothing of it stays.
            self._files.delete(path)
            raise

    @override
    def read(self, path: str) -> bytes | None:
        return self._run("read", path, lambda: self._files.read(path))

    @override
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        return self._run("read", path, lambda: self._files.read_chunks(path))

    @override
    def size(self, path: str) -> int | None:
        return self._run("size", path, lambda: self._files.size(path))

    @override
    def find_modified_time(self, path: str) -> datetime | None:
        return self._files.find_modified_time(path)

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        return self._run("list", directory, lambda: self._files.list(directory))

    @override
    def list_unfinished(self, directory: str) -> tuple[filesystem.Unfinished, ...]:
        return self._files.list_unfinished(directory)

    @override
    def delete(self, path: str) -> None:
        self._run("delete", path, lambda: self._files.delete(path))

    @override
    def delete_tree(self, path: str) -> None:
        self._run("delete", path, lambda: self._files.delete_tree(path))

    @override
    def make_directory(self, path: str) -> None:
        self._files.make_directory(path)

    @override
    def delete_directory_if_empty(self, path: str) -> None:
        self._files.delete_directory_if_empty(path)


class CountedFiles(FailingOnce):
    """Files whose calls `calls` counts."""

    def __init__(self, files: filesystem.CreatesAtomically, calls: Calls) -> None:
        super().__init__(files)
        self._calls = calls

    @override
    def _fails(self, call: str, path: str) -> tuple[bool, bool]:
        return self._calls.next()


@dataclass(frozen=True, slots=True)
class FailingOnceStorage(FileSystemStorage):
    """Checkpoint storage in which calls fail once for each `fail`, in whatever process."""

    faults: str = ""
    """A directory with one file for each call that is still to fail."""

    def fail(self, call: str, path: str, *, after: bool = False) -> None:
        """Let the next call `call` of a path that matches `path` fail."""
        faults = Path(self.faults)
        faults.mkdir(exist_ok=True)
        number = len(list(faults.iterdir()))
        # Beside the directory first: a process must not read half of the file.
        file = faults.with_suffix(".new")
        file.write_text(path, encoding="utf-8")
        file.rename(faults / f"{number}-{call}-{'after' if after else 'before'}")

    def list_due(self) -> list[str]:
        """Return the calls that have not failed yet."""
        return sorted(file.name for file in Path(self.faults).iterdir())

    @override
    def open(self, job: str) -> JobStorage:
        local = LocalFileSystem(self.root, Modes(), advice=CHECKPOINT_STORAGE)
        files = _FaultyFiles(local, Path(self.faults))
        return JobStorage(files, job, self.inline_threshold_bytes, files)


class _FaultyFiles(FailingOnce):
    def __init__(self, files: filesystem.CreatesAtomically, faults: Path) -> None:
        super().__init__(files)
        self._faults = faults

    @override
    def _fails(self, call: str, path: str) -> tuple[bool, bool]:
        for file in sorted(self._faults.glob(f"*-{call}-*")):
            # Of several processes at once, the one that deletes the file fails.
            with suppress(FileNotFoundError):
                if re.search(file.read_text(encoding="utf-8"), path):
                    file.unlink()
                    return file.name.endswith("before"), file.name.endswith("after")
        return False, False
