"""A double of a schema registry: the part of Confluent's REST protocol that is asked, in a thread.

It judges no compatibility and parses no schema: what it is to refuse, it is told. The real one is
in tests/integration/test_schema_registry.py; this one fails at the moment that a test chooses.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote

_Answer = tuple[int, object]


class SchemaRegistryDouble:
    """Keeps schemas in memory; a context manager."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, user: str | None = None) -> None:
        """Listen on a free port; answer once entered.

        Args:
            tls: Serve https with it.
            user: `name:password` that every request must have.
        """
        self._lock = threading.Lock()
        self._schemas: dict[tuple[str, int], dict[str, Any]] = {}
        """By context, which is empty for the default one, and id: each context counts anew."""
        self._subjects: dict[str, list[int]] = {}
        self._user = None if user is None else base64.b64encode(user.encode()).decode()
        self.asked: list[str] = []
        """Every request, as `GET /path`."""
        self.failing: _Answer | None = None
        """What every request is answered with, while it is set."""
        self.incompatible: set[str] = set()
        """Subjects that take no further version."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._scheme = "http"
        if tls is not None:
            self._scheme = "https"
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )

    def __enter__(self) -> SchemaRegistryDouble:
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
        self._thread.join()

    @property
    def url(self) -> str:
        """Its address."""
        return f"{self._scheme}://localhost:{self._server.server_address[1]}"

    def keep(
        self,
        subject: str,
        schema: object,
        *,
        kind: str = "AVRO",
        references: Mapping[str, tuple[str, int]] | None = None,
    ) -> int:
        """Register `schema` under `subject`; return its id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        refers = [
            {"name": name, "subject": other, "version": version}
            for name, (other, version) in (references or {}).items()
        ]
        with self._lock:
            return self._keep(subject, {"schema": text, "schemaType": kind, "references": refers})

    def forget(self, schema_id: int) -> None:
        """Know `schema_id` no more."""
        with self._lock:
            del self._schemas["", schema_id]

    def forget_subject(self, subject: str) -> None:
        """Have no version of `subject` any more."""
        with self._lock:
            del self._subjects[subject]

    def _keep(self, subject: str, schema: dict[str, Any]) -> int:
        context = _context_of(subject)
        ids = {one: kept for (of, one), kept in self._schemas.items() if of == context}
        same = [one for one, kept in ids.items() if kept == schema]
        schema_id = same[0] if same else 1 + max(ids, default=0)
        self._schemas[context, schema_id] = schema
        versions = self._subjects.setdefault(subject, [])
        if schema_id not in versions:
            versions.append(schema_id)
        return schema_id

    def answer(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> _Answer:
        """Return status and answer of one request."""
        body = body or {}
        path, _, query = path.partition("?")
        match method, [unquote(part) for part in path.strip("/").split("/")]:
            case "GET", ["schemas", "ids", number]:
                subject = parse_qs(query).get("subject", [""])[0]
                kept = self._schemas.get((_context_of(subject), int(number)))
                return (200, kept) if kept else _missing(40403, "Schema not found")
            case "GET", ["subjects", subject, "versions", version]:
                return self._version(subject, version)
            case "POST", ["subjects", subject, "versions"]:
                if subject in self.incompatible:
                    return 409, {
                        "error_code": 409,
                        "message": "Schema being registered is incompatible",
                    }
                return 200, {"id": self._keep(subject, _described(body))}
            case "POST", ["subjects", subject]:
                wanted = _described(body)
                for at, one in enumerate(self._subjects.get(subject, ()), 1):
                    if self._schemas[_context_of(subject), one] == wanted:
                        return 200, {"subject": subject, "version": at, "id": one, **wanted}
                return _missing(40403, "Schema not found")
            case _:
                return _missing(404, "HTTP 404 Not Found")

    def _version(self, subject: str, version: str) -> _Answer:
        versions = self._subjects.get(subject, [])
        at = len(versions) if version == "latest" else int(version)
        if not 1 <= at <= len(versions):
            return _missing(40401, f"Subject '{subject}' not found.")
        schema_id = versions[at - 1]
        kept = self._schemas[_context_of(subject), schema_id]
        return 200, {"subject": subject, "version": at, "id": schema_id, **kept}

    def _served(self, method: str, path: str, user: str | None, body: dict[str, Any]) -> _Answer:
        with self._lock:
            self.asked.append(f"{method} {path}")
            if self._user is not None and user != f"Basic {self._user}":
                return 401, {"error_code": 401, "message": "Unauthorized"}
            if self.failing is not None:
                return self.failing
            return self.answer(method, path, body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        served: Callable[[str, str, str | None, dict[str, Any]], _Answer] = self._served

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body: dict[str, Any] = json.loads(self.rfile.read(length) or b"{}")
                user = self.headers.get("Authorization")
                status, answer = served(self.command, self.path, user, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _serve  # noqa: N815 - the server's names

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Print nothing."""

        return Handler


def _context_of(subject: str) -> str:
    """Return the context that `subject` names, as `:.name:subject`."""
    return subject[1:].partition(":")[0] if subject.startswith(":.") else ""


def _described(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema": body["schema"],
        "schemaType": body.get("schemaType") or "AVRO",
        "references": body.get("references") or [],
    }


def _missing(code: int, message: str) -> _Answer:
    return 404, {"error_code": code, "message": message}
