"""Rare events of schedules, drawn from an own generator, so that other schedules stay the same."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from onceflow.core.protocol.log import memory as log_memory

BUNDLE_ROWS, BUNDLE_S = 3, 0.05
"""How many rows a relay that bundles passes on at once at the most, and after how long."""
DECIDED_BY_COPY = 3
"""How many decisions there are when somebody copies storage that is in use."""


@dataclass(frozen=True)
class Rarities:
    """The rarities of one schedule."""

    slow_log: float
    """The part of the requests to the decision log that take long."""
    bundles: bool
    """True if the relay keeps rows for a moment and passes several on at once."""
    attempts_remembered: int | None
    """The number of attempts that the log remembers; None: the number of production."""
    partitions_at_s: tuple[float, ...]
    """The times when partitions appear, from the start of the schedule on."""
    decided_by_copy: int
    """The number of decisions in the older copy of the storage; 0: it is new storage."""

    @classmethod
    def draw(cls, seed: int) -> Rarities:
        """Return those of the schedule of `seed`."""
        rng = random.Random(f"rarities 46 {seed}")
        attempts_remembered = rng.randint(1, 3) if rng.random() < 0.03 else None
        grows = attempts_remembered or rng.random() < 0.01
        return cls(
            slow_log=0.2 if rng.random() < 0.04 else 0.0,
            bundles=rng.random() < 0.05,
            attempts_remembered=attempts_remembered,
            partitions_at_s=tuple(sorted(rng.uniform(0.1, 3.5) for _ in range(4 if grows else 0))),
            decided_by_copy=0 if rng.random() < 0.1 else DECIDED_BY_COPY,
        )


@contextmanager
def remembering(attempts: int | None) -> Generator[None, None, None]:
    """Have every log remember so many attempts; None changes nothing."""
    if attempts is None:
        yield
        return
    with patch.object(log_memory, "ATTEMPTS_MAX", attempts):
        yield
