"""Servers that may be killed, one topic for all tests, and drivers that outlive most of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.crash.ledger_driver import LOCAL_PROCESSES, PAYMENTS, LedgerSpec
from tests.crash.ledger_runs import LedgerDriver, LedgerRun

from onceflow.integration.judge import Verdict, verify
from onceflow.integration.pytest_plugin import postgres_database
from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.integration.workload import produce

__all__ = ["postgres_database"]

TOPIC = "payments"
_names = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/crash/"):
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def onceflow_postgres() -> Iterator[EmbeddedPostgres]:
    """Ours alone, so a test may kill it; it must run again when the test ends."""
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def payments_kafka() -> Iterator[EmbeddedKafka]:
    """A broker that a test may kill, with all payments in one topic."""
    with EmbeddedKafka() as server:
        server.create_topic(TOPIC, PAYMENTS.partitions)
        produce(PAYMENTS, server.bootstrap_servers, TOPIC)
        yield server


@pytest.fixture(scope="session")
def spark_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerDriver]:
    driver = LedgerDriver(tmp_path_factory.mktemp("driver"), "local[2]")
    yield driver
    driver.end()


@pytest.fixture(scope="session")
def local_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerDriver]:
    driver = LedgerDriver(tmp_path_factory.mktemp("driver"), LOCAL_PROCESSES)
    yield driver
    driver.end()


@pytest.fixture
def ledger_driver(request: pytest.FixtureRequest) -> Iterator[LedgerDriver]:
    """A driver on Spark's local[2], or on local processes where the parameter says "local".

    A test that fails takes it down, so that the next one starts clean.
    """
    failed_before = request.session.testsfailed
    where = getattr(request, "param", "spark")
    driver: LedgerDriver = request.getfixturevalue(f"{where}_driver")
    yield driver
    if request.session.testsfailed > failed_before:
        driver.end()


@pytest.fixture
def ledger_spec(
    payments_kafka: EmbeddedKafka, postgres_database: str, tmp_path: Path
) -> LedgerSpec:
    """A job of this test's own, with a database of its own."""
    return LedgerSpec(
        job=f"ledger-{next(_names)}",
        bootstrap_servers=payments_kafka.bootstrap_servers,
        topic=TOPIC,
        postgres_url=postgres_database,
        storage=str(tmp_path / "checkpoints"),
        released=str(tmp_path / "released"),
    )


@pytest.fixture
def judge(postgres_database: str) -> Callable[[LedgerRun], Verdict]:
    """The judge, which asks the table and nobody else."""
    return lambda run: verify(postgres_database, "ledger", PAYMENTS)
