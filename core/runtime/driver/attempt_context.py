"""What an attempt is given by the job driver, and what its thread is told by everybody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.errors import OnceflowError, SourceError
from onceflow.core.graph import Graph
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.decisions import CheckpointKind, SavepointRequest
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.protocol.splits import Split
from onceflow.core.runtime.driver.job_events import JobEvent
from onceflow.core.runtime.driver.savepoints import Savepoints
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.transport.control_plane import ControlEvent
from onceflow.core.storage import ClaimedLog, JobStorage


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What an attempt is given by the job driver."""

    plan: AttemptPlan
    graph: Graph
    program: bytes = field(repr=False)
    """What slots are deployed with; see `program`."""
    log: ClaimedLog
    storage: JobStorage
    storage_token: str
    recovery: SinkRecovery
    restored: CompletedCheckpoint
    next_checkpoint: CheckpointId
    coordinator: Callable[[float], CheckpointCoordinator]
    """Builds the coordinator as of the time given, once every slot runs."""
    publish: Callable[[JobEvent], None]
    """Records what happens; from any thread, at once."""
    savepoints: Savepoints
    running: Callable[[], None]
    """Called once, when every slot runs."""


@dataclass(frozen=True, slots=True)
class SlotsEnded:
    """All slots of an attempt have returned, or one has died."""

    attempt: AttemptId
    error: OnceflowError


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The user asks for a checkpoint, or to stop with one."""

    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class SavepointRequested:
    """The user asks for a savepoint, or to stop with one; see `Savepoints`."""

    request: SavepointRequest


@dataclass(frozen=True, slots=True)
class SavepointWritten:
    """A savepoint is whole, or `error` says why not."""

    attempt: AttemptId
    checkpoint: CheckpointId
    request: SavepointRequest
    size_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The user asks to leave at once, without a checkpoint."""


class JobCancelled(OnceflowError):
    """Raised inside an attempt when the user has cancelled the job."""

    retry = "never"


@dataclass(frozen=True, slots=True)
class RecoveryEnded:
    """Every sink agrees with the log, or one of them does not."""


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


@dataclass(frozen=True, slots=True)
class AppendEnded:
    """The decision log holds `completed`, or `error` says why not, or that nobody knows."""

    attempt: AttemptId
    completed: CompletedCheckpoint
    append_ms: float
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class GlobalCommitEnded:
    """The driver has committed up to `checkpoint` for sink `uid`, or gave up with `error`."""

    attempt: AttemptId
    uid: str
    sink_id: str
    checkpoint: CheckpointId
    error: BaseException | None = None


AttemptEvent: TypeAlias = (
    ControlEvent
    | SlotsEnded
    | CheckpointRequested
    | SavepointRequested
    | SavepointWritten
    | CancelRequested
    | RecoveryEnded
    | DiscoveryAnswered
    | BlockersListed
    | AppendEnded
    | GlobalCommitEnded
)
