"""A program in a process of its own: the one harness by which tests start, watch and kill jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals

from typing_extensions import Self

from onceflow.integration.faults import processes

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 120.0
_TAIL_CHARS = 4_000


class Program:
    """A process that leads a session, with its output in `log`.

    A context manager that kills the process alone: its children notice by themselves, as after a
    crash. `kill_tree` and `end` kill more.

    The program finds what the tests find: `onceflow`, `tests` and `benchmarks`. If the test run
    dies, the program dies with it.
    """

    def __init__(
        self,
        log: Path,
        *command: object,
        environment: Mapping[str, str | None] | None = None,
        cwd: Path = REPOSITORY,
    ) -> None:
        """Start `command`.

        `environment` is added to that of the tests. A variable whose value is None is removed.
        """
        self.log = log
        self.begins_at = log.stat().st_size if log.exists() else 0
        """The size of the log at the start: earlier programs may have written to it."""
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        variables = {**os.environ, **paths, **(environment or {})}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watchdog = processes.Watchdog(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process, also of one that has ended."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.poll()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return the exit status once the process has ended."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs after {timeout_s:g} s: {self.tail()}") from None
        self._watchdog.release()
        return status

    def wait_until(
        self, holds: Callable[[], object], timeout_s: float = TIMEOUT_S, *, pause_s: float = 0.02
    ) -> None:
        """Return once `holds`. Fail if the process ends before, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            status = self.poll()
            assert status is None or holds(), f"exit status {status}: {self.tail()}"
            assert time.monotonic() < deadline, f"not in {timeout_s:g} s: {self.tail()}"
            time.sleep(pause_s)

    def signal(self, number: Signals) -> None:
        """Send a signal to the process alone."""
        processes.signal_process(self.pid, number)

    def signal_group(self, number: Signals) -> None:
        """Send a signal to the process group, as ^C and a shell's `kill %1` do."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the process alone. Idempotent."""
        self._process.kill()
        self.wait(30)

    def kill_tree(self) -> None:
        """SIGKILL the process and its descendants. Idempotent."""
        processes.kill_tree(self.pid)
        self.wait(30)

    def end(self) -> None:
        """SIGKILL all that is left of the session, orphans too. Idempotent."""
        processes.kill_session(self.pid)
        self.wait(30)

    def output(self) -> str:
        """Return what the program has printed."""
        whole = self.log.read_bytes()[self.begins_at :]
        return whole.decode(errors="replace")

    def read_page(self, url: str) -> bytes:
        """Return what answers at `url`, or nothing while the program does not answer."""
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                page: bytes = response.read()
        except OSError:
            return b""
        return page

    def tail(self) -> str:
        """Return the end of what the program has printed."""
        return self.output()[-_TAIL_CHARS:]


def python(*arguments: object) -> tuple[object, ...]:
    """Return the command that runs this Python with `arguments`."""
    return (sys.executable, *arguments)
