"""A directory of an HDFS as a file system, over WebHDFS.

    whole or nothing    bytes are written to `.<name>.<unique>.tmp` next to their target, and a
                        rename shows them: one step of the NameNode, which writes it to its edit log
                        before it answers
    creation            that rename without OVERWRITE: of simultaneous ones, one succeeds, because
                        a NameNode changes names under one lock and refuses an existing name
    durable             a closed file is on as many DataNodes as `dfs.namenode.replication.min`
                        says, in their memory or on disk: `dfs.datanode.synconclose` says on disk

If a reply is lost, it is unknown whether the rename was carried out. The temporary name is unique,
so the bytes at the target are read back, and the caller compares them with its own.

Source: Apache Hadoop 3.5, "The Hadoop FileSystem API Definition": rename(src, dest, options).
"""

from __future__ import annotations

import re
import tempfile
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import IO, Any, cast

from typing_extensions import override

from onceflow.core.errors import OnceflowError, StorageError
from onceflow.core.storage.filesystems import filesystem, webhdfs
from onceflow.core.storage.filesystems.local import CHUNK_BYTES

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
_SPOOLED_BYTES_MAX = 64 << 20
"""The size above which a file that is filled piece by piece moves to the local disk."""
_TRIES_MAX = 4
"""The number of tries of a rename: its directory may be deleted meanwhile, or a reply be lost."""
_DIRECTORY_GOES = "another process keeps deleting the directory"
_GONE = "FileNotFoundException"
_BELOW_A_FILE = "ParentNotDirectoryException"
_TAKEN = "FileAlreadyExistsException"
_NOT_EMPTY = "PathIsNotEmptyDirectoryException"
_REFUSALS = {
    "AccessControlException": "give this user read and write access (hdfs dfs -chown)",
    "SecurityException": "HDFS requires authentication: give a delegation token",
    "AuthenticationException": "HDFS requires authentication: give a delegation token",
    "InvalidToken": "renew the delegation token",
    _BELOW_A_FILE: "a file is at the path of a directory: move it away",
    "UnsupportedOperationException": "WebHDFS is switched off there (dfs.webhdfs.enabled)",
}
"""Failures that persist until someone acts, by HDFS's exception name, with the remedy."""


class HdfsFiles(filesystem.CreatesAtomically, filesystem.Renames):
    """The files below one directory of an HDFS. Connects at the first use; any thread."""

    at_once_max = filesystem.REQUESTS_AT_ONCE_MAX

    def __init__(self, settings: webhdfs.HdfsSettings) -> None:
        """Store the settings. Opens no connection yet."""
        self._settings = settings
        self._hdfs = webhdfs.WebHdfs(settings)

    @override
    def location(self, path: str) -> str:
        return f"{self._settings.url.rstrip('/')}/{path}".rstrip("/")

    def _full(self, path: str) -> str:
        return f"{self._settings.root}/{path}".rstrip("/") or "/"

    # --- creating and writing -----------------------------------------------------------------

    @override
    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        temporary = _beside(path)
        try:
            with self.explain_failure("create", path):
                self._make_parent(path)
                self._hdfs.put(self._full(temporary), data)
                return self._create(temporary, path)
        finally:
            self.delete_quietly(temporary)

    def _create(self, temporary: str, path: str) -> filesystem.CreateOutcome:
        """Rename `temporary` to `path` unless that exists. If a reply is lost, try again."""
        lost: StorageError | None = None
        for _ in range(_TRIES_MAX):
            try:
                self._rename(temporary, path, "NONE")
            except webhdfs.ReplyLost as error:
                lost = error
                continue
            except webhdfs.RemoteError as error:
                if error.name == _GONE and self.size(temporary) is not None:
                    self._make_parent(path)  # another process deleted the directory
                    continue
                # After a lost reply, a refusal may be caused by our own rename, which succeeded.
                if lost is None and error.name not in (_TAKEN, _GONE):
                    raise
                return self._standing(path, error)
            except webhdfs.NotServed as error:
                if lost is None:
                    raise
                return self._standing(path, error)
            return filesystem.Created()
        if lost is None:
            raise StorageError(f"{_DIRECTORY_GOES}; tried {_TRIES_MAX} times")
        return self._standing(path, lost)

    def _standing(self, path: str, error: StorageError) -> filesystem.AlreadyExists:
        """Return the file at `path`, after a creation that may have failed."""
        try:
            existing = self.read(path)
        except StorageError as unread:
            raise filesystem.CreationUnknown(
                f"{error}; and it cannot be read back: {unread}"
            ) from None
        if existing is None:
            where = self.location(path)
            raise filesystem.CreationUnknown(
                f"{error}; {where} is not there now, and may still appear"
            )
        return filesystem.AlreadyExists(existing)

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        temporary = _beside(path)
        counted = filesystem.CountedChunks(chunks)
        # An empty chunk would end a chunked request body.
        sent = (bytes(chunk) for chunk in counted if memoryview(chunk).nbytes)
        try:
            with self.explain_failure("write", path):
                self._make_parent(path)
                self._hdfs.put_once(self._full(temporary), sent)
                self._show(temporary, path, counted.size_bytes)
        except BaseException:
            self.delete_quietly(temporary)
            raise
        return counted.size_bytes

    def _show(self, temporary: str, path: str, size_bytes: int) -> None:
        """Rename `temporary` to `path`, and replace an existing file."""
        for _ in range(_TRIES_MAX):
            try:
                self._rename(temporary, path, "OVERWRITE")
            except (webhdfs.RemoteError, webhdfs.ReplyLost) as error:
                if isinstance(error, webhdfs.RemoteError) and error.name != _GONE:
                    raise
                if self.size(temporary) is None:
                    # The source is gone and the target has our size: the rename whose reply was
                    # lost succeeded.
                    if self.size(path) == size_bytes:
                        return
                    raise
                self._make_parent(path)
                continue
            return
        raise StorageError(f"{_DIRECTORY_GOES}; tried {_TRIES_MAX} times")

    def _rename(self, source: str, target: str, options: str) -> None:
        self._hdfs.ask_once(
            "PUT",
            "RENAME",
            self._full(source),
            destination=self._full(target),
            renameoptions=options,
        )

    @override
    def rename(self, source: str, target: str) -> bool:
        with self.explain_failure("move a file to", target):
            for _ in range(_TRIES_MAX):
                self._make_parent(target)
                try:
                    self._rename(source, target, "OVERWRITE")
                except webhdfs.RemoteError as error:
                    if error.name != _GONE:
                        raise
                    if self.size(source) is None:
                        return False
                    continue
                except webhdfs.ReplyLost:
                    if self.size(source) is None:
                        # The source is gone: the rename was carried out, or another process moved
                        # or deleted it.
                        return self.size(target) is not None
                    continue
                return True
            raise StorageError(f"{_DIRECTORY_GOES}; tried {_TRIES_MAX} times")

    # --- reading ------------------------------------------------------------------------------

    @override
    def read(self, path: str) -> bytes | None:
        with self.explain_failure("read", path):
            try:
                return self._hdfs.get(self._full(path))
            except webhdfs.RemoteError as error:
                _check_missing(error)
                return None

    @override
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        with self.explain_failure("read", path):
            try:
                chunks = self._hdfs.stream(self._full(path), CHUNK_BYTES)
            except webhdfs.RemoteError as error:
                _check_missing(error)
                return None
        return self._read_chunks(chunks, path)

    def _read_chunks(self, chunks: Iterator[bytes], path: str) -> Iterator[bytes]:
        with self.explain_failure("read", path):
            yield from chunks

    @override
    def size(self, path: str) -> int | None:
        status = self._status(path)
        return None if status is None else int(status["length"])

    @override
    def find_modified_time(self, path: str) -> datetime | None:
        status = self._status(path)
        if status is None:
            return None
        return datetime.fromtimestamp(status["modificationTime"] / 1000, timezone.utc)

    def _status(self, path: str) -> dict[str, Any] | None:
        with self.explain_failure("look at", path):
            try:
                status = self._hdfs.ask("GET", "GETFILESTATUS", self._full(path))["FileStatus"]
            except webhdfs.RemoteError as error:
                _check_missing(error)
                return None
        return status if status["type"] == "FILE" else None

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        names = (str(status["pathSuffix"]) for status in self._statuses(directory))
        return tuple(sorted(name for name in names if not _TEMPORARY.fullmatch(name)))

    @override
    def list_unfinished(self, directory: str) -> tuple[filesystem.Unfinished, ...]:
        names = sorted(str(status["pathSuffix"]) for status in self._statuses(directory))
        matches = map(_TEMPORARY.fullmatch, names)
        return tuple(filesystem.Unfinished(match[0], match[1]) for match in matches if match)

    def _statuses(self, directory: str) -> Sequence[dict[str, Any]]:
        with self.explain_failure("list", directory):
            try:
                answer = self._hdfs.ask("GET", "LISTSTATUS", self._full(directory))
            except webhdfs.RemoteError as error:
                _check_missing(error)
                return []
        statuses = cast("list[dict[str, Any]]", answer["FileStatuses"]["FileStatus"])
        # If the path is a file, HDFS lists that file with an empty name.
        return [status for status in statuses if status["pathSuffix"]]

    @override
    def visible_files(self) -> Sequence[str]:
        files: list[str] = []
        directories = [""]
        while directories:
            directory = directories.pop()
            for status in self._statuses(directory):
                path = f"{directory}/{status['pathSuffix']}".lstrip("/")
                if filesystem.is_visible(path):
                    (files if status["type"] == "FILE" else directories).append(path)
        return sorted(files)

    # --- deleting -----------------------------------------------------------------------------

    @override
    def delete(self, path: str) -> None:
        self._delete(path, recursive="false")

    @override
    def delete_tree(self, path: str) -> None:
        self._delete(path, recursive="true")

    def _delete(self, path: str, *, recursive: str) -> None:
        with self.explain_failure("delete", path):
            try:
                self._hdfs.ask("DELETE", "DELETE", self._full(path), recursive=recursive)
            except webhdfs.RemoteError as error:
                _check_missing(error)

    @override
    def make_directory(self, path: str) -> None:
        with self.explain_failure("make directory", path):
            self._hdfs.ask("PUT", "MKDIRS", self._full(path))

    def _make_parent(self, path: str) -> None:
        self.make_directory(path.rpartition("/")[0])

    @override
    def delete_directory_if_empty(self, path: str) -> None:
        with self.explain_failure("delete directory", path):
            try:
                self._hdfs.ask("DELETE", "DELETE", self._full(path), recursive="false")
            except webhdfs.RemoteError as error:
                if error.name != _NOT_EMPTY:
                    _check_missing(error)

    # --- files that are filled piece by piece --------------------------------------------------

    @override
    def create(self, path: str) -> IO[bytes]:
        """Return a temporary file of this machine. `finish` sends it to HDFS."""
        # A request to a DataNode is one stream, which cannot stay open as long as a writer needs.
        return cast("IO[bytes]", tempfile.SpooledTemporaryFile(_SPOOLED_BYTES_MAX))

    @override
    def finish(self, file: IO[bytes], path: str) -> int:
        with file:
            file.seek(0)
            return self.write(path, iter(lambda: file.read(CHUNK_BYTES), b""))

    @override
    def drop(self, file: IO[bytes], path: str) -> None:
        file.close()

    @override
    def make_names_durable(self, directory: str) -> None:
        """Do nothing: a NameNode answers only when its edit log has the name."""

    @override
    @contextmanager
    def explain_failure(self, action: str, path: str) -> Generator[None]:
        """Convert a failure into an error that names action, file and, if known, the remedy."""
        try:
            yield
        except webhdfs.RemoteError as error:
            message = f"cannot {action} {self.location(path)}: {error}"
            refusal = _REFUSALS.get(error.name)
            if refusal is not None:
                raise filesystem.StorageRefused(f"{message}; {refusal}") from None
            raise StorageError(message) from None
        except (webhdfs.NotServed, webhdfs.ReplyLost, OSError) as error:
            raise StorageError(f"cannot {action} {self.location(path)}: {error}") from None
        except OnceflowError:
            raise


def _beside(path: str) -> str:
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}.{name}.{uuid.uuid4().hex}.tmp"


def _check_missing(error: webhdfs.RemoteError) -> None:
    """Raise `error` unless it means that there is no such file."""
    # Older versions report a path below a file as a missing right. Only the text tells.
    below_a_file = error.name == _BELOW_A_FILE or "(is not a directory)" in str(error)
    if error.name != _GONE and not below_a_file:
        raise error
