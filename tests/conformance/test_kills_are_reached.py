"""A clause that kills processes fails if no process dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conformance.beginning_sink import BeginningSink
from tests.conformance.reference_sink import ReferenceTarget
from tests.conformance.reference_source import ReferenceInput

from onceflow.core.crash_points import SINK_POINTS, CrashPoint
from onceflow.integration.conformance import Violation
from onceflow.integration.conformance.clause import Clause, check_clause
from onceflow.integration.conformance.clauses import batching, running, source_jobs
from onceflow.integration.conformance.harness import Effort
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.whole_job import KillPlan

# A sink passes SINK_POINTS only if its author wants that, so a clause about them may be skipped.
_OF_JOBS = [
    one
    for one in running.CLAUSES
    if not any(one.id == f"job-killed-at-{point}" for point in SINK_POINTS)
]


@pytest.fixture
def disarm_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no process armed at any crash point."""

    def plan_no_crash(
        parallelism: int, crash: CrashPoint | None = None, crash_at: int = 1
    ) -> KillPlan:
        del crash, crash_at
        return KillPlan(parallelism)

    def arm_nothing(processes: Processes, point: CrashPoint) -> None:
        del processes, point

    monkeypatch.setattr(running, "KillPlan", plan_no_crash)
    monkeypatch.setattr(source_jobs, "KillPlan", plan_no_crash)
    monkeypatch.setattr(Processes, "arm", arm_nothing)


@pytest.mark.usefixtures("disarm_all")
@pytest.mark.parametrize("clause", [*_OF_JOBS, batching.batch_killed_at_each_step], ids=str)
def test_a_clause_of_kills_fails_when_no_process_dies(
    clause: Clause, tmp_path: Path, onceflow_processes: Processes
) -> None:
    target = ReferenceTarget(tmp_path, BeginningSink)
    with pytest.raises(Violation, match="no process died"):
        check_clause(clause, target, onceflow_processes, Effort(seed=1, rounds=2))


@pytest.mark.usefixtures("disarm_all")
@pytest.mark.parametrize("clause", source_jobs.CLAUSES, ids=str)
def test_a_clause_of_kills_of_sources_fails_when_no_process_dies(
    clause: Clause, tmp_path: Path, onceflow_processes: Processes
) -> None:
    with pytest.raises(Violation, match="no process died"):
        check_clause(clause, ReferenceInput(tmp_path), onceflow_processes)
