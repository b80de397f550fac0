"""The decisions of the coordinator, which the runtime carries out in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, StateHandle
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef


class CheckpointKind(Enum):
    """The reason for a checkpoint, which determines what follows it. Travels in the barrier."""

    PERIODIC = "periodic"
    MANUAL = "manual"
    STOP = "stop"
    """Sources read nothing after this barrier, even if the checkpoint fails, or overtakes rows and
    another STOP follows. Once the checkpoint is committed, the job finishes."""
    FINAL = "final"
    """All sources had reached their end before this barrier. Once the checkpoint is committed, the
    job ends."""
    END = "end"
    """All rows before the end of the input are decided. Before this barrier, functions make their
    last rows. Once the checkpoint is committed, the job ends. Taken only if functions make last
    rows."""
    SAVEPOINT = "savepoint"
    """A checkpoint for the user to keep: written elsewhere and never decided. The job goes on."""
    SAVEPOINT_STOP = "savepoint_stop"
    """A savepoint after whose barrier sources read nothing. A STOP follows once it is written."""
    SAVEPOINT_DRAIN = "savepoint_drain"
    """A savepoint before whose barrier all sources end. A FINAL follows once it is written."""
    BOOTSTRAP = "bootstrap"
    """A savepoint that was written from DataFrames. No barrier has this kind."""

    @property
    def is_savepoint(self) -> bool:
        """True if the checkpoint is written for the user and never decided.

        The barrier of a savepoint is always aligned.
        """
        return self in {
            CheckpointKind.BOOTSTRAP,
            CheckpointKind.SAVEPOINT,
            CheckpointKind.SAVEPOINT_STOP,
            CheckpointKind.SAVEPOINT_DRAIN,
        }

    @property
    def stops_sources(self) -> bool:
        """True if sources read nothing after the barrier, even if the checkpoint fails."""
        return self in {
            CheckpointKind.STOP,
            CheckpointKind.SAVEPOINT_STOP,
            CheckpointKind.SAVEPOINT_DRAIN,
        }

    @property
    def ends_emission(self) -> bool:
        """True if no row is emitted after the barrier.

        The following checkpoint commits the rows that the savepoint contains, and no others.
        """
        return self in {CheckpointKind.SAVEPOINT_STOP, CheckpointKind.SAVEPOINT_DRAIN}

    @property
    def ends_job(self) -> bool:
        """True if only commits are left once this checkpoint is decided without rows in flight."""
        return self in {CheckpointKind.STOP, CheckpointKind.FINAL, CheckpointKind.END}

    @property
    def ends_input(self) -> bool:
        """True if functions make their last rows before the barrier, which overtakes no row."""
        return self in {CheckpointKind.END, CheckpointKind.SAVEPOINT_DRAIN}


class StateForm(Enum):
    """The form in which state is written. Travels in the barrier."""

    NATIVE = "native"
    """The form that suits the state backend best. Another backend cannot read it."""
    CANONICAL = "canonical"
    """The form that every backend can read."""


@dataclass(frozen=True, slots=True)
class SavepointTarget:
    """The directory of a savepoint that is being written. Travels in the barrier.

    A slot may write its state there only if the directory contains the mark `id`, which the driver
    has written. A directory of the same name on another machine's disk does not contain it.
    """

    location: str
    id: str
    """The id of the savepoint's request, which no other savepoint has."""


@dataclass(frozen=True, slots=True)
class SavepointRequest:
    """A user's request for a savepoint, with an id of its own."""

    id: str
    kind: CheckpointKind
    form: StateForm = StateForm.CANONICAL
    target: SavepointTarget | None = None
    """The directory that slots may write to; None if only the driver writes there."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """The mark between a channel's elements before the checkpoint and those after it.

    As a decision of the coordinator it means: tell every source subtask to emit this barrier.
    """

    checkpoint: CheckpointId
    kind: CheckpointKind
    triggered_at_ms: int
    """The trigger's time by the wall clock of the driver's machine. It is for people and metrics;
    no decision may depend on it."""
    overtakes_after_s: float | None = None
    """The seconds for which the barrier still waits behind rows, or None if it never overtakes.
    With 0, it overtakes rows now.

    A subtask that delays the barrier subtracts the delay before it forwards the barrier, so that no
    two clocks are compared.
    """
    form: StateForm = StateForm.NATIVE
    target: SavepointTarget | None = None
    """For a savepoint: the directory that slots may write to, if any. It is in the barrier because
    a barrier may arrive in a slot before the driver's order does."""

    @property
    def overtakes(self) -> bool:
        """True if the barrier goes ahead of all rows from here on."""
        return self.overtakes_after_s is not None and self.overtakes_after_s <= 0


@dataclass(frozen=True, slots=True)
class AppendDecision:
    """Append `completed` to the decision log, then report the outcome; one append at a time.

    Call `on_logged` or `on_append_failure`. If the outcome of the append is unknown, call neither
    and end the attempt.
    """

    completed: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class WriteSavepoint:
    """Write `completed` to the place that `request` names, then call `on_savepoint_end`.

    Checkpoints go on meanwhile, except those that must follow the savepoint.
    """

    request: SavepointRequest
    completed: CompletedCheckpoint
    in_target: frozenset[SubtaskRef] = frozenset()
    """The subtasks whose state is in the savepoint's directory already. Their handles name files
    there. The handles of all other subtasks name files in the job's storage, which must be copied.
    """


@dataclass(frozen=True, slots=True)
class AbortSavepoint:
    """Tell the requester that `request` will not be fulfilled, and delete what was written."""

    request: SavepointRequest
    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """Tell every subtask that `checkpoint` is decided: it must commit everything up to it."""

    checkpoint: CheckpointId
    oldest_retained: CheckpointId
    """The oldest checkpoint that is still retained. Data that only older checkpoints needed, such
    as proofs of commits, may be deleted."""


@dataclass(frozen=True, slots=True)
class NotifyAbort:
    """Tell every subtask that `checkpoint` is never decided; its transactions stay pending."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class DiscardState:
    """Delete these files. No checkpoint names them now or later, and some may be gone already.

    Prune the decision log first, so that it never names a deleted file.
    """

    handles: tuple[StateHandle, ...]


@dataclass(frozen=True, slots=True)
class CountFailure:
    """Report in status and metrics that `checkpoint` has failed."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class FailAttempt:
    """End the attempt.

    Nothing is decided after it. The restart strategy chooses what comes next.
    """

    reason: str
    checkpoint: CheckpointId | None


@dataclass(frozen=True, slots=True)
class FinishJob:
    """Close everything: every subtask has committed the last checkpoint."""

    checkpoint: CheckpointId


Decision: TypeAlias = (
    Barrier
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
