"""A clause of the two-phase contract: one sentence, one test, how it ends on a target."""

from __future__ import annotations

import inspect
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from onceflow.integration.conformance.harness import Effort, Harness
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.target import NotTestable, SinkTarget, Violation


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


DEFAULT_EFFORT = Effort()


class ClauseOutcome(Enum):
    """How a clause ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """How one clause ended for one sink, and why."""

    clause: Clause
    outcome: ClauseOutcome
    seconds: float
    reason: str = ""


def hindrance(clause: Clause, target: SinkTarget, failed: Collection[str]) -> str:
    """Return why `clause` cannot be tested on `target`; empty when it can.

    `failed` are the ids of clauses that have failed for it.
    """
    broken = [one for one in clause.rests_on if one in failed]
    if broken:
        return f"rests on {', '.join(broken)}"
    missing = [
        name for name in clause.needs if getattr(type(target), name) is getattr(SinkTarget, name)
    ]
    return f"needs {', '.join(f'{name}()' for name in missing)}" if missing else ""


def check_clause(
    clause: Clause, target: SinkTarget, processes: Processes, effort: Effort = DEFAULT_EFFORT
) -> None:
    """Raise unless `target` keeps `clause`. Leaves nothing in doubt that the sink can abort.

    Raises:
        Violation: It breaks the clause.
        NotTestable: It cannot be tested here.
        Exception: Whatever the sink raised where it should not: it breaks the clause, too.
    """
    with tempfile.TemporaryDirectory(prefix="onceflow-clause-") as directory:
        harness = Harness(target, processes, Path(directory), effort, clause.id)
        try:
            clause.test(harness)
        finally:
            harness.clean_up()


def run_clauses(
    make_target: Callable[[], SinkTarget],
    clauses: Iterable[Clause],
    processes: Processes,
    effort: Effort = DEFAULT_EFFORT,
) -> Iterator[ClauseResult]:
    """Run `clauses` one by one, each on a target of its own, and yield how each ended."""
    failed: set[str] = set()
    for clause in clauses:
        target = make_target()
        began = time.monotonic()
        try:
            outcome, reason = _outcome(clause, target, processes, effort, failed)
        finally:
            target.close()
        if outcome is ClauseOutcome.FAILED or reason.startswith("rests on"):
            failed.add(clause.id)
        yield ClauseResult(clause, outcome, time.monotonic() - began, reason)


def _outcome(
    clause: Clause, target: SinkTarget, processes: Processes, effort: Effort, failed: set[str]
) -> tuple[ClauseOutcome, str]:
    hindered = hindrance(clause, target, failed)
    if hindered:
        return ClauseOutcome.NOT_TESTED, hindered
    try:
        check_clause(clause, target, processes, effort)
    except NotTestable as error:
        return ClauseOutcome.NOT_TESTED, str(error)
    except Violation as violation:
        return ClauseOutcome.FAILED, str(violation)
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-4:])
        return ClauseOutcome.FAILED, f"{type(error).__name__}: {error}\n{trace}"
    return ClauseOutcome.PASSED, ""
