"""Every test below here talks to real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.each_reader import each_reader as each_reader
from tests.support.driver_process import DriverProcess

from onceflow.integration.servers import EmbeddedPostgres
from onceflow.integration.servers.kinds import KafkaServer


@pytest.fixture
def servers(onceflow_kafka: KafkaServer) -> str:
    return onceflow_kafka.bootstrap_servers


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    """A server whose changes can be read."""
    with EmbeddedPostgres({"wal_level": "logical"}) as running:
        yield running


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[DriverProcess]:
    process = DriverProcess(tmp_path)
    yield process
    process.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/integration/"):
            item.add_marker(pytest.mark.integration)
