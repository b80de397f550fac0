"""Processes of the kit, as the one that starts them sees them."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.runtime.cluster.process_host import (
    Link,
    ProcessHost,
    ProcessKilled,
    Raised,
    Returned,
)
from onceflow.integration.conformance.target import Violation

TIMEOUT_S = 60.0
"""How long one process may be silent: longer than a sink waits for a server that has come back."""


class ChildFailed(Exception):
    """Raised when the function of a process raised."""

    def __init__(self, raised: Raised) -> None:
        super().__init__(f"{raised.kind}: {raised.text}\n{raised.trace}")
        self.raised = raised


class Child:
    """One real process. Used by one thread."""

    def __init__(self, pid: int, link: Link) -> None:
        self.pid = pid
        self._link = link

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Return what the function returned.

        Raises:
            ChildFailed: It raised.
            Violation: That was what it raised.
            ProcessKilled: The process was killed before it was done.
            TimeoutError: It is not done yet.
        """
        word = self._next(timeout_s)
        while not isinstance(word, (Returned, Raised)):
            word = self._next(timeout_s)  # the function has sent a value, which nobody asks for
        self._link.close()
        if isinstance(word, Returned):
            return word.value
        if word.kind == Violation.__name__:
            raise Violation(word.text)
        raise ChildFailed(word)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the next value that the function sent over its link.

        Raises:
            ChildFailed: It raised instead.
            ProcessKilled: The process was killed.
            TimeoutError: It says nothing.
        """
        value = self._next(timeout_s)
        if isinstance(value, Raised):
            raise ChildFailed(value)
        return value

    def freeze(self) -> None:
        """SIGSTOP it: none of its threads runs until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again, and tell its function, which waits for that."""
        os.kill(self.pid, signal.SIGCONT)
        # After the SIGCONT: a stopped process takes nothing, and the pipe may be full.
        self._link.send(None)

    def kill(self) -> None:
        """SIGKILL it; return when it is gone. Not to be called after its last word."""
        os.kill(self.pid, signal.SIGKILL)
        with suppress(ProcessKilled):
            while True:
                self._next(TIMEOUT_S)
        self._link.close()

    def _next(self, timeout_s: float) -> Any:
        if not self._link.poll(timeout_s):
            raise TimeoutError(f"a process of the kit says nothing for {timeout_s} s")
        try:
            return self._link.recv()
        except (EOFError, ConnectionResetError) as error:
            raise ProcessKilled("the process is gone without a word") from error


class Processes:
    """Starts processes. One thread; ends all of them when it is closed."""

    def __init__(self) -> None:
        """Start nothing yet: what forks them is started with the first one."""
        self._directory = tempfile.TemporaryDirectory(prefix="onceflow-conformance-")
        self.crash_points = Path(self._directory.name)
        """A file of a crash point's name here kills the first process that reaches the point."""
        self._host = ProcessHost()

    def start(self, function: Callable[..., object], *arguments: object) -> Child:
        """Return a new process that runs `function(link, *arguments)`; all pickle by reference.

        Raises:
            ProcessKilled: It ended before it began.
            Violation: The sink among `arguments` does not pickle.
        """
        _check_pickles(arguments)
        return Child(*self._host.start(_run_armed, str(self.crash_points), function, arguments))

    def run(self, function: Callable[..., object], *arguments: object) -> Any:
        """Return what `function(link, *arguments)` returned in a process of its own."""
        return self.start(function, *arguments).result()

    def arm(self, point: CrashPoint) -> None:
        """Have the first process killed that reaches `point`."""
        (self.crash_points / point).touch()

    def disarm(self) -> bool:
        """Forget every crash point that nobody reached; return whether there was one."""
        left = list(self.crash_points.iterdir())
        for path in left:
            path.unlink(missing_ok=True)
        return bool(left)

    def close(self) -> None:
        """End the host, and with it every process that is still linked. Idempotent."""
        self._host.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


def _run_armed(
    link: Link, crash_points: str, function: Callable[..., object], arguments: tuple[object, ...]
) -> object:
    """Run a function of the kit where it can be killed at crash points."""
    # In the child alone: the process that runs the tests must not die at a crash point.
    os.environ[VARIABLE] = crash_points
    return function(link, *arguments)


def _check_pickles(arguments: tuple[object, ...]) -> None:
    try:
        pickle.dumps(arguments)
    # What cannot be pickled says so by TypeError, AttributeError or PicklingError.
    except Exception as error:
        raise Violation(
            f"the sink goes to other processes, and does not pickle: {error}. Keep settings alone"
            " in it, in a class of a module; open in writer() and committer() what they need"
        ) from error


def eventually(ask: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Return whether `ask` came true in time."""
    deadline = time.monotonic() + timeout_s
    while not ask():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
