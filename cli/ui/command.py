"""The command `onceflow ui`, which serves the page of all jobs until a signal ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from onceflow.cli.jobs import command
from onceflow.cli.jobs.client import within
from onceflow.cli.jobs.observed_jobs import ObservedJobs
from onceflow.cli.terminal import say
from onceflow.cli.ui.jobs_api import UiServer
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.settings.pipeline_settings import Endpoint, TlsFiles, is_loopback

PORT = 8090


def ui(
    storage: command.Storage,
    host: Annotated[
        str, typer.Option(help="Address to listen at. An address other than loopback needs TLS.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen at. 0 chooses a free one.", min=0, max=65_535)
    ] = PORT,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address, but open no browser.")
    ] = False,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate to show; serves HTTPS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    names: Annotated[
        str | None,
        typer.Option(
            help="Further host names by which browsers may reach the page, separated by commas."
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="How long to wait for the storage at the start, in seconds.", min=0.0),
    ] = 60.0,
    token_file: command.TokenFile = None,
    authority: command.Authority = None,
    driver_host: command.DriverHost = None,
) -> None:
    """Show all jobs in a checkpoint storage in the browser, whether they run or not."""
    try:
        endpoint = _check_address(host, port, certificate, key, names)
        jobs = ObservedJobs(storage, command.make_access(token_file, authority, driver_host))
        within(timeout, f"checkpoint storage {storage}", jobs.names)
        server = UiServer(jobs, endpoint)
    except (OnceflowError, TimeoutError) as error:
        say(f"onceflow: {error}", style="red")
        status = command.EXIT_USAGE if isinstance(error, ConfigError) else command.EXIT_REFUSED
        raise typer.Exit(status) from error
    with _until_signalled() as ended:
        server.start()
        print(f"page:  {server.url}\ntoken: {server.token}", flush=True)
        say(f"Jobs in {storage}. Paste the token into the page. Ctrl-C ends it.")
        if not no_open:
            server.open_browser()
        ended.wait()
    server.close()


def _check_address(
    host: str, port: int, certificate: Path | None, key: Path | None, names: str | None
) -> Endpoint:
    """Return the endpoint. Raise ConfigError if the token could leave this machine unencrypted."""
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key go together: give both")
    tls = None if certificate is None else TlsFiles(str(certificate), str(key), "")
    if tls is None and not is_loopback(host):
        raise ConfigError(
            f"other machines can reach --host {host}, and the token would be sent unencrypted:"
            " add --certificate and --key; or omit --host, and reach this machine by `ssh -L"
            f" {port or PORT}:127.0.0.1:{port or PORT}`"
        )
    return Endpoint(host=host, port=port, tls=tls, names=names)


@contextmanager
def _until_signalled() -> Generator[threading.Event, None, None]:
    """Yield an event that SIGINT and SIGTERM set. Restore the old handlers afterwards."""
    ended = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, end) for number in signals}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
