"""The driver's HTTP endpoint, open while the driver owns its job.

The server runs on its own daemon threads. The driver starts it after the first claim, so that a
refused start does not overwrite the address of a running driver. An error here never fails the job.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import ssl
import stat
import threading
import time
from pathlib import Path
from typing import Protocol

from onceflow.core.errors import ConfigError
from onceflow.core.runtime.driver.http_server import HttpServer
from onceflow.core.runtime.driver.job_api import ControlledJob, JobApi
from onceflow.core.runtime.events.listeners import JobListener
from onceflow.core.server_tls import load_server_tls
from onceflow.core.settings.pipeline_settings import Endpoint
from onceflow.core.storage.log.driver_files import (
    EXPECTED_FORM,
    AddressFiles,
    DriverAddress,
    is_token,
)

TOLD_TIMEOUT_S = 2.0
"""The time in seconds that an ended job waits for clients to read the outcome of their
operations."""

_log = logging.getLogger("onceflow.runtime.endpoint")


class ServedJob(ControlledJob, Protocol):
    """A job that answers requests over HTTP."""

    @property
    def name(self) -> str:
        """The job's name."""
        ...

    def add_listener(self, listener: JobListener) -> None:
        """Pass every event from now on to `listener`."""
        ...


class EndpointServer:
    """The HTTP server of one driver. The job's thread calls `serve` and `close`."""

    def __init__(self, settings: Endpoint, job: ServedJob, files: AddressFiles) -> None:
        self._settings = settings
        self._job = job
        self._files = files
        self._instance = secrets.token_hex(8)
        self._api: JobApi | None = None
        self._server: HttpServer | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    def serve(self) -> None:
        """Start the server on other threads. Does nothing if the server has started."""
        if self._thread is None:
            name = f"endpoint of job {self._job.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
            # A program may exit as soon as it sees that its job has ended.
            atexit.register(self.close)

    def close(self) -> None:
        """Stop the server once clients know the outcome of their operations, or after a timeout.

        Two calls, also from two threads, are safe: each returns when the server is closed.
        """
        with self._closing:
            with self._lock:
                self._closed, server, self._server = True, self._server, None
            if self._api is not None and server is not None:
                self._api.await_answers(TOLD_TIMEOUT_S)
                self._files.remove(self._instance)
                server.close()
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            token, kept_elsewhere = self._token()
            self._api = api = JobApi(self._job, self._instance, token, self._names())
            self._job.add_listener(api.on_event)
            server = HttpServer(self._settings.host, self._settings.port, api, self._tls())
            with self._lock:
                if self._closed:
                    server.close()
                    return
                self._server = server
                server.start(f"endpoint of job {self._job.name}")
                self._files.write(self._address(server), None if kept_elsewhere else token)
        except Exception as error:
            if not self._closed:
                _log.warning(
                    "commands such as `onceflow status` cannot reach job %s: %s: %s"
                    " (endpoint.host=%s, endpoint.port=%d); the job runs on",
                    self._job.name,
                    type(error).__name__,
                    error,
                    self._settings.host,
                    self._settings.port,
                )

    def _tls(self) -> ssl.SSLContext | None:
        if (files := self._settings.tls) is None:
            return None
        return load_server_tls(files.certificate, files.key)

    def _names(self) -> set[str]:
        settings = self._settings
        names = {settings.host, socket.gethostname()}
        if not settings.is_loopback:
            names.add(socket.getfqdn())
        return names | {name.strip() for name in (settings.names or "").split(",") if name.strip()}

    def _address(self, server: HttpServer) -> DriverAddress:
        settings, port = self._settings, server.port
        scheme = "http" if settings.tls is None else "https"
        host = settings.host
        if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
            host = socket.getfqdn()
        host = f"[{host}]" if ":" in host else host
        return DriverAddress(
            job=self._job.name,
            instance=self._instance,
            url=f"{scheme}://{host}:{port}",
            host=socket.gethostname(),
            pid=os.getpid(),
            since_ms=int(time.time() * 1000),
            loopback=settings.is_loopback,
            authority=settings.tls.authority if settings.tls else "",
        )

    def _token(self) -> tuple[str, bool]:
        """Return the token, and True if it is in a token file outside checkpoint storage.

        Raises:
            ConfigError: Users other than the owner may read the token file, or it holds no token.
        """
        drawn = secrets.token_urlsafe(32)
        if self._settings.token_file is None:
            return drawn, False
        path = Path(self._settings.token_file)
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(drawn)
            return drawn, True
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(f"token_file {path} has mode {mode:#o}: make it 0o600")
        token = path.read_text(encoding="ascii", errors="replace").strip()
        if not is_token(token):
            raise ConfigError(f"token_file {path} holds no token: {EXPECTED_FORM}")
        return token, True
