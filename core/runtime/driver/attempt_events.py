"""What an attempt's thread is told by everybody else: slots, Spark, storage and the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.errors import SourceError
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.protocol.splits import Split
from onceflow.core.runtime.transport.control_plane import ControlEvent


@dataclass(frozen=True, slots=True)
class StageEnded:
    """Spark's barrier stage is over."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The user asks for a checkpoint, or to stop with one."""

    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The user asks to leave at once, without a checkpoint."""


@dataclass(frozen=True, slots=True)
class RecoveryEnded:
    """Every sink agrees with the log, or one of them does not."""


@dataclass(frozen=True, slots=True)
class SplitsDiscovered:
    """What source `uid` has answered: splits that are new, or why it cannot be read on."""

    attempt: AttemptId
    uid: str
    splits: tuple[Split, ...] = ()
    error: SourceError | None = None


@dataclass(frozen=True, slots=True)
class AppendEnded:
    """The decision log holds `completed`, or `error` says why not, or that nobody knows."""

    attempt: AttemptId
    completed: CompletedCheckpoint
    append_ms: float
    error: BaseException | None


AttemptEvent: TypeAlias = (
    ControlEvent
    | StageEnded
    | CheckpointRequested
    | CancelRequested
    | RecoveryEnded
    | SplitsDiscovered
    | AppendEnded
)
