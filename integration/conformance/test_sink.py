"""The test of `pytest --onceflow-sink MODULE:NAME`, which needs no test file of the user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onceflow.integration.conformance.suite import SinkConformance
from onceflow.integration.conformance.target import SinkTarget
from onceflow.integration.conformance_plugin import target_of


class TestNamedSink(SinkConformance):
    """The tests of the sink that --onceflow-sink names."""

    @pytest.fixture
    def sink_target(self, pytestconfig: pytest.Config) -> Iterator[SinkTarget]:
        """The target that the option's function returns, a new one for each clause."""
        target = target_of(pytestconfig)
        yield target
        target.close()
