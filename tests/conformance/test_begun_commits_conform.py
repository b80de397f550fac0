"""A correct sink that begins commits passes every clause; one that begins none is told so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conformance import broken_server_sinks, broken_sinks
from tests.conformance.beginning_sink import BeginningCommitter, BeginningSink
from tests.conformance.reference_sink import ReferenceSink, ReferenceTarget

from onceflow.core.protocol.committables import Committable
from onceflow.integration import conformance
from onceflow.integration.conformance.clauses import beginning, running
from onceflow.integration.conformance.processes import Processes


class TestBeginningSink(conformance.SinkConformance):
    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> conformance.SinkTarget:
        return ReferenceTarget(tmp_path, BeginningSink)


class _NeverBegins(BeginningCommitter):
    def begin_commit(self, committable: Committable) -> bool:
        return False


class NeverBegins(BeginningSink):
    """Has the method, and begins nothing."""

    committer_class = _NeverBegins


@pytest.mark.parametrize(
    ("sink", "reason"),
    [
        (ReferenceSink, "the sink's committer has no begin_commit()"),
        (NeverBegins, "begin_commit() returned False for the second transaction of a subtask"),
    ],
)
def test_clauses_about_begun_commits_are_not_passed_by_a_sink_that_begins_none(
    sink: type[ReferenceSink], reason: str, tmp_path: Path, onceflow_processes: Processes
) -> None:
    clauses = [one for one in beginning.CLAUSES if not one.needs]
    if sink is ReferenceSink:
        clauses.append(running.job_killed_at_begun)
    results = conformance.run_clauses(
        lambda: ReferenceTarget(tmp_path, sink), clauses, onceflow_processes
    )
    ends = {result.clause.id: (result.outcome, result.reason) for result in results}
    assert ends == {clause.id: (conformance.ClauseOutcome.NOT_TESTED, reason) for clause in clauses}


def test_each_clause_about_begun_commits_has_a_sink_that_breaks_it() -> None:
    broken = {sink.breaks for sink in (*broken_sinks.GALLERY, *broken_server_sinks.GALLERY)}
    assert {one.id for one in beginning.CLAUSES} <= broken
