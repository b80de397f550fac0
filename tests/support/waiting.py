"""Waiting for a fact, with a deadline that a machine under load keeps."""

from __future__ import annotations

import time
from collections.abc import Callable

from onceflow import Job, JobStatus

TIMEOUT_S = 90.0


def await_true(
    holds: Callable[[], object],
    what: object = "it does not hold in time",
    *,
    timeout_s: float = TIMEOUT_S,
    pause_s: float = 0.01,
) -> None:
    """Return once `holds`. Fail with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(pause_s)


def await_in(job: Job, holds: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Return once `holds`. Fail if the job ends before, or after `timeout_s`."""
    await_status(job, lambda _: bool(holds()), timeout_s)


def await_status(
    job: Job, holds: Callable[[JobStatus], bool], timeout_s: float = TIMEOUT_S
) -> JobStatus:
    """Return the first status for which `holds`.

    Fail if the job ends before, or after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not holds(status := job.status()):
        assert not status.state.ended, status
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status
