"""Tests how the Kafka source decodes good and bad records of a real broker."""

from __future__ import annotations

import datetime as dt
import time
from threading import Thread

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from tests.integration import kafka_feed
from tests.integration.kafka_feed import (
    Transactions,
    ids,
    produce,
    read_rows,
    read_to_end,
    reading,
    record,
    source,
)
from tests.integration.kafka_sink_kit import await_markers

from onceflow.core.errors import BadRecord
from onceflow.core.spi.dead_letters import DeadLetter
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.sources import KafkaSource

pytestmark = pytest.mark.usefixtures("each_reader")


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        (b'{"id": 1, "account": "a"', "truncated"),
        (b'{"id": "7", "account": "a"}', "column 'id' (int64): Expected `int`, got `str`"),
        (b'{"id": 1.5, "account": "a"}', "got `float`"),
        (b'{"id": null, "account": "a"}', "column 'id' (int64): Expected `int`, got `null`"),
        (b'{"account": "a"}', "missing required field `id`"),
        (b'{"id": 9223372036854775808, "account": "a"}', "found 9223372036854775808"),
        (b'[1, "a"]', "Expected `object`, got `array`"),
        (b'{"id": 1, "account": "a"}{"id": 2, "account": "b"}', "trailing characters"),
        (b'{"id": 1, "account": "\xff"}', "utf-8"),
        (b"", "truncated"),
        (None, "no value (a tombstone)"),
    ],
)
def test_bad_record_names_its_offset_and_what_is_wrong(
    servers: str, kafka_topic: TopicFactory, value: bytes | None, fragment: str
) -> None:
    topic = kafka_topic(2)
    values = [record(0), record(1), value, record(3)]
    produce(servers, topic, values, partition=1)
    with reading(source(servers, topic)) as reader, pytest.raises(BadRecord) as caught:
        read_rows(reader, 4)
    assert str(caught.value).startswith(f"{topic}-1 offset 2: ")
    assert fragment.lower() in str(caught.value).lower()
    dropping = source(servers, topic, on_bad_record="drop", ending_offsets="latest")
    with reading(dropping) as reader:
        assert ids(read_to_end(reader)) == [0, 1, 3]
        assert getattr(reader, "dropped_count") == 1  # noqa: B009 - not part of the contract


def test_value_that_its_column_cannot_hold_names_its_offset(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    values = [b'{"id": %d, "price": "1.%02d"}' % (n, n) for n in range(50)]
    values[31] = b'{"id": 31, "price": 1.005}'
    produce(servers, topic, values)
    schema = "id TINYINT NOT NULL, price DECIMAL(6, 2)"
    with (
        reading(source(servers, topic, schema=schema)) as reader,
        pytest.raises(BadRecord) as caught,
    ):
        read_rows(reader, 50)
    assert str(caught.value).startswith(f"{topic}-0 offset 31: column 'price'")
    assert "1.005" in str(caught.value)
    described = source(servers, topic, schema=schema, on_bad_record="drop", ending_offsets="latest")
    with reading(described) as reader:
        assert ids(read_to_end(reader)) == [n for n in range(50) if n != 31]


def test_metadata_columns_stay_beside_their_rows_when_bad_records_are_dropped(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    writer = Transactions(servers)
    writer.write(topic, [record(0), b"bad", record(2)])
    writer.commit()
    # The mark that follows is a record, too, and comes a moment after the answer.
    assert await_markers(servers, topic, timeout_s=90)
    produce(servers, topic, [b"bad", record(5), record(6)])
    described = source(
        servers, topic, include_metadata=True, on_bad_record="drop", ending_offsets="latest"
    )
    with reading(described) as reader:
        rows = read_to_end(reader)
    assert [(row["id"], row["_offset"]) for row in rows] == [(0, 0), (2, 2), (5, 5), (6, 6)]
    assert {(row["_topic"], row["_partition"]) for row in rows} == {(topic, 0)}
    age = dt.datetime.now(dt.timezone.utc) - rows[0]["_timestamp"]
    assert dt.timedelta(0) <= age < dt.timedelta(minutes=1)


def test_raw_format_has_spark_s_columns_and_keeps_tombstones(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, [b"\x00\xff", None, b""])
    described = KafkaSource(
        servers, topic=topic, format="raw", ending_offsets="latest", native=kafka_feed.NATIVE
    )
    assert described.schema.names == [
        *("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
    ]
    with reading(described) as reader:
        rows = read_to_end(reader)
    assert [(row["key"], row["value"], row["offset"]) for row in rows] == [
        (None, b"\x00\xff", 0),
        (None, None, 1),
        (None, b"", 2),
    ]
    assert {row["timestampType"] for row in rows} == {0}


def test_bad_record_becomes_a_letter_with_its_origin_and_is_behind_the_next_snapshot(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    produce(servers, topic, [b"{", None], partition=1)
    described = source(servers, topic, on_bad_record="dead_letter")
    assert described.has_dead_letters
    letters: list[DeadLetter] = []
    with reading(described) as reader:
        deadline = time.monotonic() + 90
        while len(letters) < 2:
            assert time.monotonic() < deadline
            assert reader.poll(0.5) is None
            letters += reader.take_rejected()
        splits = reader.snapshot()
    assert [
        (letter.topic, letter.partition, letter.offset, letter.value) for letter in letters
    ] == [
        (topic, 1, 0, b"{"),
        (topic, 1, 1, None),
    ]
    assert "truncated" in letters[0].reason
    # A reader that goes on there sees the good record that follows, and no bad one again.
    produce(servers, topic, [record(7)], partition=1)
    with reading(described, splits=splits) as reader:
        assert ids(read_rows(reader, 1)) == [7]
        assert list(reader.take_rejected()) == []


def test_records_that_come_one_by_one_are_gathered_into_batches(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    records, polls = 0, 0
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "acks": "all"})
    with reading(source(servers, topic)) as reader:
        produce(servers, topic, [record(0)])
        read_rows(reader, 1)
        sender = Thread(target=_send_one_by_one, args=(producer, topic, 400), daemon=True)
        sender.start()
        until = time.monotonic() + 60
        while records < 400:
            assert time.monotonic() < until, f"{records} of 400 records"
            batch = reader.poll(0.2)
            if isinstance(batch, pa.RecordBatch):
                records, polls = records + batch.num_rows, polls + 1
        sender.join(60)
    # Each was a batch of its own where the broker answered with the first record that it had.
    assert polls <= 200


def _send_one_by_one(producer: Producer, topic: str, count: int) -> None:
    for number in range(1, count + 1):
        producer.produce(topic, record(number), partition=0)
        assert producer.flush(30) == 0
