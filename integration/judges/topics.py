"""The judge of a topic: reads it to its end as any read_committed consumer does.

A record is a JSON object with the columns of a table's row. Beyond what is asked of a table, one
account's records must stand in one partition, and there in the order of their `n`: a consumer gets
them in no other order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from onceflow.core.errors import ConfigError
from onceflow.core.msgspec_decoders import json_decoder
from onceflow.integration.judges.verdict import Found, NoVerdict, Verdict
from onceflow.integration.workload import (
    AMOUNT_MIN_CENTS,
    DIGEST_ACCOUNT_PRIME,
    DIGEST_AMOUNT_PRIME,
    Payments,
)

_SILENCE_S = 30.0
_ANSWER_TIMEOUT_S = 20.0
_BATCH_RECORDS = 10_000
_WAIT_S = 0.1
"""The client waits for so many records although it knows that the end has come."""
_ACCOUNT = "acct-"


class _Row(msgspec.Struct, gc=False):
    id: int | None
    account: str | None
    amount: int | None
    balance: int | None
    n: int | None


class _Chain(msgspec.Struct, gc=False):
    """Where an account's records stand, and how far they have come."""

    partition: int
    n: int | None
    balance: int | None


def verify_topic(bootstrap_servers: str, topic: str, payments: Payments) -> Verdict:
    """Return the verdict on `topic` after a run over `payments`; nobody may write meanwhile.

    Reads every partition from its beginning to where its last decided transaction ends, and changes
    nothing. In doubt are the partitions in which a transaction is open there. About 4 s a million
    records.

    Raises:
        ConfigError: There is no such topic, or a record in it is not a payment.
        NoVerdict: The broker does not answer.
    """
    settings: dict[str, str | int | bool] = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "onceflow-judge",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        "log_level": 0,
    }
    try:
        consumer = Consumer(settings)
        try:
            partitions = _partitions_of(consumer, topic)
            tally = _Tally(payments)
            for message in _records(consumer, partitions):
                tally.take(message)
            committed_end = _ends(consumer, partitions)
        finally:
            consumer.close()
        watcher = Consumer({**settings, "isolation.level": "read_uncommitted"})
        try:
            end = _ends(watcher, partitions)
        finally:
            watcher.close()
    except KafkaException as error:
        raise NoVerdict(f"Kafka did not say what topic {topic} holds: {error}") from error
    in_doubt = sum(one != other for one, other in zip(committed_end, end, strict=True))
    return tally.count(in_doubt).judge(payments)


class _Tally:
    """Counts records in the order of their partitions."""

    def __init__(self, payments: Payments) -> None:
        self._seen = np.zeros(payments.records, dtype=np.bool_)
        self._strangers: set[int] = set()
        self._chains: dict[str | None, _Chain] = {}
        self._rows = 0
        self._digest = 0
        self._wrong = 0
        self._decode = json_decoder(_Row).decode

    def take(self, message: Message) -> None:
        """Count one record."""
        value = message.value()
        try:
            row = self._decode(b"" if value is None else value)
        except (msgspec.DecodeError, TypeError) as error:
            raise ConfigError(
                f"topic {message.topic()} cannot be verified: partition {message.partition()} "
                f"offset {message.offset()}: {error}; a record needs the columns id, account, "
                "amount, balance and n"
            ) from error
        self._rows += 1
        if row.id is not None:
            if 0 <= row.id < len(self._seen):
                self._seen[row.id] = True
            else:
                self._strangers.add(row.id)
            if row.amount is not None:
                self._digest += (row.id % DIGEST_AMOUNT_PRIME) * (row.amount - AMOUNT_MIN_CENTS + 1)
                self._digest += (row.id % DIGEST_ACCOUNT_PRIME) * _number_of(row.account)
        if not self._follows(row, message.partition() or 0):
            self._wrong += 1

    def count(self, in_doubt: int) -> Found:
        """Return the counts."""
        expected_ids = int(self._seen.sum())
        return Found(
            rows=self._rows,
            ids=expected_ids + len(self._strangers),
            expected_ids=expected_ids,
            digest=self._digest,
            wrong_balances=self._wrong,
            in_doubt=in_doubt,
        )

    def _follows(self, row: _Row, partition: int) -> bool:
        before = self._chains.get(row.account)
        if before is None:
            before = self._chains[row.account] = _Chain(partition, 0, 0)
        right = (
            partition == before.partition
            and None not in {before.n, before.balance, row.n, row.balance, row.amount}
            and row.n == (before.n or 0) + 1
            and row.balance == (before.balance or 0) + (row.amount or 0)
        )
        before.n, before.balance = row.n, row.balance
        return right


def _number_of(account: str | None) -> int:
    """Return the number of an account that is written as we write it, else -1."""
    digits = "" if account is None else account.removeprefix(_ACCOUNT)
    if len(digits) != 6 or not (digits.isascii() and digits.isdigit()):
        return -1
    return int(digits) if account == _ACCOUNT + digits else -1


def _partitions_of(consumer: Consumer, topic: str) -> Sequence[TopicPartition]:
    metadata = consumer.list_topics(topic, timeout=_ANSWER_TIMEOUT_S).topics.get(topic)
    if metadata is None or metadata.error is not None or not metadata.partitions:
        raise ConfigError(f"topic {topic} cannot be verified: there is no such topic")
    return [TopicPartition(topic, partition, 0) for partition in sorted(metadata.partitions)]


def _records(consumer: Consumer, partitions: Sequence[TopicPartition]) -> Iterator[Message]:
    """Yield every committed record, one partition after the other, each in its order.

    Read at once they would come in another order each time, and with it another verdict on an
    account that stands in two of them.
    """
    for partition in partitions:
        consumer.assign([partition])
        yield from _to_the_end(consumer, partition)


def _to_the_end(consumer: Consumer, partition: TopicPartition) -> Iterator[Message]:
    heard_at = time.monotonic()
    while True:
        messages = consumer.consume(_BATCH_RECORDS, _WAIT_S)
        if messages:
            heard_at = time.monotonic()
        elif time.monotonic() - heard_at > _SILENCE_S:
            raise NoVerdict(
                f"the broker was silent for {_SILENCE_S:g} s before the end of {partition}"
            )
        for message in messages:
            error = message.error()
            if error is None:
                yield message
            # A number of librdkafka's own, which its stubs do not have as a class attribute.
            elif error.code() == KafkaError._PARTITION_EOF:
                return
            elif not error.retriable():
                raise KafkaException(error)


def _ends(consumer: Consumer, partitions: Sequence[TopicPartition]) -> list[int]:
    """Return where each partition ends for a consumer of this isolation."""
    ends: list[int] = []
    for partition in partitions:
        # None when it took too long, which the client's stubs do not say.
        answer = cast(
            "tuple[int, int] | None",
            consumer.get_watermark_offsets(partition, timeout=_ANSWER_TIMEOUT_S),
        )
        if answer is None:
            raise NoVerdict(f"the broker does not say where {partition} ends")
        ends.append(answer[1])
    return ends
