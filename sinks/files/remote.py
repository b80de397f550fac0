"""File systems that fsspec reaches: object stores (s3, gs, abfs, …), HDFS, SFTP.

fsspec's own listings cache is off: read-after-write is demanded. Conditional creation is the
service's own where fsspec hands it on (S3's If-None-Match, Google's if-generation-match); elsewhere
fsspec asks whether the file exists and then writes it, which two callers may do at one moment.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

import fsspec
from typing_extensions import override

from onceflow.core.errors import ConfigError, OnceflowError, SinkError
from onceflow.sinks.files.options import followed_options, secrets_of
from onceflow.sinks.files.store import CopyingStore, RenamingStore, Store, is_seen

_THREADS_MAX = 16
"""Requests under way at once: each waits for the network, none needs the processor."""


class FsspecStore(Store):
    """What all of fsspec's file systems have in common. Connects when it is first used."""

    def __init__(self, url: str, shown: str, options: Mapping[str, Any]) -> None:
        """Touch nothing yet; `shown` is the url as it may be printed."""
        self._url = url
        self._shown = shown
        self._options = options
        self._opened: tuple[Any, str] | None = None

    @property
    def _fs(self) -> Any:
        return self._open()[0]

    def _full(self, path: str) -> str:
        return f"{self._open()[1]}/{path}".rstrip("/")

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            try:
                fs, root = fsspec.core.url_to_fs(self._url, **followed_options(self._options))
            except ImportError as error:
                raise ConfigError(
                    f"{self._shown} needs a package that is not installed: {error}"
                ) from error
            except (TypeError, ValueError) as error:
                # Not chained: the error, or its traceback, may quote the options.
                raise ConfigError(
                    f"{self._shown}: fsspec does not take the url and storage_options: "
                    f"{self._without_secrets(str(error))}"
                ) from None
            # The file system is shared within this process, for connecting is slow.
            fs.dircache.use_listings_cache = False
            self._opened = fs, str(root).rstrip("/")
        return self._opened

    @override
    def location(self, path: str) -> str:
        return f"{self._shown}/{path}".rstrip("/")

    @override
    def create(self, path: str) -> IO[bytes]:
        with self.named("create", path):
            self._make_parent(path)
            return cast("IO[bytes]", self._fs.open(self._full(path), "wb"))

    @override
    def finish(self, file: IO[bytes], path: str) -> int:
        with self.named("write", path):
            size_bytes = file.tell()
            file.close()
            return size_bytes

    @override
    def drop(self, file: IO[bytes], path: str) -> None:
        # `discard` ends an upload under way without completing it; not every file has one.
        with suppress(Exception):
            cast("Any", file).discard()
        with suppress(Exception):
            # Keeps the file's own close, and its finalizer, from completing it after all.
            cast("Any", file).closed = True
        with suppress(Exception):
            self._fs.rm_file(self._full(path))

    @override
    def make_names_durable(self, directory: str) -> None:
        """Nothing is left to do: a finished file has its name."""

    @override
    def write(self, path: str, data: bytes) -> None:
        with self.named("write", path):
            self._make_parent(path)
            self._fs.pipe_file(self._full(path), data)

    @override
    def create_if_absent(self, path: str, data: bytes) -> bool:
        try:
            with self.named("create", path):
                self._make_parent(path)
                self._fs.pipe_file(self._full(path), data, mode="create")
        except OnceflowError:
            # Taken, or a reply was lost: what stands there tells.
            existing = self.read(path)
            if existing is None:
                raise
            return existing == data
        return True

    @override
    def read(self, path: str) -> bytes | None:
        with self.named("read", path):
            try:
                return bytes(self._fs.cat_file(self._full(path)))
            except FileNotFoundError:
                return None

    @override
    def size(self, path: str) -> int | None:
        with self.named("look at", path):
            try:
                return int(self._fs.info(self._full(path))["size"])
            except FileNotFoundError:
                return None

    @override
    def list(self, directory: str) -> Sequence[str]:
        full = self._full(directory)
        with self.named("list", directory):
            try:
                found = cast("list[str]", self._fs.ls(full, detail=False))
            except FileNotFoundError:
                return ()
        names = (name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != full)
        return sorted(name for name in names if not name.endswith(_UNFINISHED))

    @override
    def files(self) -> Sequence[str]:
        root = self._full("")
        with self.named("list", ""):
            found = cast("list[str]", self._fs.find(root))
        below = (path[len(root) :].lstrip("/") for path in found if path.startswith(root))
        return sorted(path for path in below if is_seen(path) and not path.endswith(_UNFINISHED))

    @override
    def delete(self, path: str) -> None:
        with self.named("delete", path), suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    @override
    def unfinished(self, directory: str) -> Sequence[str]:
        return ()

    @override
    def for_each(self, call: Callable[[str], object], paths: Iterable[str]) -> None:
        todo = list(paths)
        if len(todo) < 2:
            for path in todo:
                call(path)
            return
        with ThreadPoolExecutor(min(len(todo), _THREADS_MAX)) as threads:
            for _ in threads.map(call, todo):
                pass

    def _make_parent(self, path: str) -> None:
        """Do nothing: object stores have no directories."""

    @override
    @contextmanager
    def named(self, action: str, path: str) -> Generator[None]:
        """Name what failed. Backends raise whatever their client library does: all is caught."""
        try:
            yield
        except OnceflowError:
            raise
        except Exception as error:
            reason = self._without_secrets(f"{type(error).__name__}: {error}")
            text = f"cannot {action} {self.location(path)}: {reason}"
            if isinstance(error, PermissionError):
                raise ConfigError(
                    f"{text}; give the credentials in storage_options the right to list, read, "
                    "write and delete there"
                ) from None
            if isinstance(error, FileNotFoundError):
                raise ConfigError(f"{text}; create the bucket or container first") from None
            raise SinkError(text) from None

    def _without_secrets(self, text: str) -> str:
        for secret in secrets_of(followed_options(self._options)):
            text = text.replace(secret, "***")
        return text


_UNFINISHED = ".unfinished"


class ObjectStore(FsspecStore, CopyingStore):
    """An object store: what is written appears whole when it is closed; a copy likewise."""

    @override
    def copy(self, source: str, target: str) -> bool:
        with self.named("copy a file to", target):
            try:
                self._fs.cp_file(self._full(source), self._full(target))
            except FileNotFoundError:
                if self.size(source) is None:
                    return False
                raise
        return True


class RemoteDirectory(FsspecStore, RenamingStore):
    """A file system with directories and an atomic rename, behind fsspec: HDFS, SFTP.

    Its files show while they are written, so a small file is written beside its name and renamed.
    """

    @override
    def write(self, path: str, data: bytes) -> None:
        unfinished = self._unfinished(path, data)
        # Several file systems refuse to rename onto a file that exists.
        self.delete(path)
        self.rename(unfinished, path)

    @override
    def create_if_absent(self, path: str, data: bytes) -> bool:
        # HDFS and SFTP rename onto no file that exists: of two callers one succeeds.
        existing = self.read(path)
        if existing is None:
            unfinished = self._unfinished(path, data)
            try:
                with self.named("create", path):
                    self._fs.mv(self._full(unfinished), self._full(path))
            except SinkError:
                existing = self.read(path)
                if existing is None:
                    raise
            finally:
                self.delete(unfinished)
        return existing is None or existing == data

    def _unfinished(self, path: str, data: bytes) -> str:
        """Write `data` beside `path`; return where."""
        unfinished = f"{path}.{uuid.uuid4().hex}{_UNFINISHED}"
        with self.named("write", path):
            self._make_parent(path)
            self._fs.pipe_file(self._full(unfinished), data)
        return unfinished

    @override
    def unfinished(self, directory: str) -> Sequence[str]:
        with self.named("list", directory):
            try:
                found = cast("list[str]", self._fs.ls(self._full(directory), detail=False))
            except FileNotFoundError:
                return ()
        names = (name.rpartition("/")[2] for name in found)
        return sorted(name for name in names if name.endswith(_UNFINISHED))

    @override
    def rename(self, source: str, target: str) -> bool:
        with self.named("move a file to", target):
            self._make_parent(target)
            if not self._fs.exists(self._full(source)):
                return False
            try:
                self._fs.mv(self._full(source), self._full(target))
            except Exception:
                # Somebody else has moved it between the two calls, or it is a failure.
                if self._fs.exists(self._full(source)):
                    raise
                return False
        return True

    @override
    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(self._full(path.rpartition("/")[0]), exist_ok=True)
