"""One search, from a world and a mistake to its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.exploration.mistakes import Mistake
from tests.exploration.patches import running
from tests.exploration.search import UNLIMITED, Limits, search
from tests.exploration.system import System
from tests.exploration.worlds import World
from tests.simulation.variant import Variant


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one search."""

    world: str
    mistake: str
    """The mistake in the code; empty if the code is as it is."""
    states: int
    depth: int
    seconds: float
    is_complete: bool
    violation: str
    trace: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        """True if a law is broken without a mistake, or none is with one."""
        return bool(self.violation) != bool(self.mistake) and not self.is_cut_off

    @property
    def is_cut_off(self) -> bool:
        """True if a limit has ended the search before it found anything."""
        return not self.is_complete and not self.violation


def explore(
    world: World,
    mistake: Mistake | None = None,
    limits: Limits = UNLIMITED,
    tell: Callable[[int, int], None] | None = None,
) -> Result:
    """Visit the states of `world` until a law is broken or all are visited."""
    variant = mistake.find_variant() if mistake else Variant()
    with running(variant):
        verdict = search(System(world, variant), limits, tell)
    return Result(
        world.name,
        mistake.name if mistake else "",
        verdict.states,
        verdict.depth,
        verdict.seconds,
        verdict.is_complete,
        verdict.violation,
        verdict.trace,
    )
