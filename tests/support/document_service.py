"""A small HTTP service of documents that can be created once, as object stores are."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import unquote


class DocumentService(ThreadingHTTPServer):
    """Documents that can be created once, as the example's docstring describes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.documents: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.lose_replies = 0
        self.refuse_with = 0
        self.tokens: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/rows"

    @classmethod
    @contextmanager
    def running(cls) -> Generator[DocumentService]:
        """Yield a service that answers on a thread of its own."""
        with cls() as service:
            thread = threading.Thread(target=service.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield service
            finally:
                service.shutdown()
                thread.join(30)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all documents."""
        documents = list(self.documents.items())
        texts = [text for name, text in documents if "owner" not in name]
        return [json.loads(line) for line in b"".join(texts).splitlines()]

    def ids(self) -> list[int]:
        """Return the column `id` of all rows, sorted."""
        return sorted(row["id"] for row in self.rows())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed while it sent: no document
            self.close_connection = True
            return
        service = self.service
        service.tokens.add(str(self.headers["Authorization"]))
        if service.refuse_with:
            self._answer(service.refuse_with)
            return
        with service.lock:
            created = service.documents.setdefault(self.name, body) is body
            losing = service.lose_replies > 0
            service.lose_replies -= losing
        if losing:
            self.close_connection = True
            return
        self._answer(201 if created or self.headers["If-None-Match"] != "*" else 412)

    def do_HEAD(self) -> None:
        self._answer(200 if self.name in self.service.documents else 404)

    def do_GET(self) -> None:
        document = self.service.documents.get(self.name)
        self._answer(404 if document is None else 200, document or b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's
        pass

    @property
    def service(self) -> DocumentService:
        return cast("DocumentService", self.server)

    @property
    def name(self) -> str:
        return unquote(self.path.rpartition("/")[2])

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
