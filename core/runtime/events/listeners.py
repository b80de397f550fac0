"""Takes a job's events: folds them into its status, and passes them to listeners.

A listener has a thread and a bounded queue of its own. It sees every event in order, unless it is
so slow that its queue is full: then it misses some, and is told how many. What it raises is logged,
and stops neither the job nor the listener.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from onceflow.core.runtime.events.job_events import EventsDropped, JobEnded, JobEvent
from onceflow.core.runtime.events.status import JobStatus, apply

_log = logging.getLogger("onceflow.runtime.listeners")

JobListener: TypeAlias = Callable[[JobEvent, JobStatus], object]
"""Called with each event of a job, and the status as of that event."""

QUEUE_LENGTH = 1_000
"""Events that may wait for a listener: with a heartbeat a second, of 100 slots for 10 s."""

END_TIMEOUT_S = 5.0
"""How long the job's end waits for listeners to take what they have been told."""


class StatusTracker:
    """The only one who knows a job's status; any thread may publish, read and listen."""

    def __init__(
        self,
        job: str,
        listeners: Iterable[JobListener] = (),
        count: JobListener = lambda _event, _status: None,
    ) -> None:
        """Take listeners, and `count`, which sees every event before the job goes on.

        `count` misses nothing, so it must be quick, wait for nothing and raise nothing.
        """
        self._lock = threading.Lock()
        self._count = count
        self._status = JobStatus(job)
        self._feeds: list[_Feed] = []
        for listener in listeners:
            self.add_listener(listener)

    @property
    def status(self) -> JobStatus:
        """The job as of its last event."""
        return self._status

    def publish(self, event: JobEvent) -> None:
        """Record `event`. Waits for no listener."""
        with self._lock:
            before = self._status
            self._status = apply(before, event)
            self._count(event, self._status)
            for feed in self._feeds:
                # Under the lock, so that all listeners have the same order of events.
                feed.offer(event, self._status)
        for one in self._status.dropped_state[len(before.dropped_state) :]:
            # Outside of the lock: a handler of the log may be slow, or ask for the status itself.
            _log.warning("job %s: %s was restored and is dropped", before.job, one)

    def add_listener(self, listener: JobListener) -> None:
        """Tell `listener` of every event from now on; a job that has ended has no more."""
        with self._lock:
            if not self._status.state.ended:
                self._feeds.append(_Feed(listener, self._status.job))

    def close(self) -> None:
        """Wait until every listener has taken the last event, for `END_TIMEOUT_S` at most."""
        deadline = time.monotonic() + END_TIMEOUT_S
        for feed in self._feeds:
            feed.close(max(0.0, deadline - time.monotonic()))


class _Feed:
    """What one listener is still to be told, and the thread that tells it."""

    def __init__(self, listener: JobListener, job: str) -> None:
        self._listener = listener
        self._job = job
        self._name = getattr(listener, "__qualname__", type(listener).__qualname__)
        self._waiting: deque[tuple[JobEvent, JobStatus]] = deque()
        self._dropped = 0
        self._errors = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f"listener {self._name} of job {job}", daemon=True
        )
        self._thread.start()

    def offer(self, event: JobEvent, status: JobStatus) -> None:
        """Have the listener told, unless too much waits already. The job's end always fits."""
        with self._changed:
            # One that is too slow misses many events at one place, rather than one here and there.
            room = QUEUE_LENGTH // 2 if self._dropped else QUEUE_LENGTH
            if len(self._waiting) >= room and not isinstance(event, JobEnded):
                self._dropped += 1
                return
            if self._dropped:
                self._waiting.append((EventsDropped(self._dropped), status))
                _log.warning(
                    "listener %s of job %s is too slow: it has missed %d events",
                    self._name,
                    self._job,
                    self._dropped,
                )
                self._dropped = 0
            self._waiting.append((event, status))
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """End the thread once it has told everything; wait for that for `timeout_s`."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "listener %s of job %s has not taken %d events by the job's end",
                self._name,
                self._job,
                len(self._waiting),
            )
        if self._errors > 1:
            _log.error(
                "listener %s of job %s has raised %d times; the first error is logged above",
                self._name,
                self._job,
                self._errors,
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                # It has ended, and everything is told.
                if not self._waiting:
                    return
                event, status = self._waiting.popleft()
            try:
                # Without the lock: the listener may take long, and `offer` must not wait for it.
                self._listener(event, status)
            except Exception:
                self._errors += 1
                if self._errors == 1:
                    _log.exception(
                        "listener %s of job %s raised at %s; the job goes on",
                        self._name,
                        self._job,
                        type(event).__name__,
                    )
