"""A separate address for Prometheus and probes, without a token, for all jobs of the process.

    GET /metrics             the metrics of the jobs
    GET /healthz  /readyz    the health of the jobs; see `health`

Jobs with the same address share its server, so a program with several pipelines has one port to
scrape, and each sample names its job. The answers hold no secret: only names of jobs, operators and
splits, and numbers.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec

from onceflow.core.errors import ConfigError
from onceflow.core.runtime.driver.health import HEALTH_PATH, READY_PATH, Health, answer_probe
from onceflow.core.runtime.driver.http_server import HttpServer, Request, Response
from onceflow.core.runtime.driver.web_page import find_stranger
from onceflow.core.runtime.metrics.exposition import Measured, expose
from onceflow.core.settings.pipeline_settings import Metrics, is_loopback

_log = logging.getLogger("onceflow.metrics")

METRICS_PATH = "/metrics"
KNOWN_PATHS = (METRICS_PATH, HEALTH_PATH, READY_PATH)
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def answer_scrape(measured: Iterable[Measured], request: Request) -> Response:
    """Return the answer to `GET /metrics`.

    Raises:
        ConfigError: `prometheus-client` is not installed.
    """
    shown = expose(measured, request.headers.get("accept", ""))
    headers = {**_HEADERS, "Content-Type": shown.content_type}
    return Response(HTTPStatus.OK, shown.body, headers)


@dataclass(frozen=True, slots=True)
class ShownJob:
    """The functions that read one job's metrics and health. Any thread calls them."""

    measure: Callable[[], Measured]
    judge: Callable[[], Health]
    names: frozenset[str] = frozenset()
    """Host names that browsers may use, in lower case, in addition to addresses and localhost."""


class MetricsApi:
    """Handles requests at the separate metrics address. Any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[object, ShownJob] = {}

    def add(self, key: object, job: ShownJob) -> None:
        """Show `job` from now on."""
        with self._lock:
            self._shown[key] = job

    def remove(self, key: object) -> bool:
        """Stop showing the job of `key`. Return True if no job is shown any more."""
        with self._lock:
            self._shown.pop(key, None)
            return not self._shown

    def refuse(self, head: Request) -> Response | None:
        """Refuse a foreign host name, an unknown path, and any method but GET."""
        with self._lock:
            names = frozenset[str]().union(*(job.names for job in self._shown.values()))
        if stranger := find_stranger(head, names, setting="metrics.names"):
            return self.explain(*stranger)
        path = urlsplit(head.target).path
        if path not in KNOWN_PATHS:
            known = f"unknown path {path[:100]}; see {', '.join(KNOWN_PATHS)}"
            return self.explain(HTTPStatus.NOT_FOUND, known)
        if head.method != "GET":
            refused = self.explain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is supported")
            return Response(refused.status, refused.body, {**refused.headers, "Allow": "GET"})
        return None

    def has_token(self, head: Request) -> bool:
        """Return False: requests at this address need no token."""
        del head
        return False

    def answer(self, request: Request) -> Response:
        """Answer a scrape or a probe."""
        with self._lock:
            shown = tuple(self._shown.values())
        path = urlsplit(request.target).path
        if path != METRICS_PATH:
            return answer_probe(path, [job.judge() for job in shown])
        try:
            return answer_scrape([job.measure() for job in shown], request)
        except ConfigError as error:
            return self.explain(HTTPStatus.NOT_IMPLEMENTED, str(error))

    def explain(self, status: HTTPStatus, reason: str) -> Response:
        """Return a response that describes the problem with a request."""
        headers = {**_HEADERS, "Content-Type": "application/json"}
        return Response(status, msgspec.json.encode({"error": reason}), headers)


class _SharedServer:
    """The server of one address. `_LOCK` guards it."""

    def __init__(self, host: str, port: int) -> None:
        self.api = MetricsApi()
        self._server = HttpServer(host, port, self.api)
        self._server.start(f"metrics at {host}:{port}")

    def close(self) -> None:
        """Stop the server."""
        self._server.close()


_LOCK = threading.Lock()
_SERVERS: dict[tuple[str, int], _SharedServer] = {}


class ShownMetrics:
    """A job at its separate metrics address. The job's thread calls `show` and `hide`."""

    def __init__(self, settings: Metrics, name: str, job: ShownJob) -> None:
        self._address = settings.parse_bind()
        self._name = name
        self._job = replace(job, names=self._names(settings.names))
        self._thread: threading.Thread | None = None
        self._hidden = False

    def show(self) -> None:
        """Start answering on other threads. Does nothing if it has started or no address is set."""
        if self._thread is None and self._address is not None:
            name = f"metrics of job {self._name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def hide(self) -> None:
        """Stop showing the job. The last job at an address closes its server. Idempotent."""
        with _LOCK:
            self._hidden = True
            server = _SERVERS.get(self._address) if self._address else None
            if server is None or not server.api.remove(self) or self._address is None:
                return
            del _SERVERS[self._address]
        # Outside the lock: `close` joins a thread, and other jobs may need the lock.
        server.close()

    def _names(self, given: str | None) -> frozenset[str]:
        if self._address is None:
            return frozenset()
        host = self._address[0]
        names = {host, socket.gethostname()}
        if not is_loopback(host):
            names.add(socket.getfqdn())
        names |= {name.strip() for name in (given or "").split(",") if name.strip()}
        return frozenset(name.lower() for name in names)

    def _run(self) -> None:
        assert self._address is not None
        try:
            with _LOCK:
                # The job may have ended before this thread began; it must not be shown then.
                if self._hidden:
                    return
                if (server := _SERVERS.get(self._address)) is None:
                    server = _SERVERS[self._address] = _SharedServer(*self._address)
                server.api.add(self, self._job)
        except OSError as error:
            host, port = self._address
            _log.warning(
                "metrics.prometheus.bind: no metrics can be served at %s:%d: %s; job %s runs on,"
                " and its endpoint serves /metrics, too",
                host,
                port,
                error,
                self._name,
            )
