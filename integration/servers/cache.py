"""How servers' programs get into the cache."""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from onceflow.core import cache
from onceflow.integration.servers.process import ServerError

_LAST_LINES = 15


@contextmanager
def exclusive(path: Path, timeout_s: float) -> Generator[None, None, None]:
    """Hold the lock file `path` for the block, as `core.cache` does.

    Raises:
        ServerError: Another process held it for `timeout_s`.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(cache.exclusive(path, timeout_s))
        except TimeoutError as error:
            raise ServerError(str(error)) from error
        yield


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
