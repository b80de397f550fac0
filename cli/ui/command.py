"""`onceflow ui`: serves the page of all jobs in a storage until it is ended by a signal."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import ssl
import sys
import threading
import webbrowser
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from onceflow.cli.jobs.client import within
from onceflow.cli.jobs.command import EXIT_REFUSED, EXIT_USAGE, Authority, Storage, TokenFile
from onceflow.cli.jobs.observed_jobs import ObservedJobs
from onceflow.cli.terminal import say
from onceflow.cli.ui.jobs_api import JobsApi
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.runtime.driver.http_server import HttpServer
from onceflow.core.settings.pipeline_settings import Endpoint, TlsFiles, is_loopback

PORT = 8090


def ui(
    storage: Storage,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Another one than loopback needs TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65_535)] = PORT,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address, and start no browser.")
    ] = False,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate to show; serves HTTPS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    names: Annotated[
        str | None,
        typer.Option(help="Further host names under which browsers ask, separated by commas."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the storage at the start.", min=0.0)
    ] = 60.0,
    token_file: TokenFile = None,
    authority: Authority = None,
) -> None:
    """Show all jobs in a checkpoint storage in the browser, whether they run or not."""
    try:
        endpoint = _check_address(host, port, certificate, key, names)
        jobs = ObservedJobs(storage, token_file, authority)
        within(timeout, f"checkpoint storage {storage}", jobs.names)
        token = secrets.token_urlsafe(32)
        server = _listen(endpoint, JobsApi(jobs, token, _names_of(endpoint)))
    except (OnceflowError, TimeoutError) as error:
        say(f"onceflow: {error}", style="red")
        status = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_REFUSED
        raise typer.Exit(status) from error
    with _until_signalled() as ended:
        server.start("onceflow ui")
        url = _url_of(endpoint, server.port)
        print(f"page:  {url}\ntoken: {token}", flush=True)
        say(f"Jobs in {storage}. Paste the token into the page. Ctrl-C ends it.")
        if not no_open and _has_screen():
            webbrowser.open(url)
        ended.wait()
    server.close()


def _check_address(
    host: str, port: int, certificate: Path | None, key: Path | None, names: str | None
) -> Endpoint:
    """Raise ConfigError unless the token stays on this machine, or is encrypted on its way."""
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key go together: name both")
    tls = None if certificate is None else TlsFiles(str(certificate), str(key), "")
    if tls is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is seen by other machines, and the token would go there unencrypted:"
            " add --certificate and --key; or leave --host away, and reach this machine by"
            f" `ssh -L {port or PORT}:127.0.0.1:{port or PORT}`"
        )
    return Endpoint(host=host, port=port, tls=tls, names=names)


def _listen(endpoint: Endpoint, api: JobsApi) -> HttpServer:
    host, port = endpoint.host, endpoint.port
    try:
        context = None
        if endpoint.tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(endpoint.tls.certificate, endpoint.tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--certificate and --key cannot be used: {error}") from error
    try:
        return HttpServer(host, port, api, context)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} of {host} is in use: name another by --port; 0 takes a free one"
        else:
            reason = f"--host {host} --port {port}: {error.strerror or error}"
        raise ConfigError(reason) from error


def _names_of(endpoint: Endpoint) -> set[str]:
    names = {endpoint.host, socket.gethostname()}
    if not endpoint.is_loopback:
        names.add(socket.getfqdn())
    return names | {name.strip() for name in (endpoint.names or "").split(",") if name.strip()}


def _url_of(endpoint: Endpoint, port: int) -> str:
    scheme = "http" if endpoint.tls is None else "https"
    host = endpoint.host
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        host = socket.getfqdn()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _has_screen() -> bool:
    """Return whether a browser would get a window; one in the terminal would hide the token."""
    shown = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.stdout.isatty() and (sys.platform == "darwin" or bool(shown))


@contextmanager
def _until_signalled() -> Generator[threading.Event, None, None]:
    """Make SIGINT and SIGTERM set an event, instead of what they did before."""
    ended = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in signals}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
