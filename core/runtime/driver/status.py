"""What a job tells about itself: plain values, safe to read at any time from any thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from onceflow.core.runtime.messages import SinkMetrics, SubtaskMetrics


class JobState(Enum):
    """Where a job stands."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FINISHED = "finished"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self in _ENDED


_ENDED = frozenset({JobState.FINISHED, JobState.STOPPED, JobState.CANCELLED, JobState.FAILED})


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot of the running attempt."""

    slot: int
    pid: int
    parent_pid: int
    host: str
    rss_bytes: int = 0
    heard_at_s: float = 0.0
    subtasks: tuple[SubtaskMetrics, ...] = ()
    sinks: tuple[SinkMetrics, ...] = ()


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """Transactions of one sink, over all its subtasks, in this attempt and its recovery.

    As last told by the slots, so up to a heartbeat old.
    """

    uid: str
    sink_id: str
    open: int = 0
    """Subtasks that have written rows since their last barrier."""
    prepared: int = 0
    """In doubt now: pre-committed, and not known to be committed."""
    committed: int = 0
    aborted: int = 0
    """What older attempts had left, rolled back by recovery."""
    retried: int = 0
    """Tries of commits that did not succeed and were repeated."""
    rows_committed: int = 0
    rows_rejected: int = 0
    """Bad rows that the writers left out."""
    oldest_prepared_s: float = 0.0
    """Age of what has been in doubt for longest; 0 when nothing is."""
    last_commit_ms: float = 0.0
    """The slowest subtask's last commit, from hearing the decision to the target's answer."""


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """One completed checkpoint; the parts are the slowest subtask's, in milliseconds."""

    checkpoint: int
    attempt: int
    triggered_at_ms: int
    duration_ms: float
    """From the trigger to the decision in the log."""
    alignment_ms: float
    sync_ms: float
    async_ms: float
    append_ms: float
    size_bytes: int
    committed_ms: float | None = None
    """From the decision to the last subtask's report that all is committed."""


@dataclass(frozen=True, slots=True)
class AttemptStats:
    """How one attempt began, as seconds since the one before it failed (or since the start)."""

    attempt: int
    restored_checkpoint: int
    began_at_s: float
    """Seconds since the epoch."""
    slots_ended_s: float = 0.0
    claimed_s: float = 0.0
    recovered_s: float = 0.0
    slots_up_s: float = 0.0
    deployed_s: float = 0.0
    running_s: float = 0.0
    committed: int = 0
    """Transactions that recovery committed."""
    aborted: int = 0
    """Transactions that recovery rolled back."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as of now."""

    job: str
    state: JobState
    attempt: int = 0
    restores: int = 0
    slots: tuple[SlotStatus, ...] = ()
    checkpoints_completed: int = 0
    checkpoints_failed: int = 0
    checkpoints_pending: tuple[int, ...] = ()
    last_checkpoint: CheckpointStats | None = None
    history: tuple[CheckpointStats, ...] = ()
    """The last completed checkpoints, oldest first."""
    attempts: tuple[AttemptStats, ...] = ()
    last_error: str = ""
    records_in: int = 0
    """Records read by all sources in this attempt.

    It is 0 again after a restart; what is read once more from the restored checkpoint counts again.
    """
    rejected: int = 0
    """Bad records left out in this attempt: dropped, or sent to the dead letters."""
    subtasks: tuple[SubtaskMetrics, ...] = field(default=())
    dropped_state: tuple[str, ...] = ()
    """What restored checkpoints held and `allow_non_restored_state` has dropped, for people."""
    sinks: tuple[SinkStatus, ...] = ()
    """By uid; a sink is here from the attempt's recovery on."""
