"""Installs programs that only tests use into the cache."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from onceflow.integration.servers.server import ServerError

_LAST_LINES = 15


def run_installer(
    command: Sequence[str],
    timeout_s: float,
    overdue: str,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run what builds or installs a server's program; return when it has succeeded.

    Raises:
        ServerError: It failed, and the end of what it said; or it took longer than `timeout_s`:
            then `overdue` is the text.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            cwd=cwd,
            env=env,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(overdue) from error
    if done.returncode != 0:
        last_lines = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise ServerError(f"{' '.join(command)} ended with status {done.returncode}:\n{last_lines}")
