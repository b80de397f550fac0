"""The cache of this machine, which persists between runs and whose entries appear atomically."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


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
                        f"another process holds {path} for {timeout_s:g} s; "
                        "end it, or delete the file if it hangs"
                    ) from None
                time.sleep(0.2)
        yield
