"""A directory of an HDFS as a file system, over WebHDFS.

    whole or nothing    bytes go to `.<name>.<unique>.tmp` beside their target, and a rename shows
                        them: one step of the NameNode, written to its edit log before it answers
    creation            that rename without OVERWRITE: of any number at one moment one succeeds, for
                        a NameNode changes names under one lock, and refuses a name that is taken
    durable             a closed file is on as many DataNodes as `dfs.namenode.replication.min`
                        says, in their memory or on disk: `dfs.datanode.synconclose` says on disk

A reply that is lost leaves a rename unknown. It is not guessed: the temporary name is unique, so
what stands under the target's name is read back, and who compares the bytes learns whose they are.

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
from onceflow.core.storage.filesystems.filesystem import (
    REQUESTS_AT_ONCE_MAX,
    AlreadyExists,
    CountedChunks,
    Created,
    CreateOutcome,
    CreatesAtomically,
    CreationUnknown,
    Renames,
    StorageRefused,
    Unfinished,
    is_visible,
)
from onceflow.core.storage.filesystems.local import CHUNK_BYTES
from onceflow.core.storage.filesystems.webhdfs import (
    HdfsSettings,
    NotServed,
    RemoteError,
    ReplyLost,
    WebHdfs,
)

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
_SPOOLED_BYTES_MAX = 64 << 20
"""The size above which a file that is filled piece by piece waits on the local disk."""
_TRIES_MAX = 4
"""How often a name is moved again: its directory was deleted meanwhile, or a reply was lost."""
_DIRECTORY_GOES = "somebody keeps deleting the directory"
_GONE = "FileNotFoundException"
_BELOW_A_FILE = "ParentNotDirectoryException"
_TAKEN = "FileAlreadyExistsException"
_NOT_EMPTY = "PathIsNotEmptyDirectoryException"
_REFUSALS = {
    "AccessControlException": "let the user of the request read and write there (hdfs dfs -chown)",
    "SecurityException": "HDFS asks for proof of who this is: give a delegation token",
    "AuthenticationException": "HDFS asks for proof of who this is: give a delegation token",
    "InvalidToken": "renew the delegation token",
    _BELOW_A_FILE: "a file stands where a directory must be: move it away",
    "UnsupportedOperationException": "WebHDFS is switched off there (dfs.webhdfs.enabled)",
}
"""What stays as it is until somebody acts on it, by HDFS's own word for it."""


class HdfsFiles(CreatesAtomically, Renames):
    """The files below one directory of an HDFS. Connects when it is first used; any thread."""

    at_once_max = REQUESTS_AT_ONCE_MAX

    def __init__(self, settings: HdfsSettings) -> None:
        """Touch nothing yet."""
        self._settings = settings
        self._hdfs = WebHdfs(settings)

    @override
    def location(self, path: str) -> str:
        return f"{self._settings.url.rstrip('/')}/{path}".rstrip("/")

    def _full(self, path: str) -> str:
        return f"{self._settings.root}/{path}".rstrip("/") or "/"

    # --- creating and writing -----------------------------------------------------------------

    @override
    def create_if_absent(self, path: str, data: bytes) -> CreateOutcome:
        temporary = _beside(path)
        try:
            with self.explain_failure("create", path):
                self._make_parent(path)
                self._hdfs.put(self._full(temporary), data)
                return self._create(temporary, path)
        finally:
            self.delete_quietly(temporary)

    def _create(self, temporary: str, path: str) -> CreateOutcome:
        """Move `temporary` to `path` unless that is taken; a lost reply is asked for again."""
        lost: StorageError | None = None
        for _ in range(_TRIES_MAX):
            try:
                self._rename(temporary, path, "NONE")
            except ReplyLost as error:
                lost = error
                continue
            except RemoteError as error:
                if error.name == _GONE and self.size(temporary) is not None:
                    self._make_parent(path)  # somebody has deleted the directory
                    continue
                # After a lost reply any refusal may be the echo of our own rename that succeeded.
                if lost is None and error.name not in (_TAKEN, _GONE):
                    raise
                return self._standing(path, error)
            except NotServed as error:
                if lost is None:
                    raise
                return self._standing(path, error)
            return Created()
        if lost is None:
            raise StorageError(f"{_DIRECTORY_GOES}; tried {_TRIES_MAX} times")
        return self._standing(path, lost)

    def _standing(self, path: str, error: StorageError) -> AlreadyExists:
        """Return what stands at `path` after a creation that did not succeed for certain."""
        try:
            existing = self.read(path)
        except StorageError as unread:
            raise CreationUnknown(f"{error}; and it cannot be read back: {unread}") from None
        if existing is None:
            where = self.location(path)
            raise CreationUnknown(f"{error}; {where} is not there now, and may still appear")
        return AlreadyExists(existing)

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        temporary = _beside(path)
        counted = CountedChunks(chunks)
        # An empty chunk would end a body that is sent in chunks.
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
        """Move `temporary` onto `path`, whatever is there."""
        for _ in range(_TRIES_MAX):
            try:
                self._rename(temporary, path, "OVERWRITE")
            except (RemoteError, ReplyLost) as error:
                if isinstance(error, RemoteError) and error.name != _GONE:
                    raise
                if self.size(temporary) is None:
                    # The source is gone and the target has our size: the try whose reply was lost
                    # did it.
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
                except RemoteError as error:
                    if error.name != _GONE:
                        raise
                    if self.size(source) is None:
                        return False
                    continue
                except ReplyLost:
                    if self.size(source) is None:
                        # The source is gone: the rename was carried out, or somebody else moved or
                        # deleted it.
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
            except RemoteError as error:
                _check_missing(error)
                return None

    @override
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        with self.explain_failure("read", path):
            try:
                chunks = self._hdfs.stream(self._full(path), CHUNK_BYTES)
            except RemoteError as error:
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
            except RemoteError as error:
                _check_missing(error)
                return None
        return status if status["type"] == "FILE" else None

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        names = (str(status["pathSuffix"]) for status in self._statuses(directory))
        return tuple(sorted(name for name in names if not _TEMPORARY.fullmatch(name)))

    @override
    def list_unfinished(self, directory: str) -> tuple[Unfinished, ...]:
        names = sorted(str(status["pathSuffix"]) for status in self._statuses(directory))
        matches = map(_TEMPORARY.fullmatch, names)
        return tuple(Unfinished(match[0], match[1]) for match in matches if match)

    def _statuses(self, directory: str) -> Sequence[dict[str, Any]]:
        with self.explain_failure("list", directory):
            try:
                answer = self._hdfs.ask("GET", "LISTSTATUS", self._full(directory))
            except RemoteError as error:
                _check_missing(error)
                return []
        statuses = cast("list[dict[str, Any]]", answer["FileStatuses"]["FileStatus"])
        # Asked for a file, HDFS lists that file with an empty name.
        return [status for status in statuses if status["pathSuffix"]]

    @override
    def visible_files(self) -> Sequence[str]:
        files: list[str] = []
        directories = [""]
        while directories:
            directory = directories.pop()
            for status in self._statuses(directory):
                path = f"{directory}/{status['pathSuffix']}".lstrip("/")
                if is_visible(path):
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
            except RemoteError as error:
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
            except RemoteError as error:
                if error.name != _NOT_EMPTY:
                    _check_missing(error)

    # --- files that are filled piece by piece --------------------------------------------------

    @override
    def create(self, path: str) -> IO[bytes]:
        """Return a file of this machine: HDFS is given it when it is finished."""
        # A request to a DataNode is one stream: it cannot stay open for as long as a writer takes.
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
        """Nothing is left to do: a NameNode answers when its edit log has the name."""

    @override
    @contextmanager
    def explain_failure(self, action: str, path: str) -> Generator[None]:
        """Turn a failure into an error that names action, file and, if it is known, the remedy."""
        try:
            yield
        except RemoteError as error:
            message = f"cannot {action} {self.location(path)}: {error}"
            refusal = _REFUSALS.get(error.name)
            if refusal is not None:
                raise StorageRefused(f"{message}; {refusal}") from None
            raise StorageError(message) from None
        except (NotServed, ReplyLost, OSError) as error:
            raise StorageError(f"cannot {action} {self.location(path)}: {error}") from None
        except OnceflowError:
            raise


def _beside(path: str) -> str:
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}.{name}.{uuid.uuid4().hex}.tmp"


def _check_missing(error: RemoteError) -> None:
    """Raise `error` unless it says that there is no such file."""
    # Older versions report a path below a file as a missing right, and tell it by the text alone.
    below_a_file = error.name == _BELOW_A_FILE or "(is not a directory)" in str(error)
    if error.name != _GONE and not below_a_file:
        raise error
