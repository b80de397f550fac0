"""What an attempt is given by the job driver, and what its thread is told by everybody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.api.graph import Graph
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
    retain: Callable[[Sequence[CompletedCheckpoint]], None] = lambda _retained: None
    """Says which checkpoints the log retains now."""
    promise: Callable[[float], None] = lambda _within_s: None
    """Says that the attempt's thread turns again within so many seconds."""


AttemptEvent: TypeAlias = SlotConnected | AttemptFact
"""What reaches the thread of the job driver; a slot that dials in is known to the loop by its
hello."""
