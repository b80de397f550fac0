"""A directory as a file system: a local disk, or a network file system that all machines mount.

Bytes are written to `.<name>.<unique>.tmp` next to their target and synced. Then a hard link (which
fails if the target exists) or a rename shows the whole file, and the directory is synced. A killed
writer leaves at most that temporary file, which readers never look at.

Source: POSIX.1-2017 link(), rename(), fsync(): link fails with EEXIST; both are atomic to others; a
new name survives a crash only once its directory is synced. NFS (RFC 1813): a repeated LINK may
answer EEXIST to the client that made it; so callers compare the bytes.
"""
# Paths are str: a checkpoint opens, lists and deletes too many files to wrap each in a Path.
# ruff: noqa: PTH100, PTH101, PTH102, PTH103, PTH104, PTH105, PTH106, PTH108, PTH112, PTH118
# ruff: noqa: PTH120, PTH123, PTH202, PTH208

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from typing_extensions import override

from onceflow.core.errors import StorageError
from onceflow.core.storage.filesystems import filesystem

CHUNK_BYTES = 1 << 20
"""The size of one read: large enough to make calls cheap, small enough for a core's cache."""
SYNC_BYTES = 8 << 20
"""The number of bytes of a long file after which a sync starts, while more bytes are written."""
TRIES_MAX = 16
"""The number of tries of a call while another process keeps deleting files that it needs."""
DIRECTORIES_KNOWN_MAX = 4096
"""The maximum number of directories that are remembered as existing, and not created again."""

_OWNER_ONLY = 0o700
_BUFFER_BYTES = 1 << 20
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")

_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_LINK_DID_NOTHING = _NO_HARD_LINKS | {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.ENOENT,
    errno.ENOTDIR,
}
"""The errors of link() that prove that it had no effect. After any other, its effect is unknown."""

_REFUSALS: Mapping[int, str] = {
    errno.EACCES: "give the user of this process read and write access there",
    errno.EPERM: "give the user of this process read and write access there",
    errno.EROFS: "mount it writable, or choose another directory",
    errno.ENOTDIR: "a file is at the path of a directory: move it away",
    errno.EISDIR: "a directory is at the path of a file: move it away",
    errno.EEXIST: "a file is at the path of a directory: move it away",
    errno.ENAMETOOLONG: "choose a shorter directory",
    errno.EXDEV: "files can only be moved within one file system: mount no other one in it",
}
"""The remedies of errors that persist until someone acts."""
_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "disk full: free space",
    errno.EDQUOT: "disk quota used up: free space or raise the quota",
    errno.EFBIG: "over the largest file allowed here: raise the limit (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ESTALE: "the network file system has lost the file or directory: mount it again",
}


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of new files and directories, whatever the process's umask."""

    files: int = 0o600
    directories: int = 0o700


@dataclass(frozen=True, slots=True)
class Advice:
    """The texts that the directory's purpose adds to messages."""

    subject: str = ""
    """The start of each message."""
    remedies: Mapping[int, str] = field(default_factory=dict[int, str])
    """Remedies by errno, which replace the general ones."""


_ANOTHER_USER = (
    "give the user of this process read and write access there; if driver and executors are"
    " different users of one group: FileSystemStorage(…, directory_mode=0o2770, file_mode=0o660)"
)
_GIVEN_UP = "; the current checkpoint is abandoned and nothing of it is committed"
CHECKPOINT_STORAGE = Advice(
    "checkpoint storage: ",
    {
        errno.EACCES: _ANOTHER_USER,
        errno.EPERM: _ANOTHER_USER,
        **{
            number: _REMEDIES[number] + _GIVEN_UP
            for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        },
    },
)


class LocalFileSystem(filesystem.CreatesAtomically, filesystem.AdoptsFiles, filesystem.Renames):
    """A directory of this machine. Holds no open resource; any thread, any process."""

    def __init__(
        self, root: str, modes: Modes | None = None, *, advice: Advice | None = None
    ) -> None:
        """Store the arguments. If `modes` is None, the umask decides the modes of new files."""
        self._root = os.path.abspath(root).rstrip("/")
        self._modes = modes
        self._advice = advice or Advice()
        self._directory_mode = modes.directories if modes else None
        self._known: set[str] = set()
        """The directories that this process has seen durable. They may be deleted by now."""

    @override
    def location(self, path: str) -> str:
        return f"{self._root}/{path}"

    @override
    def make_directory(self, path: str) -> None:
        full = self.location(path)
        with self.explain_failure("make directory", path):
            make_durable_directory(full, self._root, self._directory_mode)

    @override
    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        full = self.location(path)
        for _ in range(TRIES_MAX):
            with self.explain_failure("create", path):
                # Written again for each try: another process may have deleted the previous file as
                # litter.
                temporary, _ = self._write_temporary(path, (data,))
            try:
                outcome = self._publish(temporary, path)
            finally:
                remove_quietly(temporary)
            if outcome is not None:
                return outcome
        raise StorageError(
            f"cannot create {full}: another process keeps deleting files in its directory"
        )

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        full = self.location(path)
        with self.explain_failure("write", path):
            size_bytes = self._replace(path, chunks)
            _sync_name(full)
        return size_bytes

    @override
    def adopt(self, path: str, source: Path) -> bool:
        full = self.location(path)
        with self.explain_failure("write", path):
            self._make_parent(path)
            if self._modes:
                # Before the link, so that the new name never has other rights.
                os.chmod(source, self._modes.files)
            sync_file(source)
            try:
                # The real path, because link() on Linux would link a symbolic link itself, not its
                # target.
                os.link(os.path.realpath(source), full)
            except OSError as error:
                if error.errno in _LINK_DID_NOTHING:
                    return False
                raise
            _sync_name(full)
        return True

    @override
    def read(self, path: str) -> bytes | None:
        chunks = self.read_chunks(path)
        return None if chunks is None else b"".join(chunks)

    @override
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        full = self.location(path)
        with self.explain_failure("read", path):
            try:
                file = open(full, "rb", buffering=0)  # noqa: SIM115 - closed by its reader
            except filesystem.MISSING:
                return None
        return self._chunks(file, path)

    @override
    def size(self, path: str) -> int | None:
        with self.explain_failure("look at", path):
            try:
                return os.path.getsize(self.location(path))
            except filesystem.MISSING:
                return None

    @override
    def find_modified_time(self, path: str) -> datetime | None:
        full = self.location(path)
        with self.explain_failure("read", path):
            try:
                seconds = Path(full).stat().st_mtime
            except filesystem.MISSING:
                return None
        return datetime.fromtimestamp(seconds, timezone.utc)

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        return tuple(name for name in self._names(directory) if not _TEMPORARY.fullmatch(name))

    @override
    def list_unfinished(self, directory: str) -> tuple[filesystem.Unfinished, ...]:
        matches = map(_TEMPORARY.fullmatch, self._names(directory))
        return tuple(filesystem.Unfinished(match[0], match[1]) for match in matches if match)

    @override
    def delete(self, path: str) -> None:
        full = self.location(path)
        with self.explain_failure("delete", path), suppress(*filesystem.MISSING):
            os.unlink(full)

    @override
    def delete_tree(self, path: str) -> None:
        full = self.location(path)
        with self.explain_failure("delete", path):
            for _ in range(TRIES_MAX):
                if tree_is_gone(full):
                    return
            raise OSError(errno.ENOTEMPTY, "another process keeps adding files to the directory")

    @override
    def delete_directory_if_empty(self, path: str) -> None:
        with self.explain_failure("delete directory", path), suppress(*filesystem.MISSING):
            try:
                os.rmdir(self.location(path))
            except OSError as error:
                # If the directory is not empty, POSIX allows either error.
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise

    # --- files that are filled piece by piece --------------------------------------------------

    @override
    @contextmanager
    def explain_failure(self, action: str, path: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise self._failure(action, path, error) from error

    @override
    def create(self, path: str) -> IO[bytes]:
        with self.explain_failure("create", path):
            # Buffered, because a raw file may write only a part of the data if the disk is full,
            # and Arrow ignores how much was written.
            return os.fdopen(self._open_new(path, self.location(path)), "wb", _BUFFER_BYTES)

    @override
    def finish(self, file: IO[bytes], path: str) -> int:
        with self.explain_failure("write", path), file:
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    @override
    def drop(self, file: IO[bytes], path: str) -> None:
        with suppress(OSError):
            file.close()
        remove_quietly(self.location(path))

    @override
    def make_names_durable(self, directory: str) -> None:
        with self.explain_failure("make durable", directory):
            sync_directory(self.location(directory))

    @override
    def visible_files(self) -> Sequence[str]:
        paths: list[str] = []
        with self.explain_failure("list", ""):
            for directory, below, names in os.walk(self._root):
                # In place: os.walk continues with this list.
                below[:] = [name for name in below if filesystem.is_visible(name)]
                paths += [
                    os.path.join(directory, name) for name in names if filesystem.is_visible(name)
                ]
        return sorted(os.path.relpath(path, self._root) for path in paths)

    @override
    def rename(self, source: str, target: str) -> bool:
        full_source, full_target = self.location(source), self.location(target)
        with self.explain_failure("move a file to", target):
            for _ in range(TRIES_MAX):
                self._make_parent(target)
                try:
                    os.rename(full_source, full_target)
                except FileNotFoundError:
                    if not os.path.lexists(full_source):
                        return False
                    # Another process has deleted the empty directory since it was created.
                    self._known.discard(os.path.dirname(full_target))
                else:
                    return True
            raise OSError(errno.ENOENT, "another process keeps deleting its directory")

    # --- steps --------------------------------------------------------------------------------

    def _publish(self, temporary: str, path: str) -> filesystem.CreateOutcome | None:
        """Link `temporary` to `path`, durably, unless the name exists.

        Returns None, without any effect, if another process deleted `temporary` (as litter of a
        writer believed dead), or deleted the existing file at `path`, between two calls.
        """
        full = self.location(path)
        try:
            os.link(temporary, full)
        except FileExistsError:
            existing = self._existing(path)
            return None if existing is None else filesystem.AlreadyExists(existing)
        except FileNotFoundError:
            return None
        except OSError as error:
            failure = self._failure("create", path, error)
            # On a network file system, the reply may be lost after the link was created.
            if error.errno not in _LINK_DID_NOTHING:
                raise filesystem.CreationUnknown(str(failure)) from error
            if error.errno in _NO_HARD_LINKS:
                raise filesystem.StorageRefused(
                    f"{self._advice.subject}cannot create {full}: {error.strerror}; creating a"
                    " file that no other process can overwrite needs a file system where this"
                    " process may create hard links: choose another directory"
                ) from error
            raise failure from error
        self._sync_published(path)
        return filesystem.Created()

    def _existing(self, path: str) -> bytes | None:
        """Return the file at `path`, made durable: its creator may have died before syncing it."""
        try:
            with open(self.location(path), "rb") as file:
                existing = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise filesystem.CreationUnknown(str(self._failure("read", path, error))) from error
        self._sync_published(path)
        return existing

    def _sync_published(self, path: str) -> None:
        try:
            sync_directory(os.path.dirname(self.location(path)))
        except OSError as error:
            raise filesystem.CreationUnknown(
                str(self._failure("make durable", path, error))
            ) from error

    def _chunks(self, file: io.FileIO, path: str) -> Iterator[bytes]:
        with file:
            while True:
                with self.explain_failure("read", path):
                    chunk = file.read(CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk

    def _failure(self, action: str, path: str, error: OSError) -> StorageError:
        """Return an error with the failed action, the path, the reason and the remedy."""
        number = error.errno or 0
        remedy = (
            self._advice.remedies.get(number)
            or _REFUSALS.get(number)
            or _REMEDIES.get(number, "check its disk or mount")
        )
        kind = filesystem.StorageRefused if number in _REFUSALS else StorageError
        return kind(
            f"{self._advice.subject}cannot {action} {self.location(path)}:"
            f" {error.strerror or error}; {remedy}"
        )

    def _names(self, directory: str) -> Sequence[str]:
        with self.explain_failure("list", directory):
            try:
                return sorted(os.listdir(self.location(directory)))
            except filesystem.MISSING:
                return ()

    def _make_parent(self, path: str) -> None:
        parent = os.path.dirname(self.location(path))
        if parent not in self._known:
            make_durable_directory(parent, self._root, self._directory_mode)
            # Forgetting costs only a few syscalls for each directory, and directories of old
            # checkpoints are not needed again.
            if len(self._known) >= DIRECTORIES_KNOWN_MAX:
                self._known.clear()
            self._known.add(parent)

    def _replace(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write the joined chunks to `path`, and replace an existing file. Return the size.

        The content is durable, the name is not.
        """
        temporary, size_bytes = self._write_temporary(path, chunks)
        try:
            # The bytes are synced by now, so a crash leaves the old file or the whole new one.
            os.replace(temporary, self.location(path))
        except BaseException:
            remove_quietly(temporary)
            raise
        return size_bytes

    def _write_temporary(self, path: str, chunks: Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Write and sync the joined chunks next to `path`. Return the file's name and size."""
        directory, name = os.path.split(self.location(path))
        temporary = f"{directory}/.{name}.{uuid.uuid4().hex}.tmp"
        descriptor = self._open_new(path, temporary)
        try:
            size_bytes = _write_chunks(descriptor, chunks)
            os.fsync(descriptor)
        except BaseException:
            remove_quietly(temporary)
            raise
        finally:
            os.close(descriptor)
        return temporary, size_bytes

    def _open_new(self, path: str, full: str) -> int:
        tries = 0
        while True:
            try:
                self._make_parent(path)
                return self._open_private(full)
            except (FileNotFoundError, FileExistsError):
                # A parent directory was empty for a moment, and a `discard` has deleted it. (If
                # that happens between the two steps of makedirs, it raises FileExistsError.)
                self._known.discard(os.path.dirname(full))
                tries += 1
                if tries >= TRIES_MAX:
                    raise

    def _open_private(self, full: str) -> int:
        mode = self._modes.files if self._modes else 0o666
        # O_CLOEXEC: a process that is started meanwhile must not inherit the descriptor.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(full, flags, mode)
        if self._modes and mode & ~_OWNER_ONLY:  # the umask may have removed bits
            os.fchmod(descriptor, mode)
        return descriptor


def _write_chunks(descriptor: int, chunks: Iterable[bytes | memoryview]) -> int:
    """Write the joined chunks and return their size. Syncs a long file early, all but its end."""
    size_bytes = synced_bytes = 0
    sync: Future[None] | None = None
    # The executor starts its thread only at the first submit.
    with ThreadPoolExecutor(1, "early-sync") as thread:
        for chunk in chunks:
            size_bytes += write_all(descriptor, chunk)
            if size_bytes - synced_bytes < SYNC_BYTES or (sync and not sync.done()):
                continue
            if sync is not None:
                sync.result()
            sync, synced_bytes = thread.submit(os.fdatasync, descriptor), size_bytes
    if sync is not None:
        # Linux reports a failed write once to a descriptor, so the caller's own sync would succeed.
        sync.result()
    return size_bytes


def make_durable_directory(full: str, root: str, mode: int | None = None) -> None:
    """Create `full` and sync each directory that contains it, from its parent up to the root.

    Existing directories are synced, too: their creator may have died before syncing. New
    directories get `mode`; if it is None, the umask decides.
    """
    top = full
    while not os.path.isdir(os.path.dirname(top)):
        top = os.path.dirname(top)
    # Up to the root. If the root is new, up to the first directory above it that existed.
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
            if mode != _OWNER_ONLY:  # no umask removes these bits
                os.chmod(directory, mode)


def write_all(descriptor: int, data: bytes | memoryview) -> int:
    """Write all of `data` and return the number of bytes."""
    remaining = memoryview(data).cast("B")
    while remaining:
        # A full disk first causes a short write. The next call raises the error.
        remaining = remaining[os.write(descriptor, remaining) :]
    return memoryview(data).nbytes


def tree_is_gone(full: str) -> bool:
    """Delete directory `full` with its content. Return False if files were added meanwhile."""
    try:
        shutil.rmtree(full)
    except FileNotFoundError:
        return not os.path.lexists(full)
    except NotADirectoryError:
        if os.path.lexists(full):
            raise
    except OSError as error:
        # A writer that does not know yet that its checkpoint is dead has added a file.
        if error.errno == errno.ENOTEMPTY:
            return False
        raise
    return True


def sync_file(path: Path) -> None:
    """Sync the bytes of the file at `path`, so that they survive a crash."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(full: str) -> None:
    """Sync directory `full`, so that the names in it survive a crash."""
    descriptor = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems keep names durable anyway, and refuse to sync a directory.
        if error.errno not in {errno.EINVAL, errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


def remove_quietly(full: str) -> None:
    """Remove a file that is no longer needed. Ignores OSError, so as not to hide another error."""
    with suppress(OSError):
        os.unlink(full)


def _sync_name(full: str) -> None:
    """Make the name of a new file durable. If that fails, remove the file."""
    try:
        sync_directory(os.path.dirname(full))
    except BaseException:
        remove_quietly(full)
        raise
