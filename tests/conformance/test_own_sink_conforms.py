"""The sink of the examples keeps every clause that its target lets be tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples.own_sink_target import make_target

from onceflow.integration.conformance import SinkConformance, SinkTarget


class TestOwnSink(SinkConformance):
    @pytest.fixture
    def sink_target(self) -> Iterator[SinkTarget]:
        target = make_target()
        yield target
        target.close()
