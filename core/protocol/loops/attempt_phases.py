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
    """Slots dial in, and sinks are made to agree with the log."""

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
    """What the coordinator is told nothing before the end of."""


@dataclass(slots=True)
class Investigating:
    """A slot has lost a channel, and says so before the end of the slot at its other side."""

    failed: Failed
    error: OnceflowError
    deadline_s: float


@dataclass(slots=True)
class Leaving:
    """The job is done. Acks of checkpoints that were given up still come: their files go (I9)."""

    coordinator: CheckpointCoordinator
    is_finished: bool
    deadline_s: float


@dataclass(slots=True)
class Over:
    """The attempt has ended."""


AttemptPhase: TypeAlias = Gathering | Starting | Coordinating | Investigating | Leaving | Over
