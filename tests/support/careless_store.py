"""An object store of one process that can be careless: what no real server does when asked."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, quote, urlsplit
from xml.sax.saxutils import escape

from typing_extensions import Self, override


class CarelessStore:
    """Speaks as much of S3 as storage asks for; signatures are not looked at.

    `heeds_conditions`: whether `If-None-Match: *` keeps an object from being replaced.
    `throttled`: so many requests from now on are answered with 503 SlowDown.
    `refuses_with`: every request is answered with 400 and this word.
    """

    def __init__(self, *, heeds_conditions: bool = True) -> None:
        self.heeds_conditions = heeds_conditions
        self.throttled = 0
        self.refuses_with = ""
        self.refused = 0
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
            if store.refuses_with:
                code, status = store.refuses_with, 400
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
        self.wfile.write(data)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._refused():
            return
        store, path = self.careless, urlsplit(self.path).path
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
        data = self.careless.objects.get(url.path)
        if data is None:
            self._answer(404, "<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._answer(200, data)

    def do_DELETE(self) -> None:
        if not self._refused():
            self.careless.objects.pop(urlsplit(self.path).path, None)
            self._answer(204)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self._refused():
            return
        url = urlsplit(self.path)
        for key in re.findall("<Key>([^<]*)</Key>", asked):
            self.careless.objects.pop(f"{url.path.rstrip('/')}/{quote(key)}", None)
        self._answer(200, "<DeleteResult></DeleteResult>")

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> str:
        prefix = query.get("prefix", [""])[0]
        start = f"{bucket.rstrip('/')}/"
        keys = sorted(path[len(start) :] for path in self.careless.objects)
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>1</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys
            if key.startswith(prefix)
        )
        return f"<ListBucketResult>{found}<IsTruncated>false</IsTruncated></ListBucketResult>"
