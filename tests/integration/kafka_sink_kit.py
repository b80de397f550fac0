"""A Kafka sink's writers and committers without a runtime, and a consumer that reads committed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from typing_extensions import Self

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import (
    Committer,
    CommitterContext,
    OnBadRow,
    SinkWriter,
    WriterContext,
)
from onceflow.core.staging import StagingArea
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import KafkaSink

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string()),
        pa.field("amount", pa.int64()),
    ]
)
SINK_ID = "job.ledger"
LOG_ID = "log-1"
_READ_S = 30.0


def rows(ids: Iterable[int]) -> pa.RecordBatch:
    """Return one row for each id."""
    numbers = list(ids)
    return pa.record_batch(
        [
            pa.array(numbers, pa.int64()),
            pa.array([f"acct-{number % 7}" for number in numbers]),
            pa.array([number * 10 for number in numbers], pa.int64()),
        ],
        schema=SCHEMA,
    )


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
            assert time.monotonic() < until, f"no end of {topic} in {deadline_s} s"
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


def ids_in(servers: str, topic: str, *, isolation: str = "read_committed") -> list[int]:
    """Return the ids in `topic`, sorted, doubles kept."""
    found = messages(servers, topic, isolation=isolation)
    return sorted(json.loads(one.value() or b"")["id"] for one in found)


def decided_ids_in(servers: str, topic: str, *, timeout_s: float = 100) -> list[int]:
    """Return the ids in `topic`, sorted, doubles kept, once no transaction is open in it.

    A broker answers a commit when it is decided, and marks the partitions of it afterwards: one
    that dies in between does so when it is up again.
    """
    assert await_markers(servers, topic, timeout_s=timeout_s), f"open after {timeout_s} s: {topic}"
    return ids_in(servers, topic)


def await_markers(servers: str, topic: str, *, timeout_s: float) -> bool:
    """Return whether within `timeout_s` a moment came with no open transaction in `topic`."""
    until = time.monotonic() + timeout_s
    partitions = list(
        AdminClient({"bootstrap.servers": servers, "log_level": 2})
        .list_topics(topic, timeout=10)
        .topics[topic]
        .partitions
    )
    while any(open_transaction_blocks(servers, topic, one) for one in partitions):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def open_transaction_blocks(servers: str, topic: str, partition: int = 0) -> bool:
    """Return whether a transaction is open in the partition, so that consumers wait behind it."""
    ends: list[int] = []
    for isolation in ("read_committed", "read_uncommitted"):
        reader = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "onceflow-test-end",
                "isolation.level": isolation,
                "log_level": 2,
            }
        )
        _, end = reader.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
        ends.append(end)
        reader.close()
    return ends[0] < ends[1]


def marker(servers: str, group: str, topic: str) -> tuple[int, str] | None:
    """Return offset and metadata that `group` has committed with partition 0 of `topic`."""
    reader = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 2})
    try:
        found = reader.committed([TopicPartition(topic, 0)], timeout=10)[0]
    finally:
        reader.close()
    return None if found.offset < 0 else (found.offset, found.metadata or "")


@dataclass
class Job:
    """A sink under one sink id, staging in `directory`; closes everything that it made."""

    sink: KafkaSink
    directory: Path
    sink_id: str = SINK_ID
    log_id: str = LOG_ID
    schema: pa.Schema = field(default_factory=lambda: SCHEMA)
    on_bad_row: OnBadRow = OnBadRow.FAIL
    _open: ExitStack = field(default_factory=ExitStack)

    @property
    def staging(self) -> StagingArea:
        return FileStagingArea.in_directory(str(self.directory), self.sink_id)

    def staged(self) -> list[str]:
        """Return the names of what is staged, receipts not counted."""
        return [str(one) for one in self.staging.transactions() if one.sequence < 9000]

    def receipts(self) -> list[str]:
        """Return the names of the transactions that have receipts."""
        names = [one for one in self.staging.transactions() if one.sequence >= 9000]
        return [f"{one.sink_id}/{one.attempt}/{one.checkpoint}/{one.subtask}/0" for one in names]

    def check(self, attempt: int = 1) -> Self:
        self.sink.check(self.committer_context(attempt), self.schema)
        return self

    def committer_context(self, attempt: int = 1) -> CommitterContext:
        return CommitterContext(
            "job", "ledger", self.sink_id, AttemptId(attempt), self.log_id, self.staging
        )

    def writer(self, attempt: int = 1, subtask: int = 0, parallelism: int = 1) -> SinkWriter:
        writer = self.sink.writer(
            WriterContext(
                job="job",
                uid="ledger",
                sink_id=self.sink_id,
                subtask=subtask,
                parallelism=parallelism,
                attempt=AttemptId(attempt),
                first_checkpoint=CheckpointId(1),
                schema=self.schema,
                staging=self.staging,
                on_bad_row=self.on_bad_row,
            )
        )
        self._open.callback(writer.close)
        return writer

    def committer(self, attempt: int = 1) -> Committer:
        committer = self.sink.committer(self.committer_context(attempt))
        self._open.callback(committer.close)
        return committer

    def prepare(
        self,
        checkpoint: int,
        ids: Iterable[int] | pa.RecordBatch,
        attempt: int = 1,
        subtask: int = 0,
    ) -> Committable:
        """Return what a writer of its own pre-committed; the writer is closed."""
        writer = self.writer(attempt, subtask)
        writer.write(ids if isinstance(ids, pa.RecordBatch) else rows(ids))
        committable = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        assert committable is not None
        return committable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()


def names(found: Sequence[Committable]) -> list[str]:
    """Return the names of committables, sorted."""
    return sorted(str(committable.transaction) for committable in found)


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
    admin.delete_consumer_groups([group])[group].result(20)
