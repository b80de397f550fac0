"""Explores many schedules, finds the shortest failing one, and tries every broken variant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.simulation.caught import CAUGHT_BY
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedule import Outcome, run_schedule
from tests.simulation.variant import Variant

RARE = tuple(sorted(set(CAUGHT_BY.values())))
"""Schedules that reach what few do: each has caught a broken variant."""

MUTANT_SCHEDULES_MAX = 4_000
"""The rarest mutant needs about 1,000 schedules; one that needs more than this has survived."""


@dataclass(frozen=True)
class Exploration:
    """The result of many schedules."""

    schedules: int
    decisions: int
    attempts: int
    lost: int
    failures: tuple[Outcome, ...]


@dataclass(frozen=True)
class MutantVerdict:
    """The way in which a broken variant was caught. `caught` is None if it survived."""

    name: str
    schedules: int
    caught: Outcome | None


def explore(
    seeds: Iterable[int],
    *,
    variant: Variant | None = None,
    tell: Callable[[Outcome], object] | None = None,
) -> Exploration:
    """Run the schedules of `seeds`; stop after five failures, each of which is told at once."""
    failures: list[Outcome] = []
    decisions = attempts = lost = count = 0
    for seed in seeds:
        outcome = run_schedule(seed, variant or Variant())
        count += 1
        decisions += outcome.decisions
        attempts += outcome.attempts
        lost += outcome.lost
        if outcome.violation:
            failures.append(outcome)
            if tell is not None:
                tell(outcome)
            if len(failures) == 5:
                break
    return Exploration(count, decisions, attempts, lost, tuple(failures))


def shortest(failures: tuple[Outcome, ...]) -> Outcome:
    """Return the failure with the shortest trace: the one to read first."""
    return min(failures, key=lambda outcome: len(outcome.trace))


def try_mutants(seed: int) -> Iterator[MutantVerdict]:
    """Yield the verdict on every broken variant."""
    for variant in MUTANTS:
        yield try_mutant(variant, seed)


def try_mutant(variant: Variant, seed: int) -> MutantVerdict:
    """Try the schedule that is known to catch `variant`, if any, then those from `seed` on."""
    known = [CAUGHT_BY[variant.name]] if variant.name in CAUGHT_BY else []
    schedules = 0
    for number in (*known, *range(seed, seed + MUTANT_SCHEDULES_MAX)):
        schedules += 1
        outcome = run_schedule(number, variant)
        if outcome.violation:
            return MutantVerdict(variant.name, schedules, outcome)
    return MutantVerdict(variant.name, schedules, None)
