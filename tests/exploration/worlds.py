"""The worlds that are explored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.exploration.ports import SinkOfWorld

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind


@dataclass(frozen=True, slots=True)
class World:
    """A small world: the number of processes, rows, checkpoints and faults in it."""

    name: str
    description: str
    drivers: int = 1
    slots: int = 1
    rows: int = 1
    """The number of rows of each split. A slot has one split."""
    sinks: tuple[SinkOfWorld, ...] = (SinkOfWorld("db", "two-phase"),)
    checkpoints: int = 1
    """The highest number of a requested checkpoint. The one at the end follows by itself."""
    asks_once: bool = False
    """True if a checkpoint is requested in one attempt only."""
    faults: int = 1
    sink_slots: int = 0
    """The number of slots with a sink subtask of their own, to which all sources send rows. 0: each
    source writes its rows to the sinks itself."""
    overtakes: bool = False
    """True if barriers overtake rows in the exchange."""
    savepoint: CheckpointKind | None = None
    """The kind of the savepoint that the user requests at any time, and starts from later."""
    reduces: bool = True
    """False to visit also orders of steps that are known to lead to the same states."""

    @property
    def has_exchange(self) -> bool:
        """True if each source sends its rows to all sink subtasks."""
        return self.sink_slots > 0


WORLDS: Final = (
    World("one slot", "one driver, one slot, one fault; a checkpoint and the one at the end"),
    World(
        "two slots",
        "one driver, two slots, one fault; the checkpoint at the end",
        slots=2,
        checkpoints=0,
    ),
    World(
        "two faults",
        "one driver, one slot, two faults; the checkpoint at the end",
        faults=2,
        checkpoints=0,
    ),
    World(
        "two drivers",
        "two drivers that both claim the job, one slot",
        drivers=2,
        faults=0,
        checkpoints=0,
    ),
    World(
        "staged",
        "rows that wait in checkpoint storage; one fault",
        sinks=(SinkOfWorld("topic", "staged"),),
    ),
    World(
        "versions",
        "whole checkpoints that the driver commits; one fault",
        sinks=(SinkOfWorld("lake", "versions"),),
    ),
    World(
        "two sinks",
        "a sink whose slots commit, and one whose driver does; one fault",
        sinks=(SinkOfWorld("db", "two-phase"), SinkOfWorld("lake", "versions")),
        checkpoints=0,
    ),
    World(
        "exchange",
        "two sources that send rows to two sinks; aligned barriers, two checkpoints",
        slots=2,
        sink_slots=2,
        faults=0,
    ),
    World(
        "exchange with a fault",
        "as before, with one fault; the checkpoint at the end",
        slots=2,
        sink_slots=2,
        checkpoints=0,
    ),
    World(
        "overtaking",
        "two sources that send rows to two sinks; barriers that overtake rows, two checkpoints",
        slots=2,
        sink_slots=2,
        faults=0,
        overtakes=True,
    ),
    World(
        "overtaking with a fault",
        "one source that sends two rows to one sink; barriers that overtake rows, a checkpoint in"
        " one attempt and the one at the end, one fault",
        rows=2,
        sink_slots=1,
        asks_once=True,
        overtakes=True,
    ),
    World(
        "savepoint",
        "a savepoint while the job goes on, and a start from it; one fault",
        checkpoints=0,
        savepoint=CheckpointKind.SAVEPOINT,
    ),
    World(
        "stop with a savepoint",
        "a savepoint with which the job stops, and a start from it; one fault",
        checkpoints=0,
        savepoint=CheckpointKind.SAVEPOINT_STOP,
    ),
)
