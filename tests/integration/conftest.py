"""Every test below here talks to real servers."""

from __future__ import annotations

import pytest
from tests.integration.each_reader import each_reader as each_reader

from onceflow.integration.servers.kinds import KafkaServer


@pytest.fixture
def servers(onceflow_kafka: KafkaServer) -> str:
    return onceflow_kafka.bootstrap_servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/integration/"):
            item.add_marker(pytest.mark.integration)
