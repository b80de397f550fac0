"""What the coordinator can decide; the runtime carries it out, in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, StateHandle
from onceflow.core.protocol.ids import CheckpointId


class CheckpointKind(Enum):
    """Why a checkpoint is taken, and so what follows it. Travels in the barrier."""

    PERIODIC = "periodic"
    MANUAL = "manual"
    STOP = "stop"
    """Sources read nothing after this barrier, also if it fails or overtakes rows and another one
    follows; once it is committed, the job finishes."""
    FINAL = "final"
    """All sources had reached their end before this barrier; once it is committed, the job ends."""
    END = "end"
    """All rows before the end of the input are decided; before this barrier functions make their
    last ones. Once it is committed, the job ends. Taken only where functions do so."""
    SAVEPOINT = "savepoint"
    """For the user to keep: written elsewhere, never decided. The job goes on."""
    SAVEPOINT_STOP = "savepoint_stop"
    """A savepoint after whose barrier sources read nothing; a STOP follows once it is written."""
    SAVEPOINT_DRAIN = "savepoint_drain"
    """A savepoint before whose barrier all sources end; a FINAL follows once it is written."""
    BOOTSTRAP = "bootstrap"
    """A savepoint that was made of DataFrames. No barrier has this kind."""

    @property
    def is_savepoint(self) -> bool:
        """Whether it is written for the user, and never decided. Its barrier is always aligned."""
        return self in {
            CheckpointKind.BOOTSTRAP,
            CheckpointKind.SAVEPOINT,
            CheckpointKind.SAVEPOINT_STOP,
            CheckpointKind.SAVEPOINT_DRAIN,
        }

    @property
    def stops_sources(self) -> bool:
        """Whether sources read nothing after the barrier, whatever becomes of it."""
        return self in {
            CheckpointKind.STOP,
            CheckpointKind.SAVEPOINT_STOP,
            CheckpointKind.SAVEPOINT_DRAIN,
        }

    @property
    def ends_emission(self) -> bool:
        """Whether nothing is emitted after the barrier.

        What follows commits what the savepoint holds, and no row that it does not know of.
        """
        return self in {CheckpointKind.SAVEPOINT_STOP, CheckpointKind.SAVEPOINT_DRAIN}

    @property
    def ends_job(self) -> bool:
        """Whether only its commits are left to do once it is decided, if no row is in flight."""
        return self in {CheckpointKind.STOP, CheckpointKind.FINAL, CheckpointKind.END}

    @property
    def ends_input(self) -> bool:
        """Whether functions make their last rows before the barrier, which overtakes none."""
        return self in {CheckpointKind.END, CheckpointKind.SAVEPOINT_DRAIN}


class StateForm(Enum):
    """How state is written. Travels in the barrier."""

    NATIVE = "native"
    """As the state backend does it best; another one cannot read it."""
    CANONICAL = "canonical"
    """As every backend reads it."""


@dataclass(frozen=True, slots=True)
class SavepointRequest:
    """What a user has asked for, under an id of its own."""

    id: str
    kind: CheckpointKind
    form: StateForm = StateForm.CANONICAL


@dataclass(frozen=True, slots=True)
class TriggerCheckpoint:
    """Tell every source subtask to emit this barrier."""

    checkpoint: CheckpointId
    kind: CheckpointKind
    triggered_at_ms: int
    overtakes_after_s: float | None = None
    """How long the barrier waits its turn behind rows: see `Barrier`."""
    form: StateForm = StateForm.NATIVE


@dataclass(frozen=True, slots=True)
class AppendDecision:
    """Append to the decision log, then call `on_logged` or `on_append_failure`; one at a time.

    If the outcome of the append is unknown, call neither and end the attempt.
    """

    completed: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class WriteSavepoint:
    """Write `completed` where `request` wants it, then report `savepoint_ended`.

    Nothing waits for it but what must come after it.
    """

    request: SavepointRequest
    completed: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class AbortSavepoint:
    """Tell who asked that `request` will not be fulfilled; what is written of it goes."""

    request: SavepointRequest
    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """Tell every subtask that `checkpoint` is decided: commit everything up to it."""

    checkpoint: CheckpointId
    oldest_retained: CheckpointId
    """What older checkpoints needed (proofs of commits, say) may be forgotten."""


@dataclass(frozen=True, slots=True)
class NotifyAbort:
    """Tell every subtask that `checkpoint` is never decided; what it prepared stays pending."""

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
    """For status and metrics: `checkpoint` has failed."""

    checkpoint: CheckpointId
    reason: str


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
    | WriteSavepoint
    | AbortSavepoint
    | NotifyComplete
    | NotifyAbort
    | DiscardState
    | CountFailure
    | FailAttempt
    | FinishJob
)
