"""The test of `pytest --onceflow-source MODULE:NAME`, which needs no test file of the user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onceflow.integration.conformance.source_input import SourceInput
from onceflow.integration.conformance.suite import SourceConformance
from onceflow.integration.conformance_plugin import input_of


class TestNamedSource(SourceConformance):
    """The tests of the source that --onceflow-source names."""

    @pytest.fixture
    def source_input(self, pytestconfig: pytest.Config) -> Iterator[SourceInput]:
        """The input that the option's function returns, a new one for each clause."""
        source_input = input_of(pytestconfig)
        yield source_input
        source_input.close()
