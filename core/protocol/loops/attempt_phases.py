"""The phases of one attempt, and what each of them remembers. `attempt` draws the way between them.

Used by the loop of the attempt alone, which changes them in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import AppendDecision, SavepointRequest
from onceflow.core.protocol.messages import Failed


@dataclass(slots=True)
class Gathering:
    """Slots connect, and recovery brings each sink in line with the decision log."""

    deadline_s: float | None = None
    has_all_slots: bool = False
    sinks_agree: bool = False


@dataclass(slots=True)
class Starting:
    """Slots restore their state."""

    deadline_s: float


@dataclass(slots=True)
class Coordinating:
    """Every slot runs, and checkpoints are taken."""

    coordinator: CheckpointCoordinator
    waits_for: AppendDecision | SavepointRequest | None = None
    """The append or savepoint whose outcome the coordinator must hear before any other fact."""


@dataclass(slots=True)
class Investigating:
    """A slot has lost a channel. The end of the slot at the other side may be the cause."""

    failed: Failed
    error: OnceflowError
    deadline_s: float


@dataclass(slots=True)
class Leaving:
    """The job is done, and slots leave. Files of aborted checkpoints are still deleted (I9)."""

    coordinator: CheckpointCoordinator
    is_finished: bool
    deadline_s: float


@dataclass(slots=True)
class Over:
    """The attempt has ended."""


AttemptPhase: TypeAlias = Gathering | Starting | Coordinating | Investigating | Leaving | Over
