"""A Kafka of one process, as far as the sink's lanes use it: transactions, fences and offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from tests.support.failing_once import Calls

from onceflow.sinks.kafka import clients


class KafkaDouble:
    """The contents of the broker: committed records, and the metadata of committed offsets."""

    def __init__(self, calls: Calls) -> None:
        self.values: list[bytes] = []
        self.offsets: dict[tuple[str, str], str] = {}
        self.epochs: Counter[str] = Counter()
        self.begun: set[str] = set()
        """The transactional ids whose owner has begun a transaction and not ended it."""
        self.calls = calls

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the sink's clients speak with this one from now on."""
        monkeypatch.setattr(clients, "Producer", self._producer)
        monkeypatch.setattr(clients, "Consumer", self._consumer)

    def _producer(self, config: Mapping[str, Any]) -> Producer:
        return Producer(self, config["transactional.id"])

    def _consumer(self, config: Mapping[str, Any]) -> Consumer:
        return Consumer(self, config["group.id"])


def _lose(*, lost: bool) -> None:
    if lost:
        raise KafkaException(KafkaError(KafkaError.NETWORK_EXCEPTION, "connection lost"))


class Producer:
    """A producer of one transactional id."""

    def __init__(self, broker: KafkaDouble, name: str) -> None:
        self._broker = broker
        self._name = name
        self._epoch = 0
        self._values: list[bytes] = []
        self._offsets: dict[tuple[str, str], str] = {}

    def init_transactions(self, timeout_s: float) -> None:
        before, after = self._call()
        _lose(lost=before)
        self._broker.epochs[self._name] += 1
        self._epoch = self._broker.epochs[self._name]
        self._broker.begun.discard(self._name)
        _lose(lost=after)

    def begin_transaction(self) -> None:
        self._broker.begun.add(self._name)
        self._values, self._offsets = [], {}

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, **_: Any) -> None:
        self._values.append(value)

    def send_offsets_to_transaction(
        self, offsets: Sequence[TopicPartition], group: str, timeout_s: float
    ) -> None:
        _lose(lost=any(self._call()))
        self._offsets |= {(group, offset.topic): offset.metadata or "" for offset in offsets}

    def commit_transaction(self, timeout_s: float) -> None:
        before, after = self._call()
        _lose(lost=before)
        if self._epoch != self._broker.epochs[self._name]:
            code = KafkaError._FENCED  # pyright: ignore[reportPrivateUsage]
            raise KafkaException(KafkaError(code, "fenced", fatal=True))
        self._broker.values += self._values
        self._broker.offsets |= self._offsets
        self._broker.begun.discard(self._name)
        _lose(lost=after)

    def abort_transaction(self, timeout_s: float) -> None:
        if self._epoch == self._broker.epochs[self._name]:
            self._broker.begun.discard(self._name)
        self._values, self._offsets = [], {}

    def poll(self, timeout_s: float) -> int:
        return 0

    def purge(self, *, blocking: bool) -> None:
        """Nothing waits here."""

    def _call(self) -> tuple[bool, bool]:
        return self._broker.calls.next()


class Consumer:
    """A reader of the offsets of one group."""

    def __init__(self, broker: KafkaDouble, group: str) -> None:
        self._broker = broker
        self._group = group

    def committed(self, asked: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        _lose(lost=any(self._broker.calls.next()))
        texts = [self._broker.offsets.get((self._group, one.topic), "") for one in asked]
        return [
            TopicPartition(one.topic, 0, 1 if text else -1001, text)
            for one, text in zip(asked, texts, strict=True)
        ]

    def consumer_group_metadata(self) -> str:
        return self._group

    def close(self) -> None:
        """Nothing is open."""
