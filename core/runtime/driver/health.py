"""Answers of the health probes: is the driver alive and making progress, and does the job run.

    /healthz  200 unless the driver's loop hangs, or no checkpoint has completed for too long
    /readyz   200 while the job is RUNNING and this driver has decided a checkpoint

If several jobs share an address, an answer is 200 only if all of these jobs are well. The answer is
JSON that names the problem of each job; it holds no secret and needs no token.

At each turn of its loop, the job's thread promises the time of its next turn. Before an operation
that may take long (a recovery, a restart's delay), the thread promises that longer time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.runtime.driver.http_server import Response
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.settings.pipeline_settings import RuntimeSettings

HEALTH_PATH = "/healthz"
READY_PATH = "/readyz"
_HEADERS = {
    "Content-Type": "application/json",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one job. An empty text means that nothing is wrong."""

    job: str
    sickness: str
    """The reason why a new driver might do better."""
    unreadiness: str
    """The reason why the job does not run now."""


class JobHealth:
    """Judges the health of one job. The job's threads pass events and promises; any thread asks."""

    def __init__(
        self, checkpointing: CheckpointSettings, runtime: RuntimeSettings, intervals: int | None
    ) -> None:
        """Create the judge.

        A job is unhealthy after `intervals` without a checkpoint; None: never.
        """
        # Longer than the driver may be blocked without a fault: a lost slot is noticed by its
        # missing heartbeats, and then slots and committers each get time to end.
        self._patience_s = runtime.heartbeat_timeout_s + 2 * runtime.cancel_timeout_s
        self._checkpoint_limit_s = None
        if checkpointing.interval_s is not None and intervals is not None:
            # A checkpoint may take as long as its timeout without being a sign of a hang.
            self._checkpoint_limit_s = (
                intervals * checkpointing.interval_s + checkpointing.timeout_s
            )
        self._takes_checkpoints = checkpointing.interval_s is not None
        self._due_s: float | None = None
        self._progress_s: float | None = None
        """The time of the last completed checkpoint, or of the first run, by `time.monotonic`. None
        before."""

    def promise(self, within_s: float) -> None:
        """Promise that the job's thread loops again within `within_s` on an idle machine."""
        self._due_s = time.monotonic() + within_s + self._patience_s

    def on_event(self, event: job_events.JobEvent) -> None:
        """Record the time of events that count as progress."""
        if isinstance(event, job_events.CheckpointCompleted) or (
            isinstance(event, job_events.AttemptRunning) and self._progress_s is None
        ):
            self._progress_s = event.at.monotonic_s

    def judge(self, status: JobStatus) -> Health:
        """Return the health of the job now."""
        if status.state.ended:
            return Health(status.job, "", f"the job has ended: {status.state.value}")
        now_s = time.monotonic()
        return Health(status.job, self._find_sickness(now_s), self._find_unreadiness(status))

    def _find_sickness(self, now_s: float) -> str:
        due_s, progress_s = self._due_s, self._progress_s
        if due_s is not None and now_s > due_s:
            return f"the driver's loop hangs: its next turn is {now_s - due_s:.0f} s overdue"
        if self._checkpoint_limit_s is None or progress_s is None:
            return ""
        since_s = now_s - progress_s
        if since_s <= self._checkpoint_limit_s:
            return ""
        return (
            f"no checkpoint has completed for {since_s:.0f} s; the limit is"
            f" {self._checkpoint_limit_s:.0f} s"
        )

    def _find_unreadiness(self, status: JobStatus) -> str:
        if status.state is not job_events.JobState.RUNNING:
            return f"the job is {status.state.value}"
        if self._takes_checkpoints and not status.checkpoints_completed:
            return "no checkpoint is decided yet"
        return ""


def answer_probe(path: str, healths: Iterable[Health]) -> Response:
    """Return the answer to `/healthz` or `/readyz`."""
    asks: Callable[[Health], str]
    asks = _read_sickness if path == HEALTH_PATH else _read_unreadiness
    jobs: Mapping[str, str] = {health.job: asks(health) or "ok" for health in healths}
    is_well = all(text == "ok" for text in jobs.values())
    body = msgspec.json.encode({"ok": is_well, "jobs": jobs})
    status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(status, body, _HEADERS)


def _read_sickness(health: Health) -> str:
    return health.sickness


def _read_unreadiness(health: Health) -> str:
    return health.unreadiness
