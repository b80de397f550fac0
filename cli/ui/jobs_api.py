"""The HTTP API of `onceflow ui`, and its server: the page, and the jobs in a storage.

    GET  /  /page/*                  the page; only the page needs no token
    GET  /v1/about                   the kind of this server
    GET  /v1/jobs                    a line for each job
    GET  /v1/jobs/NAME/…             as at the driver's endpoint; without a driver: overview, stored
    POST /v1/jobs/NAME/…             passed to the driver

This server has its own token. It sends each driver the token that the driver has stored. So anyone
with this server's token controls all jobs of the storage. Answers are those of the driver's
endpoint, or `{"error": …}` with 401, 403, 404, 405, 409 (the job does not run), 421 (another driver
than the page has shown) and 504 (the driver does not answer).
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from onceflow.cli.jobs.client import DriverNotThere, DriverSilent
from onceflow.cli.jobs.driver_access import UnknownDriverHost
from onceflow.cli.jobs.observed_jobs import ObservedJobs
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.runtime.driver import web_page
from onceflow.core.runtime.driver.http_server import HttpServer, Request, Response
from onceflow.core.runtime.driver.job_api import DEADLINE_HEADER, INSTANCE_HEADER
from onceflow.core.runtime.driver.web_page import has_token
from onceflow.core.server_tls import load_server_tls
from onceflow.core.settings.pipeline_settings import Endpoint

_JOBS = "/v1/jobs"


class JobsApi:
    """The HTTP application of one storage. Any number of threads may use it."""

    def __init__(self, jobs: ObservedJobs, token: str, names: Collection[str] = ()) -> None:
        """`names` are host names that browsers may use, besides addresses and localhost."""
        self._jobs = jobs
        self._token = token
        self._names = frozenset(name.lower() for name in names)
        self._page = web_page.WebPage()
        self.visited = threading.Event()
        """An event that is set after the first request with the token."""

    def refuse(self, head: Request) -> Response | None:
        """Return the refusal of a request that is not allowed, or None if it is allowed."""
        if stranger := web_page.find_stranger(head, self._names):
            return self.explain(*stranger)
        if self._page.has(urlsplit(head.target).path) or has_token(head, self._token):
            return None
        missing = "send the token that `onceflow ui` has printed: Authorization: Bearer …"
        return self.explain(HTTPStatus.UNAUTHORIZED, missing)

    def has_token(self, head: Request) -> bool:
        """Return True if the request has the page's token."""
        return has_token(head, self._token)

    def answer(self, request: Request) -> Response:
        """Answer a request that `refuse` has allowed."""
        path = urlsplit(request.target).path
        if self._page.has(path):
            return self._page.answer(request)
        self.visited.set()
        try:
            return self._answer(request, path)
        except UnknownDriverHost as error:
            return self.explain(HTTPStatus.CONFLICT, str(error))
        except ConfigError as error:
            return self.explain(HTTPStatus.NOT_FOUND, str(error))
        except DriverSilent as error:
            return self.explain(HTTPStatus.GATEWAY_TIMEOUT, str(error))
        except (DriverNotThere, OnceflowError) as error:
            return self.explain(HTTPStatus.CONFLICT, str(error))

    def explain(self, status: HTTPStatus, reason: str) -> Response:
        """Return an error answer with `status` and `reason`."""
        return web_page.make_json_response(status, {"error": reason})

    def _answer(self, request: Request, path: str) -> Response:
        if path.startswith(f"{_JOBS}/"):
            name, _, what = path.removeprefix(f"{_JOBS}/").partition("/")
            return self._answer_for_job(request, name, what)
        if path not in {"/v1/about", _JOBS}:
            known = f"/v1/about, {_JOBS} and {_JOBS}/NAME/…"
            return self.explain(HTTPStatus.NOT_FOUND, f"unknown path {path[:200]}; see {known}")
        if request.method != "GET":
            not_taken = f"{path} does not support {request.method}"
            return self.explain(HTTPStatus.METHOD_NOT_ALLOWED, not_taken)
        if path == "/v1/about":
            about = {"kind": "storage", "storage": self._jobs.storage}
            return web_page.make_json_response(HTTPStatus.OK, about)
        return web_page.make_json_response(HTTPStatus.OK, {"jobs": self._jobs.summaries()})

    def _answer_for_job(self, request: Request, name: str, what: str) -> Response:
        query = urlsplit(request.target).query
        path = f"{what}?{query}" if query else what
        try:
            shown = request.headers.get(INSTANCE_HEADER.lower())
            if shown and shown != self._jobs.driver(name).address.instance:
                another = (
                    f"another driver of job {name!r} runs now, so nothing was done. Reload the page"
                )
                return self.explain(HTTPStatus.MISDIRECTED_REQUEST, another)
            reply = self._jobs.relay(
                name, request.method, path, request.body, _read_deadline(request)
            )
        except DriverNotThere:
            if request.method != "GET":
                raise
            return self._answer_without_driver(name, what)
        # The driver has refused the token in its storage. This must not look like a refusal by this
        # server.
        status = HTTPStatus(reply.status)
        if status is HTTPStatus.UNAUTHORIZED:
            stale = f"the driver of job {name!r} rejects the token that is in its storage"
            return self.explain(HTTPStatus.CONFLICT, stale)
        return web_page.make_json_response(status, reply.content)

    def _answer_without_driver(self, name: str, what: str) -> Response:
        now = self._jobs.read_overview(name)
        match what:
            case "overview":
                return web_page.make_json_response(HTTPStatus.OK, now)
            case "stored":
                return web_page.make_json_response(HTTPStatus.OK, self._jobs.read_stored(name))
            case _:
                reason = (
                    f"job {name!r} does not run (state: {now['state']}), and only its driver can"
                    f" answer {what[:40]!r}: start the job"
                )
                return self.explain(HTTPStatus.CONFLICT, reason)


def _read_deadline(request: Request) -> int:
    """Return the deadline of a request in milliseconds since 1970."""
    text = request.headers.get(DEADLINE_HEADER.lower(), "")
    return int(text) if text.isdecimal() else int((time.time() + 5) * 1000)


LOOPBACK = Endpoint()


class UiServer:
    """A server of the page with its own token. `close` is idempotent."""

    def __init__(self, jobs: ObservedJobs, endpoint: Endpoint = LOOPBACK) -> None:
        """Start to listen. `start` starts to answer.

        Raises:
            ConfigError: The address or the certificate cannot be used.
        """
        self.token = secrets.token_urlsafe(32)
        self._endpoint = endpoint
        self._api = JobsApi(jobs, self.token, _list_names(endpoint))
        self._server = _listen(endpoint, self._api)

    @property
    def url(self) -> str:
        """The URL of the page for browsers."""
        scheme = "http" if self._endpoint.tls is None else "https"
        host = self._endpoint.host
        if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
            host = socket.getfqdn()
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    def start(self) -> None:
        """Start to answer requests, on another thread."""
        self._server.start("onceflow ui")

    def wait_for_visitor(self, timeout_s: float) -> bool:
        """Wait for the first request with the token. Return False on timeout."""
        return self._api.visited.wait(timeout_s)

    def open_browser(self) -> None:
        """Open the page if there is a display. A browser in the terminal would hide the token."""
        shown = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if sys.stdout.isatty() and (sys.platform == "darwin" or shown):
            webbrowser.open(self.url)

    def close(self) -> None:
        """Stop answering."""
        self._server.close()


def _listen(endpoint: Endpoint, api: JobsApi) -> HttpServer:
    host, port = endpoint.host, endpoint.port
    context = None
    try:
        if endpoint.tls is not None:
            context = load_server_tls(endpoint.tls.certificate, endpoint.tls.key)
    except OSError as error:
        raise ConfigError(f"--certificate and --key cannot be used: {error}") from error
    try:
        return HttpServer(host, port, api, context)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = (
                f"port {port} of {host} is in use: choose another with --port; 0 chooses a free"
                " port"
            )
        else:
            reason = f"--host {host} --port {port}: {error.strerror or error}"
        raise ConfigError(reason) from error


def _list_names(endpoint: Endpoint) -> set[str]:
    names = {endpoint.host, socket.gethostname()}
    if not endpoint.is_loopback:
        names.add(socket.getfqdn())
    return names | {name.strip() for name in (endpoint.names or "").split(",") if name.strip()}
