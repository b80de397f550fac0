"""The messages between a job driver and its slots, and within a slot, as plain values.

A stream belongs to the attempt and the slot that its `Hello` names; the driver drops what is said
on one of another attempt, and tells that slot to shut down (I7). What the driver says of
checkpoints is also the mail of the subtasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.protocol.checkpoints.decisions import NotifyAbort, TriggerCheckpoint
from onceflow.core.protocol.checkpoints.snapshots import InFlight, StateHandle, SubtaskSnapshot
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.record_times import RecordTimes
from onceflow.core.protocol.sink_counts import SinkCounts
from onceflow.core.protocol.splits import Split

# --- slot to driver ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A slot is up: who it is, where its channels can be reached, what it runs."""

    attempt: AttemptId
    slot: int
    pid: int
    parent_pid: int
    """The process that forked the slot: the executor's Python daemon."""
    host: str
    data_address: str
    versions: dict[str, str]
    storage_probe: str = ""
    """What the slot read where the driver had written a token: shows that storage is shared."""
    machine: str = ""
    """The host name of its machine, for people."""
    network_id: str = ""
    """The identity of its network stack. Slots with different ones cannot have one address."""
    loopback: bool = False
    """True if `host` is a loopback address, which no other machine can reach."""


@dataclass(frozen=True, slots=True)
class Running:
    """Every chain of the slot has its state and its channels, and has begun."""

    dropped: tuple[str, ...] = ()
    """State that the checkpoint held and no operator takes, for people."""


@dataclass(frozen=True, slots=True)
class Acked:
    """One subtask's part of a checkpoint is durable."""

    checkpoint: CheckpointId
    snapshot: SubtaskSnapshot
    record_times: RecordTimes | None = None
    """Of a source that has them: when the records were made that came since the last barrier."""


@dataclass(frozen=True, slots=True)
class Declined:
    """One subtask cannot take part in a checkpoint; it goes on with the stream."""

    checkpoint: CheckpointId
    subtask: SubtaskRef
    reason: str


@dataclass(frozen=True, slots=True)
class CommittedThrough:
    """A subtask has heard of `checkpoint`, and has nothing left to commit up to it."""

    subtask: SubtaskRef
    checkpoint: CheckpointId
    commit_ms: float = 0.0
    committed: CheckpointId = GENESIS
    """What its sinks have committed, whether or not the subtask has had time to hear of it."""


@dataclass(frozen=True, slots=True)
class SourceExhausted:
    """A bounded source subtask has emitted its last record."""

    subtask: SubtaskRef


@dataclass(frozen=True, slots=True)
class Failed:
    """A slot cannot go on.

    `error_class` is a name of `onceflow.core.errors`, or of another module.
    """

    slot: int
    error_class: str
    message: str
    trace: str
    retry: str
    fingerprint: str = ""
    """The same for the same mistake of the program; empty for any other failure."""


@dataclass(frozen=True, slots=True)
class FunctionMetric:
    """A metric of a user's function in one subtask, since that began."""

    operator: str
    name: str
    kind: str
    """counter, gauge or histogram."""
    value: float = 0.0
    """Of a histogram: the sum of all values."""
    bounds: tuple[float, ...] = ()
    """Of a histogram: the upper bounds of its buckets, rising, without infinity."""
    counts: tuple[int, ...] = ()
    """Of a histogram: how many values are in each bucket; one more than there are bounds."""


@dataclass(frozen=True, slots=True)
class SubtaskMetrics:
    """What one subtask has done since it began; times in seconds."""

    subtask: SubtaskRef
    records_in: int = 0
    records_out: int = 0
    busy_s: float = 0.0
    backpressured_s: float = 0.0
    cpu_s: float = 0.0
    input_batches: int = 0
    """Waiting in the input channels now."""
    rejected: int = 0
    """Bad records left out: dropped, or sent to the dead letters."""
    functions: tuple[FunctionMetric, ...] = ()
    """What functions of the user count."""


@dataclass(frozen=True, slots=True)
class SinkMetrics(SinkCounts):
    """What one subtask's transactions of one sink have gone through since it began."""

    uid: str
    sink_id: str
    subtask: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A source or sink of one subtask waits for a server outside, or has a call to it under way."""

    uid: str
    what: str
    """The server that the subtask waits for, and its address, as text for people."""
    waited_s: float
    call: str = ""
    """The call that is under way, for people. It may succeed: nothing says that the server is away.

    Empty if the server has not answered, or has refused.
    """


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A slot is alive, or the driver is: then the fields say nothing."""

    slot: int = -1
    subtasks: tuple[SubtaskMetrics, ...] = ()
    rss_bytes: int = 0
    sinks: tuple[SinkMetrics, ...] = ()
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotClosed:
    """A slot has closed everything and leaves, as it was told to."""


# --- driver to slot ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoredOperator:
    """One operator's state for one subtask; there is one where a checkpoint held any of it."""

    uid: str
    keyed: tuple[StateHandle, ...] = ()
    """Of every old subtask whose key groups meet this subtask's.

    The backend takes what is its own.
    """
    lists: dict[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    raw: tuple[StateHandle, ...] = ()
    """State not kept by key, of every old subtask by number.

    Of one of them where it is broadcast; of those with this subtask's key groups where it is raw.
    """


@dataclass(frozen=True, slots=True)
class Deploy:
    """Begin: what to run, where the other slots are, and this one's state of every operator."""

    data_addresses: tuple[str, ...]
    restored_checkpoint: CheckpointId
    next_checkpoint: CheckpointId
    operators: tuple[RestoredOperator, ...]
    in_flight: tuple[InFlight, ...]
    """Rows to take before anything that comes, in that order; of other subtasks, too."""
    program: bytes = field(repr=False)
    """See `program`: holds whatever secrets the user's sources and sinks hold."""

    def operator(self, uid: str) -> RestoredOperator | None:
        """Return the state of operator `uid`; None when the checkpoint holds none."""
        return next((operator for operator in self.operators if operator.uid == uid), None)


@dataclass(frozen=True, slots=True)
class OfferSplits:
    """Splits of source `uid` that have appeared: to be read once a decision holds them."""

    uid: str
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """The checkpoint is in the decision log: commit everything up to it."""

    checkpoint: CheckpointId
    retain_ledger_from: dict[str, CheckpointId]
    """By sink id: proofs of commits of older checkpoints may be forgotten."""


@dataclass(frozen=True, slots=True)
class GloballyCommitted:
    """The driver has committed all that was decided up to `checkpoint` for `sink_id`."""

    sink_id: str
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Close everything, roll back what is open, commit nothing more, say `SlotClosed` and leave."""

    reason: str


SlotMessage: TypeAlias = (
    Hello
    | Running
    | Acked
    | Declined
    | CommittedThrough
    | SourceExhausted
    | Failed
    | Heartbeat
    | SlotClosed
)
SubtaskMail: TypeAlias = TriggerCheckpoint | OfferSplits | Complete | NotifyAbort | Shutdown
"""What the thread of a subtask is told; triggers and splits are for those of sources."""
DriverMessage: TypeAlias = Deploy | SubtaskMail | GloballyCommitted | Heartbeat

# --- within a slot ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletionHeard:
    """Every operator of the subtask knows the checkpoint to be decided."""

    subtask: SubtaskRef
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class SinkCommitted:
    """One sink of a subtask has nothing left to commit up to `through`."""

    subtask: SubtaskRef
    uid: str
    through: CheckpointId
    commit_ms: float


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part of the slot cannot go on, and so the attempt cannot."""

    error: BaseException
