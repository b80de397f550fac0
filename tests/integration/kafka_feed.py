"""Writes to topics and reads them through a source, for the tests of the Kafka source."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, cast

import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import EndOfInput, ReaderContext, SourceReader, Split
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.integration.servers.process import ServerError
from onceflow.sources import KafkaSource

SCHEMA = "id BIGINT NOT NULL, account STRING NOT NULL"
NATIVE: bool | None = None
"""Whether sources read natively; see `each_reader`."""
CONTEXT = ReaderContext(
    job="ledger", uid="payments", subtask=0, parallelism=1, attempt=AttemptId(1)
)


def record(number: int) -> bytes:
    return b'{"id": %d, "account": "acct-%d"}' % (number, number % 7)


def produce(
    servers: str, topic: str, values: Iterable[bytes | None], *, partition: int = 0
) -> None:
    """Return when the broker has all of `values`, in order."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
    for count, value in enumerate(values):
        producer.produce(topic, value=value, partition=partition)
        if count % 1000 == 0:
            producer.poll(0)
    assert producer.flush(30) == 0


class Transactions:
    """A transactional producer."""

    def __init__(self, servers: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "transactional.id": uuid.uuid4().hex,
                "linger.ms": 0,
                "log_level": 2,
            }
        )
        self._producer.init_transactions(30)

    def write(self, topic: str, values: Iterable[bytes], *, partition: int = 0) -> None:
        """Leave `values` in an open transaction, on the broker."""
        self._producer.begin_transaction()
        for value in values:
            self._producer.produce(topic, value=value, partition=partition)
        assert self._producer.flush(30) == 0

    def commit(self) -> None:
        self._producer.commit_transaction(30)

    def abort(self) -> None:
        self._producer.abort_transaction(30)


class _Admin(Protocol):
    def delete_records(
        self, offsets: list[TopicPartition]
    ) -> dict[TopicPartition, Future[object]]: ...

    def create_partitions(self, new: list[NewPartitions]) -> dict[str, Future[None]]: ...

    def delete_topics(self, topics: list[str]) -> dict[str, Future[None]]: ...


def _admin(servers: str) -> _Admin:
    return cast("_Admin", AdminClient({"bootstrap.servers": servers}))


def delete_before(servers: str, topic: str, offset: int, *, partition: int = 0) -> None:
    """Return when the records of the partition before `offset` are gone, as by retention."""
    admin = _admin(servers)
    for future in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result(60)


def add_partitions(servers: str, topic: str, total: int) -> None:
    admin = _admin(servers)
    admin.create_partitions([NewPartitions(topic, total)])[topic].result(60)


def delete_topic(servers: str, topic: str) -> None:
    admin = _admin(servers)
    admin.delete_topics([topic])[topic].result(60)


def recreate_topic(server: KafkaServer, topic: str, partitions: int) -> None:
    """Return when there is another, empty topic of the name."""
    delete_topic(server.bootstrap_servers, topic)
    until = time.monotonic() + 90
    while True:
        try:
            server.create_topic(topic, partitions)
        except ServerError:
            # The deletion goes on behind the answer.
            assert time.monotonic() < until, f"topic {topic} is still there"
            time.sleep(0.05)
        else:
            return


def group_offsets(servers: str, group: str, topic: str, partitions: int) -> list[int]:
    """Return what the group has committed for each partition; -1001 for nothing."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group})
    asked = [TopicPartition(topic, partition) for partition in range(partitions)]
    until = time.monotonic() + 90
    try:
        while True:
            try:
                return [found.offset for found in consumer.committed(asked, timeout=10)]
            except KafkaException:
                # A broker that has just started is still loading its groups.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
    finally:
        consumer.close()


def source(servers: str, topic: str, **settings: Any) -> KafkaSource:
    """Return a source of `SCHEMA` unless told otherwise."""
    given: dict[str, Any] = {"schema": SCHEMA, "native": NATIVE, **settings}
    return KafkaSource(servers, topic=topic, **given)


@contextlib.contextmanager
def reading(
    described: KafkaSource, splits: Sequence[Split] | None = None
) -> Generator[SourceReader, None, None]:
    """Yield a reader of `splits` (default: all, resolved now), closed afterwards."""
    reader = described.reader(described.splits() if splits is None else splits, CONTEXT)
    try:
        yield reader
    finally:
        reader.close()


def read_to_end(reader: SourceReader, *, deadline_s: float = 90.0) -> list[Mapping[str, Any]]:
    """Return every row up to the end of input."""
    rows: list[Mapping[str, Any]] = []
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        batch = reader.poll(0.2)
        if isinstance(batch, EndOfInput):
            return rows
        if isinstance(batch, pa.RecordBatch):
            rows += batch.to_pylist()
    raise AssertionError(f"no end of input within {deadline_s} s, after {len(rows)} rows")


def read_rows(
    reader: SourceReader, count: int, *, deadline_s: float = 90.0
) -> list[Mapping[str, Any]]:
    """Return `count` rows, or more if a batch had them."""
    rows: list[Mapping[str, Any]] = []
    until = time.monotonic() + deadline_s
    while len(rows) < count:
        if time.monotonic() > until:
            raise AssertionError(f"{len(rows)} rows instead of {count} within {deadline_s} s")
        batch = reader.poll(0.2)
        assert not isinstance(batch, EndOfInput), f"the input ended after {len(rows)} rows"
        if isinstance(batch, pa.RecordBatch):
            rows += batch.to_pylist()
    return rows


def ids(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]
