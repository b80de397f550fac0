"""The scratch directories of processes, and the deletion of those left by killed processes.

    <base>/onceflow-<job>-<slot>-<drawn>/       local files of a slot: RocksDB, spools
    <base>/onceflow-<job>-<slot>-<drawn>.lock   locked by its process while it lives

When the process ends, even by SIGKILL, the lock is released. So a process that gets the lock of
another directory knows that no process uses that directory, even if the process id was reused. The
lock is taken before the directory is created, and the lock file is deleted after the directory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import threading
from pathlib import Path

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
            lock = os.open(_lock_of(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                if _try_lock(lock, _lock_of(path)):
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
        _lock_of(self.path).unlink(missing_ok=True)
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
            _log.info("deleted %s, which a process that was killed has left", directory)
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


def _lock_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}{_SUFFIX}")
