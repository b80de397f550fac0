"""Everything below here runs on the servers that the switch chooses."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/containers/"):
            item.add_marker(pytest.mark.integration)
