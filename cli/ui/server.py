"""The server of the page of all jobs, for browsers on this machine or, with TLS, on others."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import ssl
import sys
import webbrowser

from onceflow.cli.jobs.observed_jobs import ObservedJobs
from onceflow.cli.ui.jobs_api import JobsApi
from onceflow.core.errors import ConfigError
from onceflow.core.runtime.driver.http_server import HttpServer
from onceflow.core.settings.pipeline_settings import Endpoint

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
        self._api = JobsApi(jobs, self.token, _names_of(endpoint))
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
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(endpoint.tls.certificate, endpoint.tls.key)
    except (OSError, ssl.SSLError) as error:
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


def _names_of(endpoint: Endpoint) -> set[str]:
    names = {endpoint.host, socket.gethostname()}
    if not endpoint.is_loopback:
        names.add(socket.getfqdn())
    return names | {name.strip() for name in (endpoint.names or "").split(",") if name.strip()}
