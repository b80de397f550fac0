"""The pytest tests of a sink and of a source, one for each clause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onceflow.integration.conformance.clause import Clause, Subject, check_clause, hindrance
from onceflow.integration.conformance.clause_catalog import CLAUSES
from onceflow.integration.conformance.harness import Effort
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.source_catalog import SOURCE_CLAUSES
from onceflow.integration.conformance.source_input import SourceInput
from onceflow.integration.conformance.target import NotTestable, SinkTarget
from onceflow.integration.conformance_plugin import list_failed_clauses, subject_label


class SinkConformance:
    """The tests of a sink: write `class TestMySink(SinkConformance)` with `make_target`.

    If the target needs pytest fixtures, such as a database, override the fixture `sink_target`
    instead.
    """

    def make_target(self) -> SinkTarget:
        """Return the target under test. Called for each clause, so share expensive resources."""
        raise NotImplementedError(f"{type(self).__name__} needs make_target()")

    @pytest.fixture
    def sink_target(self) -> Iterator[SinkTarget]:
        """The target of one clause. It is closed after the clause."""
        target = self.make_target()
        yield target
        target.close()

    @pytest.mark.parametrize("clause", CLAUSES, ids=str)
    def test_clause(
        self,
        clause: Clause,
        sink_target: SinkTarget,
        onceflow_processes: Processes,
        onceflow_effort: Effort,
        request: pytest.FixtureRequest,
    ) -> None:
        """The target keeps the clause."""
        _run_clause(clause, sink_target, onceflow_processes, onceflow_effort, request)


class SourceConformance:
    """The tests of a source: write `class TestMySource(SourceConformance)` with `make_input`.

    If the input needs pytest fixtures, such as a server, override the fixture `source_input`
    instead.
    """

    def make_input(self) -> SourceInput:
        """Return a new input. Called for each clause, so share expensive resources."""
        raise NotImplementedError(f"{type(self).__name__} needs make_input()")

    @pytest.fixture
    def source_input(self) -> Iterator[SourceInput]:
        """The input of one clause. It is closed after the clause."""
        source_input = self.make_input()
        yield source_input
        source_input.close()

    @pytest.mark.parametrize("clause", SOURCE_CLAUSES, ids=str)
    def test_clause(
        self,
        clause: Clause,
        source_input: SourceInput,
        onceflow_processes: Processes,
        onceflow_effort: Effort,
        request: pytest.FixtureRequest,
    ) -> None:
        """The source keeps the clause."""
        _run_clause(clause, source_input, onceflow_processes, onceflow_effort, request)


def _run_clause(
    clause: Clause,
    subject: Subject,
    processes: Processes,
    effort: Effort,
    request: pytest.FixtureRequest,
) -> None:
    """Check the clause, or skip the test if the clause cannot be tested."""
    __tracebackhide__ = True
    failed = list_failed_clauses(request.config, subject_label(request.node))
    hindered = hindrance(clause, subject, failed)
    if hindered:
        pytest.skip(hindered)
    try:
        check_clause(clause, subject, processes, effort)
    except NotTestable as error:
        pytest.skip(str(error))
