"""Receives a job's events, updates its status, and passes both to listeners.

Each listener has its own thread and bounded queue. It receives every event in order. If it is so
slow that its queue is full, it misses events and receives their number. Its exceptions are logged,
and stop neither the job nor the listener.
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
"""A function that is called with each event of a job, and the status after that event."""

QUEUE_LENGTH = 1_000
"""The number of events that may wait for a listener: 10 s of heartbeats of 100 slots."""

END_TIMEOUT_S = 5.0
"""The time that the job's end waits for listeners to process their queues."""


class StatusTracker:
    """The owner of a job's status. Any thread may publish, read and add listeners."""

    def __init__(
        self,
        job: str,
        listeners: Iterable[JobListener] = (),
        count: JobListener = lambda _event, _status: None,
    ) -> None:
        """Create the tracker. `count` receives every event before the job goes on.

        `count` misses no event, so it must be quick, and must not wait or raise.
        """
        self._lock = threading.Lock()
        self._count = count
        self._status = JobStatus(job)
        self._feeds: list[_Feed] = []
        for listener in listeners:
            self.add_listener(listener)

    @property
    def status(self) -> JobStatus:
        """The status of the job after its last event."""
        return self._status

    def publish(self, event: JobEvent) -> None:
        """Record `event`. Does not wait for listeners."""
        with self._lock:
            before = self._status
            self._status = apply(before, event)
            self._count(event, self._status)
            for feed in self._feeds:
                # Under the lock, so that all listeners have the same order of events.
                feed.offer(event, self._status)
        for state in self._status.dropped_state[len(before.dropped_state) :]:
            # Outside the lock: a log handler may be slow, or read the status itself.
            _log.warning(
                "job %s drops %s, which no operator of the pipeline uses", before.job, state
            )

    def add_listener(self, listener: JobListener) -> None:
        """Pass every event from now on to `listener`. Does nothing if the job has ended."""
        with self._lock:
            if not self._status.state.ended:
                self._feeds.append(_Feed(listener, self._status.job))

    def close(self) -> None:
        """Wait until every listener has received the last event, at most `END_TIMEOUT_S`."""
        deadline = time.monotonic() + END_TIMEOUT_S
        for feed in self._feeds:
            feed.close(max(0.0, deadline - time.monotonic()))


class _Feed:
    """The queue of one listener, and the thread that calls it."""

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
        """Queue an event for the listener, unless the queue is full. JobEnded always fits."""
        with self._changed:
            # A slow listener misses many events in a row, rather than single ones here and there.
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
        """End the thread after it has emptied the queue; wait at most `timeout_s`."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "listener %s of job %s had not received %d events when the job ended",
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
                # The job has ended, and the queue is empty.
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
                        "listener %s of job %s raised at %s; the job runs on",
                        self._name,
                        self._job,
                        type(event).__name__,
                    )
