"""The sink of the examples keeps every clause that its target lets be tested."""

from __future__ import annotations

from examples.sqlite_target import make_target

from onceflow.integration.conformance import SinkConformance, SinkTarget


class TestSqliteSink(SinkConformance):
    def make_target(self) -> SinkTarget:
        return make_target()
