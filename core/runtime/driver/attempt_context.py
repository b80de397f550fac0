"""The context that the job driver passes to an attempt, and the events that the attempt handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.plan.graph import Graph
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.loops.attempt_facts import AttemptFact
from onceflow.core.runtime.driver.savepoints import Savepoints
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.runtime.events.job_events import JobEvent
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.transport.control_plane import SlotConnected
from onceflow.core.storage import ClaimedLog, JobStorage


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """The objects and callbacks that the job driver passes to one attempt."""

    plan: AttemptPlan
    graph: Graph
    program: bytes = field(repr=False)
    """The pickled program that slots are deployed with; see `slot.program`."""
    log: ClaimedLog
    storage: JobStorage
    storage_token: str
    recovery: SinkRecovery
    restored: CompletedCheckpoint
    next_checkpoint: CheckpointId
    coordinator: Callable[[float], CheckpointCoordinator]
    """Builds the coordinator, given the time, once all slots run."""
    publish: Callable[[JobEvent], None]
    """Records an event. Any thread may call it; it returns at once."""
    savepoints: Savepoints
    running: Callable[[], None]
    """Called once, when all slots run."""
    retain: Callable[[Sequence[CompletedCheckpoint]], None] = lambda _retained: None
    """Called with the checkpoints that the log retains now."""
    promise: Callable[[float], None] = lambda _within_s: None
    """Called with the number of seconds within which the attempt's thread runs its loop again."""


AttemptEvent: TypeAlias = SlotConnected | AttemptFact
"""The events that the attempt's thread handles. If a slot connects, the loop sees only its
hello."""
