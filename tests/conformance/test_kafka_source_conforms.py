"""Kafka's source keeps every clause of the contract, on a real broker."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
from tests.integration import kafka_feed

from onceflow.core.spi import Source
from onceflow.integration.conformance import SourceConformance, SourceInput
from onceflow.integration.servers.kafka import delete_topics
from onceflow.integration.servers.kinds import KafkaServer

pytestmark = pytest.mark.integration


class KafkaInput(SourceInput):
    """A topic of its own, with three partitions."""

    def __init__(self, broker: KafkaServer) -> None:
        self._broker = broker
        self._servers = broker.bootstrap_servers
        self._topic = f"rows-{secrets.token_hex(4)}"
        self._partitions = 3
        self._exists = False
        self._counts = Counter[int]()

    def fill(self, rows: int) -> Mapping[str, Sequence[object]]:
        self._broker.create_topic(self._topic, self._partitions)
        self._exists = True
        names = [f"{self._topic}-{partition}" for partition in range(self._partitions)]
        return {name: self.append(name, rows) for name in names}

    def source(self) -> Source:
        return self._describe()

    def source_with_end(self) -> Source:
        return self._describe(ending_offsets="latest")

    def append(self, split_id: str, rows: int) -> Sequence[object]:
        partition = _partition_of(split_id)
        first = partition * 1_000_000 + self._counts[partition]
        self._counts[partition] += rows
        numbers = range(first, first + rows)
        values = map(kafka_feed.record, numbers)
        kafka_feed.produce(self._servers, self._topic, values, partition=partition)
        return numbers

    def add_split(self, rows: int) -> tuple[str, Sequence[object]]:
        split_id = f"{self._topic}-{self._partitions}"
        self._partitions += 1
        kafka_feed.add_partitions(self._servers, self._topic, self._partitions)
        return split_id, self.append(split_id, rows)

    def remove_split(self, split_id: str) -> str:
        delete_topics(self._servers, [self._topic])
        self._exists = False
        return self._topic

    def count_acknowledged(self, split_id: str) -> int:
        offsets = kafka_feed.group_offsets(
            self._servers, self._topic, self._topic, self._partitions
        )
        return max(0, offsets[_partition_of(split_id)])

    def close(self) -> None:
        if self._exists:
            delete_topics(self._servers, [self._topic])

    def _describe(self, **settings: object) -> Source:
        return kafka_feed.source(
            self._servers,
            self._topic,
            group_id=self._topic,
            batch_rows=5,
            starting_offsets="earliest",
            partition_discovery_interval=0.1,
            **settings,
        )


def _partition_of(split_id: str) -> int:
    return int(split_id.rpartition("-")[2])


class TestKafkaSource(SourceConformance):
    @pytest.fixture
    def source_input(self, onceflow_kafka: KafkaServer) -> Iterator[SourceInput]:
        source_input = KafkaInput(onceflow_kafka)
        yield source_input
        source_input.close()
