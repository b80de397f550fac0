"""The file systems that fsspec reaches, such as SFTP, for the file sink and Spark's formats.

They cannot hold checkpoints, because creation is not atomic. To create a file only if there is
none, fsspec mostly checks whether it exists and then writes it, which two callers may do at the
same time. Checkpoints are in `local`, `bucket` or `hdfs`; `core.storage.descriptions` chooses.

The listings cache of fsspec is off, because the interface demands read-after-write.
"""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain
from typing import IO, Any, cast

import fsspec
from typing_extensions import override

from onceflow.core.errors import ConfigError, OnceflowError, StorageError
from onceflow.core.secret_references import follow_references
from onceflow.core.storage.filesystems import filesystem

_CHUNK_BYTES = 1 << 20
_UNFINISHED = re.compile(r"(.+)\.[0-9a-f]+\.unfinished")
_SECRET = re.compile(r"secret|passw|token|sas|credential|key|connection_string", re.IGNORECASE)
_MISSING = (*filesystem.MISSING, FileExistsError)
"""The errors of a missing path. fsspec's memory file system raises FileExistsError below a file."""
_SECRET_LENGTH_MIN = 4
"""The minimum length of a text that is masked in errors: a shorter one could be part of any word.
"""


class FsspecFiles(filesystem.StreamedFiles):
    """The common base of fsspec's file systems. Connects at the first use."""

    at_once_max = filesystem.REQUESTS_AT_ONCE_MAX

    def __init__(self, url: str, shown: str, options: Mapping[str, Any]) -> None:
        """Store the arguments; `shown` is the url without secrets. Opens no connection yet."""
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
                fs, root = fsspec.core.url_to_fs(
                    self._url, **follow_option_references(self._options)
                )
            except ImportError as error:
                raise ConfigError(
                    f"{self._shown} needs a package that is not installed: {error}"
                ) from error
            except (TypeError, ValueError) as error:
                # Not chained: the error, or its traceback, may quote the options.
                raise ConfigError(
                    f"{self._shown}: fsspec rejects the url and storage_options:"
                    f" {self._without_secrets(str(error))}"
                ) from None
            # fsspec caches file systems within the process, because connecting is slow.
            fs.dircache.use_listings_cache = False
            self._opened = fs, str(root).rstrip("/")
        return self._opened

    @override
    def location(self, path: str) -> str:
        return f"{self._shown}/{path}".rstrip("/")

    @override
    def read(self, path: str) -> bytes | None:
        with self.explain_failure("read", path):
            try:
                return bytes(self._fs.cat_file(self._full(path)))
            except _MISSING:
                return None

    @override
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        with self.explain_failure("read", path):
            try:
                file = cast("IO[bytes]", self._fs.open(self._full(path), "rb"))
            except _MISSING:
                return None
        return self._chunks(file, path)

    @override
    def size(self, path: str) -> int | None:
        with self.explain_failure("look at", path):
            try:
                return int(self._fs.info(self._full(path))["size"])
            except _MISSING:
                return None

    @override
    def find_modified_time(self, path: str) -> datetime | None:
        with self.explain_failure("look at", path):
            try:
                return cast("datetime", self._fs.modified(self._full(path)))
            except (*_MISSING, NotImplementedError):
                return None

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        return tuple(name for name in self._names(directory) if not _UNFINISHED.fullmatch(name))

    @override
    def delete(self, path: str) -> None:
        with self.explain_failure("delete", path), suppress(*_MISSING):
            self._fs.rm_file(self._full(path))

    @override
    def delete_tree(self, path: str) -> None:
        with self.explain_failure("delete", path), suppress(*_MISSING):
            self._fs.rm(self._full(path), recursive=True)

    @override
    def create(self, path: str) -> IO[bytes]:
        with self.explain_failure("create", path):
            self._make_parent(path)
            return cast("IO[bytes]", self._fs.open(self._full(path), "wb"))

    @override
    def finish(self, file: IO[bytes], path: str) -> int:
        with self.explain_failure("write", path):
            size_bytes = file.tell()
            file.close()
            return size_bytes

    @override
    def drop(self, file: IO[bytes], path: str) -> None:
        # `discard` aborts an upload without completing it. Not every file has this method.
        with suppress(Exception):
            cast("Any", file).discard()
        with suppress(Exception):
            # Keeps the file's own `close` and finalizer from completing the upload after all.
            cast("Any", file).closed = True
        with suppress(Exception):
            self._fs.rm_file(self._full(path))

    @override
    def make_names_durable(self, directory: str) -> None:
        """Do nothing: a finished file has its name already."""

    @override
    def visible_files(self) -> Sequence[str]:
        root = self._full("")
        with self.explain_failure("list", ""):
            paths = cast("list[str]", self._fs.find(root))
        # fsspec returns full paths; ours are relative to the root.
        below = (path[len(root) :].lstrip("/") for path in paths if path.startswith(root))
        return sorted(
            path
            for path in below
            if filesystem.is_visible(path) and not _UNFINISHED.fullmatch(path)
        )

    @override
    @contextmanager
    def explain_failure(self, action: str, path: str) -> Generator[None]:
        """Convert any exception of a client library into an error with action and location."""
        try:
            yield
        except OnceflowError:
            raise
        except Exception as error:
            reason = self._without_secrets(f"{type(error).__name__}: {error}")
            text = f"cannot {action} {self.location(path)}: {reason}"
            if isinstance(error, PermissionError):
                raise filesystem.StorageRefused(
                    f"{text}; grant the credentials in storage_options the right to list, read,"
                    " write and delete there"
                ) from None
            if isinstance(error, FileNotFoundError):
                raise filesystem.StorageRefused(
                    f"{text}; create the bucket or container first"
                ) from None
            raise StorageError(text) from None

    def _put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write the joined `chunks`, in one request if there is only one chunk."""
        pieces = iter(chunks)
        first, second = next(pieces, b""), next(pieces, None)
        if second is None:
            with self.explain_failure("write", path):
                self._make_parent(path)
                # In one request a file appears whole, or not at all, on every store.
                self._fs.pipe_file(self._full(path), bytes(first))
            return memoryview(first).nbytes
        file = self.create(path)
        try:
            for chunk in chain((first, second), pieces):
                with self.explain_failure("write", path):
                    file.write(chunk)
            return self.finish(file, path)
        except BaseException:
            self.drop(file, path)
            raise

    def _chunks(self, file: IO[bytes], path: str) -> Iterator[bytes]:
        with file:
            while True:
                with self.explain_failure("read", path):
                    chunk = file.read(_CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk

    def _names(self, directory: str) -> Sequence[str]:
        full = self._full(directory)
        with self.explain_failure("list", directory):
            try:
                names = cast("list[str]", self._fs.ls(full, detail=False))
            except _MISSING:
                return ()
        return sorted(
            name.rstrip("/").rpartition("/")[2] for name in names if name.rstrip("/") != full
        )

    @abstractmethod
    def _make_parent(self, path: str) -> None:
        """Create the directory of `path` if the file system has directories."""

    def _without_secrets(self, text: str) -> str:
        for secret in secrets_of(follow_option_references(self._options)):
            # Clients quote URLs and headers, which may hold secrets, in their errors.
            text = text.replace(secret, "***")
        return text


class ObjectStore(FsspecFiles, filesystem.Copies):
    """An object store: a file appears whole when it is closed, and a copy appears whole."""

    @override
    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        try:
            with self.explain_failure("create", path):
                self._fs.pipe_file(self._full(path), data, mode="create")
        except StorageError as error:
            # The name is taken, or a reply was lost: the existing bytes tell which.
            existing = self.read(path)
            if existing is not None:
                return filesystem.AlreadyExists(existing)
            if isinstance(error, filesystem.StorageRefused):
                raise
            raise filesystem.CreationUnknown(str(error)) from None
        return filesystem.Created()

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        return self._put(path, chunks)

    @override
    def copy(self, source: str, target: str) -> bool:
        with self.explain_failure("copy a file to", target):
            try:
                self._fs.cp_file(self._full(source), self._full(target))
            except FileNotFoundError:
                if self.size(source) is None:
                    return False
                raise
        return True

    @override
    def _make_parent(self, path: str) -> None:
        """Do nothing: object stores have no directories."""


class RemoteDirectory(FsspecFiles, filesystem.Renames):
    """A file system with directories and an atomic rename, reached through fsspec: HDFS, SFTP.

    Files are visible while they are written, so a file is written under another name and then
    renamed. While `write` replaces a file, there is no file for a moment: several of these file
    systems refuse to rename onto an existing name.
    """

    @override
    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        # HDFS and SFTP do not rename onto an existing file, so only one of two callers succeeds.
        existing = self.read(path)
        if existing is not None:
            return filesystem.AlreadyExists(existing)
        unfinished = self._beside(path)
        self._put(unfinished, (data,))
        try:
            with self.explain_failure("create", path):
                self._fs.mv(self._full(unfinished), self._full(path))
        except StorageError as error:
            existing = self.read(path)
            if existing is not None:
                return filesystem.AlreadyExists(existing)
            if isinstance(error, filesystem.StorageRefused):
                raise
            raise filesystem.CreationUnknown(str(error)) from None
        finally:
            self.delete(unfinished)
        return filesystem.Created()

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        unfinished = self._beside(path)
        size_bytes = self._put(unfinished, chunks)
        # Deleted first, because the rename may refuse an existing name: see the class.
        self.delete(path)
        self.rename(unfinished, path)
        return size_bytes

    @override
    def list_unfinished(self, directory: str) -> tuple[filesystem.Unfinished, ...]:
        matches = map(_UNFINISHED.fullmatch, self._names(directory))
        return tuple(filesystem.Unfinished(match[0], match[1]) for match in matches if match)

    @override
    def make_directory(self, path: str) -> None:
        with self.explain_failure("make directory", path):
            self._fs.makedirs(self._full(path), exist_ok=True)

    @override
    def delete_directory_if_empty(self, path: str) -> None:
        if self._names(path):
            return
        with self.explain_failure("delete directory", path), suppress(*_MISSING):
            self._fs.rmdir(self._full(path))

    @override
    def rename(self, source: str, target: str) -> bool:
        with self.explain_failure("move a file to", target):
            self._make_parent(target)
            if not self._fs.exists(self._full(source)):
                return False
            try:
                self._fs.mv(self._full(source), self._full(target))
            except Exception:
                # Another process has moved it between the two calls, or this is a failure.
                if self._fs.exists(self._full(source)):
                    raise
                return False
        return True

    def _beside(self, path: str) -> str:
        return f"{path}.{uuid.uuid4().hex}.unfinished"

    @override
    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(self._full(path.rpartition("/")[0]), exist_ok=True)


def follow_option_references(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with references to secrets replaced by the secrets, to open a client.

    Raises:
        ConfigError: A reference cannot be resolved here.
    """
    resolved: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            resolved[name] = follow_option_references(cast("Mapping[str, Any]", value))
        elif isinstance(value, str):
            resolved[name] = follow_references(value, setting=f"storage_options[{name!r}]")
        else:
            resolved[name] = value
    return resolved


def secrets_of(options: Mapping[str, Any], *, known_secret: bool = False) -> list[str]:
    """Return each text in `options` whose name marks it as secret, longest first."""
    secrets: list[str] = []
    for name, value in options.items():
        secret = known_secret or _SECRET.search(name) is not None
        if isinstance(value, Mapping):
            secrets += secrets_of(cast("Mapping[str, Any]", value), known_secret=secret)
        elif secret and isinstance(value, str) and len(value) >= _SECRET_LENGTH_MIN:
            secrets.append(value)
    return sorted(secrets, key=len, reverse=True)
