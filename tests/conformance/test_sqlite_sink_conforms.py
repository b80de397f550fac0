"""The sink of the examples keeps every clause that its target lets be tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples.sqlite_target import make_target

from onceflow.integration.conformance import SinkConformance, SinkTarget

# The kit kills at lines of the package that the sink is of; this sink's `pre_commit` is inherited
# from onceflow. The whole job's kills at `flushed` and `prepared` go through it.
_INHERITED = "killed-in-pre-commit"


class TestSqliteSink(SinkConformance):
    @pytest.fixture
    def sink_target(self, request: pytest.FixtureRequest) -> Iterator[SinkTarget]:
        if str(request.node.callspec.params["clause"]) == _INHERITED:
            pytest.skip("pre_commit is inherited: no line of the sink's own package runs in it")
        target = make_target()
        yield target
        target.close()
