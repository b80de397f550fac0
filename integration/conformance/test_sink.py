"""The test that needs no file of yours: `pytest --onceflow-sink MODULE:NAME` runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onceflow.integration.conformance.suite import SinkConformance
from onceflow.integration.conformance.target import SinkTarget
from onceflow.integration.conformance_plugin import target_of


class TestNamedSink(SinkConformance):
    """The sink that --onceflow-sink names."""

    @pytest.fixture
    def sink_target(self, pytestconfig: pytest.Config) -> Iterator[SinkTarget]:
        """What the option's function returns, anew for each clause."""
        target = target_of(pytestconfig)
        yield target
        target.close()
