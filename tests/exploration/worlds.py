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
    reduces: bool = True
    """False to visit also orders of steps that are known to lead to the same states."""


WORLDS: Final = (
    World("one slot", "one driver, one slot, one fault; a checkpoint and the one at the end"),
    World("two slots", "one driver, two slots, one fault", slots=2),
)
