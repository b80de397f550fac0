"""The clauses of the two-phase contract, each with a sentence and a test, and their results."""

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
    """A rule that every sink must keep, and its test.

    `rests_on` are the clauses that this clause requires. If one of them fails, this clause is not
    run. So a sink that breaks one rule fails in one clause only.
    """

    id: str
    says: str
    scenarios: tuple[int, ...]
    """The numbers of the scenarios in Apache Flink's tests that it covers."""
    test: Callable[[Harness], None] = field(repr=False)
    needs: tuple[str, ...] = ()
    """The optional methods of the target that it needs."""
    rests_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.id


def clause(
    *, scenarios: Sequence[int] = (), needs: Sequence[str] = (), rests_on: Sequence[Clause] = ()
) -> Callable[[Callable[[Harness], None]], Clause]:
    """Make a clause from a test. Its id is the function's name, its sentence the docstring."""

    def make(test: Callable[[Harness], None]) -> Clause:
        return Clause(
            id=test.__name__.replace("_", "-"),
            says=" ".join((inspect.getdoc(test) or "").split()),
            scenarios=tuple(scenarios),
            test=test,
            needs=tuple(needs),
            rests_on=tuple(prerequisite.id for prerequisite in rests_on),
        )

    return make


DEFAULT_EFFORT = Effort()


class ClauseOutcome(Enum):
    """The outcome of a clause."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """The outcome of a clause for a sink, and its reason."""

    clause: Clause
    outcome: ClauseOutcome
    seconds: float
    reason: str = ""


def hindrance(clause: Clause, target: SinkTarget, failed: Collection[str]) -> str:
    """Return the reason why `clause` cannot be tested on `target`, or "".

    `failed` are the ids of clauses that have failed for this sink.
    """
    broken = [prerequisite for prerequisite in clause.rests_on if prerequisite in failed]
    if broken:
        return f"rests on {', '.join(broken)}"
    missing = [
        name for name in clause.needs if getattr(type(target), name) is getattr(SinkTarget, name)
    ]
    return f"needs {', '.join(f'{name}()' for name in missing)}" if missing else ""


def check_clause(
    clause: Clause, target: SinkTarget, processes: Processes, effort: Effort = DEFAULT_EFFORT
) -> None:
    """Raise Violation if `target` breaks `clause`. Then abort all transactions in doubt.

    Raises:
        Violation: The target breaks the clause.
        NotTestable: The clause cannot be tested here.
        Exception: An unexpected error of the sink, which also breaks the clause.
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
    """Run `clauses` one by one, each on a new target, and yield their results."""
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
