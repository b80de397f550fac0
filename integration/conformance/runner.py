"""Runs clauses on a target and says how each ended."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.harness import Effort, Harness
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.target import NotTestable, SinkTarget
from onceflow.integration.conformance.violation import Violation

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
    """Return when `target` keeps `clause`. Leaves nothing in doubt that the sink can abort.

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
