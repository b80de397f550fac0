"""Iceberg's own REST catalog as a process of this machine, and a gateway in front of it that fails.

The server is what Iceberg's project tests its clients with: its REST adapter over a JDBC catalog,
here of a SQLite file. It knows no users, so the gateway asks for the token.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

from onceflow.integration.servers.kafka_jars import jars_of, java_command
from onceflow.integration.servers.process import LOOPBACK, ServerProcess

# The newest one that is published whole.
_VERSION = "1.10.1"
_ARTIFACT = "iceberg-open-api"
_ANSWER_S = 30.0


class RestCatalogServer(ServerProcess):
    """The catalog; its tables are in `warehouse`. Fetched once (212 MB)."""

    name = "iceberg-rest"

    @property
    def warehouse(self) -> str:
        """The URL of the directory of all tables."""
        return f"file://{self.directory}/warehouse"

    @override
    def _initialize(self) -> None:
        """Leave it to the server, which makes its catalog when it starts first."""

    @override
    def _command(self) -> Sequence[str | Path]:
        jars = jars_of(
            f"{_ARTIFACT}-{_VERSION}",
            [("org.apache.iceberg", _ARTIFACT, _VERSION)],
            "Iceberg's REST catalog (212 MB, once)",
        )
        flags = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
        return [java_command(), *flags, "-jar", jars / f"{_ARTIFACT}-{_VERSION}.jar"]

    @override
    def _spawn(self, log: int) -> subprocess.Popen[bytes]:
        settings = {
            "CATALOG_REST_PORT": str(self.port),
            "CATALOG_URI": f"jdbc:sqlite:{self.directory}/catalog.db",
            "CATALOG_WAREHOUSE": self.warehouse,
        }
        return subprocess.Popen(
            self._command(),
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @override
    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}/v1/config", timeout=1):
                return True
        except OSError:
            return False


@dataclass(frozen=True)
class CommitFault:
    """The fault of a commit with rows."""

    reaches_catalog: bool
    """Whether the catalog gets the request."""
    status: int = 0
    """What the client is answered in place of the catalog's answer; 0: its connection is cut."""
    first: Callable[[], object] = lambda: None
    """What runs first, while the client waits."""


class CatalogGateway:
    """Passes requests to the catalog at `port`. Methods: any thread."""

    def __init__(self, port: int) -> None:
        """Listen."""
        self.catalog_port = port
        self.token = ""
        """What each request must bear; empty: nothing is asked for."""
        self.refused = 0
        """How many requests did not bear it."""
        self._faults: list[CommitFault] = []
        self._server = _GatewayServer(self)
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def spoil_commit(self, fault: CommitFault) -> None:
        """Have `fault` happen to the next commit with rows."""
        self._faults.append(fault)

    @property
    def spoils(self) -> bool:
        """True if a fault has not happened yet."""
        return bool(self._faults)

    def take_fault(self, body: bytes) -> CommitFault | None:
        """Return what is to happen to the request, once; None: nothing, or it adds no rows."""
        if not self._faults or not _adds_rows(body):
            return None
        return self._faults.pop()

    def close(self) -> None:
        """Listen no more. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)


def _adds_rows(body: bytes) -> bool:
    """Return whether a request is a commit of the sink that has a checkpoint's rows."""
    if b"onceflow.checkpoint-before" not in body:
        return False
    updates: list[dict[str, Any]] = json.loads(body)["updates"]
    summaries = [
        update["snapshot"]["summary"] for update in updates if update["action"] == "add-snapshot"
    ]
    return any(
        summary["onceflow.checkpoint"] != summary["onceflow.checkpoint-before"]
        for summary in summaries
    )


class _GatewayServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, gateway: CatalogGateway) -> None:
        super().__init__((LOOPBACK, 0), _GatewayRequest)
        self.gateway = gateway


class _GatewayRequest(BaseHTTPRequestHandler):
    server: _GatewayServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    # A second write without it waits for the client's delayed acknowledgement.
    disable_nagle_algorithm = True

    def do_request(self) -> None:
        gateway = self.server.gateway
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if gateway.token and self.headers.get("Authorization") != f"Bearer {gateway.token}":
            gateway.refused += 1
            self._answer(401, _describe_error(401, "NotAuthorizedException"))
            return
        fault = gateway.take_fault(body)
        if fault is not None:
            fault.first()
        reply: tuple[int, bytes] | None = None
        if fault is None or fault.reaches_catalog:
            try:
                reply = self._ask(gateway.catalog_port, body)
            except OSError:
                self.close_connection = True
                return
        if fault is None and reply is not None:
            self._answer(*reply)
        elif fault is not None and fault.status:
            self._answer(fault.status, _describe_error(fault.status, "ByTheGateway"))
        else:
            self.close_connection = True

    do_GET = do_POST = do_HEAD = do_DELETE = do_request  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def _ask(self, port: int, body: bytes) -> tuple[int, bytes]:
        catalog = http.client.HTTPConnection(LOOPBACK, port, timeout=_ANSWER_S)
        try:
            headers = {"Content-Type": self.headers.get("Content-Type") or "application/json"}
            catalog.request(self.command, self.path, body or None, headers)
            response = catalog.getresponse()
            return response.status, response.read()
        finally:
            catalog.close()

    def _answer(self, status: int, answer: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)


def _describe_error(status: int, kind: str) -> bytes:
    return json.dumps({"error": {"message": "by a test", "type": kind, "code": status}}).encode()
