"""What the loop of an attempt is told, and what it decides; both are closed unions.

Facts are told in the order in which they happen. Decisions are carried out in the order given, each
before the next fact is told. Three decisions ask for something that only the runtime knows, and
are answered at once: `SendHeartbeats` by `OutboxesMeasured`, `LookAtRecovery` by `RecoveryStep`,
`SavepointRequest` by `SavepointBegun`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from typing_extensions import assert_never

from onceflow.core.errors import OnceflowError, SourceError
from onceflow.core.protocol.checkpoints.decisions import (
    AbortSavepoint,
    AppendDecision,
    CheckpointKind,
    CountFailure,
    DiscardState,
    NotifyAbort,
    NotifyComplete,
    SavepointRequest,
    TriggerCheckpoint,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import (
    Acked,
    CommittedThrough,
    Failed,
    GloballyCommitted,
    Heartbeat,
    Hello,
    OfferSplits,
    Running,
    Shutdown,
    SlotMessage,
)
from onceflow.core.protocol.splits import Split

# --- facts: slots -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotMessageReceived:
    """A slot has sent a message."""

    attempt: AttemptId
    slot: int
    message: SlotMessage


@dataclass(frozen=True, slots=True)
class SlotGone:
    """A slot's stream has ended."""

    slot: int
    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class SlotsEnded:
    """All slots of an attempt have returned, or one has died."""

    attempt: AttemptId
    error: OnceflowError


@dataclass(frozen=True, slots=True)
class OutboxesMeasured:
    """By slot, how long the oldest message has waited for the slot to take it."""

    waiting_s: Mapping[int, float]


# --- facts: requests --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The user asks for a checkpoint, or to stop with one."""

    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The user asks to leave at once, without a checkpoint."""


Request: TypeAlias = CheckpointRequested | SavepointRequest | CancelRequested


class JobCancelled(OnceflowError):
    """Ends an attempt when the user has cancelled the job."""

    retry = "never"


@dataclass(frozen=True, slots=True)
class SavepointBegun:
    """Whether the request still stands: one that has waited for too long has been answered."""

    request: SavepointRequest
    stands: bool


# --- facts: what is done beside the loop ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecoveryEnded:
    """Every sink agrees with the log, or `error` says why one does not."""

    attempt: AttemptId
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RecoveryStep:
    """What recovery waits for, and since when."""

    text: str
    began_at_s: float


@dataclass(frozen=True, slots=True)
class AppendEnded:
    """The decision log holds `completed`, or `error` says why not, or that nobody knows."""

    attempt: AttemptId
    completed: CompletedCheckpoint
    append_ms: float
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class SavepointWritten:
    """A savepoint is whole, or `error` says why not."""

    attempt: AttemptId
    checkpoint: CheckpointId
    request: SavepointRequest
    size_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class GlobalCommitEnded:
    """The driver has committed up to `checkpoint` for sink `uid`, or gave up with `error`."""

    attempt: AttemptId
    uid: str
    sink_id: str
    checkpoint: CheckpointId
    error: BaseException | None = None
    versions: int = 0
    """How many versions of the target it has made since it last said so."""
    files: int = 0
    """How many data files these have added."""


@dataclass(frozen=True, slots=True)
class DiscoveryAnswered:
    """What source `uid` has answered: splits that are new, or why it cannot be read on."""

    attempt: AttemptId
    uid: str
    splits: tuple[Split, ...] = ()
    error: SourceError | None = None


@dataclass(frozen=True, slots=True)
class BlockersListed:
    """Whom the writers of sink `uid` wait for; empty: nobody, or the target does not tell."""

    attempt: AttemptId
    uid: str
    blockers: tuple[str, ...]


AttemptFact: TypeAlias = (
    Hello
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
    """The slot that has said `hello` takes part."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class DismissSlot:
    """Tell the slot that has said `hello` to leave: it does not take part."""

    hello: Hello
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseSlot:
    """A slot has left in good order: send it nothing more."""

    slot: int


@dataclass(frozen=True, slots=True)
class SendHeartbeats:
    """Tell every slot that the driver lives, then report `OutboxesMeasured`."""


@dataclass(frozen=True, slots=True)
class LookAtRecovery:
    """Report `RecoveryStep`."""


@dataclass(frozen=True, slots=True)
class SlotsComplete:
    """Every slot takes part."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Let people know of `fact`; nothing else follows from it."""

    fact: (
        SlotsComplete
        | RecoveryEnded
        | Running
        | Heartbeat
        | Acked
        | CommittedThrough
        | GlobalCommitEnded
        | AppendEnded
        | BlockersListed
        | SlotGone
        | Failed
    )


@dataclass(frozen=True, slots=True)
class DeploySlots:
    """Send every slot its program and its state."""


@dataclass(frozen=True, slots=True)
class EnterRunning:
    """Every slot runs: begin what goes on beside the coordinator."""


@dataclass(frozen=True, slots=True)
class AskBeside:
    """Ask sources that are due what they have more than `decided`, and sinks that `overdue` are of.

    They answer with `DiscoveryAnswered` and `BlockersListed`, some time later or never.
    """

    decided: CompletedCheckpoint
    overdue: frozenset[SubtaskRef]


@dataclass(frozen=True, slots=True)
class TakeDiscovered:
    """Source `uid` has answered and may be asked again; send `offers`, by slot."""

    uid: str
    offers: Mapping[int, OfferSplits]


@dataclass(frozen=True, slots=True)
class CloseAttempt:
    """The job is done, and its slots have left or had their time; nothing is decided after it."""

    is_finished: bool
    """False: the job was stopped."""


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """The attempt has failed, or was cancelled; nothing is decided after it."""

    error: BaseException


AttemptDecision: TypeAlias = (
    AdmitSlot
    | DismissSlot
    | ReleaseSlot
    | SendHeartbeats
    | LookAtRecovery
    | Announce
    | DeploySlots
    | EnterRunning
    | AskBeside
    | TakeDiscovered
    | SavepointRequest
    | SavepointWritten
    | TriggerCheckpoint
    | AppendDecision
    | WriteSavepoint
    | AbortSavepoint
    | NotifyComplete
    | NotifyAbort
    | DiscardState
    | CountFailure
    | GloballyCommitted
    | Shutdown
    | CloseAttempt
    | EndAttempt
)
"""`NotifyAbort`, `GloballyCommitted` and `Shutdown` are messages: they go to every slot.

A `SavepointRequest` is to be begun, and `SavepointBegun` to be reported; from then on the end of
the attempt answers it. `SavepointWritten` is passed on: whoever asked is told.
"""


def is_of_another_attempt(fact: AttemptFact, attempt: AttemptId) -> bool:
    """Return whether `fact` belongs to an attempt other than `attempt`."""
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
            # Threads and connections of the attempt before may still report. What they say is
            # true of that attempt alone.
            return fact.attempt != attempt
        case (
            Hello()  # it is told to leave
            | OutboxesMeasured()
            | CheckpointRequested()
            | SavepointRequest()
            | CancelRequested()
            | SavepointBegun()
            | RecoveryStep()
        ):
            return False
        case _:
            assert_never(fact)
