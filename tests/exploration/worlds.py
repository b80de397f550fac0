"""The worlds that are explored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.exploration.ports import SinkOfWorld


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
    faults: int = 1
    has_exchange: bool = False
    """True if each source sends its rows to all sink subtasks."""
    overtakes: bool = False
    """True if barriers overtake rows in the exchange."""
    reduces: bool = True
    """False to visit also orders of steps that are known to lead to the same states."""


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
        faults=0,
        has_exchange=True,
    ),
    World(
        "overtaking",
        "two sources that send rows to two sinks; barriers that overtake rows, two checkpoints",
        slots=2,
        faults=0,
        has_exchange=True,
        overtakes=True,
    ),
)
