"""Positions of a Kafka reader behind the markers of transactions."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, TopicPartition

from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import ReaderContext
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.position import PartitionPosition

_CLIENT = "onceflow.sources.kafka.client"


class _AtTheEnd:
    """A client that has returned the record at 4, and reports the end at 6, after a marker."""

    def __init__(self) -> None:
        end = KafkaError(KafkaError._PARTITION_EOF)
        self._events = [Message(topic="t", partition=0, offset=6, error=end)]

    def poll(self, _: float) -> Message | None:
        return self._events.pop() if self._events else None

    def consume(self, *_: object) -> list[Message]:
        return []

    def position(self, _: object) -> list[TopicPartition]:
        return [TopicPartition("t", 0, 5, leader_epoch=3)]

    def assign(self, _: object) -> None: ...


class _NoWatch:
    failure = None

    def __init__(self, *_: object, **__: object) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


def _open(*_: object, **__: object) -> Any:
    return _AtTheEnd()


def _close(_: object) -> None: ...


def test_a_position_behind_a_marker_has_no_leader_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch of the marker is not known, and a wrong one makes the log look cut off."""
    monkeypatch.setattr(f"{_CLIENT}.open_consumer", _open)
    monkeypatch.setattr(f"{_CLIENT}.LivenessWatch", _NoWatch)
    monkeypatch.setattr(f"{_CLIENT}.close_in_time", _close)
    source = KafkaSource("localhost:9", topic="t", schema="id BIGINT", native=False)
    started = PartitionPosition("t", 0, 5, leader_epoch=3)
    context = ReaderContext("job", "uid", 0, 1, AttemptId(1))
    reader = source.reader([started.to_split()], context)
    assert reader.poll(0.0) is None
    (split,) = reader.snapshot()
    position = PartitionPosition.from_split(split)
    assert (position.next, position.leader_epoch) == (6, None)
    reader.close()
