"""What happens in a job, as plain values: the one account that status, listeners and pages read.

Every event is frozen, pickles, and says when it happened by two clocks. In order, events of one job
are

    JobStarted (AttemptBegan … AttemptEnded JobRestarting)* AttemptBegan … AttemptEnded JobEnded

where an attempt that fails before it has claimed the job has neither a begin nor an end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import SnapshotTimings
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import SinkMetrics, SubtaskMetrics, Wait
from onceflow.core.protocol.record_times import RecordTimes
from onceflow.core.spi import SplitOffsets


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
class RecoveredSink:
    """What recovery did to the transactions of one sink."""

    uid: str
    sink_id: str
    committed: int = 0
    """Transactions that it committed; not those that it found committed."""
    rows_committed: int = 0
    aborted: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time on the driver's machine."""

    monotonic_s: float
    """Of `time.monotonic`: for differences between events of one process."""
    wall_s: float
    """Seconds since the epoch: for people, and for comparison with other machines."""

    @classmethod
    def now(cls) -> Moment:
        """Return the present."""
        return cls(time.monotonic(), time.time())


@dataclass(frozen=True, slots=True)
class _Timed:
    at: Moment = field(default_factory=Moment.now, kw_only=True)


@dataclass(frozen=True, slots=True)
class JobStarted(_Timed):
    """`Pipeline.start` was called."""

    sources: frozenset[str] = frozenset()
    """The uids of the job's sources."""


@dataclass(frozen=True, slots=True)
class AttemptBegan(_Timed):
    """An attempt has claimed the job, and goes on from `restored_checkpoint`."""

    attempt: AttemptId
    restored_checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class StateDropped(_Timed):
    """The restored checkpoint holds `state`, and the pipeline goes on without it."""

    state: tuple[str, ...]
    """For people."""


@dataclass(frozen=True, slots=True)
class SlotJoined(_Timed):
    """A slot has dialled in, and takes part."""

    slot: int
    pid: int
    parent_pid: int
    host: str


@dataclass(frozen=True, slots=True)
class SlotsJoined(_Timed):
    """Every slot takes part."""


@dataclass(frozen=True, slots=True)
class SinksRecovered(_Timed):
    """Every sink agrees with the decision log."""

    sinks: tuple[RecoveredSink, ...]


@dataclass(frozen=True, slots=True)
class SlotsDeployed(_Timed):
    """Every slot has been sent its state and the program."""


@dataclass(frozen=True, slots=True)
class AttemptRunning(_Timed):
    """Every slot runs."""

    committers: frozenset[str] = frozenset()
    """The uids of the sinks whose checkpoints the driver commits."""


@dataclass(frozen=True, slots=True)
class SlotReported(_Timed):
    """A slot has sent its counters with a heartbeat."""

    slot: int
    subtasks: tuple[SubtaskMetrics, ...] = ()
    sinks: tuple[SinkMetrics, ...] = ()
    rss_bytes: int = 0
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotLeft(_Timed):
    """A slot takes part no more."""

    slot: int
    error: str = ""
    """Why it was lost, or what it reported as its failure; empty when it was told to leave."""


@dataclass(frozen=True, slots=True)
class SplitsDiscovered(_Timed):
    """Splits of source `uid` have appeared. They are read once a checkpoint holds them."""

    uid: str
    splits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LagMeasured(_Timed):
    """Source `uid` was asked how far its splits go; by the last completed checkpoint."""

    uid: str
    splits: tuple[SplitOffsets, ...]
    """Empty when it could not tell."""


@dataclass(frozen=True, slots=True)
class SinkBlocked(_Timed):
    """Writers of sink `uid` owe an ack, and wait for `blockers` in the target.

    It comes again when these change.
    """

    uid: str
    blockers: tuple[str, ...]
    """For people. Empty: no ack is overdue any more, or nobody is waited for."""


@dataclass(frozen=True, slots=True)
class CommitRefused(_Timed):
    """Sink `uid` has refused what the driver commits: in a recovery, or a whole checkpoint.

    It comes with each try, and once more when it is committed. What slots commit is in their
    reports.
    """

    uid: str
    refusal: str
    """For people: what is not committed, why, and what to do. Empty: it is committed."""
    is_stuck: bool = False
    """Whether it is refused again and again until a person helps."""


@dataclass(frozen=True, slots=True)
class CheckpointTriggered(_Timed):
    """The sources are told to emit barrier `checkpoint`."""

    checkpoint: CheckpointId
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class CheckpointAcked(_Timed):
    """One subtask's part of `checkpoint` is durable."""

    checkpoint: CheckpointId
    subtask: SubtaskRef
    timings: SnapshotTimings
    record_times: RecordTimes | None = None
    """Of a source that has them: when the records were made that came since the last barrier."""


@dataclass(frozen=True, slots=True)
class CheckpointCompleted(_Timed):
    """`checkpoint` is in the decision log: it will be committed, whatever fails from here on."""

    checkpoint: CheckpointId
    append_ms: float


@dataclass(frozen=True, slots=True)
class SavepointCompleted(_Timed):
    """Savepoint `checkpoint` is whole in the directory `place`. Nothing is decided by it."""

    checkpoint: CheckpointId
    place: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SavepointRestored(_Timed):
    """The job begins from the savepoint in `place`: `checkpoint` is the decision that says so."""

    checkpoint: CheckpointId
    place: str


@dataclass(frozen=True, slots=True)
class CheckpointFailed(_Timed):
    """`checkpoint` was given up. What was prepared for it is decided by a later one."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class SubtaskCommitted(_Timed):
    """The sinks of `subtask` have committed everything up to `checkpoint`."""

    subtask: SubtaskRef
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class CheckpointCommitted(_Timed):
    """The driver has committed everything up to `checkpoint` for sink `uid`.

    Only of sinks that commit whole checkpoints, as those of lake tables do.
    """

    uid: str
    checkpoint: CheckpointId
    versions: int = 0
    """How many versions of the target it has made since the event before."""
    files: int = 0
    """How many data files these have added."""


@dataclass(frozen=True, slots=True)
class LeftoversAborted(_Timed):
    """What slots of older attempts had prepared after recovery is rolled back."""

    attempt: AttemptId
    sinks: tuple[RecoveredSink, ...]


@dataclass(frozen=True, slots=True)
class AttemptEnded(_Timed):
    """An attempt is over; its slots are told to leave."""

    attempt: AttemptId
    error: str = ""
    """Why, when that is not the end of the job's work."""


@dataclass(frozen=True, slots=True)
class JobRestarting(_Timed):
    """The slots have left, and another attempt begins after `delay_s`."""

    delay_s: float
    error: str


@dataclass(frozen=True, slots=True)
class JobEnded(_Timed):
    """Nothing more will happen."""

    state: JobState
    error: str = ""


@dataclass(frozen=True, slots=True)
class EventsDropped(_Timed):
    """A slow listener misses `count` events that came here. Sent to that listener alone."""

    count: int


JobEvent: TypeAlias = (
    JobStarted
    | AttemptBegan
    | StateDropped
    | SlotJoined
    | SlotsJoined
    | SinksRecovered
    | SlotsDeployed
    | AttemptRunning
    | SlotReported
    | SlotLeft
    | SplitsDiscovered
    | LagMeasured
    | SinkBlocked
    | CommitRefused
    | CheckpointTriggered
    | CheckpointAcked
    | CheckpointCompleted
    | SavepointCompleted
    | SavepointRestored
    | CheckpointFailed
    | SubtaskCommitted
    | CheckpointCommitted
    | LeftoversAborted
    | AttemptEnded
    | JobRestarting
    | JobEnded
    | EventsDropped
)
