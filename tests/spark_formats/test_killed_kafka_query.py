"""A query from Kafka into Postgres whose driver is killed in mid-batch: the table is the topic."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest
from tests.integration.kafka_feed import produce, record
from tests.integration.postgres_sink_kit import ids_in, prepared, query
from tests.support.drawn_seeds import draw_random
from tests.support.program import Program, python
from tests.support.stream_queries import STARVED

from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer

pytestmark = [pytest.mark.spark, pytest.mark.integration]

_STARTS_MAX = 4
_BATCH = 5_000
"""What the program reads at once, at the most."""
_FEW, _MANY = 2 * _BATCH, 8 * _BATCH
_PREPARED = "SELECT 1 FROM pg_prepared_xacts WHERE database = current_database()"
_DEADLINE_S = 240.0


class Driver:
    """The program as a process of its own; each start goes on from the checkpoint."""

    def __init__(self, arguments: list[str], log: Path, records: int) -> None:
        self.arguments, self.log, self.records = arguments, log, records

    def start(self) -> Program:
        program = python("-m", "tests.spark_formats.kafka_to_postgres", *self.arguments)
        return Program(self.log, *program)

    def killed_when(self, holds: Callable[[], bool]) -> None:
        """Start it and SIGKILL it with its JVM and workers, as soon as `holds`."""
        process = self.start()
        try:
            until = time.monotonic() + _DEADLINE_S
            while not holds():
                if process.poll() is not None:
                    self.expect_starved(process)
                    process = self.start()
                assert time.monotonic() < until, f"nothing to kill it in: {process.tail()}"
                time.sleep(0.01)
        finally:
            process.kill_tree()

    def ended(self) -> None:
        """Start it and wait until it has read the whole topic.

        Spark gives a Python worker ten seconds to begin, which a busy machine may not keep: a
        driver that fails is started again, as it is by whoever runs one.
        """
        statuses: list[int] = []
        while 0 not in statuses:
            assert len(statuses) < _STARTS_MAX, statuses
            process = self.start()
            try:
                statuses.append(process.wait(_DEADLINE_S))
            finally:
                process.kill_tree()
            if statuses[-1] != 0:
                self.expect_starved(process)

    def expect_starved(self, process: Program) -> None:
        """Return when the driver ended by Spark's own impatience, and by nothing of ours."""
        assert process.poll() != 0, "it read everything before it was killed"
        assert STARVED in process.output(), f"{process.poll()}: {process.tail()}"


@pytest.fixture
def driver(
    request: pytest.FixtureRequest,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    postgres_database: str,
    tmp_path: Path,
) -> Driver:
    records: int = request.param
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(2)
    for partition in range(2):
        values = map(record, range(partition, records, 2))
        produce(servers, topic, values, partition=partition)
    query(postgres_database, "CREATE TABLE ledger (id bigint, account text)")
    arguments = [servers, topic, postgres_database, str(tmp_path / "checkpoint")]
    return Driver(arguments, tmp_path / "driver.log", records)


def _has_rows(url: str, least: int, then_s: float) -> bool:
    """Return whether the table has `least` rows, and had them `then_s` ago."""
    if len(ids_in(url)) < least:
        return False
    time.sleep(then_s)
    return True


@pytest.mark.slow  # test_stream_sink kills such a query's process, too
@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", [_FEW], indirect=True)
def test_a_driver_killed_while_a_batch_is_prepared_loses_and_doubles_nothing(
    driver: Driver, postgres_database: str
) -> None:
    with psycopg.connect(postgres_database, autocommit=True) as watch:
        driver.killed_when(lambda: watch.execute(_PREPARED).fetchone() is not None)
    driver.ended()
    assert ids_in(postgres_database) == list(range(driver.records))
    assert prepared(postgres_database) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("driver", [_MANY], indirect=True)
def test_a_driver_killed_again_and_again_loses_and_doubles_nothing(
    driver: Driver, postgres_database: str
) -> None:
    draw = draw_random()
    for _ in range(3):
        rows = len(ids_in(postgres_database)) + draw.choice([1, 5_000, 9_000])
        driver.killed_when(partial(_has_rows, postgres_database, rows, draw.uniform(0, 0.3)))
    driver.ended()
    assert ids_in(postgres_database) == list(range(driver.records))
    assert prepared(postgres_database) == []
