"""Broken variants of the protocol, and the world in which each must break a law."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.mutants import MUTANTS
from tests.simulation.variant import Variant


@dataclass(frozen=True, slots=True)
class Mistake:
    """A broken variant, and the world in which it is tried."""

    name: str
    world: str

    def find_variant(self) -> Variant:
        return next(variant for variant in MUTANTS if variant.name == self.name)


CAUGHT_IN = {
    "one slot": (
        "commits at pre-commit, before the decision",
        "tells sinks to commit before the decision",
        "acks before the prepare",
    ),
}

MISTAKES = tuple(Mistake(name, world) for world, names in CAUGHT_IN.items() for name in names)
