"""Whole jobs over topics that the broker cleans while they are read: compaction and retention.

Offsets have holes there, and ends that no record has.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from tests.integration.kafka_feed import Transactions, delete_before, produce, record, source
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint, kill_a_slot
from tests.support.ledger import SETTINGS
from tests.support.waiting import await_true

from onceflow import Checkpointing, FixedDelay, JobState, LocalProcesses, Pipeline
from onceflow.core.errors import OffsetOutOfRange
from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.sources import KafkaSource

KEYS, ROUNDS = 60, 40
COMPACTED = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
    "segment.ms": "1000",
}
_At = tuple[int, int]
"""A partition and an offset."""


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedKafka]:
    """A broker that compacts."""
    options = {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "100"}
    with EmbeddedKafka(options) as server:
        yield server


def run_of(directory: Path, described: KafkaSource) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    # So that rows can be asked for before the job has opened the sink.
    (directory / "out" / "committed").mkdir(parents=True, exist_ok=True)
    pipeline = Pipeline(
        LocalProcesses(),
        name="cleaned",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    pipeline.read(described, uid="records").write(sink, uid="out")
    return pipeline, sink


class KeyedRecords:
    """Writes values and tombstones by key, and remembers each by its offset."""

    def __init__(self, servers: str, topic: str) -> None:
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
        self._topic = topic
        self._count = 0
        self.written: dict[_At, tuple[bytes, bytes | None]] = {}

    def write_rounds(self, count: int) -> None:
        """Write each key in each round; return when the broker has all."""
        for _ in range(count):
            for key in range(KEYS):
                self._count += 1
                value = None if self._count % 11 == 0 else b"%d" % self._count
                self._producer.produce(
                    self._topic,
                    key=b"k%d" % key,
                    value=value,
                    partition=key % 2,
                    # By these times the broker begins a segment a round, and compacts all others.
                    timestamp=1_700_000_000_000 + self._count // KEYS * 2_000,
                    on_delivery=self._remember,
                )
            assert self._producer.flush(30) == 0

    def _remember(self, error: object, message: Message) -> None:
        assert error is None
        at = (message.partition() or 0, message.offset() or 0)
        self.written[at] = (message.key() or b"", message.value())


def offsets_left(servers: str, topic: str) -> list[_At]:
    """Return where the topic has records now, by a consumer that is no part of the product."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": uuid.uuid4().hex,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    left: list[_At] = []
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in (0, 1)])
        ended: set[int | None] = set()
        until = time.monotonic() + 60
        while len(ended) < 2:
            assert time.monotonic() < until
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error() is None:
                left.append((message.partition() or 0, message.offset() or 0))
            else:
                ended.add(message.partition())
    finally:
        consumer.close()
    return left


def to_record(row: dict[str, Any]) -> tuple[_At, tuple[bytes, bytes | None]]:
    return (row["partition"], row["offset"]), (row["key"], row["value"])


@pytest.mark.parametrize("native", [None, False])
def test_a_job_reads_each_record_that_compaction_leaves_once_through_kills(
    broker: EmbeddedKafka, tmp_path: Path, native: bool | None
) -> None:
    servers = broker.bootstrap_servers
    topic = broker.create_topic(f"compacted-{uuid.uuid4().hex[:8]}", 2, config=COMPACTED)
    records = KeyedRecords(servers, topic)
    records.write_rounds(ROUNDS)
    await_true(
        lambda: len(offsets_left(servers, topic)) < KEYS * ROUNDS // 2, "nothing was compacted"
    )
    described = KafkaSource(servers, topic=topic, format="raw", native=native)
    pipeline, sink = run_of(tmp_path, described)
    job = pipeline.start()
    writing = threading.Thread(target=records.write_rounds, args=(ROUNDS,))
    writing.start()
    for number in range(3):
        await_checkpoint(job)
        kill_a_slot(job, number)
    writing.join(90)
    last = {partition: max(o for p, o in records.written if p == partition) for partition in (0, 1)}
    await_true(
        lambda: set(last.items()) <= {to_record(row)[0] for row in sink.rows()},
        "the last records were not read",
    )
    job.cancel()
    rows = [to_record(row) for row in sink.rows()]
    assert max(Counter(at for at, _ in rows).values()) == 1
    assert all(records.written[at] == value for at, value in rows)
    missing = set(offsets_left(servers, topic)) - {at for at, _ in rows}
    assert missing == set()


def test_a_bounded_job_ends_where_compaction_has_left_no_record(
    broker: EmbeddedKafka, tmp_path: Path
) -> None:
    servers = broker.bootstrap_servers
    topic = broker.create_topic(f"holes-{uuid.uuid4().hex[:8]}", 2, config=COMPACTED)
    records = KeyedRecords(servers, topic)
    records.write_rounds(ROUNDS)
    first = KEYS // 2 * (ROUNDS // 2)
    await_true(
        lambda: all(abs(offset - first) > 5 for _, offset in offsets_left(servers, topic)),
        "the middle was not compacted",
    )
    ends = {topic: {0: first, 1: first + 1}}
    described = KafkaSource(servers, topic=topic, format="raw", ending_offsets=ends)
    pipeline, sink = run_of(tmp_path, described)
    assert pipeline.run(90).state is JobState.FINISHED
    expected = {at for at in offsets_left(servers, topic) if at[1] < first + at[0]}
    assert {to_record(row)[0] for row in sink.rows()} == expected


def test_a_job_behind_retention_fails_by_name_and_goes_on_where_the_loss_is_accepted(
    broker: EmbeddedKafka, tmp_path: Path
) -> None:
    servers = broker.bootstrap_servers
    topic = broker.create_topic(f"kept-{uuid.uuid4().hex[:8]}", 1)
    produce(servers, topic, map(record, range(3_000)))

    def read_until(number: int, **options: Any) -> Counter[int]:
        pipeline, sink = run_of(tmp_path, source(servers, topic, **options))
        job = pipeline.start()
        await_true(
            lambda: job.status().state.ended or any(row["id"] == number for row in sink.rows()),
            f"record {number} was not read",
        )
        job.stop()
        return Counter(row["id"] for row in sink.rows())

    assert read_until(2_999) == Counter(range(3_000))
    produce(servers, topic, map(record, range(3_000, 5_000)))
    delete_before(servers, topic, 4_000)
    with pytest.raises(OffsetOutOfRange, match="offset 3000 was to be read next"):
        read_until(4_999)
    read = read_until(4_999, fail_on_data_loss=False)
    assert read == Counter([*range(3_000), *range(4_000, 5_000)])


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
def test_a_bounded_job_ends_among_markers_and_aborted_records_at_the_very_end(
    broker: EmbeddedKafka, tmp_path: Path, cut: int
) -> None:
    """`cut` takes so many offsets off the end: markers, then aborted records, then good ones."""
    servers = broker.bootstrap_servers
    topic = broker.create_topic(f"marked-{uuid.uuid4().hex[:8]}", 1)
    transactions = Transactions(servers)
    transactions.write(topic, [record(0), record(1)])  # 0 1, and a marker at 2
    transactions.commit()
    transactions.write(topic, [record(2)])  # 3, and a marker at 4
    transactions.commit()
    transactions.write(topic, [record(3)])  # 5, aborted by a marker at 6
    transactions.abort()
    ends = {topic: {0: 7 - cut}}
    pipeline, sink = run_of(tmp_path, source(servers, topic, ending_offsets=ends))
    assert pipeline.run(90).state is JobState.FINISHED
    assert sorted(row["id"] for row in sink.rows()) == ([0, 1, 2] if cut < 4 else [0, 1])


def test_null_keys_and_empty_values_beside_repeated_headers_are_as_they_were_written(
    broker: EmbeddedKafka, tmp_path: Path
) -> None:
    servers = broker.bootstrap_servers
    topic = broker.create_topic(f"odd-{uuid.uuid4().hex[:8]}", 1)
    producer = Producer({"bootstrap.servers": servers})
    odd: list[tuple[bytes | None, bytes | None]] = [
        (None, b"v"), (b"", b""), (None, None), (None, b""), (b"", None), (b"\0", b"\xff\n{}")
    ]  # fmt: skip
    headers: list[tuple[str, str | bytes | None]]
    for key, value in odd:
        headers = [("h", b"1"), ("h", b"2"), ("h", None), ("", b"")]
        producer.produce(topic, key=key, value=value, headers=headers, partition=0)
    assert producer.flush(30) == 0
    described = KafkaSource(servers, topic=topic, format="raw", ending_offsets="latest")
    pipeline, sink = run_of(tmp_path, described)
    assert pipeline.run(90).state is JobState.FINISHED
    assert [(row["key"], row["value"]) for row in sink.rows()] == odd
