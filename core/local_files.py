"""The local files of a machine: a cache that persists between runs, and scratch directories.

Entries of the cache appear atomically.

    <base>/onceflow-<job>-<slot>-<drawn>/       local files of a slot: RocksDB, spools
    <base>/onceflow-<job>-<slot>-<drawn>.lock   locked by its process while it lives

When the process ends, even by SIGKILL, the lock is released. So a process that gets the lock of
another directory knows that no process uses that directory, even if the process id was reused. The
lock is taken before the directory is created, and the lock file is deleted after the directory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from onceflow.core.errors import StateError


def cache_directory() -> Path:
    """Return ONCEFLOW_CACHE, else $XDG_CACHE_HOME/onceflow, else ~/.cache/onceflow.

    The directory may not exist yet. `publish` and `exclusive` create it.
    """
    chosen = os.environ.get("ONCEFLOW_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "onceflow"


def make_private_directory(path: Path) -> None:
    """Create directory `path` and its missing parents with mode 0700, independent of the umask.

    Does not change the modes of existing directories.
    """
    missing: list[Path] = []
    directory = path
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)


def is_private(directory: Path) -> bool:
    """Return True if only this user and root can change files below `directory` in the cache."""
    cache = cache_directory()
    above = [parent for parent in directory.parents if parent.is_relative_to(cache)]
    return all(
        status.st_uid in {0, os.geteuid()} and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for status in (path.stat() for path in (directory, *above))
    )


@contextmanager
def publish(target: Path) -> Generator[Path, None, None]:
    """Yield an empty directory that is renamed to `target` when the block succeeds.

    So `target` is never visible half filled, even if the process is killed. If two processes
    publish the same target, the first one wins, and the other's copy is deleted. After an error in
    the block, nothing remains.
    """
    make_private_directory(target.parent)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield fresh
        try:
            fresh.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def exclusive(path: Path, timeout_s: float) -> Generator[None, None, None]:
    """Hold the lock file `path` during the block, against all threads and processes.

    If the process that holds the lock dies, the lock is released. The file remains.

    Raises:
        TimeoutError: Another process held it for `timeout_s`.
    """
    make_private_directory(path.parent)
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {path} for {timeout_s:g} s. End that process,"
                        " or delete the file if it hangs"
                    ) from None
                time.sleep(0.2)
        yield


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMEDY = (
    "if it is full, free space there, or keep the state on a larger local disk:"
    " RocksDBBackend(directory=…), or RuntimeSettings(scratch_dir=…) for all working files"
)
_MIB = 1 << 20


def advise_on_disk(path: Path) -> str:
    """Return the free space of the disk that has `path`, and what to do if the disk is full."""
    for parent in (path, *path.parents):
        # The path may not exist yet, or lie below a directory that this user may not search.
        with suppress(OSError):
            usage = shutil.disk_usage(parent)
            free, total = usage.free / _MIB, usage.total / _MIB
            return f"the disk of {parent} has {free:,.1f} MiB of {total:,.1f} MiB free; {_REMEDY}"
    return f"the free space of the disk of {path} is not known; {_REMEDY}"


@contextmanager
def naming_full_disk(path: Path, work: str) -> Generator[None, None, None]:
    """Raise StateError, which names `path` and the remedy, if the disk has no room for `work`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise StateError(f"{work} in {path}: {error}; {advise_on_disk(path)}") from error


_PREFIX, _SUFFIX = "onceflow-", ".lock"
_creating = threading.Lock()
_of_processes: dict[tuple[int, Path], ScratchDirectory] = {}
_log = logging.getLogger("onceflow.scratch")


class ScratchDirectory:
    """A directory that only this process uses. Built by `create`."""

    def __init__(self, path: Path, lock: int) -> None:
        """`path` is an empty directory, and `lock` the open file of its lock."""
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, base: Path, owner: str) -> ScratchDirectory:
        """Create a new directory in `base`. First delete directories of dead processes.

        `owner` is a part of its name, to help people.

        Raises:
            OSError: The directory cannot be created.
        """
        base.mkdir(parents=True, exist_ok=True)
        delete_left_behind(base)
        while True:
            path = base / f"{_PREFIX}{owner}-{secrets.token_hex(8)}"
            lock = os.open(_name_lock(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                if _try_lock(lock, _name_lock(path)):
                    path.mkdir(mode=0o700)
                    return cls(path, lock)
            except OSError:
                os.close(lock)
                raise
            os.close(lock)

    def delete(self) -> None:
        """Delete the directory and its content. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        _name_lock(self.path).unlink(missing_ok=True)
        os.close(lock)


def directory_of_process(base: Path) -> Path:
    """Return this process's only directory in `base`. It is deleted after the process has died.

    Any thread.

    Raises:
        OSError: The directory cannot be created.
    """
    with _creating:
        # A forked process has a different directory from its parent.
        key = os.getpid(), base
        if key not in _of_processes:
            _of_processes[key] = ScratchDirectory.create(base, f"process-{os.getpid()}")
        return _of_processes[key].path


def delete_left_behind(base: Path) -> None:
    """Delete the directories in `base` whose processes are dead. Ignores OSErrors."""
    for lock_file in base.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            lock = os.open(lock_file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            # The file belongs to another user, or was deleted in the meantime.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            directory = lock_file.with_name(lock_file.name.removesuffix(_SUFFIX))
            shutil.rmtree(directory, ignore_errors=True)
            lock_file.unlink(missing_ok=True)
            _log.info("deleted %s, which a killed process had left", directory)
        except OSError:
            # A living process holds the lock.
            continue
        finally:
            os.close(lock)


def _try_lock(lock: int, file: Path) -> bool:
    """Lock the new file `file`, open as `lock`. Return False if another process deleted it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), file.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _name_lock(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}{_SUFFIX}")
