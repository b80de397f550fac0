"""A clause of the two-phase contract: one sentence, one test, the scenarios that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onceflow.integration.conformance.harness import Harness


@dataclass(frozen=True, slots=True)
class Clause:
    """One rule that every sink keeps, and how to find out.

    `rests_on` are clauses without which this one means nothing: when one of them fails, this one is
    not run. So a sink that breaks one rule fails on one clause, the one to read first.
    """

    id: str
    says: str
    scenarios: tuple[int, ...]
    """Numbers of the scenarios in Apache Flink's own tests that it stands for."""
    test: Callable[[Harness], None] = field(repr=False)
    needs: tuple[str, ...] = ()
    """Optional methods of the target."""
    rests_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.id


def clause(
    *, scenarios: Sequence[int] = (), needs: Sequence[str] = (), rests_on: Sequence[Clause] = ()
) -> Callable[[Callable[[Harness], None]], Clause]:
    """Make a clause of a test: its id is the function's name, its sentence the docstring."""

    def make(test: Callable[[Harness], None]) -> Clause:
        return Clause(
            id=test.__name__.replace("_", "-"),
            says=" ".join((inspect.getdoc(test) or "").split()),
            scenarios=tuple(scenarios),
            test=test,
            needs=tuple(needs),
            rests_on=tuple(one.id for one in rests_on),
        )

    return make
