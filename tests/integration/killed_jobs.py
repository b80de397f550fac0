"""The processes of a job that a crash test kills, and starts again: forks of one program."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.integration.decision_directory import DecisionDirectory
from typing_extensions import Self

from onceflow.core.crash_points import VARIABLE
from onceflow.core.runtime.cluster import process_host

Main = Callable[[Sequence[str]], None]

_host = process_host.ProcessHost()
_host.close_at_exit()


class Attempt:
    """One process of a job, as the test that kills it sees it."""

    def __init__(self, pid: int, link: process_host.Link) -> None:
        self.pid = pid
        self.errors = ""
        """What it raised, if it did."""
        self._link = link
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return how it ended: 0, 1 with `errors`, or minus SIGKILL; None while it runs."""
        return self._ended_in(0)

    def wait(self, timeout_s: float = 90) -> int:
        """Return how it ended.

        Raises:
            AssertionError: It still runs.
        """
        status = self._ended_in(timeout_s)
        assert status is not None, f"process {self.pid} still runs after {timeout_s:g} s"
        return status

    def signal(self, number: signal.Signals) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it; it may still run for a moment."""
        self.signal(signal.SIGKILL)

    def _ended_in(self, timeout_s: float) -> int | None:
        if self._status is None and self._link.poll(timeout_s):
            try:
                word = self._link.recv()
            except (EOFError, ConnectionResetError):
                how = _host.how_ended(self.pid)
                assert how == "was killed by SIGKILL", how
                self._status = -signal.SIGKILL
            else:
                assert isinstance(word, process_host.Returned | process_host.Raised), word
                self._status = int(isinstance(word, process_host.Raised))
                self.errors = (
                    f"{word.text}\n{word.trace}" if isinstance(word, process_host.Raised) else ""
                )
            self._link.close()
        return self._status


def start(main: Main, points: str, arguments: Sequence[str]) -> Attempt:
    """Start a process that runs `main` and kills itself at the crash points in `points`."""
    return Attempt(*_host.start(_armed, main, points, arguments))


class KilledJob:
    """The attempts of one job, each a process that runs `main`."""

    def __init__(self, main: Main, directory: Path) -> None:
        self._main = main
        self.log = DecisionDirectory(directory / "log")
        self._points = directory / "crash-points"
        self._started: list[Attempt] = []
        self.log.path.mkdir()
        self._points.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Leave no process behind, however the test ended."""
        for attempt in self._started:
            attempt.kill()
            with contextlib.suppress(process_host.ProcessKilled):
                attempt.wait(30)

    def start_with(self, *arguments: object) -> Attempt:
        given = [str(argument) for argument in arguments]
        attempt = start(self._main, str(self._points), given)
        self._started.append(attempt)
        return attempt


def finished(attempt: Attempt, *, timeout_s: float = 90) -> int:
    """Return how the attempt ended: 0, or minus SIGKILL."""
    status = attempt.wait(timeout_s)
    assert status in (0, -signal.SIGKILL), attempt.errors
    return status


def _armed(link: process_host.Link, main: Main, points: str, arguments: Sequence[str]) -> None:
    """Run a job where it can be killed at crash points."""
    del link
    os.environ[VARIABLE] = points
    main(arguments)
