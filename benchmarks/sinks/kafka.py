"""Kafka beside a plain transactional producer."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import msgspec
from confluent_kafka import Producer
from typing_extensions import override

from benchmarks.sinks.alone import Clock, Loaded
from benchmarks.sinks.place import Effect, Place, Way
from benchmarks.sinks.rows import Rows
from benchmarks.stage import BenchmarkError, Stage
from onceflow.integration.judge import verify_topic
from onceflow.integration.servers.kafka import delete_topics
from onceflow.sinks import KafkaSink

_PARTITIONS = 2
_TIMEOUT_S = 120.0


class KafkaPlace(Place):
    """Topics of the stage's broker; the address is a topic's name."""

    name = "Kafka"
    bare = "transactional producer"

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._numbers = itertools.count(1)

    @property
    @override
    def ways(self) -> Mapping[str, Way]:
        return {"staged, one transaction a checkpoint": Way(self._sink)}

    @override
    @contextmanager
    def empty(self) -> Generator[str, None, None]:
        topic = self._stage.kafka.create_topic(f"sink-{next(self._numbers)}", _PARTITIONS)
        try:
            yield topic
        finally:
            delete_topics(self._stage.kafka.bootstrap_servers, [topic])

    @override
    def load_bare(self, address: str, rows: Rows) -> Loaded:
        producer = Producer(
            {
                "bootstrap.servers": self._stage.kafka.bootstrap_servers,
                "transactional.id": f"bare-{address}",
                "partitioner": "murmur2_random",
                "linger.ms": 50,
                "batch.size": 1_000_000,
                "queue.buffering.max.messages": 200_000,
                "delivery.report.only.error": True,
                "log_level": 2,
            }
        )
        producer.init_transactions(_TIMEOUT_S)
        encode = msgspec.json.Encoder().encode
        with Clock() as clock:
            producer.begin_transaction()
            for batch in rows.batches:
                for row in batch.to_pylist():
                    _produce(producer, address, encode(row), row["account"])
                producer.poll(0)
            producer.commit_transaction(_TIMEOUT_S)
        return Loaded(rows.count, clock.seconds, clock.cpu_s)

    @override
    def verify(self, address: str, rows: Rows, effect: Effect) -> None:
        verdict = verify_topic(self._stage.kafka.bootstrap_servers, address, rows.payments)
        if not verdict.ok:
            raise BenchmarkError(f"the topic is wrong: {verdict}")

    def _sink(self, topic: str) -> KafkaSink:
        return KafkaSink(self._stage.kafka.bootstrap_servers, topic=topic, key="account")


def _produce(producer: Producer, topic: str, value: bytes, key: str) -> None:
    while True:
        try:
            producer.produce(topic, value, key=key)
            return
        except BufferError:
            producer.poll(0.1)
