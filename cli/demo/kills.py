"""When what is killed: by the progress of the job, not by the clock, and the same for one seed.

The stream is cut into one part a kill, and a tail. In each part the job is first let commit
something (so that there is a checkpoint to come back to), then more records flow, and the kill
strikes at a seeded record and a seeded fraction of a checkpoint interval later, so that every
moment of a checkpoint is hit sooner or later. What comes after the part is held back until then:
however fast the job is, it cannot finish before it was killed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from onceflow.cli.demo.settings import KillKind

_TAIL_FRACTION = 0.1
_COMMIT_FRACTION = 0.25
# Less than the next part's commit, more than nothing.
_RESERVE_FRACTION = 0.2
_STRIKE_FRACTIONS = (0.35, 0.8)
# Of a checkpoint interval: with the time that a part takes to flow, it reaches the next checkpoint.
_DELAY_FRACTION_MAX = 0.6


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One kill to come. All counts are records from the beginning of the stream.

    commit_records <= strike_records <= end_records <= reserve_records
    """

    kind: KillKind
    commit_records: int
    """Until these are committed, no more than these are produced."""
    strike_records: int
    """Once the job has read these, the kill is near ..."""
    delay_s: float
    """... and comes this much later."""
    end_records: int
    """Until then, no more than these are produced."""
    reserve_records: int
    """If all of them are committed by then, these are produced, to have some in flight."""


@dataclass(slots=True)
class DoneKill:
    """One kill that has happened."""

    kind: KillKind
    pids: tuple[int, ...]
    """The processes that it ended."""
    at_records: int
    """Records that the job had read at that moment, by its own word."""
    committed_records: int
    """Of these, the ones committed before."""
    at_rows: int
    """Rows visible in the target at that moment."""
    at_s: float
    """Seconds since the job was started."""
    recovered_s: float | None = None
    """Seconds from the kill until records flowed again; None when the job ended before."""


def plan_kills(
    kinds: Sequence[KillKind], records: int, seed: int, *, interval_s: float
) -> tuple[PlannedKill, ...]:
    """Return the kills in the order in which they happen, at seeded moments."""
    # Not the workload's generator: the same payments can be run under other kills.
    randomness = random.Random(f"kills {seed}")  # noqa: S311 - reproducible, not secret
    shuffled = list(kinds)
    randomness.shuffle(shuffled)
    part = records * (1 - _TAIL_FRACTION) / max(len(shuffled), 1)
    reserve = min(part * _RESERVE_FRACTION, records * _TAIL_FRACTION / 2)
    return tuple(
        PlannedKill(
            kind,
            commit_records=int(part * (i + _COMMIT_FRACTION)),
            strike_records=int(part * (i + randomness.uniform(*_STRIKE_FRACTIONS))),
            delay_s=interval_s * randomness.uniform(0, _DELAY_FRACTION_MAX),
            end_records=int(part * (i + 1)),
            reserve_records=int(part * (i + 1) + reserve),
        )
        for i, kind in enumerate(shuffled)
    )
