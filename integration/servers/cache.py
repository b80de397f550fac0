"""Where downloads are kept, and how they appear there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from onceflow.integration.servers.process import ServerError

_LAST_LINES = 15


def cache_directory() -> Path:
    """Return ONCEFLOW_CACHE, else $XDG_CACHE_HOME/onceflow, else ~/.cache/onceflow; made if new."""
    chosen = os.environ.get("ONCEFLOW_CACHE")
    if chosen:
        directory = Path(chosen).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        directory = (Path(base) if base else Path.home() / ".cache") / "onceflow"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def publish(target: Path) -> Generator[Path, None, None]:
    """Yield an empty directory beside `target` that becomes `target` when the block ends well.

    `target` is therefore never seen half filled, whatever is killed. Of two processes that publish
    the same target, the first wins and the other's copy is dropped. An error in the block leaves
    nothing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield fresh
        try:
            fresh.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def exclusive(path: Path, timeout_s: float) -> Generator[None, None, None]:
    """Hold the lock file `path`, against threads of other processes too, for the block.

    The lock ends with the process that holds it, however that dies; the file stays.

    Raises:
        ServerError: Another process held it for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"another process holds {path} for {timeout_s:g} s; "
                        "end it, or delete the file if it hangs"
                    ) from None
                time.sleep(0.2)
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
        said = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise ServerError(f"{' '.join(command)} ended with status {done.returncode}:\n{said}")
