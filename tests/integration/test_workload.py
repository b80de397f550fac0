"""The payments that reach the topic are those that the seed names."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from confluent_kafka import Consumer, TopicPartition

from onceflow.core.errors import ConfigError
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers import KafkaServer
from onceflow.integration.workload import Payments, produce


def _read(server: KafkaServer, topic: str, count: int) -> dict[int, list[bytes]]:
    consumer = Consumer({"bootstrap.servers": server.bootstrap_servers, "group.id": "test"})
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    found: dict[int, list[bytes]] = defaultdict(list)
    for message in consumer.consume(count, 20):
        value, partition = message.value(), message.partition()
        assert value is not None
        assert partition is not None
        found[partition].append(value)
    consumer.close()
    return found


def test_every_payment_is_in_the_partition_of_its_id_in_order(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    payments = Payments(records=50_003, accounts=100, partitions=3, seed=5)
    topic = kafka_topic(3)
    seen: list[int] = []
    produce(payments, onceflow_kafka.bootstrap_servers, topic, progress=seen.append)
    assert seen == [20_000, 40_000, 50_003]
    found = _read(onceflow_kafka, topic, 50_003)
    for partition in range(3):
        records = [json.loads(value) for value in found[partition]]
        assert [record["id"] for record in records] == list(range(partition, 50_003, 3))
        assert {record["account"] for record in records} == {f"acct-{i:06}" for i in range(100)}
        assert min(record["amount"] for record in records) == -500
        assert max(record["amount"] for record in records) == 1000
    assert json.loads(found[0][0]).keys() == {"id", "account", "amount", "ts"}


def test_one_seed_is_one_workload_and_another_is_another() -> None:
    def records(seed: int) -> list[bytes]:
        payments = Payments(records=30_000, seed=seed)
        return [record for chunk in payments.chunks() for record in chunk.json()]

    assert records(1) == records(1)
    assert records(1) != records(2)
    assert Payments(30_000, seed=1).digest() != Payments(30_000, seed=2).digest()


def test_topic_that_does_not_exist_is_an_error_and_no_silence(onceflow_kafka: KafkaServer) -> None:
    with pytest.raises(Exception, match=r"(?i)unknown.*(topic|partition)"):
        produce(Payments(10), onceflow_kafka.bootstrap_servers, "no-such-topic")


def test_topic_with_too_few_partitions_is_an_error(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    with pytest.raises(Exception, match=r"(?i)unknown.*partition"):
        produce(Payments(10, partitions=2), onceflow_kafka.bootstrap_servers, kafka_topic(1))


def test_workload_without_accounts_is_refused() -> None:
    with pytest.raises(ConfigError, match="accounts=0"):
        Payments(10, accounts=0)
