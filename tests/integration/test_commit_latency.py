"""A job from Kafka to Postgres, scraped: how long each record took until its row was visible."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from tests.integration import postgres_sink_kit as postgres
from tests.integration.kafka_feed import record
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    FixedDelay,
    Job,
    KeyedFunction,
    LocalProcesses,
    Metrics,
    Pipeline,
    Record,
)
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.integration.servers.process import free_port
from onceflow.sinks import PostgresSink
from onceflow.sources import KafkaSource

parser: Any = pytest.importorskip("prometheus_client.parser")

OLD, NEW = 700, 300
OLD_S = 200
"""How long ago the old records were made: in another bucket than the new, on a slow machine too."""


class Unchanged(KeyedFunction):
    """Has the sink run in another chain than the source."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, record: Record) -> Record:
        return record


def produce(servers: str, topic: str, numbers: range, age_s: int) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
    made_ms = int(time.time() * 1000) - age_s * 1000
    for number in numbers:
        producer.produce(topic, record(number), partition=number % 2, timestamp=made_ms)
    assert producer.flush(30) == 0


def scrape(bind: str) -> dict[str, float]:
    """Return the histogram of sink `out`: buckets by their bounds, `sum` and `count`."""
    with urllib.request.urlopen(f"http://{bind}/metrics", timeout=30) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
    return {
        sample.labels.get("le") or sample.name.rpartition("_")[2]: sample.value
        for family in families
        if family.name == "onceflow_commit_latency_seconds"
        for sample in family.samples
        if sample.labels["sink"] == "out"
    }


def await_count(job: Job, bind: str, count: int) -> dict[str, float]:
    deadline = time.monotonic() + 90
    while True:
        status = job.status()
        found = scrape(bind) if status.checkpoints_completed else {}
        if found.get("count", 0) >= count:
            return found
        assert time.monotonic() < deadline, (found, status)
        time.sleep(0.1)


@pytest.mark.servers
def test_each_record_counts_once_by_its_own_time_though_slots_are_killed(
    tmp_path: Path,
    postgres_database: str,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
) -> None:
    postgres.query(postgres_database, "CREATE TABLE ledger (id bigint PRIMARY KEY, account text)")
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(2)
    bind = f"127.0.0.1:{free_port()}"
    produce(servers, topic, range(OLD), OLD_S)
    pipeline = Pipeline(
        LocalProcesses(tmp_path / "logs"),
        name="latency",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.3),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
        metrics=Metrics(prometheus_bind=bind),
    )
    source = KafkaSource(
        servers, topic=topic, schema="id BIGINT NOT NULL, account STRING", batch_rows=20
    )
    records = pipeline.read(source, uid="records").key_by("account")
    records.process(Unchanged(), uid="pass").write(
        PostgresSink(postgres_database, table="ledger"), uid="out"
    )
    job = pipeline.start()
    await_count(job, bind, 1)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    old = await_count(job, bind, OLD)
    assert old["count"] == OLD
    assert old["60.0"] == 0
    produce(servers, topic, range(OLD, OLD + NEW), 0)
    found = await_count(job, bind, OLD + NEW)
    status = job.stop()
    assert found["count"] == len(postgres.ids_in(postgres_database, "ledger")) == OLD + NEW
    assert found["60.0"] == NEW, "the new ones, and no other"
    assert OLD * OLD_S <= found["sum"] < OLD * 2 * OLD_S + NEW * 60
    assert status.restores == 1
