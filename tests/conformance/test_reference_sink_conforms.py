"""A correct sink passes every clause that its target lets be tested."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conformance.reference_sink import ReferenceTarget

from onceflow.integration.conformance import SinkConformance, SinkTarget


class TestReferenceSink(SinkConformance):
    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> SinkTarget:
        return ReferenceTarget(tmp_path)
