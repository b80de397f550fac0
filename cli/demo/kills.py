"""When what is killed: by the progress of the job, not by the clock, and the same for one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from onceflow.cli.demo.settings import KillKind

# The last kill must leave the job enough to do that it cannot finish before it is hit.
_LAST_FRACTION = 0.75
_FIRST_FRACTION = 0.05


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One kill to come: as soon as the job has read `at_records` records."""

    kind: KillKind
    at_records: int


@dataclass(slots=True)
class DoneKill:
    """One kill that has happened."""

    kind: KillKind
    pids: tuple[int, ...]
    """The processes that it ended."""
    at_rows: int
    """Rows visible in the table at that moment."""
    at_s: float
    """Seconds since the job was started."""
    recovered_s: float | None = None
    """Seconds from the kill to the first new row in the table; None when none came."""


def plan_kills(kinds: Sequence[KillKind], records: int, seed: int) -> tuple[PlannedKill, ...]:
    """Return the kills in the order in which they happen, at seeded moments.

    The span is cut into one equal part a kill, and each falls anywhere in the middle of its part:
    no two coincide, and none comes too late.
    """
    # Not the workload's generator: the same payments can be run under other kills.
    randomness = random.Random(f"kills {seed}")  # noqa: S311 - reproducible, not secret
    shuffled = list(kinds)
    randomness.shuffle(shuffled)
    part = (_LAST_FRACTION - _FIRST_FRACTION) / max(len(shuffled), 1)
    return tuple(
        PlannedKill(
            kind, int(records * (_FIRST_FRACTION + part * (i + randomness.uniform(0.1, 0.9))))
        )
        for i, kind in enumerate(shuffled)
    )
