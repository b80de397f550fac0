"""Tests the Kafka source on records that were deleted before it read them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
from tests.integration import kafka_feed
from tests.integration.kafka_feed import (
    SCHEMA,
    delete_before,
    delete_topic,
    ids,
    produce,
    read_rows,
    read_to_end,
    reading,
    record,
    source,
)

from onceflow.core.errors import OffsetOutOfRange
from onceflow.core.spi import Split
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kafka import create_topic
from onceflow.sources import KafkaSource

pytestmark = pytest.mark.usefixtures("each_reader")


def _position(split: Split) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(split.position)
    return found


def _next(splits: Sequence[Split]) -> list[int]:
    return [_position(split)["next"] for split in splits]


def test_position_whose_records_were_deleted_names_the_gap(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(100)))
    described = source(servers, topic)
    splits = described.splits()
    delete_before(servers, topic, 60)
    with reading(described, splits) as reader, pytest.raises(OffsetOutOfRange) as caught:
        read_rows(reader, 1)
    text = str(caught.value)
    assert f"{topic}-0: offset 0 was to be read next, but the earliest one left is 60" in text
    assert "60 offsets (0 to 59)" in text
    assert "fail_on_data_loss=False" in text


def test_records_deleted_under_a_slow_reader_are_missed_by_name_and_never_jumped(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(50_000)))
    fetch_little = {"queued.min.messages": 100, "fetch.message.max.bytes": 4000}
    batch_rows = 50
    with reading(source(servers, topic, batch_rows=batch_rows, options=fetch_little)) as reader:
        found = ids(read_rows(reader, 200))
        delete_before(servers, topic, 49_000)
        with pytest.raises(OffsetOutOfRange) as caught:
            while True:
                found += ids(read_rows(reader, 1))
    # All that came before the gap came without a hole. The gap begins right behind it, or behind
    # the records of the batch that the error has ended, which are read again.
    assert found == list(range(len(found)))
    text = str(caught.value)
    named = re.search(rf"{re.escape(topic)}-0: offset (\d+) was to be read next", text)
    assert named is not None, text
    assert len(found) <= int(named[1]) < len(found) + batch_rows
    assert "earliest one left is 49000" in text


def test_accepted_gap_is_logged_and_everything_left_is_read_once(
    servers: str, kafka_topic: TopicFactory, caplog: pytest.LogCaptureFixture
) -> None:
    topic = kafka_topic(2)
    for partition in (0, 1):
        produce(servers, topic, map(record, range(2000)), partition=partition)
    described = source(servers, topic, ending_offsets="latest", fail_on_data_loss=False)
    splits = described.splits()
    delete_before(servers, topic, 1500, partition=1)
    with caplog.at_level(logging.WARNING), reading(described, splits) as reader:
        found = ids(read_to_end(reader))
    assert sorted(found) == sorted([*range(2000), *range(1500, 2000)])
    assert "1500 offsets (0 to 1499) were deleted" in caplog.text


def test_position_beyond_the_end_says_that_the_topic_is_another_one(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(10)))
    described = source(servers, topic)
    split = described.splits()[0]
    beyond = Split(split.id, json.dumps({**_position(split), "next": 500}).encode())
    with reading(described, [beyond]) as reader, pytest.raises(OffsetOutOfRange) as caught:
        read_rows(reader, 1)
    assert "offset 500 was to be read next, but the topic ends at 10" in str(caught.value)


def test_topic_created_again_is_refused_or_read_from_its_start_when_loss_is_accepted(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(500)))
    strict = source(servers, topic)
    loose = source(servers, topic, fail_on_data_loss=False, batch_rows=3)
    with reading(strict) as refusing, reading(loose) as accepting:
        assert ids(read_rows(refusing, 500)) == list(range(500))
        assert ids(read_rows(accepting, 500)) == list(range(500))
        delete_topic(servers, topic)
        create_topic(servers, topic, 1)
        produce(servers, topic, map(record, range(1000, 1010)))
        with pytest.raises(OffsetOutOfRange, match="but the topic ends at 10"):
            read_rows(refusing, 1)
        found: list[int] = []
        while len(found) < 10:
            found += ids(read_rows(accepting, 1))
            # At no time does a snapshot leave out what has not been returned.
            assert _next(accepting.snapshot()) == [len(found)]
    assert found == list(range(1000, 1010))


def test_accepted_gap_of_one_topic_moves_no_other_one_back(
    servers: str, kafka_topic: TopicFactory
) -> None:
    lasting, renewed = kafka_topic(), kafka_topic()
    produce(servers, lasting, map(record, range(100)))
    produce(servers, renewed, map(record, range(500)))
    described = KafkaSource(
        servers,
        topic=[lasting, renewed],
        schema=SCHEMA,
        fail_on_data_loss=False,
        native=kafka_feed.NATIVE,
    )
    with reading(described) as reader:
        read_rows(reader, 600)
        # The end of the lasting topic has been told, at 100; then it goes beyond that.
        assert reader.poll(0.3) is None
        produce(servers, lasting, map(record, range(100, 150)))
        read_rows(reader, 50)
        delete_topic(servers, renewed)
        create_topic(servers, renewed, 1)
        produce(servers, renewed, map(record, range(3)))
        assert ids(read_rows(reader, 3)) == [0, 1, 2]
        assert _next(reader.snapshot()) == [150, 3]
        produce(servers, lasting, [record(150)])
        assert ids(read_rows(reader, 1)) == [150]


def test_explicit_start_that_was_deleted_is_refused_when_the_job_starts(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(10)))
    delete_before(servers, topic, 4)
    start = {topic: {0: 1}}
    with pytest.raises(OffsetOutOfRange, match=r"offset 1 was to be read next.*left is 4"):
        source(servers, topic, starting_offsets=start).splits()
    accepted = source(servers, topic, starting_offsets=start, fail_on_data_loss=False)
    assert _next(accepted.splits()) == [4]
