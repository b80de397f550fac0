"""A client of HDFS over HTTP, as each NameNode and DataNode serves it: requests, retries, errors.

The NameNode changes names, each in one step. Bytes are sent to and read from a DataNode that the
NameNode names. If several NameNodes are given, one in standby or out of reach is skipped.

Source: Apache Hadoop 3.5, "WebHDFS REST API".
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode

from onceflow.core.errors import ConfigError, StorageError
from onceflow.core.imports import naming_extras
from onceflow.core.secret_references import follow_references, has_reference
from onceflow.core.storage.filesystems.bucket_settings import Patience

T = TypeVar("T")

SCHEMES: Mapping[str, str] = {"webhdfs": "http", "swebhdfs": "https"}
_URL = re.compile(r"(s?webhdfs)://([^/?#@]+)(/[^?#]*)", re.IGNORECASE)
_PREFIX = "/webhdfs/v1"
_TEXTS = ("user", "token", "authority")
_NUMBERS = ("request_timeout_s", "retry_timeout_s")
_CONNECT_TIMEOUT_S = 5.0
_PAUSE_S = 0.05
_PAUSE_S_MAX = 3.0
"""The longest pause between requests while no NameNode serves. Each pause doubles the previous."""
_LATER = frozenset({"StandbyException", "RetriableException", "SafeModeException"})
"""The exceptions that pass: this NameNode does not serve now, or none does yet."""


class ReplyLost(StorageError):
    """Raised if a request was sent and it is unknown whether it was carried out."""


class NotServed(StorageError):
    """Raised if no NameNode has carried out a request, and none will."""


class RemoteError(StorageError):
    """Raised if HDFS answers with an exception; `name` is its name in HDFS."""

    def __init__(self, message: str, name: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.name = name
        self.status = status


@dataclass(frozen=True, slots=True)
class HdfsSettings:
    """A directory of an HDFS and the user of requests. Can be pickled; its text hides the token."""

    url: str
    """`webhdfs://namenode:9870/path`, `swebhdfs://` for TLS; several NameNodes with commas."""
    user: str = ""
    """The user of the request, if HDFS does not authenticate."""
    token: str = field(default="", repr=False)
    """A delegation token, by reference."""
    authority: str = ""
    """A file with the certificates that `swebhdfs` trusts. Default: the system's certificates."""
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if _URL.fullmatch(self.url) is None:
            raise ConfigError(
                f"{self.url.partition('://')[0]}://… names no directory of an HDFS: write"
                " webhdfs://namenode:9870/path (the NameNode's HTTP port), without a user"
            )
        if self.token and not has_reference(self.token):
            raise ConfigError(
                f"{self.url}: token holds a secret, which Spark would write to disks. Give a"
                " reference instead: ${env:NAME} or ${file:/path}"
            )
        if self.patience.request_timeout_s <= 0 or self.patience.retry_timeout_s < 0:
            raise ConfigError(f"{self.url}: a timeout must be over 0")

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> HdfsSettings:
        """Return the settings of `options` of a file sink.

        Raises:
            ConfigError: An option is unknown, or out of range.
        """
        texts = {name: str(options[name]) for name in _TEXTS if name in options}
        numbers = {name: float(options[name]) for name in _NUMBERS if name in options}
        if unknown := set(options) - set(_TEXTS) - set(_NUMBERS):
            known = ", ".join((*_TEXTS, *_NUMBERS))
            raise ConfigError(f"{url}: no option {', '.join(sorted(unknown))}; there are {known}")
        return cls(url, **texts, patience=Patience(**numbers))

    @property
    def _parts(self) -> tuple[str, str, str]:
        match = _URL.fullmatch(self.url)
        assert match is not None
        return match[1].lower(), match[2], match[3]

    @property
    def root(self) -> str:
        """The directory's path in HDFS."""
        return self._parts[2].rstrip("/")

    @property
    def name_nodes(self) -> tuple[str, ...]:
        """The addresses of the NameNodes, as URLs."""
        scheme, hosts, _ = self._parts
        return tuple(f"{SCHEMES[scheme]}://{host}" for host in hosts.split(",") if host)

    def identity(self) -> dict[str, str]:
        """Return the request parameters that identify the user.

        Raises:
            ConfigError: The reference of the token cannot be resolved.
        """
        if self.token:
            return {"delegation": follow_references(self.token, setting=f"token of {self.url}")}
        user = self.user or os.environ.get("HADOOP_USER_NAME", "")
        return {"user.name": user} if user else {}


def is_hdfs(url: str) -> bool:
    """Return True if `url` has a scheme of WebHDFS."""
    return url.partition("://")[0].lower() in SCHEMES and "://" in url


class WebHdfs:
    """A client of one HDFS. Any thread; connects at the first use."""

    def __init__(self, settings: HdfsSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._opened: Any = None
        self._current = 0
        """The index of the NameNode that served last."""

    # --- names ---------------------------------------------------------------------------------

    def ask(self, method: str, op: str, path: str, **parameters: str) -> dict[str, Any]:
        """Return the answer to a request that may be carried out twice.

        Raises:
            RemoteError: HDFS answers with an exception.
            NotServed: No NameNode has answered before the retry timeout.
        """
        return self._patiently(lambda: self._answer(method, op, path, parameters), (ReplyLost,))

    def ask_once(self, method: str, op: str, path: str, **parameters: str) -> dict[str, Any]:
        """Return the answer to a request that is carried out at most once.

        Raises:
            RemoteError: HDFS answers with an exception, and has changed nothing.
            NotServed: No NameNode has accepted the request.
            ReplyLost: A NameNode has the request; it is unknown whether it was carried out.
        """
        return self._patiently(lambda: self._answer(method, op, path, parameters), ())

    # --- bytes ---------------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> None:
        """Write `data` to `path`, and replace an existing file.

        Repeats the request until it succeeds.

        Readers may see a partial file meanwhile. Raises the errors of `ask`.
        """
        self._patiently(lambda: self._put(path, data), (ReplyLost,))

    def put_once(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write the joined `chunks`, which can be sent only once, to `path`.

        Raises:
            RemoteError, NotServed, ReplyLost: As `ask_once`; a partial file may exist.
        """
        self._put(path, chunks)

    def get(self, path: str) -> bytes:
        """Return the content of `path`. Raises the errors of `ask`."""

        def read() -> bytes:
            response = self._open_file(path)
            with _translate_lost_connection("read"):
                return bytes(response.data)

        return self._patiently(read, (ReplyLost,))

    def stream(self, path: str, chunk_bytes: int) -> Iterator[bytes]:
        """Yield the content of `path`.

        Raises:
            RemoteError, NotServed: As `ask`, before the first chunk.
            ReplyLost: The connection broke.
        """
        response = self._patiently(lambda: self._open_file(path), (ReplyLost,))

        def chunks() -> Iterator[bytes]:
            try:
                with _translate_lost_connection("read"):
                    yield from response.stream(chunk_bytes)
            finally:
                response.release_conn()

        return chunks()

    # --- requests ------------------------------------------------------------------------------

    def _open_file(self, path: str) -> Any:
        location = self._answer("GET", "OPEN", path, {"noredirect": "true"})["Location"]
        return self._require_ok(self._request("GET", str(location)))

    def _put(self, path: str, body: bytes | Iterable[bytes]) -> None:
        parameters = {"overwrite": "true", "noredirect": "true"}
        # Requested without the body: a NameNode would drop the body if it redirects.
        location = self._answer("PUT", "CREATE", path, parameters)["Location"]
        response = self._require_ok(self._request("PUT", str(location), body))
        with _translate_lost_connection("read the answer"):
            response.drain_conn()

    def _answer(
        self, method: str, op: str, path: str, parameters: Mapping[str, str]
    ) -> dict[str, Any]:
        base = self._settings.name_nodes[self._current]
        query = urlencode({"op": op, **parameters, **self._settings.identity()})
        url = f"{base}{_PREFIX}{quote(path)}?{query}"
        response = self._require_ok(self._request(method, url))
        with _translate_lost_connection("read the answer"):
            text = response.data
        return cast("dict[str, Any]", json.loads(text)) if text else {}

    def _request(self, method: str, url: str, body: bytes | Iterable[bytes] | None = None) -> Any:
        client = self._client()  # first: it names the extra that is missing
        from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

        try:
            return client.request(
                method,
                url,
                body=body,
                preload_content=False,
                redirect=False,
                retries=False,
                headers={"Content-Type": "application/octet-stream"},
            )
        # Without a connection nothing was sent, so every request may be repeated.
        except (NewConnectionError, ConnectTimeoutError) as error:
            raise _Later(_without_query(str(error))) from None
        except HTTPError as error:
            raise ReplyLost(_without_query(str(error))) from None

    def _require_ok(self, response: Any) -> Any:
        """Return `response` if it is no error. Otherwise raise the error that it describes."""
        if response.status < 300:
            return response
        with _translate_lost_connection("read the answer"):
            text = response.data.decode("utf-8", "replace")
        try:
            exception = json.loads(text)["RemoteException"]
            name, message = str(exception["exception"]), str(exception["message"])
        except (ValueError, KeyError, TypeError):
            name, message = f"HTTP {response.status}", _without_query(text[:300])
            # Not an answer of HDFS, but of a proxy or a servlet: the request may have been carried
            # out.
            if response.status >= 500:
                raise ReplyLost(f"{name}: {message}") from None
        first_line = message.partition("\n")[0]
        # The exception may be wrapped in another one, whose text names it.
        if name in _LATER or any(later in first_line for later in _LATER):
            raise _Later(f"{name}: {first_line}")
        raise RemoteError(f"{name}: {first_line}", name, response.status)

    def _patiently(self, call: Callable[[], T], again_after: tuple[type[StorageError], ...]) -> T:
        deadline = time.monotonic() + self._settings.patience.retry_timeout_s
        pause_s = _PAUSE_S
        while True:
            try:
                return call()
            except StorageError as error:
                if not isinstance(error, (_Later, *again_after)):
                    raise
                if time.monotonic() + pause_s > deadline:
                    raise NotServed(
                        f"{error}; retried for {self._settings.patience.retry_timeout_s:g} s"
                    ) from None
            # Try the next NameNode: this one may be in standby, or gone.
            self._current = (self._current + 1) % len(self._settings.name_nodes)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _client(self) -> Any:
        with self._lock:
            if self._opened is None:
                with naming_extras():
                    import urllib3
                total_s = self._settings.patience.request_timeout_s
                self._opened = urllib3.PoolManager(
                    maxsize=16,
                    timeout=urllib3.Timeout(connect=min(_CONNECT_TIMEOUT_S, total_s), read=total_s),
                    ca_certs=self._settings.authority or None,
                )
            return self._opened


class _Later(StorageError):
    """Raised if a request was not carried out, for a reason that may pass."""


@contextmanager
def _translate_lost_connection(action: str) -> Generator[None]:
    """Raise ReplyLost if the connection breaks while bytes are transferred."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (HTTPError, OSError) as error:
        raise ReplyLost(f"cannot {action}: {_without_query(str(error))}") from None


def _without_query(text: str) -> str:
    """Return `text` without query parameters that may hold a token or a user."""
    return re.sub(r"(delegation|user\.name)=[^&\s'\")]*", r"\1=***", text)
