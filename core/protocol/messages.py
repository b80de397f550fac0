"""The messages between a job driver and its slots, and within a slot, as plain values.

A stream belongs to the attempt and the slot in its `Hello`. If a stream belongs to another attempt,
the driver drops its messages and tells that slot to shut down (I7). The driver's messages about
checkpoints have the same types as the mail that a slot passes to its subtasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.protocol.checkpoints.decisions import Barrier, NotifyAbort
from onceflow.core.protocol.checkpoints.snapshots import InFlight, StateHandle, SubtaskSnapshot
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.record_times import RecordTimes
from onceflow.core.protocol.sink_counts import SinkCounts
from onceflow.core.protocol.splits import Split

# --- slot to driver ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The message that a slot is up: its identity, its channels' address, its versions."""

    attempt: AttemptId
    slot: int
    pid: int
    parent_pid: int
    """The process that forked the slot: the executor's Python daemon."""
    host: str
    data_address: str
    versions: dict[str, str]
    storage_probe: str = ""
    """The text that the slot read where the driver had written a token. It shows that storage is
    shared."""
    machine: str = ""
    """The host name of its machine, for people."""
    network_id: str = ""
    """The identity of its network stack. Slots with different ones cannot have one address."""
    loopback: bool = False
    """True if `host` is a loopback address, which no other machine can reach."""


@dataclass(frozen=True, slots=True)
class Running:
    """The message that every chain of the slot has its state and channels, and has begun."""

    dropped: tuple[str, ...] = ()
    """The state in the checkpoint that no operator takes, for people."""


@dataclass(frozen=True, slots=True)
class Acked:
    """The message that one subtask's part of a checkpoint is durable."""

    checkpoint: CheckpointId
    snapshot: SubtaskSnapshot
    record_times: RecordTimes | None = None
    """The creation times of the records read since the last barrier, if the source has them."""
    in_target: bool = False
    """True if the handles name files in the directory of a savepoint, and not in the job's
    storage."""


@dataclass(frozen=True, slots=True)
class Declined:
    """The message that a subtask cannot take part in a checkpoint; it goes on with the stream."""

    checkpoint: CheckpointId
    subtask: SubtaskRef
    reason: str


@dataclass(frozen=True, slots=True)
class CommittedThrough:
    """The message that a subtask knows of `checkpoint` and has committed everything up to it."""

    subtask: SubtaskRef
    checkpoint: CheckpointId
    commit_ms: float = 0.0
    committed: CheckpointId = GENESIS
    """The checkpoint up to which its sinks have committed, even if the subtask has not yet
    processed that."""


@dataclass(frozen=True, slots=True)
class SourceExhausted:
    """The message that a bounded source subtask has emitted its last record."""

    subtask: SubtaskRef


@dataclass(frozen=True, slots=True)
class Failed:
    """The message that a slot cannot go on.

    `error_class` is a name in `onceflow.core.errors`, or in another module.
    """

    slot: int
    error_class: str
    message: str
    trace: str
    retry: str
    fingerprint: str = ""
    """The fingerprint, equal for the same mistake of the program; empty for any other failure."""


@dataclass(frozen=True, slots=True)
class FunctionMetric:
    """A metric of a user's function in one subtask, since the subtask began."""

    operator: str
    name: str
    kind: str
    """The kind: counter, gauge or histogram."""
    value: float = 0.0
    """The value; for a histogram, the sum of all values."""
    bounds: tuple[float, ...] = ()
    """The upper bounds of a histogram's buckets, rising, without infinity."""
    counts: tuple[int, ...] = ()
    """The number of values in each bucket of a histogram; one more than there are bounds."""


@dataclass(frozen=True, slots=True)
class SubtaskMetrics:
    """The metrics of one subtask since it began; times in seconds."""

    subtask: SubtaskRef
    records_in: int = 0
    records_out: int = 0
    busy_s: float = 0.0
    backpressured_s: float = 0.0
    cpu_s: float = 0.0
    input_batches: int = 0
    """The number of batches that wait in the input channels now."""
    rejected: int = 0
    """The number of bad records left out: dropped, or sent to the dead letters."""
    functions: tuple[FunctionMetric, ...] = ()
    """The metrics of the user's functions."""


@dataclass(frozen=True, slots=True)
class SinkMetrics(SinkCounts):
    """The counts of one subtask's transactions of one sink since the subtask began."""

    uid: str
    sink_id: str
    subtask: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of a subtask's source or sink for an outside server, or a running call to it."""

    uid: str
    what: str
    """The server that the subtask waits for, and its address, as text for people."""
    waited_s: float
    call: str = ""
    """The call that is running, for people. It may succeed: there is no sign that the server is
    away.

    Empty if the server has not answered, or has refused.
    """


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The message that a slot is alive, or that the driver is: then the fields have no meaning."""

    slot: int = -1
    subtasks: tuple[SubtaskMetrics, ...] = ()
    rss_bytes: int = 0
    sinks: tuple[SinkMetrics, ...] = ()
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotClosed:
    """The message that a slot has closed everything and leaves, as it was told to."""


# --- driver to slot ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoredOperator:
    """The state of one operator for one subtask.

    It exists only if the checkpoint holds such state.
    """

    uid: str
    keyed: tuple[StateHandle, ...] = ()
    """The state of every old subtask whose key groups overlap this subtask's.

    The backend takes only the key groups of this subtask.
    """
    lists: dict[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    raw: tuple[StateHandle, ...] = ()
    """State without a key, of every old subtask by number.

    If it is broadcast, of one of them. If it is raw, of those with this subtask's key groups.
    """


@dataclass(frozen=True, slots=True)
class Deploy:
    """The order to begin: the program, the other slots' addresses, this slot's operator states."""

    data_addresses: tuple[str, ...]
    restored_checkpoint: CheckpointId
    next_checkpoint: CheckpointId
    operators: tuple[RestoredOperator, ...]
    in_flight: tuple[InFlight, ...]
    """The rows to take before any new rows, in that order; includes rows of other subtasks."""
    program: bytes = field(repr=False)
    """The program, see `program`. It contains the secrets of the user's sources and sinks."""

    def operator(self, uid: str) -> RestoredOperator | None:
        """Return the state of operator `uid`, or None if the checkpoint holds none."""
        return next((operator for operator in self.operators if operator.uid == uid), None)


@dataclass(frozen=True, slots=True)
class OfferSplits:
    """The offer of new splits of source `uid`: to be read once a decision contains them."""

    uid: str
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """The order to commit everything up to `checkpoint`, which is in the decision log."""

    checkpoint: CheckpointId
    retain_ledger_from: dict[str, CheckpointId]
    """The checkpoint of each sink id from which proofs of commits must be kept. Older proofs may be
    deleted."""


@dataclass(frozen=True, slots=True)
class GloballyCommitted:
    """The message that the driver has committed the decisions up to `checkpoint` for `sink_id`."""

    sink_id: str
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The order to close everything, roll back open transactions, and commit nothing more.

    The slot then sends `SlotClosed` and leaves.
    """

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
SubtaskMail: TypeAlias = Barrier | OfferSplits | Complete | NotifyAbort | Shutdown
"""The mail of a subtask's thread. Only subtasks of sources get triggers and splits."""
DriverMessage: TypeAlias = Deploy | SubtaskMail | GloballyCommitted | Heartbeat

# --- within a slot ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletionHeard:
    """The report that every operator of the subtask knows that the checkpoint is decided."""

    subtask: SubtaskRef
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class SinkCommitted:
    """The report that one sink of a subtask has committed everything up to `through`."""

    subtask: SubtaskRef
    uid: str
    through: CheckpointId
    commit_ms: float


@dataclass(frozen=True, slots=True)
class PartFailed:
    """The report that a part of the slot cannot go on, so that the attempt cannot."""

    error: BaseException
