"""A Kafka sink's writers and committers without a runtime, and a consumer that reads committed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.integration.sink_kit import Job

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi.staging import StagingArea
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import KafkaSink

_READ_S = 90.0


def messages(
    servers: str, topic: str, *, isolation: str = "read_committed", deadline_s: float = _READ_S
) -> list[Message]:
    """Return every record of `topic` up to its end, partition after partition, in their order.

    Reading committed, the end is the last stable offset: records behind an open transaction are
    not there.
    """
    reader = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "onceflow-test-reader",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
            "log_level": 2,
        }
    )
    until = time.monotonic() + deadline_s
    found: list[Message] = []
    try:
        partitions = reader.list_topics(topic, timeout=10).topics[topic].partitions
        reader.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        ends: set[int | None] = set()
        while len(ends) < len(partitions):
            assert time.monotonic() < until, f"no end of {topic} in {deadline_s:.0f} s"
            message = reader.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is None:
                found.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:  # pyright: ignore[reportPrivateUsage]
                ends.add(message.partition())
            else:
                raise KafkaException(error)
    finally:
        reader.close()
    return sorted(found, key=lambda one: (one.partition() or 0, one.offset() or 0))


def ids_in(
    servers: str, topic: str, *, isolation: str = "read_committed", deadline_s: float = _READ_S
) -> list[int]:
    """Return the ids in `topic`, sorted, doubles kept."""
    found = messages(servers, topic, isolation=isolation, deadline_s=deadline_s)
    return sorted(json.loads(one.value() or b"")["id"] for one in found)


def decided_ids_in(servers: str, topic: str, *, timeout_s: float = 100) -> list[int]:
    """Return the ids in `topic`, sorted, doubles kept, once no transaction is open in it.

    A broker answers a commit when it is decided, and offsets the partitions of it afterwards: one
    that dies in between does so when it is up again. `timeout_s` is for both, so that a test can
    add up what it waits for.
    """
    until = time.monotonic() + timeout_s
    assert await_markers(servers, topic, timeout_s=timeout_s), f"open after {timeout_s} s: {topic}"
    return ids_in(servers, topic, deadline_s=until - time.monotonic())


def await_markers(servers: str, topic: str, *, timeout_s: float) -> bool:
    """Return whether within `timeout_s` a moment came with no open transaction in `topic`."""
    until = time.monotonic() + timeout_s
    with _ends_of(servers, topic) as blocked:
        while blocked():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
    return True


def open_transaction_blocks(servers: str, topic: str, partition: int = 0) -> bool:
    """Return whether a transaction is open in the partition, so that consumers wait behind it."""
    with _ends_of(servers, topic, [partition]) as blocked:
        return blocked()


@contextmanager
def _ends_of(
    servers: str, topic: str, partitions: Sequence[int] | None = None
) -> Generator[Callable[[], bool], None, None]:
    """Lend a look whether a transaction is open in one of the partitions, or in any."""
    committed, everything = (
        Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "onceflow-test-end",
                "isolation.level": isolation,
                "log_level": 2,
            }
        )
        for isolation in ("read_committed", "read_uncommitted")
    )
    try:
        numbers = partitions or list(
            committed.list_topics(topic, timeout=10).topics[topic].partitions
        )
        places = [TopicPartition(topic, number) for number in numbers]

        def blocked() -> bool:
            # The end of what is committed first: it only follows the other.
            return any(_end_of(committed, place) < _end_of(everything, place) for place in places)

        yield blocked
    finally:
        committed.close()
        everything.close()


def _end_of(consumer: Consumer, partition: TopicPartition, *, timeout_s: float = 60) -> int:
    """Return the end of `partition`; asks again while a broker that was killed comes back."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return int(consumer.get_watermark_offsets(partition, timeout=10)[1])
        except KafkaException:  # NOT_LEADER_FOR_PARTITION and the like
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def commit_offset(servers: str, group: str, topic: str) -> tuple[int, str] | None:
    """Return offset and metadata that `group` has committed with partition 0 of `topic`."""
    reader = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 2})
    try:
        found = reader.committed([TopicPartition(topic, 0)], timeout=10)[0]
    finally:
        reader.close()
    return None if found.offset < 0 else (found.offset, found.metadata or "")


@dataclass
class KafkaJob(Job[KafkaSink]):
    """A Kafka sink under one sink id, staging in `directory`."""

    directory: Path = field(kw_only=True)
    area: StagingArea = field(init=False)
    """The sink id's own, which `staging` is."""

    def __post_init__(self) -> None:
        self.area = FileStagingArea.in_directory(str(self.directory), self.sink_id)
        self.staging = self.area

    def staged(self) -> list[str]:
        """Return the names of what is staged, commit records not counted."""
        return [
            str(transaction)
            for transaction in self.area.transactions()
            if transaction.sequence < 9000
        ]

    def commit_records(self) -> list[str]:
        """Return the names of the transactions that have commit records."""
        names = [
            transaction for transaction in self.area.transactions() if transaction.sequence >= 9000
        ]
        return [
            f"{name.sink_id}/{name.attempt}/{name.checkpoint}/{name.subtask}/0" for name in names
        ]


def committable_of(name: str) -> Committable:
    """Return the committable called so, as the decision log would."""
    transaction = TransactionId.parse(name)
    assert transaction is not None
    return Committable(transaction, payload=b"staged")


def values_of(found: Iterable[Message]) -> list[Any]:
    """Return the JSON values of messages."""
    return [json.loads(one.value() or b"null") for one in found]


class _Groups(Protocol):
    def delete_consumer_groups(self, group_ids: list[str]) -> dict[str, Future[None]]: ...


def delete_group(servers: str, group: str) -> None:
    """Return when the broker has forgotten what `group` committed, as it does after a while."""
    admin = cast("_Groups", AdminClient({"bootstrap.servers": servers}))
    admin.delete_consumer_groups([group])[group].result(60)
