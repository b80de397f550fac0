"""Rows that databases refuse, as dead letters in a table, a topic and files, with their origin."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from tests.integration import mysql_sink_kit as mysql
from tests.integration import postgres_sink_kit as postgres
from tests.integration.kafka_feed import produce
from tests.integration.kafka_sink_kit import messages, values_of
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, FixedDelay, JobState, LocalProcesses, Pipeline
from onceflow.core.spi import Sink
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import FileSink, KafkaSink, MySQLSink, PostgresSink
from onceflow.sources import KafkaSource

RECORDS = 2_000
_TABLE = "CREATE TABLE {} (id bigint PRIMARY KEY, amount smallint)"
_LETTERS = "SELECT operator, reason, topic, partition, {}, value FROM letters"


def is_bad(number: int) -> bool:
    return number % 53 == 7


@dataclass(frozen=True)
class Branch:
    """A table that refuses some rows, and where those go."""

    target: Sink
    ids: Callable[[], list[int]]
    letters: Sink
    read: Callable[[], Iterable[tuple[Any, ...]]]
    """Each letter as operator, reason, topic, partition, offset and value."""


@pytest.fixture
def branches(
    tmp_path: Path,
    postgres_database: str,
    mysql_database: str,
    mariadb_database: str,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
) -> dict[str, Branch]:
    postgres.query(postgres_database, _TABLE.format("good"))
    postgres.query(postgres_database, _TABLE.format("better"))
    for url in (mysql_database, mariadb_database):
        mysql.query(url, _TABLE.format("good"))
    servers, topic, files = onceflow_kafka.bootstrap_servers, kafka_topic(2), str(tmp_path / "dead")
    columns = ("operator", "reason", "topic", "partition", "offset", "value")

    def in_topic() -> Iterable[tuple[Any, ...]]:
        for letter in values_of(messages(servers, topic)):
            letter["value"] = base64.b64decode(letter["value"])
            yield tuple(letter[name] for name in columns)

    def in_files() -> Iterable[tuple[Any, ...]]:
        for letter in ds.dataset(files, format="parquet").to_table().to_pylist():
            yield tuple(letter[name] for name in columns)

    return {
        "table-postgres": Branch(
            MySQLSink(mysql_database, table="good", evolve=True),
            lambda: mysql.ids_in(mysql_database, "good"),
            PostgresSink(postgres_database, table="letters", create=True),
            lambda: postgres.query(postgres_database, _LETTERS.format('"offset"')),
        ),
        "table-mysql": Branch(
            PostgresSink(postgres_database, table="good", evolve=True),
            lambda: postgres.ids_in(postgres_database, "good"),
            MySQLSink(mysql_database, table="letters", create=True),
            lambda: mysql.query(
                mysql_database, _LETTERS.replace("partition", "`partition`").format("`offset`")
            ),
        ),
        "topic": Branch(
            MySQLSink(mariadb_database, table="good", evolve=True),
            lambda: mysql.ids_in(mariadb_database, "good"),
            KafkaSink(servers, topic=topic),
            in_topic,
        ),
        "files": Branch(
            PostgresSink(postgres_database, table="better", evolve=True),
            lambda: postgres.ids_in(postgres_database, "better"),
            FileSink(files),
            in_files,
        ),
    }


@pytest.mark.servers
def test_rows_that_tables_refuse_are_dead_letters_once_wherever_they_go(
    tmp_path: Path,
    branches: dict[str, Branch],
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
) -> None:
    topic = kafka_topic(2)
    for partition in (0, 1):
        numbers = range(partition, RECORDS, 2)
        values = [b'{"id": %d, "amount": %d}' % (n, 70_000 if is_bad(n) else n) for n in numbers]
        produce(onceflow_kafka.bootstrap_servers, topic, values, partition=partition)
    source = KafkaSource(
        onceflow_kafka.bootstrap_servers,
        topic=topic,
        schema="id BIGINT NOT NULL, amount BIGINT",
        include_metadata=True,
        ending_offsets="latest",
        batch_rows=20,
    )
    pipeline = Pipeline(
        LocalProcesses(tmp_path / "logs"),
        name="letters",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.2),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records").map_batches(_slowly, uid="pace")
    for name, branch in branches.items():
        records.write(branch.target, uid=name, dead_letters=branch.letters)
    job = pipeline.start()
    deadline = time.monotonic() + 90
    while (status := job.status()).checkpoints_completed < 2:
        assert not status.state.ended, status.last_error
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    os.kill(status.slots[0].pid, signal.SIGKILL)
    assert job.wait(150).state is JobState.FINISHED, job.status().last_error
    assert job.status().restores >= 1

    expected = Counter((topic, n % 2, n // 2) for n in range(RECORDS) if is_bad(n))
    for name, branch in branches.items():
        assert branch.ids() == [n for n in range(RECORDS) if not is_bad(n)], name
        letters = list(branch.read())
        assert Counter(letter[2:5] for letter in letters) == expected, name
        for operator, reason, _, partition, offset, value in letters:
            assert (operator, json.loads(value)["id"]) == (name, 2 * offset + partition)
            assert "column 'amount'" in reason
            assert "70000" in reason


def _slowly(rows: pa.RecordBatch) -> pa.RecordBatch:
    time.sleep(0.05)
    return rows
