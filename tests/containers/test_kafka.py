"""A Kafka broker, of whatever kind, does what tests of crashes rely on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from onceflow.integration.servers import OwnKafka, make_kafka


@pytest.fixture(scope="module")
def broker() -> Iterator[OwnKafka]:
    """Runs, with a whole network, when a test ends."""
    with make_kafka(proxied=True) as running:
        yield running


def _producer(broker: OwnKafka, **settings: str) -> Producer:
    return Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all", **settings})


def _produce(broker: OwnKafka, topic: str, *values: bytes) -> None:
    producer = _producer(broker)
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(30) == 0


def _consume(broker: OwnKafka, topic: str, count: int, timeout_s: float = 90.0) -> list[bytes]:
    """Return what a reader of committed records sees, from the beginning."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "test",
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(count, timeout_s)
    consumer.close()
    return [value for message in messages if (value := message.value()) is not None]


def test_what_is_produced_is_consumed(broker: OwnKafka) -> None:
    topic = broker.create_topic("both-ways")
    _produce(broker, topic, b"a", b"b")
    assert _consume(broker, topic, 2) == [b"a", b"b"]


def test_aborted_transaction_is_not_read_and_committed_one_is(broker: OwnKafka) -> None:
    topic = broker.create_topic("transactions")
    producer = _producer(broker, **{"transactional.id": "one"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"aborted")
    producer.abort_transaction(30)
    producer.begin_transaction()
    producer.produce(topic, b"committed")
    producer.commit_transaction(30)
    assert _consume(broker, topic, 1) == [b"committed"]


def test_records_survive_kill_and_start_at_the_same_address(broker: OwnKafka) -> None:
    topic = broker.create_topic("survives")
    address = broker.bootstrap_servers
    _produce(broker, topic, b"before")
    broker.kill()
    assert not broker.running
    broker.start()
    assert broker.bootstrap_servers == address
    _produce(broker, topic, b"after")
    assert _consume(broker, topic, 2) == [b"before", b"after"]


def test_paused_broker_takes_records_only_after_unpause(broker: OwnKafka) -> None:
    topic = broker.create_topic("paused")
    producer = _producer(broker)
    broker.pause()
    producer.produce(topic, b"held")
    assert producer.flush(1) == 1
    broker.unpause()
    assert producer.flush(30) == 0
    assert _consume(broker, topic, 1) == [b"held"]


def test_refusing_network_keeps_everybody_out_until_it_heals(broker: OwnKafka) -> None:
    topic = broker.create_topic("cut")
    _produce(broker, topic, b"before")
    broker.network.refuse()
    outside = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "outside"})
    with pytest.raises(KafkaException):
        outside.list_topics(timeout=1)
    broker.network.heal()
    assert outside.list_topics(topic, timeout=20).topics[topic].error is None
    outside.close()
    _produce(broker, topic, b"after")
    assert _consume(broker, topic, 2) == [b"before", b"after"]
