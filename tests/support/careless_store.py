"""An object store of one process that can be careless: what no real server does when asked."""

from __future__ import annotations

import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from typing_extensions import Self, override


class CarelessStore:
    """Speaks as much of S3 as storage asks for; signatures are not looked at.

    `heeds_conditions`: whether `If-None-Match: *` keeps an object from being replaced.
    `throttled`: so many requests from now on are answered with 503 SlowDown.
    `refuses_with`: every request is answered with 400 and this word.
    `token`: requests with another session token are answered with 400 ExpiredToken, as Amazon does.
    `lists_only`: listings hold these objects alone, as those of a store do that lists late.
    `requests`: how many requests of each kind there were: GET, HEAD, LIST, PUT, POST, DELETE.
    """

    def __init__(self, *, heeds_conditions: bool = True) -> None:
        self.heeds_conditions = heeds_conditions
        self.throttled = 0
        self.refuses_with = ""
        self.refused = 0
        self.token = ""
        self.lists_only: frozenset[str] | None = None
        self.requests: Counter[str] = Counter()
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        store = self

        class Handler(_Handler):
            careless = store

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    careless: CarelessStore

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _refused(self) -> bool:
        store = self.careless
        with store.lock:
            is_list = "list-type" in urlsplit(self.path).query
            store.requests["LIST" if is_list else self.command] += 1
            if store.refuses_with:
                code, status = store.refuses_with, 400
            elif store.token and self.headers.get("x-amz-security-token") != store.token:
                code, status = "ExpiredToken", 400
            elif store.throttled > 0:
                store.throttled -= 1
                code, status = "SlowDown", 503
            else:
                return False
            store.refused += 1
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")
        return True

    def _answer(self, status: int, body: str | bytes = b"") -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"etag"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _key(self) -> str:
        """Return `/bucket/key`, as it was before a client encoded it for a URL."""
        return unquote(urlsplit(self.path).path)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._refused():
            return
        store, path = self.careless, self._key()
        with store.lock:
            conditional = self.headers.get("If-None-Match") == "*" and store.heeds_conditions
            taken = conditional and path in store.objects
            if not taken:
                store.objects[path] = data
        if taken:
            self._answer(412, "<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self._answer(200)

    def do_GET(self) -> None:
        if self._refused():
            return
        url = urlsplit(self.path)
        if "list-type" in parse_qs(url.query):
            self._answer(200, self._listing(url.path, parse_qs(url.query)))
            return
        data = self.careless.objects.get(self._key())
        if data is None:
            self._answer(404, "<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._answer(200, data)

    def do_DELETE(self) -> None:
        if not self._refused():
            self.careless.objects.pop(self._key(), None)
            self._answer(204)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self._refused():
            return
        url = urlsplit(self.path)
        keys = re.findall("<Key>([^<]*)</Key>", asked)
        for key in keys:
            self.careless.objects.pop(f"{url.path.rstrip('/')}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>")

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> str:
        prefix = query.get("prefix", [""])[0]
        start = f"{bucket.rstrip('/')}/"
        delimiter = query.get("delimiter", [""])[0]
        with self.careless.lock:
            paths = sorted(self.careless.objects)
            shown = self.careless.lists_only
        keys: list[str] = []
        directories: set[str] = set()
        for key in (path[len(start) :] for path in paths if shown is None or path in shown):
            below, slash, _ = key.removeprefix(prefix).partition("/")
            if not key.startswith(prefix):
                continue
            if delimiter and slash:
                directories.add(f"{prefix}{below}/")
            else:
                keys.append(key)
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>1</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys
        )
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(directory)}</Prefix></CommonPrefixes>"
            for directory in sorted(directories)
        )
        return f"<ListBucketResult>{found}<IsTruncated>false</IsTruncated></ListBucketResult>"
