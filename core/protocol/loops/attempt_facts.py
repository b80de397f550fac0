"""The facts and decisions of the attempt loop; both are closed unions.

The caller passes facts in the order in which they happen. It carries out decisions in the order
given, each before it passes the next fact. Three decisions ask for data that only the runtime has,
and it answers at once: `SendHeartbeats` by `OutboxesMeasured`, `LookAtRecovery` by `RecoveryStep`,
`SavepointRequest` by `SavepointBegun`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from typing_extensions import assert_never

from onceflow.core.errors import OnceflowError, SourceError
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints import decisions
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.splits import Split

# --- facts: slots -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotMessageReceived:
    """The fact that a slot has sent a message."""

    attempt: AttemptId
    slot: int
    message: messages.SlotMessage


@dataclass(frozen=True, slots=True)
class SlotGone:
    """The fact that a slot's stream has ended."""

    slot: int
    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class SlotsEnded:
    """The fact that all slots of an attempt have returned, or one has died."""

    attempt: AttemptId
    error: OnceflowError


@dataclass(frozen=True, slots=True)
class OutboxesMeasured:
    """The time for which the oldest unread message of each slot has waited."""

    waiting_s: Mapping[int, float]


# --- facts: requests --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The user's request for a checkpoint, or to stop with one."""

    kind: decisions.CheckpointKind


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The user's request to leave at once, without a checkpoint."""


Request: TypeAlias = CheckpointRequested | decisions.SavepointRequest | CancelRequested


class JobCancelled(OnceflowError):
    """The error that ends an attempt when the user has cancelled the job."""

    retry = "never"


@dataclass(frozen=True, slots=True)
class SavepointBegun:
    """The answer whether a request still stands.

    One that waited for too long was answered already.
    """

    request: decisions.SavepointRequest
    stands: bool


# --- facts: work in parallel to the loop ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecoveryEnded:
    """The fact that every sink agrees with the log, or `error` says why one does not."""

    attempt: AttemptId
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RecoveryStep:
    """The step that recovery waits for, and the time at which it began."""

    text: str
    began_at_s: float


@dataclass(frozen=True, slots=True)
class AppendEnded:
    """The outcome of an append of `completed` to the decision log.

    `error` is None if the log holds it. Otherwise `error` says why not, or that the outcome is
    unknown.
    """

    attempt: AttemptId
    completed: CompletedCheckpoint
    append_ms: float
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class SavepointWritten:
    """The fact that a savepoint is completely written, or `error` says why not."""

    attempt: AttemptId
    checkpoint: CheckpointId
    request: decisions.SavepointRequest
    size_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class GlobalCommitEnded:
    """The fact that the driver has committed up to `checkpoint` for sink `uid`.

    If it failed, `error` is set.
    """

    attempt: AttemptId
    uid: str
    sink_id: str
    checkpoint: CheckpointId
    error: BaseException | None = None
    versions: int = 0
    """The number of versions of the target that were made since the last report."""
    files: int = 0
    """The number of data files that these versions have added."""


@dataclass(frozen=True, slots=True)
class DiscoveryAnswered:
    """The answer of source `uid`: new splits, or the error why it cannot be read on."""

    attempt: AttemptId
    uid: str
    splits: tuple[Split, ...] = ()
    error: SourceError | None = None


@dataclass(frozen=True, slots=True)
class BlockersListed:
    """The blockers that the writers of sink `uid` wait for.

    Empty if there are none or the target does not list them.
    """

    attempt: AttemptId
    uid: str
    blockers: tuple[str, ...]


AttemptFact: TypeAlias = (
    messages.Hello
    | SlotMessageReceived
    | SlotGone
    | SlotsEnded
    | OutboxesMeasured
    | Request
    | SavepointBegun
    | RecoveryEnded
    | RecoveryStep
    | AppendEnded
    | SavepointWritten
    | GlobalCommitEnded
    | DiscoveryAnswered
    | BlockersListed
)

# --- decisions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdmitSlot:
    """Let the slot that sent `hello` take part."""

    hello: messages.Hello


@dataclass(frozen=True, slots=True)
class DismissSlot:
    """Tell the slot that sent `hello` to leave: it does not take part."""

    hello: messages.Hello
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseSlot:
    """Send the slot no further messages: it has shut down as requested."""

    slot: int


@dataclass(frozen=True, slots=True)
class SendHeartbeats:
    """Tell every slot that the driver is alive, then report `OutboxesMeasured`."""


@dataclass(frozen=True, slots=True)
class LookAtRecovery:
    """Report `RecoveryStep`."""


@dataclass(frozen=True, slots=True)
class SlotsComplete:
    """The fact that every slot takes part."""


Announced: TypeAlias = (
    SlotsComplete
    | RecoveryEnded
    | messages.Running
    | messages.Heartbeat
    | messages.Acked
    | messages.CommittedThrough
    | GlobalCommitEnded
    | AppendEnded
    | BlockersListed
    | SlotGone
    | messages.Failed
)
"""The facts that the runtime publishes for people. As a decision, such a fact has no other
consequence."""


@dataclass(frozen=True, slots=True)
class DeploySlots:
    """Send every slot its program and its state."""


@dataclass(frozen=True, slots=True)
class EnterRunning:
    """Start the work that runs in parallel to the coordinator: every slot runs."""


@dataclass(frozen=True, slots=True)
class AskBeside:
    """Ask due sources for splits that `decided` lacks, and sinks of `overdue` for blockers.

    They answer with `DiscoveryAnswered` and `BlockersListed`, some time later or never.
    """

    decided: CompletedCheckpoint
    overdue: frozenset[SubtaskRef]


@dataclass(frozen=True, slots=True)
class TakeDiscovered:
    """Send `offers`, by slot. Source `uid` has answered and may be asked again."""

    uid: str
    offers: Mapping[int, messages.OfferSplits]


@dataclass(frozen=True, slots=True)
class CloseAttempt:
    """Close the attempt: the job is done, and its slots have left or their time is over.

    Nothing is decided after it.
    """

    is_finished: bool
    """True if the job has finished; False if it was stopped."""


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """End the attempt, which has failed or was cancelled. Nothing is decided after it."""

    error: BaseException


AttemptDecision: TypeAlias = (
    AdmitSlot
    | DismissSlot
    | ReleaseSlot
    | SendHeartbeats
    | LookAtRecovery
    | Announced
    | DeploySlots
    | EnterRunning
    | AskBeside
    | TakeDiscovered
    | decisions.SavepointRequest
    | SavepointWritten
    | decisions.Barrier
    | decisions.AppendDecision
    | decisions.WriteSavepoint
    | decisions.AbortSavepoint
    | decisions.NotifyComplete
    | decisions.NotifyAbort
    | decisions.DiscardState
    | decisions.CountFailure
    | messages.GloballyCommitted
    | messages.Shutdown
    | CloseAttempt
    | EndAttempt
)
"""`NotifyAbort`, `GloballyCommitted` and `Shutdown` are messages: they go to every slot.

For a `SavepointRequest`, the runtime begins the savepoint and reports `SavepointBegun`. From then
on, the end of the attempt answers the request. The runtime passes `SavepointWritten` on to the
requester.
"""


def is_of_another_attempt(fact: AttemptFact, attempt: AttemptId) -> bool:
    """Return True if `fact` belongs to an attempt other than `attempt`."""
    match fact:
        case (
            SlotMessageReceived()
            | SlotGone()
            | SlotsEnded()
            | RecoveryEnded()
            | AppendEnded()
            | SavepointWritten()
            | GlobalCommitEnded()
            | DiscoveryAnswered()
            | BlockersListed()
        ):
            # Threads and connections of the previous attempt may still report. Their facts apply to
            # that attempt only.
            return fact.attempt != attempt
        case (
            messages.Hello()  # the loop tells it to leave
            | OutboxesMeasured()
            | CheckpointRequested()
            | decisions.SavepointRequest()
            | CancelRequested()
            | SavepointBegun()
            | RecoveryStep()
        ):
            return False
        case _:
            assert_never(fact)
