"""The clauses as tests of pytest: inherit, say what the target is, and every clause is a test."""

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
    """Tests one sink. Write `class TestMySink(SinkConformance)` with `make_target`.

    Where the target needs fixtures of pytest (a database, say), override the fixture
    `sink_target` in its stead.
    """

    def make_target(self) -> SinkTarget:
        """Return the target under test; called anew for each clause, so share what is dear."""
        raise NotImplementedError(f"{type(self).__name__} needs make_target()")

    @pytest.fixture
    def sink_target(self) -> Iterator[SinkTarget]:
        """The target of one clause; closed after it."""
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
