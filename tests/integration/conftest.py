"""Every test below here talks to real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceflow.integration.pytest_plugin import (
    kafka_topic,
    mariadb_database,
    mysql_database,
    onceflow_kafka,
    onceflow_mariadb,
    onceflow_mysql,
    onceflow_postgres,
    postgres_database,
)

__all__ = [
    "kafka_topic",
    "mariadb_database",
    "mysql_database",
    "onceflow_kafka",
    "onceflow_mariadb",
    "onceflow_mysql",
    "onceflow_postgres",
    "postgres_database",
]

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)
