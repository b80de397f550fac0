"""The workload: a seeded stream of payments, and its producer.

Equal parameters give equal bytes in the same partitions. Record i goes to partition `i %
partitions`, independent of its account. So the payments of an account come from all partitions, and
a pipeline that keys by account must exchange them.

A record is `{"id": 17, "account": "acct-000123", "amount": -250, "ts": 1767225600017}`. Ids are 0
.. records-1. The amount is in cents, -500 <= amount <= 1000. The time is in epoch milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from onceflow.core.errors import ConfigError, OnceflowError

PAYMENT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string(), nullable=False),
        pa.field("amount", pa.int64(), nullable=False),
        pa.field("ts", pa.int64(), nullable=False),
    ]
)
"""The fields of a payment's JSON."""

AMOUNT_MIN_CENTS = -500
AMOUNT_MAX_CENTS = 1000
_RECORD = b'{"id": %d, "account": "acct-%06d", "amount": %d, "ts": %d}'
_FIRST_TS_MS = 1_767_225_600_000
_CHUNK_RECORDS = 20_000
_FLUSH_TIMEOUT_S = 120.0
# The moduli of the digest's weights. The weight of an id differs between columns and repeats only
# after this many ids. So errors in two rows or two columns do not cancel out. A row adds < 2**37.
DIGEST_AMOUNT_PRIME = 1_000_003
DIGEST_ACCOUNT_PRIME = 65_521

Integers = npt.NDArray[np.int64]


class ProduceError(OnceflowError):
    """Raised when the broker did not accept every record of the workload."""

    domain = "external"
    retry = "never"


@dataclass(frozen=True, slots=True)
class Payments:
    """The parameters of a workload. Equal parameters describe equal records."""

    records: int
    accounts: int = 100_000
    partitions: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.records < 0 or not 1 <= self.accounts <= 1_000_000 or self.partitions < 1:
            raise ConfigError(
                "payments need records >= 0, 1 <= accounts <= 1000000 and partitions >= 1; got "
                f"records={self.records}, accounts={self.accounts}, partitions={self.partitions}"
            )

    def chunks(self) -> Iterator[PaymentChunk]:
        """Yield every payment in the order of its id, 20,000 at a time."""
        random = np.random.default_rng(self.seed)
        for first in range(0, self.records, _CHUNK_RECORDS):
            count = min(_CHUNK_RECORDS, self.records - first)
            yield PaymentChunk(
                ids=np.arange(first, first + count, dtype=np.int64),
                accounts=random.integers(0, self.accounts, count, dtype=np.int64),
                amounts=random.integers(
                    AMOUNT_MIN_CENTS, AMOUNT_MAX_CENTS + 1, count, dtype=np.int64
                ),
            )

    def digest(self) -> int:
        """Return a number that changes with any id, account or amount.

        A judge computes the same number from the target table.
        """
        return sum(chunk.digest() for chunk in self.chunks())


@dataclass(frozen=True, slots=True, eq=False)
class PaymentChunk:
    """A chunk of payments as columns."""

    ids: Integers
    accounts: Integers
    amounts: Integers

    def json(self) -> list[bytes]:
        """Return the records as JSON bytes."""
        rows = zip(
            self.ids.tolist(),
            self.accounts.tolist(),
            self.amounts.tolist(),
            (_FIRST_TS_MS + self.ids).tolist(),
            strict=True,
        )
        return [_RECORD % row for row in rows]

    def digest(self) -> int:
        """Return this chunk's part of the workload's digest."""
        by_amount = (self.ids % DIGEST_AMOUNT_PRIME) * (self.amounts - AMOUNT_MIN_CENTS + 1)
        by_account = (self.ids % DIGEST_ACCOUNT_PRIME) * self.accounts
        return int(by_amount.sum() + by_account.sum())


def produce(
    payments: Payments,
    bootstrap_servers: str,
    topic: str,
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Produce every payment into `topic` exactly once. Return when all replicas have acknowledged.

    Produces about 700,000 records a second on one core. A crash leaves a prefix of each partition.

    Args:
        payments: The workload. The topic must have at least its number of partitions.
        bootstrap_servers: The broker.
        topic: An existing topic.
        progress: Called with the number of records handed to the client so far.

    Raises:
        ProduceError: A record was refused or not acknowledged in time, or the topic did not grow
            by exactly the workload.
    """
    before = _count_records(bootstrap_servers, topic, payments.partitions)
    sender = _Sender(bootstrap_servers, topic)
    sent = 0
    for chunk in payments.chunks():
        records = chunk.json()
        first = int(chunk.ids[0])
        for partition in range(payments.partitions):
            sender.send(
                records[(partition - first) % payments.partitions :: payments.partitions], partition
            )
        sent += len(records)
        if progress is not None:
            progress(sent)
    sender.finish()
    grown = _count_records(bootstrap_servers, topic, payments.partitions) - before
    if grown != payments.records:
        raise ProduceError(
            f"topic {topic} grew by {grown} records instead of {payments.records}; "
            "use a topic that nobody else writes to"
        )


class _Sender:
    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._topic = topic
        self._error: KafkaError | None = None
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 50,
                "batch.size": 1_000_000,
                "queue.buffering.max.messages": 200_000,
                # A callback for each record would cost more than producing it.
                "delivery.report.only.error": True,
                "on_delivery": self._note_refusal,
                "log_level": 2,
            }
        )

    def send(self, records: list[bytes], partition: int) -> None:
        produce_one = self._producer.produce
        for record in records:
            while True:
                try:
                    produce_one(self._topic, record, partition=partition)
                except BufferError:
                    self._producer.poll(0.1)
                    self._check()
                    continue
                break
        self._producer.poll(0)
        self._check()

    def finish(self) -> None:
        left = self._producer.flush(_FLUSH_TIMEOUT_S)
        self._check()
        if left:
            raise ProduceError(
                f"{left} records for topic {self._topic} were not acknowledged in "
                f"{_FLUSH_TIMEOUT_S:g} s; is the broker alive?"
            )

    def _note_refusal(self, error: KafkaError | None, _message: object) -> None:
        self._error = self._error or error

    def _check(self) -> None:
        if self._error is not None:
            raise ProduceError(
                f"the broker refused a record for topic {self._topic}: {self._error.str()}"
            )


def _count_records(bootstrap_servers: str, topic: str, partitions: int) -> int:
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "onceflow-workload"})
    try:
        total = 0
        for partition in range(partitions):
            where = TopicPartition(topic, partition)
            low, high = consumer.get_watermark_offsets(where, timeout=20) or (0, 0)
            total += high - low
        return total
    finally:
        consumer.close()
