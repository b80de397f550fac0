"""What the coordinator can decide; the runtime carries it out, in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import CompletedCheckpoint, StateHandle


class CheckpointKind(Enum):
    """Why a checkpoint is taken, and so what follows it. Travels in the barrier."""

    PERIODIC = "periodic"
    MANUAL = "manual"
    STOP = "stop"
    """Sources read nothing after this barrier, also if it fails and another one follows; once it
    is committed, the job finishes."""
    FINAL = "final"
    """All sources had reached their end before this barrier; once it is committed, the job ends."""

    @property
    def ends_job(self) -> bool:
        """Whether nothing but this checkpoint's commits is left to do once it is decided."""
        return self in {CheckpointKind.STOP, CheckpointKind.FINAL}


@dataclass(frozen=True, slots=True)
class TriggerCheckpoint:
    """Tell every source subtask to emit this barrier."""

    checkpoint: CheckpointId
    kind: CheckpointKind
    triggered_at_ms: int


@dataclass(frozen=True, slots=True)
class AppendDecision:
    """Append to the decision log, then report `logged` or `append_failed`; one at a time.

    When nobody knows whether it is in the log, report neither and end the attempt.
    """

    completed: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """Tell every subtask that `checkpoint` is decided: commit everything up to it."""

    checkpoint: CheckpointId
    oldest_retained: CheckpointId
    """What older checkpoints needed (proofs of commits, say) may be forgotten."""


@dataclass(frozen=True, slots=True)
class NotifyAbort:
    """Tell every subtask that `checkpoint` will never complete; what it prepared stays pending."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class DiscardState:
    """Delete these files, which no checkpoint names or ever will; some may be gone already.

    Prune the decision log first, so that it never names a deleted file.
    """

    handles: tuple[StateHandle, ...]


@dataclass(frozen=True, slots=True)
class CountFailure:
    """For status and metrics: `consecutive` checkpoints in a row have failed, this one last."""

    checkpoint: CheckpointId
    reason: str
    consecutive: int


@dataclass(frozen=True, slots=True)
class FailAttempt:
    """End the attempt; nothing is decided after it. The restart strategy says what comes next."""

    reason: str
    checkpoint: CheckpointId | None


@dataclass(frozen=True, slots=True)
class FinishJob:
    """Every subtask has committed the last checkpoint: close everything."""

    checkpoint: CheckpointId


Decision: TypeAlias = (
    TriggerCheckpoint
    | AppendDecision
    | NotifyComplete
    | NotifyAbort
    | DiscardState
    | CountFailure
    | FailAttempt
    | FinishJob
)
