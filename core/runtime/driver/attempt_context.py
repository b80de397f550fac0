"""What an attempt is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from onceflow.core.graph import Graph
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.runtime.driver.progress import Progress
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.runtime.slot.chain_builder import SlotPlan
from onceflow.core.storage import ClaimedLog, JobStorage


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What an attempt is given by the job driver."""

    plan: SlotPlan
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
    progress: Progress
    running: Callable[[], None]
    """Called once, when every slot runs."""
