"""The clauses of the contracts of sinks and sources: their sentences, tests and results."""

from __future__ import annotations

import inspect
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from onceflow.integration.conformance.harness import Effort, Harness
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.source_harness import SourceHarness
from onceflow.integration.conformance.source_input import SourceInput
from onceflow.integration.conformance.target import NotTestable, SinkTarget, Violation

Subject: TypeAlias = SinkTarget | SourceInput
"""The object that an author gives to the kit: the target of a sink, or the input of a source."""


@dataclass(frozen=True, slots=True)
class Kit:
    """The kit that a clause belongs to: the kit of sinks, or the kit of sources."""

    kind: str
    """The name in reports."""
    interface: type[Subject]
    """The class whose optional methods `Clause.needs` names."""
    harness: Callable[[Any, Processes, Path, Effort, str], Harness | SourceHarness]
    """The class of the argument of `Clause.test`."""


SINKS = Kit("sinks", SinkTarget, Harness)
SOURCES = Kit("sources", SourceInput, SourceHarness)


@dataclass(frozen=True, slots=True)
class Clause:
    """A rule that every sink or every source must keep, and its test.

    `rests_on` are the clauses that this clause requires. If one of them fails, this clause is not
    run. So a sink or source that breaks one rule fails in one clause only.
    """

    id: str
    says: str
    scenarios: tuple[int, ...]
    """The numbers of the scenarios in Apache Flink's tests that it covers."""
    test: Callable[[Any], None] = field(repr=False)
    needs: tuple[str, ...] = ()
    """The optional methods of the target or input that it needs."""
    rests_on: tuple[str, ...] = ()
    kit: Kit = field(default=SINKS, repr=False)

    def __str__(self) -> str:
        return self.id


def clause(
    *,
    scenarios: Sequence[int] = (),
    needs: Sequence[str] = (),
    rests_on: Sequence[Clause] = (),
    kit: Kit = SINKS,
) -> Callable[[Callable[[Any], None]], Clause]:
    """Make a clause from a test. Its id is the function's name, its sentence the docstring."""

    def make(test: Callable[[Any], None]) -> Clause:
        return Clause(
            id=test.__name__.replace("_", "-"),
            says=" ".join((inspect.getdoc(test) or "").split()),
            scenarios=tuple(scenarios),
            test=test,
            needs=tuple(needs),
            rests_on=tuple(prerequisite.id for prerequisite in rests_on),
            kit=kit,
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
    """The outcome of a clause for a sink or source, and its reason."""

    clause: Clause
    outcome: ClauseOutcome
    seconds: float
    reason: str = ""


def hindrance(clause: Clause, subject: Subject, failed: Collection[str]) -> str:
    """Return the reason why `clause` cannot be tested on `subject`, or "".

    `failed` are the ids of clauses that have failed before.
    """
    broken = [prerequisite for prerequisite in clause.rests_on if prerequisite in failed]
    if broken:
        return f"rests on {', '.join(broken)}"
    missing = [
        name
        for name in clause.needs
        if getattr(type(subject), name) is getattr(clause.kit.interface, name)
    ]
    return f"needs {', '.join(f'{name}()' for name in missing)}" if missing else ""


def check_clause(
    clause: Clause, subject: Subject, processes: Processes, effort: Effort = DEFAULT_EFFORT
) -> None:
    """Raise Violation if `subject` breaks `clause`. Then clean up.

    Aborts all transactions in doubt of a sink, and closes all readers of a source.

    Raises:
        Violation: The sink or source breaks the clause.
        NotTestable: The clause cannot be tested here.
        Exception: An unexpected error of the sink or source, which also breaks the clause.
    """
    with tempfile.TemporaryDirectory(prefix="onceflow-clause-") as directory:
        harness = clause.kit.harness(subject, processes, Path(directory), effort, clause.id)
        try:
            clause.test(harness)
        finally:
            harness.clean_up()


def run_clauses(
    make_subject: Callable[[], Subject],
    clauses: Iterable[Clause],
    processes: Processes,
    effort: Effort = DEFAULT_EFFORT,
) -> Iterator[ClauseResult]:
    """Run `clauses` one by one, each on a new target or input, and yield their results."""
    failed: set[str] = set()
    for clause in clauses:
        subject = make_subject()
        began = time.monotonic()
        try:
            outcome, reason = _outcome(clause, subject, processes, effort, failed)
        finally:
            subject.close()
        if outcome is ClauseOutcome.FAILED or reason.startswith("rests on"):
            failed.add(clause.id)
        yield ClauseResult(clause, outcome, time.monotonic() - began, reason)


def _outcome(
    clause: Clause, subject: Subject, processes: Processes, effort: Effort, failed: set[str]
) -> tuple[ClauseOutcome, str]:
    hindered = hindrance(clause, subject, failed)
    if hindered:
        return ClauseOutcome.NOT_TESTED, hindered
    try:
        check_clause(clause, subject, processes, effort)
    except NotTestable as error:
        return ClauseOutcome.NOT_TESTED, str(error)
    except Violation as violation:
        return ClauseOutcome.FAILED, str(violation)
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-4:])
        return ClauseOutcome.FAILED, f"{type(error).__name__}: {error}\n{trace}"
    return ClauseOutcome.PASSED, ""
