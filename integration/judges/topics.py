"""The judge of a topic, which reads it to its end like any read_committed consumer.

A record is a JSON object with the columns of a table's row. In addition to the checks of a table,
all records of an account must be in one partition, in the order of their `n`. A consumer gets them
in this order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError
from onceflow.integration import workload
from onceflow.integration.judges.verdict import Found, NoVerdict, Verdict

_SILENCE_S = 30.0
_ANSWER_TIMEOUT_S = 20.0
_BATCH_RECORDS = 10_000
_WAIT_S = 0.1
"""The wait for a full batch. The client waits this long even at the end of a partition."""
_ACCOUNT = "acct-"


class _Row(msgspec.Struct, gc=False):
    id: int | None
    account: str | None
    amount: int | None
    balance: int | None
    n: int | None


class _Chain(msgspec.Struct, gc=False):
    """The partition and the last record of an account's chain."""

    partition: int
    n: int | None
    balance: int | None


def verify_topic(bootstrap_servers: str, topic: str, payments: workload.Payments) -> Verdict:
    """Return the verdict on `topic` after a run over `payments`. The run must have ended.

    Reads every partition from its beginning to the end of its last decided transaction, and changes
    nothing. Counts as in doubt each partition that has an open transaction after it. Takes about 4
    s for a million records.

    Raises:
        ConfigError: The topic does not exist, or one of its records is not a payment.
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
            partitions = _list_partitions(consumer, topic)
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
    in_doubt = sum(committed != other for committed, other in zip(committed_end, end, strict=True))
    return tally.count(in_doubt).judge(payments)


class _Tally:
    """The counts of the records read so far, partition by partition."""

    def __init__(self, payments: workload.Payments) -> None:
        self._seen = np.zeros(payments.records, dtype=np.bool_)
        self._strangers: set[int] = set()
        self._chains: dict[str | None, _Chain] = {}
        self._rows = 0
        self._digest = 0
        self._wrong = 0
        self._decode = json_decoder(_Row).decode

    def take(self, message: Message) -> None:
        """Count a record."""
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
                self._digest += (row.id % workload.DIGEST_AMOUNT_PRIME) * (
                    row.amount - workload.AMOUNT_MIN_CENTS + 1
                )
                self._digest += (row.id % workload.DIGEST_ACCOUNT_PRIME) * _parse_number(
                    row.account
                )
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


def _parse_number(account: str | None) -> int:
    """Return the number of an account in the workload's format, or -1 for any other text."""
    digits = "" if account is None else account.removeprefix(_ACCOUNT)
    if len(digits) != 6 or not (digits.isascii() and digits.isdigit()):
        return -1
    return int(digits) if account == _ACCOUNT + digits else -1


def _list_partitions(consumer: Consumer, topic: str) -> Sequence[TopicPartition]:
    metadata = consumer.list_topics(topic, timeout=_ANSWER_TIMEOUT_S).topics.get(topic)
    if metadata is None or metadata.error is not None or not metadata.partitions:
        raise ConfigError(f"topic {topic} cannot be verified: there is no such topic")
    return [TopicPartition(topic, partition, 0) for partition in sorted(metadata.partitions)]


def _records(consumer: Consumer, partitions: Sequence[TopicPartition]) -> Iterator[Message]:
    """Yield every committed record, one partition after the other, in the order of offsets.

    If partitions were read concurrently, the order would differ between runs. So would the verdict
    on an account with records in two partitions.
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
            # An error number of librdkafka, which the stubs lack as a class attribute.
            elif error.code() == KafkaError._PARTITION_EOF:
                return
            elif not error.retriable():
                raise KafkaException(error)


def _ends(consumer: Consumer, partitions: Sequence[TopicPartition]) -> list[int]:
    """Return the end offset of each partition at the consumer's isolation level."""
    ends: list[int] = []
    for partition in partitions:
        # None on timeout, which the client's stubs do not declare.
        answer = cast(
            "tuple[int, int] | None",
            consumer.get_watermark_offsets(partition, timeout=_ANSWER_TIMEOUT_S),
        )
        if answer is None:
            raise NoVerdict(f"the broker does not say where {partition} ends")
        ends.append(answer[1])
    return ends
