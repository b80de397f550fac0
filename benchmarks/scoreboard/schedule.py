"""The schedule of strikes. Equal seeds draw equal schedules, and every contestant gets the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

_FIRST_S = 3.0
"""The earliest strike, in seconds after the records begin to flow."""
_LAST_PART = 0.9
"""The part of the production time in which strikes begin."""
FROZEN_S = 6.0
DATABASE_DOWN_S = 1.5


class StrikeKind(str, Enum):
    """The kinds of strikes."""

    WORKER = "worker"
    """SIGKILL of a process that works on records."""
    COORDINATOR = "coordinator"
    """SIGKILL of the process that coordinates the workers, or of the only process."""
    FREEZE = "freeze"
    """SIGSTOP of a worker, a new start, and SIGCONT later."""
    DATABASE = "database"
    """SIGKILL of Postgres, and its start a moment later."""
    CONNECTIONS = "connections"
    """A reset of every connection to Postgres."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A strike and its moment in seconds after the records begin to flow."""

    kind: StrikeKind
    at_s: float

    def __str__(self) -> str:
        return f"{self.kind.value} at {self.at_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The strikes of one run, in the order of their moments."""

    seed: int
    producing_s: float
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.strikes))


def draw_schedule(
    seed: int, producing_s: float, kinds: tuple[StrikeKind, ...] = tuple(StrikeKind)
) -> Schedule:
    """Return the schedule of `seed`: each kind once, in equal parts of the production time.

    So an engine has some seconds to recover before the next strike. The freeze is the last strike,
    because a process that thaws would work on while the engine recovers from another strike.
    """
    rng = random.Random(f"scoreboard {seed}")
    order = list(kinds)
    rng.shuffle(order)
    order.sort(key=lambda kind: kind is StrikeKind.FREEZE)
    part_s = (producing_s * _LAST_PART - _FIRST_S) / max(1, len(order))
    strikes = tuple(
        Strike(kind, round(_FIRST_S + part_s * (number + rng.uniform(0.0, 0.5)), 2))
        for number, kind in enumerate(order)
    )
    return Schedule(seed, producing_s, strikes)
