"""The steps of durable publication on POSIX, and what its errors mean to an operator.

Source: POSIX.1-2017 link(), rename(), fsync(): link fails with EEXIST; both are atomic to others; a
new name survives a crash only once its directory is synced. NFS (RFC 1813): a repeated LINK may
answer EEXIST to the client that made it; so callers compare the bytes.
"""
# ruff: noqa: PTH101, PTH102, PTH103, PTH108, PTH112, PTH120, PTH123

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onceflow.core.errors import StorageError
from onceflow.core.storage.filesystem import (
    AlreadyExists,
    Created,
    CreateOutcome,
    PublicationUnknown,
)

OWNER_ONLY = 0o700

CHUNK_BYTES = 1 << 20
"""Of one read: large enough that calls cost nothing, small enough for the processor's cache."""
TRIES_MAX = 16
"""How often a call is made again when somebody keeps deleting what it needs."""

_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
LINK_DID_NOTHING = _NO_HARD_LINKS | {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.ENOENT,
    errno.ENOTDIR,
}
"""Answers of link() that say for certain that it did nothing; after any other, nobody knows."""

_ANOTHER_USER = (
    "let the user of this process read and write there; where driver and executors are different"
    " users of one group: FileSystemStorage(…, directory_mode=0o2770, file_mode=0o660)"
)
_REMEDIES = {
    errno.ENOSPC: "disk full: free space",
    errno.EDQUOT: "disk quota used up: free space or raise the quota",
    errno.EFBIG: "over the largest file allowed here: raise the limit (ulimit -f)",
    errno.EACCES: _ANOTHER_USER,
    errno.EPERM: _ANOTHER_USER,
    errno.EROFS: "mount it writable, or choose another directory",
    errno.EEXIST: "a file stands where a directory must be: move it away",
    errno.ENOTDIR: "a file stands where a directory must be: move it away",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ESTALE: "the network file system has lost it: mount it again",
}
_GIVES_UP_CHECKPOINT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def publish(temporary: str, full: str) -> CreateOutcome | None:
    """Show `temporary` under its name, durably, unless the name is taken.

    Returns None, and has done nothing, when somebody has deleted `temporary` (as litter of a writer
    believed dead), or what stood under the name, between two calls.
    """
    try:
        os.link(temporary, full)
    except FileExistsError:
        existing = _existing(full)
        return None if existing is None else AlreadyExists(existing)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in LINK_DID_NOTHING:
            raise PublicationUnknown(message_of("create", full, error)) from error
        if error.errno in _NO_HARD_LINKS:
            raise StorageError(
                f"cannot create {full}: {error.strerror}; the decision log needs a file system"
                " with hard links that this process may make: choose another directory"
            ) from error
        raise StorageError(message_of("create", full, error)) from error
    _sync_published(full)
    return Created()


def _existing(full: str) -> bytes | None:
    """Return what stands at `full`, made durable: its creator may have died before that."""
    try:
        with open(full, "rb") as file:
            existing = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PublicationUnknown(message_of("read", full, error)) from error
    _sync_published(full)
    return existing


def _sync_published(full: str) -> None:
    try:
        sync_directory(os.path.dirname(full))
    except OSError as error:
        raise PublicationUnknown(message_of("make durable", full, error)) from error


@dataclass(frozen=True, slots=True)
class Modes:
    """Who may do what with what is made, whatever the process's umask says."""

    files: int = 0o600
    directories: int = 0o700


def make_durable_directory(full: str, root: str, mode: int | None = None) -> None:
    """Make `full` and sync every directory that names it, from its parent up to the root.

    Also those that were there: whoever made them may have died before syncing. Directories that are
    made get `mode`; None: what the umask leaves.
    """
    top = full
    while not os.path.isdir(os.path.dirname(top)):
        top = os.path.dirname(top)
    last = min(os.path.dirname(top), root, key=len)
    if mode is None:
        os.makedirs(full, exist_ok=True)
    else:
        _make_directories(full, mode)
    directory = full
    while len(directory) > len(last):
        directory = os.path.dirname(directory)
        sync_directory(directory)


def _make_directories(full: str, mode: int) -> None:
    missing: list[str] = []
    while not os.path.isdir(full):
        missing.append(full)
        full = os.path.dirname(full)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, mode)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise
        else:
            if mode != OWNER_ONLY:  # which no umask takes away
                os.chmod(directory, mode)


def write_all(descriptor: int, data: bytes | memoryview) -> int:
    """Write all of `data`; return how many bytes that is."""
    rest = memoryview(data).cast("B")
    while rest:
        # A full disk shows as a short write first; the next call says why.
        rest = rest[os.write(descriptor, rest) :]
    return memoryview(data).nbytes


def chunks_of(file: io.FileIO, full: str) -> Iterator[bytes]:
    """Return the bytes of `file` piece by piece and close it."""
    with file:
        while True:
            with named("read", full):
                chunk = file.read(CHUNK_BYTES)
            if not chunk:
                return
            yield chunk


def tree_is_gone(full: str) -> bool:
    """Delete directory `full` and all in it; return False when somebody added to it meanwhile."""
    try:
        shutil.rmtree(full)
    except FileNotFoundError:
        return not os.path.lexists(full)
    except OSError as error:
        # A writer that does not know yet that its checkpoint is dead has added a file.
        if error.errno == errno.ENOTEMPTY:
            return False
        raise
    return True


def sync_file(path: Path) -> None:
    """Return when the bytes at `path` survive a crash."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(full: str) -> None:
    """Return when the names in directory `full` survive a crash."""
    descriptor = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems keep names without being asked, and refuse to be.
        if error.errno not in {errno.EINVAL, errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


def remove_quietly(full: str) -> None:
    """Remove what nobody reads; a failure leaves litter and must not hide what happened before."""
    with suppress(OSError):
        os.unlink(full)


@contextmanager
def named(action: str, full: str) -> Generator[None]:
    """Turn an OSError of the block into a StorageError that names `full` and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(message_of(action, full, error)) from error


def message_of(action: str, full: str, error: OSError) -> str:
    """Return what failed, where, why, and what an operator does about it."""
    remedy = _REMEDIES.get(error.errno or 0, "look at the disk or mount behind it")
    if error.errno in _GIVES_UP_CHECKPOINT:
        remedy += "; the checkpoint under way is given up and nothing of it is committed"
    return f"checkpoint storage: cannot {action} {full}: {error.strerror or error}; {remedy}"
