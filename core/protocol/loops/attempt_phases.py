"""The phases of one attempt, each with its state. `attempt` shows the transitions between them.

Only the loop of the attempt uses them, and it changes them in place.
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
    """The phase in which slots connect and recovery aligns each sink with the decision log."""

    deadline_s: float | None = None
    has_all_slots: bool = False
    sinks_agree: bool = False


@dataclass(slots=True)
class Starting:
    """The phase in which slots restore their state."""

    deadline_s: float


@dataclass(slots=True)
class Coordinating:
    """The phase in which every slot runs and checkpoints are taken."""

    coordinator: CheckpointCoordinator
    waits_for: AppendDecision | SavepointRequest | None = None
    """The append or savepoint whose outcome the coordinator must receive before any other fact."""


@dataclass(slots=True)
class Investigating:
    """The phase after a slot has lost a channel.

    The end of the slot at the other side may be the cause.
    """

    failed: Failed
    error: OnceflowError
    deadline_s: float


@dataclass(slots=True)
class Leaving:
    """The phase in which the job is done and slots leave.

    Files of aborted checkpoints are still deleted (I9).
    """

    coordinator: CheckpointCoordinator
    is_finished: bool
    deadline_s: float


@dataclass(slots=True)
class Over:
    """The phase after the end of the attempt."""


AttemptPhase: TypeAlias = Gathering | Starting | Coordinating | Investigating | Leaving | Over
