"""Checkpoint storage in a directory: a local disk, or a network file system seen by all machines.

Publication is by name: bytes go to `.<name>.<unique>.tmp` beside their target and are synced; a
hard link (which fails if the target exists) or a rename shows them whole; then the directory is
synced. A killed writer leaves at most that temporary file, which readers never look at.
"""
# Names stay text: a checkpoint opens, lists and deletes too many to wrap each in a Path.
# ruff: noqa: PTH100, PTH101, PTH105, PTH106, PTH108, PTH120, PTH123, PTH208

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from typing_extensions import override

from onceflow.core.errors import StorageError
from onceflow.core.storage.filesystem import CheckpointFileSystem, CreateOutcome, Unfinished
from onceflow.core.storage.posix import (
    LINK_DID_NOTHING,
    OWNER_ONLY,
    TRIES_MAX,
    Modes,
    chunks_of,
    make_durable_directory,
    named,
    publish,
    remove_quietly,
    sync_directory,
    sync_file,
    tree_is_gone,
    write_all,
)

DIRECTORIES_KNOWN_MAX = 4096

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")


class LocalFileSystem(CheckpointFileSystem):
    """A directory of this machine. Holds no open resource; any thread, any process."""

    def __init__(self, root: str, modes: Modes | None = None) -> None:
        """Describe the directory `root`; None: what is made gets the modes of the umask."""
        self._root = os.path.abspath(root).rstrip("/")
        self._modes = modes
        self._directory_mode = modes.directories if modes else None
        self._known: set[str] = set()
        """Directories that this process has seen durable, and that may be gone again."""

    @override
    def location(self, path: str) -> str:
        return f"{self._root}/{path}"

    @override
    def make_directory(self, path: str) -> None:
        full = self.location(path)
        with named("make directory", full):
            make_durable_directory(full, self._root, self._directory_mode)

    @override
    def create_if_absent(self, path: str, data: bytes) -> CreateOutcome:
        full = self.location(path)
        for _ in range(TRIES_MAX):
            with named("create", full):
                temporary, _ = self._write_temporary(path, (data,))
            try:
                outcome = publish(temporary, full)
            finally:
                remove_quietly(temporary)
            if outcome is not None:
                return outcome
        raise StorageError(f"cannot create {full}: somebody keeps deleting files beside it")

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        full = self.location(path)
        with named("write", full):
            size_bytes = self._place(path, chunks)
            _sync_name(full)
        return size_bytes

    @override
    def adopt(self, path: str, source: Path) -> bool:
        full = self.location(path)
        with named("write", full):
            self._make_parent(path)
            if self._modes:
                os.chmod(source, self._modes.files)
            sync_file(source)
            try:
                os.link(os.path.realpath(source), full)
            except OSError as error:
                if error.errno in LINK_DID_NOTHING:
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
        with named("read", full):
            try:
                file = open(full, "rb", buffering=0)  # noqa: SIM115 - closed by its reader
            except FileNotFoundError:
                return None
        return chunks_of(file, full)

    @override
    def modified_at(self, path: str) -> datetime | None:
        full = self.location(path)
        with named("read", full):
            try:
                seconds = Path(full).stat().st_mtime
            except FileNotFoundError:
                return None
        return datetime.fromtimestamp(seconds, timezone.utc)

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        return tuple(name for name in self._names(directory) if not _TEMPORARY.fullmatch(name))

    @override
    def list_unfinished(self, directory: str) -> tuple[Unfinished, ...]:
        matches = map(_TEMPORARY.fullmatch, self._names(directory))
        return tuple(Unfinished(match[0], match[1]) for match in matches if match)

    @override
    def delete(self, path: str) -> None:
        full = self.location(path)
        with named("delete", full), suppress(FileNotFoundError):
            os.unlink(full)

    @override
    def delete_tree(self, path: str) -> None:
        full = self.location(path)
        with named("delete", full):
            for _ in range(TRIES_MAX):
                if tree_is_gone(full):
                    return
            raise OSError(errno.ENOTEMPTY, "somebody keeps adding files")

    @override
    def delete_directory_if_empty(self, path: str) -> bool:
        full = self.location(path)
        with named("delete directory", full):
            try:
                os.rmdir(full)
            except FileNotFoundError:
                return True
            except OSError as error:
                # POSIX lets rmdir answer either when the directory is not empty.
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                    return False
                raise
        return True

    # --- steps --------------------------------------------------------------------------------

    def _names(self, directory: str) -> Sequence[str]:
        full = self.location(directory)
        with named("list", full):
            try:
                return sorted(os.listdir(full))
            except FileNotFoundError:
                return ()

    def _make_parent(self, path: str) -> None:
        parent = os.path.dirname(self.location(path))
        if parent not in self._known:
            make_durable_directory(parent, self._root, self._directory_mode)
            if len(self._known) >= DIRECTORIES_KNOWN_MAX:
                self._known.clear()
            self._known.add(parent)

    def _place(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Show the joined chunks at `path`, durable but for the name; return the size."""
        temporary, size_bytes = self._write_temporary(path, chunks)
        try:
            os.replace(temporary, self.location(path))
        except BaseException:
            remove_quietly(temporary)
            raise
        return size_bytes

    def _write_temporary(self, path: str, chunks: Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Write and sync the joined chunks beside `path`; return the file's name and size."""
        directory, name = os.path.split(self.location(path))
        temporary = f"{directory}/.{name}.{uuid.uuid4().hex}.tmp"
        descriptor = self._open_new(path, temporary)
        try:
            size_bytes = sum(write_all(descriptor, chunk) for chunk in chunks)
            os.fsync(descriptor)
        except BaseException:
            remove_quietly(temporary)
            raise
        finally:
            os.close(descriptor)
        return temporary, size_bytes

    def _open_new(self, path: str, temporary: str) -> int:
        tries = 0
        while True:
            try:
                self._make_parent(path)
                return self._open_private(temporary)
            except (FileNotFoundError, FileExistsError):
                # A directory on the way was empty for a moment, and a `discard` has taken it away
                # (makedirs answers "exists" when that happens between its own two steps).
                self._known.discard(os.path.dirname(temporary))
                tries += 1
                if tries >= TRIES_MAX:
                    raise

    def _open_private(self, temporary: str) -> int:
        mode = self._modes.files if self._modes else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, mode)
        if self._modes and mode & ~OWNER_ONLY:  # which the umask may have taken away
            os.fchmod(descriptor, mode)
        return descriptor


def _sync_name(full: str) -> None:
    """Make the name of a new file durable, or take it away again."""
    try:
        sync_directory(os.path.dirname(full))
    except BaseException:
        remove_quietly(full)
        raise
