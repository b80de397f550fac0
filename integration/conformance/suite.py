"""The pytest tests of a sink, one for each clause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onceflow.integration.conformance.clause import Clause, check_clause, hindrance
from onceflow.integration.conformance.clause_catalog import CLAUSES
from onceflow.integration.conformance.harness import Effort
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.target import NotTestable, SinkTarget
from onceflow.integration.conformance_plugin import list_failed_clauses, sink_label


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
        failed = list_failed_clauses(request.config, sink_label(request.node))
        hindered = hindrance(clause, sink_target, failed)
        if hindered:
            pytest.skip(hindered)
        try:
            check_clause(clause, sink_target, onceflow_processes, onceflow_effort)
        except NotTestable as error:
            pytest.skip(str(error))
