"""A whole job into Kafka on Spark, slots killed: a read_committed consumer sees each row once."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.kafka_sink_kit import messages, open_transaction_blocks, values_of
from tests.support.counting_source import CountingSource, amount_of
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, FixedDelay, JobState, Pipeline, count, sum_
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import KafkaSink

pytestmark = pytest.mark.spark

PARTITIONS = 3


def balances(
    spark: SparkSession, directory: Path, source: CountingSource, sink: KafkaSink, parallelism: int
) -> Pipeline:
    """Build source -> running balance -> topic."""
    pipeline = Pipeline(
        spark,
        name="balances",
        parallelism=parallelism,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records")
    running = records.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    running.write(sink, uid="topic")
    return pipeline


def assert_exactly_once(servers: str, topic: str, source: CountingSource) -> None:
    """Every row once, each account's balances a chain in the order of its partition."""
    found = messages(servers, topic)
    values = values_of(found)
    assert Counter(value["id"] for value in values) == Counter(range(source.records))
    chains: dict[str, list[tuple[int, int]]] = defaultdict(list)
    partitions: dict[str, set[int | None]] = defaultdict(set)
    for message, value in zip(found, values, strict=True):
        assert message.key() == value["account"].encode()
        assert value["amount"] == amount_of(value["id"])
        chains[value["account"]].append((value["n"], value["balance"] - value["amount"]))
        partitions[value["account"]].add(message.partition())
    assert {len(numbers) for numbers in partitions.values()} == {1}
    for account, chain in chains.items():
        assert [n for n, _ in chain] == list(range(1, len(chain) + 1)), f"order of {account}"
        assert chain[0][1] == 0
    for partition in range(PARTITIONS):
        assert not open_transaction_blocks(servers, topic, partition)


@pytest.mark.servers
def test_killed_slots_and_another_parallelism_leave_each_row_in_the_topic_once_and_in_order(
    spark: SparkSession, tmp_path: Path, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(PARTITIONS)
    source = CountingSource(12_000, splits_count=3)
    slowly = replace(source, pause_s=0.1)  # it is stopped long before the end
    sink = KafkaSink(servers, topic=topic, key="account")
    job = balances(spark, tmp_path, slowly, sink, parallelism=2).start()
    for kill in range(2):
        job.wait_for(checkpoints=2 * (kill + 1))
        os.kill(job.status().slots[kill].pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while job.status().restores <= kill:
            assert time.monotonic() < deadline, job.status()
            time.sleep(0.01)
    job.wait_for(checkpoints=5)
    assert job.stop(60).state is JobState.STOPPED
    assert 0 < len(messages(servers, topic)) < source.records
    after = balances(spark, tmp_path, source, sink, parallelism=3).run(90)
    assert after.state is JobState.FINISHED
    assert_exactly_once(servers, topic, source)
    staged = list((tmp_path / "checkpoints").rglob("staged/*/*-0.arrow"))
    assert staged == []
