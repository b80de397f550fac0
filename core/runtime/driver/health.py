"""What probes ask: whether the driver is alive and gets on, and whether the job runs.

    /healthz  200 unless the driver's loop stands still, or no checkpoint completes for long
    /readyz   200 while the job is RUNNING and this driver has decided a checkpoint

Both are of the whole process where several jobs share an address: each must be well. The answer is
JSON that names what is wrong, job by job; it holds no secret, and needs no token.

The job's thread says, at each turn, within what time it turns again. It never owes a turn while it
waits for what may take any time (a recovery, a restart's delay): then it says that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.runtime.driver.http_server import Response
from onceflow.core.runtime.events.job_events import (
    AttemptRunning,
    CheckpointCompleted,
    JobEvent,
    JobState,
)
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
    """How one job is. An empty text: nothing is wrong."""

    job: str
    sickness: str
    """Why a new driver might do better."""
    unreadiness: str
    """Why the job does not run yet, or not now."""


class JobHealth:
    """Watches one job. Events and promises come from the job's threads; any thread asks."""

    def __init__(
        self, checkpointing: CheckpointSettings, runtime: RuntimeSettings, intervals: int | None
    ) -> None:
        """Take after how many intervals without a checkpoint a job is unhealthy; None: never."""
        # Longer than the driver may rightly be held up: a lost slot is noticed by its silence, and
        # then slots and committers are each given their time to end.
        self._patience_s = runtime.heartbeat_timeout_s + 2 * runtime.cancel_timeout_s
        self._checkpoint_limit_s = None
        if checkpointing.interval_s is not None and intervals is not None:
            # A checkpoint may take as long as its timeout, and is then no sign of a standstill.
            self._checkpoint_limit_s = (
                intervals * checkpointing.interval_s + checkpointing.timeout_s
            )
        self._takes_checkpoints = checkpointing.interval_s is not None
        self._due_s: float | None = None
        self._progress_s: float | None = None
        """When a checkpoint was last completed, or the job first ran; of `time.monotonic`."""

    def promise(self, within_s: float) -> None:
        """Say that the job's thread turns again within `within_s`, on a quiet machine."""
        self._due_s = time.monotonic() + within_s + self._patience_s

    def on_event(self, event: JobEvent) -> None:
        """Note what counts as progress."""
        if isinstance(event, CheckpointCompleted) or (
            isinstance(event, AttemptRunning) and self._progress_s is None
        ):
            self._progress_s = event.at.monotonic_s

    def judge(self, status: JobStatus) -> Health:
        """Return how the job is now."""
        if status.state.ended:
            return Health(status.job, "", f"the job has ended: {status.state.value}")
        now_s = time.monotonic()
        return Health(status.job, self._find_sickness(now_s), self._find_unreadiness(status))

    def _find_sickness(self, now_s: float) -> str:
        due_s, progress_s = self._due_s, self._progress_s
        if due_s is not None and now_s > due_s:
            return f"the driver's loop stands still: its turn is {now_s - due_s:.0f} s overdue"
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
        if status.state is not JobState.RUNNING:
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
