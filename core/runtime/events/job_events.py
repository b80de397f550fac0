"""The events of a job as plain values: status, listeners and pages are all computed from them.

Every event is frozen, can be pickled, and has its time by two clocks. The order of a job's events
is

    JobStarted (AttemptBegan … AttemptEnded JobRestarting)* AttemptBegan … AttemptEnded JobEnded

An attempt that fails before it has claimed the job has neither AttemptBegan nor AttemptEnded.
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
from onceflow.core.spi import SourceProgress, SplitOffsets


class JobState(Enum):
    """The state of a job."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FINISHED = "finished"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """True if the job has ended and no more events follow."""
        return self in _ENDED


_ENDED = frozenset({JobState.FINISHED, JobState.STOPPED, JobState.CANCELLED, JobState.FAILED})


@dataclass(frozen=True, slots=True)
class RecoveredSink:
    """The actions of recovery on the transactions of one sink."""

    uid: str
    sink_id: str
    committed: int = 0
    """The number of transactions that recovery committed, without those already committed."""
    rows_committed: int = 0
    aborted: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time on the driver's machine."""

    monotonic_s: float
    """The time by `time.monotonic`, for differences between events of one process."""
    wall_s: float
    """The time in seconds since the epoch, for people and for comparison with other machines."""

    @classmethod
    def now(cls) -> Moment:
        """Return the current time."""
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
    """An attempt has claimed the job, and starts from `restored_checkpoint`."""

    attempt: AttemptId
    restored_checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class StateDropped(_Timed):
    """The restored checkpoint contains `state`, which the pipeline drops."""

    state: tuple[str, ...]
    """Descriptions for people."""


@dataclass(frozen=True, slots=True)
class SlotJoined(_Timed):
    """A slot has connected and takes part in the attempt."""

    slot: int
    pid: int
    parent_pid: int
    host: str


@dataclass(frozen=True, slots=True)
class SlotsJoined(_Timed):
    """The last slot of the attempt has joined."""


@dataclass(frozen=True, slots=True)
class SinksRecovered(_Timed):
    """Every sink agrees with the decision log."""

    sinks: tuple[RecoveredSink, ...]


@dataclass(frozen=True, slots=True)
class SlotsDeployed(_Timed):
    """The driver has sent every slot its state and the program."""


@dataclass(frozen=True, slots=True)
class AttemptRunning(_Timed):
    """The last slot has started to run."""

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
    """A slot no longer takes part in the attempt."""

    slot: int
    error: str = ""
    """The reason why it was lost, or its own failure; empty if it was told to leave."""


@dataclass(frozen=True, slots=True)
class SplitsDiscovered(_Timed):
    """New splits of source `uid` were found. They are read once a checkpoint contains them."""

    uid: str
    splits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LagMeasured(_Timed):
    """The end positions of source `uid` were read, for the splits of the last checkpoint."""

    uid: str
    splits: tuple[SplitOffsets, ...]
    """The offsets of the splits; empty if the source could not tell."""
    progress: SourceProgress | None = None
    """The distance in bytes and seconds; None if the source does not know it."""


@dataclass(frozen=True, slots=True)
class SinkBlocked(_Timed):
    """An ack of sink `uid` is overdue, because its writers wait for `blockers` in the target.

    The event is repeated when the blockers change.
    """

    uid: str
    blockers: tuple[str, ...]
    """Descriptions for people; empty if no ack is overdue any more, or there are no blockers."""


@dataclass(frozen=True, slots=True)
class CommitRefused(_Timed):
    """Sink `uid` has refused a commit of the driver: in a recovery, or of a whole checkpoint.

    The event is repeated for each try, and sent once more after the commit. Commits by slots are
    in the reports of the slots.
    """

    uid: str
    refusal: str
    """The commit, the reason, and advice, for people. Empty if the commit has succeeded."""
    is_stuck: bool = False
    """True if the sink refuses the commit until a person helps."""


@dataclass(frozen=True, slots=True)
class CheckpointTriggered(_Timed):
    """The sources were told to emit the barrier of `checkpoint`."""

    checkpoint: CheckpointId
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class CheckpointAcked(_Timed):
    """The part of one subtask in `checkpoint` is durable."""

    checkpoint: CheckpointId
    subtask: SubtaskRef
    timings: SnapshotTimings
    record_times: RecordTimes | None = None
    """The creation times of the records since the last barrier, if a source knows them."""


@dataclass(frozen=True, slots=True)
class CheckpointCompleted(_Timed):
    """`checkpoint` is in the decision log: it will be committed, whatever fails from here on."""

    checkpoint: CheckpointId
    append_ms: float


@dataclass(frozen=True, slots=True)
class SavepointCompleted(_Timed):
    """Savepoint `checkpoint` is complete in the directory `place`. It decides nothing."""

    checkpoint: CheckpointId
    place: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SavepointRestored(_Timed):
    """The job begins from the savepoint in `place`, as decision `checkpoint` records."""

    checkpoint: CheckpointId
    place: str


@dataclass(frozen=True, slots=True)
class CheckpointFailed(_Timed):
    """`checkpoint` was aborted. A later checkpoint decides its prepared transactions."""

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

    Sent only for sinks that commit whole checkpoints, such as those of lake tables.
    """

    uid: str
    checkpoint: CheckpointId
    versions: int = 0
    """The number of versions of the target that were created since the last such event."""
    files: int = 0
    """The number of data files that these versions have added."""


@dataclass(frozen=True, slots=True)
class LeftoversAborted(_Timed):
    """Transactions that slots of older attempts prepared after recovery were rolled back."""

    attempt: AttemptId
    sinks: tuple[RecoveredSink, ...]


@dataclass(frozen=True, slots=True)
class AttemptEnded(_Timed):
    """An attempt has ended. The driver has told its slots to shut down."""

    attempt: AttemptId
    error: str = ""
    """The reason, unless the job's work has ended."""


@dataclass(frozen=True, slots=True)
class JobRestarting(_Timed):
    """The slots have left, and another attempt begins after `delay_s`."""

    delay_s: float
    error: str


@dataclass(frozen=True, slots=True)
class JobEnded(_Timed):
    """The job has ended; no event follows."""

    state: JobState
    error: str = ""


@dataclass(frozen=True, slots=True)
class EventsDropped(_Timed):
    """A slow listener has missed `count` events before this one. Sent only to that listener."""

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
