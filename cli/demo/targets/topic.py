"""A topic of the broker that the payments come from."""

from __future__ import annotations

import contextlib
import time
from typing import cast

from confluent_kafka import Consumer, KafkaException, TopicPartition
from typing_extensions import override

from onceflow.cli.demo.observers import ANSWER_TIMEOUT_S, Observer
from onceflow.cli.demo.targets.target import Target
from onceflow.integration.oracle import Verdict, verify_topic
from onceflow.integration.servers import EmbeddedKafka
from onceflow.integration.workload import Payments


class TopicTarget(Target):
    """A topic that is made for it."""

    def __init__(self, server: EmbeddedKafka, topic: str, partitions: int) -> None:
        self._server = server
        self._topic = server.create_topic(topic, partitions)
        self._partitions = partitions

    @property
    @override
    def server(self) -> EmbeddedKafka:
        return self._server

    @property
    @override
    def address(self) -> str:
        return self._server.bootstrap_servers

    @property
    @override
    def place(self) -> str:
        return self._topic

    @override
    def visible_rows(self) -> Observer:
        return _Records(self.address, self._topic, self._partitions)

    @override
    def judge(self, payments: Payments) -> Verdict:
        return verify_topic(self.address, self._topic, payments)


class _Records(Observer):
    """The offsets up to which a read_committed consumer gets.

    A transaction's own mark takes an offset too, so that there are a few more than records.
    """

    def __init__(self, bootstrap_servers: str, topic: str, partitions: int) -> None:
        super().__init__("records")
        self._settings = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "onceflow-demo-watcher",
            "isolation.level": "read_committed",
            "log_level": 0,
        }
        self._partitions = [TopicPartition(topic, partition) for partition in range(partitions)]

    @override
    def _ask_until_ended(self) -> None:
        consumer = Consumer(self._settings)
        try:
            with contextlib.suppress(KafkaException):
                started_at = time.monotonic()
                while self._answered(self._sum(consumer), started_at):
                    started_at = time.monotonic()
        finally:
            consumer.close()

    def _sum(self, consumer: Consumer) -> int:
        # None when it took too long, which the client's stubs do not say.
        ends = (
            cast(
                "tuple[int, int] | None",
                consumer.get_watermark_offsets(partition, timeout=ANSWER_TIMEOUT_S),
            )
            for partition in self._partitions
        )
        known = [end[1] for end in ends if end is not None]
        return sum(known) if len(known) == len(self._partitions) else self.value
