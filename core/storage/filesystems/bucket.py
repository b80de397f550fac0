"""A bucket of an object store as a file system: S3 and compatible stores, Google, Azure.

    creation    one conditional request (S3 and Azure `If-None-Match: *`, Google
                `x-goog-if-generation-match: 0`); of several requests at the same time, the service
                accepts one
    writing     one request, or parallel parts for data larger than a part; the object becomes
                visible, whole, when the last request is answered
    retries     by the client (obstore): throttling, broken connections, 5xx, until `Patience` ends

If a reply is lost, it is unknown whether the creation succeeded. The existing bytes are then read
back, and the caller compares them with its own. An answer "exists" may be caused by the client's
own repeated request, so it does not prove that another process created the object.

Source: Amazon S3 API, PutObject (If-None-Match), since 2024-08; read-after-write since 2020-12.
"""

from __future__ import annotations

import io
import queue
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import chain
from typing import IO, Any, TypeVar, cast

from typing_extensions import override

from onceflow.core.errors import OnceflowError, StorageError
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.filesystems.bucket_settings import BucketSettings
from onceflow.core.storage.filesystems.local import CHUNK_BYTES

T = TypeVar("T")

_DELETE_MAX = 1000
"""The number of objects that one request to S3 may delete."""

_REFUSALS = {
    "NoSuchBucket": "create the bucket first, or correct its name",
    "InvalidBucketName": "a bucket cannot have this name: correct it",
    "InvalidResourceName": "a container cannot have this name: correct it",
    "ContainerNotFound": "create the container first, or correct its name",
    "AccessDenied": "grant the credentials the right to list, read, write and delete there",
    "InvalidAccessKeyId": "the store has no such access key: correct the credentials",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: correct it",
    "ExpiredToken": "the credentials have expired: renew them, and name a source that is renewed"
    " (${file:…}, or the machine's own role)",
    "InvalidToken": "the session token is not valid: renew the credentials",
    "RequestTimeTooSkewed": "the clock of this machine differs from the store's: set it (NTP)",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
    "NotImplemented": "the store does not support this request",
    "QuotaExceeded": "the store's quota is used up: raise it or delete what is not needed",
    "AuthenticationRequired": "the store rejects this token: renew the credentials",
    "AuthenticationFailed": "the key or signature does not belong to the account, or has expired"
    " (or the clock of this machine differs from the store's): correct"
    " it",
    "AuthorizationFailure": "the key or signature does not belong to the account: correct it",
    "AuthorizationPermissionMismatch": "grant the credentials the role Storage Blob Data"
    " Contributor in the container",
}
"""Failures that persist until someone acts, by the store's error code, with the remedy."""
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
"""The error codes among them that mean that the bucket, not the object, is missing."""
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
"""The error codes of credentials that were once valid. Amazon's status for them is 400, not 403."""
_BAD_REQUEST = "400 Bad Request"
_NO_CREDENTIALS = re.compile(r"token request|169\.254\.\d+\.\d+|metadata\.google")
"""The services of a cloud machine that a client asks last for credentials."""


class BucketFiles(filesystem.CreatesAtomically, filesystem.Copies):
    """The objects below one prefix of a bucket. Connects at the first use; any thread.

    Only the client that it opens holds credentials; its own attributes never do.
    """

    at_once_max = filesystem.REQUESTS_AT_ONCE_MAX

    def __init__(self, settings: BucketSettings) -> None:
        """Store the settings. Opens no connection yet."""
        self._settings = settings
        self._lock = threading.Lock()
        self._opened: Any = None

    @property
    def store(self) -> Any:
        """The client of obstore, opened once in this process."""
        with self._lock:
            if self._opened is None:
                self._opened = self._settings.client()
            return self._opened

    @override
    def location(self, path: str) -> str:
        return f"{self._settings.url}/{path}".rstrip("/")

    # --- creating and writing -----------------------------------------------------------------

    @override
    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        try:
            with self.explain_failure("create", path):
                self._ask(lambda store: store.put(path, data, mode="create"))
        # A persistent refusal: the request was answered, so nothing was created.
        except filesystem.StorageRefused:
            raise
        except StorageError as error:
            return self._standing(path, error)
        return filesystem.Created()

    def _standing(self, path: str, error: StorageError) -> filesystem.AlreadyExists:
        """Return the object at `path`, after a creation that may have failed."""
        try:
            existing = self.read(path)
        except StorageError as unread:
            raise filesystem.CreationUnknown(
                f"{error}; and the object cannot be read back: {unread}"
            ) from None
        if existing is None:
            raise filesystem.CreationUnknown(
                f"{error}; the object does not exist now, but may still appear"
            ) from None
        return filesystem.AlreadyExists(existing)

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        pieces = iter(chunks)
        # Data that fits into one part is sent in one request. An upload in parts would need three.
        first, ended = _first_part(pieces, self._settings.part_bytes)
        with self.explain_failure("write", path):
            if ended:
                self._ask(lambda store: store.put(path, first, use_multipart=False))
                return len(first)
            counted = filesystem.CountedChunks(chain((first,), pieces))
            self.put_parts(path, counted)
            return counted.size_bytes

    def put_parts(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Upload the joined `pieces` to `path`, in parts. Raises the client's errors."""
        try:
            self.store.put(
                path,
                iter(pieces),
                use_multipart=True,
                chunk_size=self._settings.part_bytes,
                max_concurrency=self._settings.parts_at_once,
            )
        except _client_error() as error:
            # The pieces cannot be read again here. The caller's next try uses the new credentials.
            if self._refuses_credentials(error):
                self._forget_client()
            raise

    @override
    def copy(self, source: str, target: str) -> bool:
        with self.explain_failure("copy a file to", target):
            try:
                self._ask(lambda store: store.copy(source, target))
            except FileNotFoundError:
                # The source or the bucket may be missing. Only for a missing source, return False.
                if self.size(source) is None:
                    return False
                raise
        return True

    # --- reading ------------------------------------------------------------------------------

    @override
    def read(self, path: str) -> bytes | None:
        with self.explain_failure("read", path):
            return self._ask_if_present(lambda store: bytes(store.get(path).bytes()))

    @override
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        with self.explain_failure("read", path):
            result = self._ask_if_present(lambda store: store.get(path))
        if result is None:
            return None
        size_bytes = result.meta["size"]
        # The first reply already carries the body, so just read it.
        if size_bytes <= self._settings.part_bytes:
            return self._pieces(path, result)
        return self._side_by_side(path, size_bytes, result.meta["e_tag"])

    def _pieces(self, path: str, result: Any) -> Iterator[bytes]:
        with self.explain_failure("read", path):
            whole = memoryview(result.bytes())
        for start in range(0, len(whole), CHUNK_BYTES):
            yield bytes(whole[start : start + CHUNK_BYTES])

    def _side_by_side(self, path: str, size_bytes: int, e_tag: str | None) -> Iterator[bytes]:
        """Yield a large object in order, while the next parts are requested in parallel."""
        part, window = self._settings.part_bytes, self._settings.parts_at_once

        def read(start: int) -> Any:
            options: Any = {"range": (start, min(start + part, size_bytes))}
            if e_tag:  # fails if the object was replaced meanwhile
                options["if_match"] = e_tag
            return self._ask(lambda store: store.get(path, options=options).bytes())

        with ThreadPoolExecutor(window, thread_name_prefix="bucket-read") as threads:
            starts = iter(range(0, size_bytes, part))
            under_way = [
                threads.submit(read, start) for start, _ in zip(starts, range(window), strict=False)
            ]
            try:
                while under_way:
                    with self.explain_failure("read", path):
                        done = memoryview(under_way.pop(0).result())
                    # For each part that arrived, request one more: `parts_at_once` requests run,
                    # and no more parts are in memory.
                    for start in starts:
                        under_way.append(threads.submit(read, start))
                        break
                    for offset in range(0, len(done), CHUNK_BYTES):
                        yield bytes(done[offset : offset + CHUNK_BYTES])
            finally:
                for future in under_way:
                    future.cancel()

    @override
    def size(self, path: str) -> int | None:
        with self.explain_failure("look at", path):
            meta = self._ask_if_present(lambda store: store.head(path))
        return None if meta is None else meta["size"]

    @override
    def find_modified_time(self, path: str) -> datetime | None:
        with self.explain_failure("look at", path):
            meta = self._ask_if_present(lambda store: store.head(path))
        return None if meta is None else meta["last_modified"]

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        with self.explain_failure("list", directory):
            listing = self._ask(lambda store: store.list_with_delimiter(directory or None))
        # A directory of an object store is only a prefix that several names share.
        paths = chain((entry["path"] for entry in listing["objects"]), listing["common_prefixes"])
        names = {path.rstrip("/").rpartition("/")[2] for path in paths}
        return tuple(sorted(names))

    @override
    def visible_files(self) -> Sequence[str]:
        return sorted(path for path in self._below("") if filesystem.is_visible(path))

    def _below(self, directory: str) -> Sequence[str]:
        with self.explain_failure("list", directory):
            return self._ask(
                lambda store: [
                    entry["path"]
                    for page in store.list(directory or None)
                    for entry in cast("list[Any]", page)
                ]
            )

    # --- deleting -----------------------------------------------------------------------------

    @override
    def delete(self, path: str) -> None:
        with self.explain_failure("delete", path):
            self._ask_if_present(lambda store: store.delete(path))

    @override
    def delete_tree(self, path: str) -> None:
        paths = self._below(path)
        if not self._settings.deletes_many:
            self.for_each(self.delete, paths)
            return
        for start in range(0, len(paths), _DELETE_MAX):
            with self.explain_failure("delete", path):
                self._ask(partial(_delete_all, paths[start : start + _DELETE_MAX]))

    @override
    def delete_directory_if_empty(self, path: str) -> None:
        """Do nothing: a bucket has no directories, and listing objects would cost a request."""

    # --- files that are filled piece by piece --------------------------------------------------

    @override
    def create(self, path: str) -> IO[bytes]:
        return cast("IO[bytes]", _Upload(self, path, self._settings.part_bytes))

    @override
    def finish(self, file: IO[bytes], path: str) -> int:
        upload = cast("_Upload", file)
        with self.explain_failure("write", path):
            return upload.complete()

    @override
    def drop(self, file: IO[bytes], path: str) -> None:
        cast("_Upload", file).give_up()
        self.delete_quietly(path)

    @override
    def make_names_durable(self, directory: str) -> None:
        """Do nothing: a finished object has its name already."""

    # --- asking the store ---------------------------------------------------------------------

    @override
    @contextmanager
    def explain_failure(self, action: str, path: str) -> Generator[None]:
        """Convert a failure into an error that names action, object and, if known, the remedy."""
        try:
            yield
        except OnceflowError:
            raise
        except (_client_error(), OSError, TimeoutError) as error:
            text, code = self._settings.describe_error(error)
            message = f"cannot {action} {self.location(path)}: {text}"
            refusal = _REFUSALS.get(code)
            if refusal is None and isinstance(error, _credentials_refused()):
                refusal = _REFUSALS["AccessDenied"]
            if refusal is None and _NO_CREDENTIALS.search(text):
                refusal = "no credentials were found: set them in the environment, or as options"
            if refusal is None and isinstance(error, FileNotFoundError):
                refusal = _REFUSALS["NoSuchBucket"]
            if refusal is not None:
                raise filesystem.StorageRefused(f"{message}; {refusal}") from None
            raise StorageError(message) from None

    def _ask_if_present(self, ask: Callable[[Any], T]) -> T | None:
        """Return the result of `ask`, or None if the bucket exists and the object does not."""
        try:
            return self._ask(ask)
        except FileNotFoundError as error:
            if any(word in str(error) for word in _NO_BUCKET):
                raise
            return None

    def _ask(self, ask: Callable[[Any], T]) -> T:
        """Return the result of `ask`.

        If the credentials are refused, read them again and retry once.
        """
        try:
            return ask(self.store)
        except _client_error() as error:
            if not (self._settings.by_reference and self._refuses_credentials(error)):
                raise
            # The file of a credentials reference may hold new credentials by now.
            self._forget_client()
            return ask(self.store)

    def _refuses_credentials(self, error: Exception) -> bool:
        """Return True if the store refused, or may have refused, the credentials."""
        if isinstance(error, _credentials_refused()):
            return True
        text, code = self._settings.describe_error(error)
        # Amazon answers 400 to an expired token. The answer to HEAD has no body and so no error
        # code.
        return code in _EXPIRED or (not code and _BAD_REQUEST in text)

    def _forget_client(self) -> None:
        with self._lock:
            self._opened = None


# Imported at the first use, like the client: a user without buckets needs no package for them.


def _client_error() -> type[Exception]:
    from obstore.exceptions import BaseError

    return BaseError


def _credentials_refused() -> tuple[type[Exception], ...]:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    return PermissionDeniedError, UnauthenticatedError


def _delete_all(paths: Sequence[str], store: Any) -> None:
    store.delete(paths)


class _Upload(io.RawIOBase):
    """A file being uploaded: held in memory up to one part, then sent in parts by a thread.

    Used by one thread. A failure of the upload is raised by the next `write`, or by `complete`.
    """

    def __init__(self, files: BucketFiles, path: str, part_bytes: int) -> None:
        super().__init__()
        self._files = files
        self._path = path
        self._part_bytes = part_bytes
        self._held = bytearray()
        self._size_bytes = 0
        # Two: one part is being sent and one waits, so memory does not grow with the file.
        self._parts: queue.Queue[bytes | _GivenUp | None] = queue.Queue(2)
        self._sender: threading.Thread | None = None
        self._failure: BaseException | None = None

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._size_bytes

    @override
    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._held += view
        self._size_bytes += len(view)
        while len(self._held) >= self._part_bytes:
            self._send(bytes(self._held[: self._part_bytes]))
            del self._held[: self._part_bytes]
        return len(view)

    def complete(self) -> int:
        """Finish the upload and return the size. Raises the upload's failure."""
        if self._sender is None:
            self._files.write(self._path, (bytes(self._held),))
        else:
            if self._held:
                self._send(bytes(self._held))
            self._send(None)
            self._sender.join()
            self._check()
        self._held = bytearray()
        super().close()
        return self._size_bytes

    def give_up(self) -> None:
        """Abort the upload, so that no object becomes visible. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None and sender.is_alive():
            with suppress(OnceflowError):
                self._put(sender, _GivenUp("the upload was abandoned"))
            sender.join()
        super().close()

    @override
    def close(self) -> None:
        """Do nothing: Arrow closes files after writing, and `complete` makes them visible."""

    def _send(self, part: bytes | None) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._upload, name="upload", daemon=True)
            self._sender.start()
        self._put(self._sender, part)

    def _put(self, sender: threading.Thread, part: bytes | _GivenUp | None) -> None:
        # If the sender has failed, it takes no more parts, so a `put` without a timeout would never
        # return.
        while sender.is_alive():
            with suppress(queue.Full):
                self._parts.put(part, timeout=0.1)
                return
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _upload(self) -> None:
        try:
            with self._files.explain_failure("write", self._path):
                self._files.put_parts(self._path, self._iterate_parts())
        except BaseException as error:
            self._failure = error

    def _iterate_parts(self) -> Iterator[bytes]:
        while (part := self._parts.get()) is not None:
            # Raised inside the client, which then aborts the upload. An upload without its end is
            # invisible.
            if isinstance(part, _GivenUp):
                raise part
            yield part


class _GivenUp(StorageError):
    """Raised inside an upload to abort it without a trace."""


def _first_part(pieces: Iterator[bytes | memoryview], part_bytes: int) -> tuple[bytes, bool]:
    """Return the first bytes of `pieces`, and True if that is all of them.

    Stops reading once the bytes no longer fit into one part.
    """
    first_pieces: list[bytes | memoryview] = []
    size_bytes = 0
    for piece in pieces:
        first_pieces.append(piece)
        size_bytes += memoryview(piece).nbytes
        if size_bytes > part_bytes:
            return b"".join(first_pieces), False
    return b"".join(first_pieces), True
