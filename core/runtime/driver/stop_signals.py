"""Handles SIGINT and SIGTERM while a program waits for a job: first stop, then cancel.

    the first     every job of the process stops with a last checkpoint; a job that has not stopped
                  within its `stop_timeout_s` is cancelled
    the second    cancels the jobs: nothing is lost, the next start repeats from the last checkpoint

The sender decides which processes get a signal. ^C goes to the terminal's process group: the
driver, and the JVM if it is the driver's parent, as under spark-submit. pyspark's own handler would
cancel all of Spark's jobs, and the JVM would stop Spark. `kill`, `docker stop` and Kubernetes send
SIGTERM to one process, which may be that JVM. So the JVM leaves SIGINT to the driver and forwards
SIGTERM. Python workers are in the process group of their daemon.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

_log = logging.getLogger("onceflow.runtime.driver")

SAME_SIGNAL_S = 1.0
"""A signal within this time after the first counts as the same request: a signal to the process
group reaches the driver directly and through the JVM."""

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """A job that signals can stop. Any thread."""

    @property
    def name(self) -> str:
        """The job's name."""
        ...

    @property
    def stop_timeout_s(self) -> float:
        """The time in seconds that the job may take to stop."""
        ...

    def stop(self) -> None:
        """Request a stop with a last checkpoint; returns at once."""
        ...

    def leave(self) -> None:
        """Request an end without a checkpoint; returns at once."""
        ...


class StopSignals:
    """Stops the jobs of this process on signals. There is one instance: `STOP_SIGNALS`."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[Stoppable] = set()
        self._watcher: threading.Thread | None = None

    def add(self, job: Stoppable) -> None:
        """Stop `job` on a signal from now on. Any thread."""
        with self._lock:
            self._running.add(job)

    def remove(self, job: Stoppable) -> None:
        """Forget `job`, which has ended. Any thread."""
        with self._lock:
            self._running.discard(job)

    @contextmanager
    def handle(self, take_signals: Callable[[], None]) -> Generator[None]:
        """Handle SIGINT and SIGTERM inside the context, unless the program has its own handlers.

        `take_signals` is called first, so that the signals reach only this process.

        Only the main thread can handle signals. A handler that the program has set stays, and so
        does an ignored SIGINT, as in the background of a shell.
        """
        taken: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            taken = {n: before for n in _NUMBERS if _may_be_taken(before := signal.getsignal(n))}
        if taken:
            self._watch()
            take_signals()
            for number in taken:
                signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, before in taken.items():
                signal.signal(number, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Queue the signal.

        Python runs this between steps of the main thread, so it takes no lock.
        """
        del frame
        self._heard.put((number, time.monotonic()))

    def _watch(self) -> None:
        """Start the thread that acts on signals, once."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._act, name="stop signals", daemon=True)
            self._watcher.start()

    def _act(self) -> None:
        while True:
            number, first_s = self._heard.get()
            jobs = self._jobs()
            timeout_s = max((job.stop_timeout_s for job in jobs), default=0.0)
            for job in jobs:
                _log.warning(
                    "%s received: job %s stops with a last checkpoint, within %.0f s; another"
                    " signal cancels it",
                    signal.Signals(number).name,
                    job.name,
                    timeout_s,
                )
                job.stop()
            why = self._why_to_cancel(first_s, timeout_s)
            for job in self._jobs():
                _log.warning("%s received: job %s is cancelled", why, job.name)
                job.leave()

    def _why_to_cancel(self, first_s: float, timeout_s: float) -> str:
        """Return the reason to cancel: a second signal, or the timeout.

        Returns early if no job is left.
        """
        deadline = time.monotonic() + timeout_s
        while self._jobs() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                # A short timeout, because the end of the jobs does not wake this thread.
                number, heard_s = self._heard.get(timeout=0.2)
                # Compare the time of arrival: `_act` may have taken the signal from the queue
                # later.
                if heard_s - first_s > SAME_SIGNAL_S:
                    return f"another {signal.Signals(number).name}"
        return f"not stopped within {timeout_s:.0f} s"

    def _jobs(self) -> list[Stoppable]:
        with self._lock:
            return list(self._running)


STOP_SIGNALS = StopSignals()


def _may_be_taken(handler: Any) -> bool:
    """Return True if `handler` is Python's or pyspark's own."""
    if handler is signal.SIG_DFL or handler is signal.default_int_handler:
        return True
    return str(getattr(handler, "__module__", "")).partition(".")[0] == "pyspark"
