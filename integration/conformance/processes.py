"""The kit's child processes, from the side of the process that starts them."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.runtime.cluster import process_host
from onceflow.core.traces import VARIABLE as TRACES_VARIABLE
from onceflow.integration.conformance.target import Violation

TIMEOUT_S = 60.0
"""The timeout for messages of a process. It is longer than a sink waits for a restarted server."""


class ChildFailed(Exception):
    """Raised when the function of a child process raised an error."""

    def __init__(self, raised: process_host.Raised) -> None:
        super().__init__(f"{raised.kind}: {raised.text}\n{raised.trace}")
        self.raised = raised


class Child:
    """A real child process. Used by one thread."""

    def __init__(self, pid: int, link: process_host.Link) -> None:
        self.pid = pid
        self._link = link

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the function's result.

        Raises:
            ChildFailed: The function raised an error.
            Violation: The function raised a Violation.
            ProcessKilled: The process was killed before it was done.
            TimeoutError: The function has not finished yet.
        """
        word = self._next(timeout_s)
        while not isinstance(word, (process_host.Returned, process_host.Raised)):
            word = self._next(timeout_s)  # skip values that the function has sent
        self._link.close()
        if isinstance(word, process_host.Returned):
            return word.value
        if word.kind == Violation.__name__:
            raise Violation(word.text)
        raise ChildFailed(word)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the next value that the function sent over its link.

        Raises:
            ChildFailed: The function raised an error instead.
            ProcessKilled: The process was killed.
            TimeoutError: The process sent nothing.
        """
        value = self._next(timeout_s)
        if isinstance(value, process_host.Raised):
            raise ChildFailed(value)
        return value

    def freeze(self) -> None:
        """SIGSTOP the process. None of its threads runs until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the process, and send its waiting function the permission to continue."""
        os.kill(self.pid, signal.SIGCONT)
        # Send after SIGCONT: a stopped process reads nothing, and the pipe may be full.
        self._link.send(None)

    def kill(self) -> None:
        """SIGKILL the process, and wait until it is dead. Do not call it after the final result."""
        os.kill(self.pid, signal.SIGKILL)
        with suppress(process_host.ProcessKilled):
            while True:
                self._next(TIMEOUT_S)
        self._link.close()

    def _next(self, timeout_s: float) -> Any:
        if not self._link.poll(timeout_s):
            raise TimeoutError(f"a process of the kit says nothing for {timeout_s} s")
        try:
            return self._link.recv()
        except (EOFError, ConnectionResetError) as error:
            raise process_host.ProcessKilled("the process is gone without a word") from error


class Processes:
    """A starter of child processes. Used by one thread. `close` ends all of them."""

    def __init__(self) -> None:
        """The host that forks the processes starts with the first process."""
        self._directory = tempfile.TemporaryDirectory(prefix="onceflow-conformance-")
        self.crash_points = Path(self._directory.name)
        """The directory for armed crash points. A file with a point's name kills the first process
        that reaches it."""
        self._traces = tempfile.TemporaryDirectory(prefix="onceflow-conformance-traces-")
        self._host = process_host.ProcessHost()

    def start(
        self, function: Callable[..., object], *arguments: object, traces: Path | None = None
    ) -> Child:
        """Start a process that runs `function(link, *arguments)`. Pickles function and arguments.

        If `traces` is a directory, all processes of its jobs record their steps there.

        Raises:
            ProcessKilled: The process ended before the function started.
            Violation: The sink among `arguments` does not pickle.
        """
        _check_pickles(arguments)
        variables = {VARIABLE: str(self.crash_points)}
        if traces is not None:
            variables[TRACES_VARIABLE] = str(traces)
        return Child(*self._host.start(_run_armed, variables, function, arguments))

    def make_trace_directory(self) -> Path:
        """Return a new directory for the traces of one job. `close` deletes it."""
        return Path(tempfile.mkdtemp(dir=self._traces.name))

    def run(self, function: Callable[..., object], *arguments: object) -> Any:
        """Run `function(link, *arguments)` in a new process. Return its result."""
        return self.start(function, *arguments).result()

    def arm(self, point: CrashPoint) -> None:
        """Arm `point`: the first process that reaches it is killed."""
        (self.crash_points / point).touch()

    def disarm(self) -> bool:
        """Disarm all crash points that were not reached. Return True if there was one."""
        left = list(self.crash_points.iterdir())
        for path in left:
            path.unlink(missing_ok=True)
        return bool(left)

    def close(self) -> None:
        """End the host and all processes that are still linked. Idempotent."""
        self._host.close()
        self._directory.cleanup()
        self._traces.cleanup()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close this object."""
        self.close()


def _run_armed(
    link: process_host.Link,
    variables: Mapping[str, str],
    function: Callable[..., object],
    arguments: tuple[object, ...],
) -> object:
    """Run a function of the kit with crash points and traces enabled."""
    # Enable crash points only in the child: the test process must not die at a crash point.
    os.environ.update(variables)
    return function(link, *arguments)


def _check_pickles(arguments: tuple[object, ...]) -> None:
    try:
        pickle.dumps(arguments)
    # Pickling fails with TypeError, AttributeError or PicklingError.
    except Exception as error:
        raise Violation(
            f"the sink goes to other processes, and does not pickle: {error}. Keep settings alone"
            " in it, in a class of a module; open in writer() and committer() what they need"
        ) from error


def eventually(ask: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Wait until `ask` returns True. Return False on timeout."""
    deadline = time.monotonic() + timeout_s
    while not ask():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
