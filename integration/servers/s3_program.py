"""The program of an S3 server, built once on this machine from its public Go module.

Versity's S3 gateway: it keeps objects as files, locks a key while it is written, so that of any
number of conditional creations one wins, and its tests hold it to that. Apache-2.0.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from onceflow.core.cache import cache_directory, publish
from onceflow.integration.servers.cache import exclusive, run_installer
from onceflow.integration.servers.server import ServerError

VERSION = "v1.8.0"
PROGRAM_VARIABLE = "ONCEFLOW_VERSITYGW"
BUILD_TIMEOUT_S = 1200.0
"""About three minutes of processor time, on a machine that others may use as well."""

_MODULE = "github.com/versity/versitygw/cmd/versitygw"


class NoGo(ServerError):
    """Raised when the server would have to be built and there is nothing to build it with."""


def s3_program(
    *, progress: Callable[[str], None] | None = None, timeout_s: float = BUILD_TIMEOUT_S
) -> Path:
    """Return the program: ONCEFLOW_VERSITYGW, or one on PATH, or built into the cache.

    Processes that ask at the same time wait for the first. A crash leaves nothing half built.

    Raises:
        NoGo: There is none, and no Go to build it with.
        ServerError: It could not be built; quotes the end of what Go said.
    """
    named = os.environ.get(PROGRAM_VARIABLE) or shutil.which("versitygw")
    if named:
        return Path(named)
    target = cache_directory() / f"versitygw-{VERSION}"
    program = target / "versitygw"
    if program.exists():
        return program
    go = shutil.which("go")
    if go is None:
        raise NoGo(
            "the S3 server of the tests (versitygw) is built from its Go module, and no `go` is on"
            f" PATH: install Go 1.25 or newer, or name the program in {PROGRAM_VARIABLE}"
        )
    with exclusive(target.with_name(f"{target.name}.lock"), timeout_s):
        if not program.exists():
            if progress is not None:
                progress(f"building versitygw {VERSION} (a few minutes, once) into {target}")
            with publish(target) as fresh:
                _build(go, fresh, timeout_s)
    return program


def _build(go: str, into: Path, timeout_s: float) -> None:
    flags = f"{os.environ.get('GOFLAGS', '')} -buildvcs=false".strip()
    environment = {**os.environ, "GOBIN": str(into), "CGO_ENABLED": "0", "GOFLAGS": flags}
    command = [go, "install", "-trimpath", "-ldflags=-s -w", f"{_MODULE}@{VERSION}"]
    overdue = (
        f"versitygw {VERSION} was not built in {timeout_s:g} s; try again: what Go has compiled so"
        " far is kept"
    )
    run_installer(command, timeout_s, overdue, env=environment)
    if not (into / "versitygw").exists():
        raise ServerError(f"{' '.join(command)} succeeded, and there is no versitygw in {into}")
