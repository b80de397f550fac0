"""The context that a job driver passes to an attempt: its events, and the streams to its slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.plan.graph import Graph
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.loops.attempt_facts import AttemptFact
from onceflow.core.protocol.messages import DriverMessage
from onceflow.core.runtime.driver.savepoints import Savepoints
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.runtime.events.job_events import JobEvent
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.transport.control_plane import SlotConnected, SlotLink
from onceflow.core.storage import ClaimedLog, JobStorage


class SlotPool:
    """The connected slots.

    Used by the attempt's thread alone; the attempt's loop admits the slots.
    """

    def __init__(self) -> None:
        self._links: dict[int, SlotLink] = {}

    def __iter__(self) -> Iterator[tuple[int, SlotLink]]:
        return iter(self._links.items())

    def __getitem__(self, slot: int) -> SlotLink:
        return self._links[slot]

    def admit(self, link: SlotLink) -> None:
        """Add the slot, so that `send_all` reaches it."""
        self._links[link.hello.slot] = link

    def remove(self, slot: int) -> None:
        """Remove a slot that has left."""
        self._links.pop(slot, None)

    def send_all(self, message: DriverMessage) -> None:
        """Send `message` to every connected slot, without waiting."""
        for link in self._links.values():
            link.send(message)

    def waiting_s(self, now: float) -> dict[int, float]:
        """Return, by slot, how long its oldest unsent message has waited; 0 if none waits."""
        return {slot: link.waiting_s(now) for slot, link in self._links.items()}


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
