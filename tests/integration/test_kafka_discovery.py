"""Partitions and topics that appear, go and come back, as a Kafka source sees them."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaException
from tests.integration import kafka_feed

from onceflow.clients.kafka.brokers import Brokers
from onceflow.core.errors import OffsetOutOfRange, StateIncompatible
from onceflow.core.spi import Split
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.position import PartitionPosition


@pytest.fixture
def topics_to_be(servers: str) -> Iterator[Callable[[str], str]]:
    """Takes the names of topics that are deleted after the test, if they are there then."""
    names: list[str] = []

    def take(name: str) -> str:
        names.append(name)
        return name

    yield take
    for name in names:
        with contextlib.suppress(KafkaException):
            kafka_feed.delete_topic(servers, name)


def _next(splits: Any) -> dict[str, int]:
    return {split.id: PartitionPosition.from_split(split).next for split in splits}


def _pattern(servers: str, pattern: str, **settings: Any) -> KafkaSource:
    return KafkaSource(servers, topic_pattern=pattern, schema=kafka_feed.SCHEMA, **settings)


@pytest.mark.parametrize("start", ["latest", "explicit"])
def test_partitions_added_later_start_at_their_first_record_wherever_the_source_began(
    servers: str, kafka_topic: TopicFactory, start: str
) -> None:
    topic = kafka_topic(1)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(3)))
    offsets = "latest" if start == "latest" else {topic: {0: 2}}
    described = kafka_feed.source(servers, topic, starting_offsets=offsets)
    known = described.splits()
    assert described.discover(known) == known
    kafka_feed.add_partitions(servers, topic, 3)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(4)), partition=2)
    began = 3 if start == "latest" else 2
    assert _next(described.discover(known)) == {
        f"{topic}-0": began,
        f"{topic}-1": 0,
        f"{topic}-2": 0,
    }


def test_bounded_source_takes_no_partition_that_was_not_there_when_it_began(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    described = kafka_feed.source(servers, topic, ending_offsets="latest")
    known = described.splits()
    kafka_feed.add_partitions(servers, topic, 2)
    assert described.discover(known) == known


def test_reader_takes_splits_while_it_reads_and_hands_out_every_record_once(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(3)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(30_000)), partition=0)
    writer = kafka_feed.Transactions(servers)
    writer.write(topic, map(kafka_feed.record, range(30_000, 30_500)), partition=1)
    writer.commit()
    described = kafka_feed.source(servers, topic, batch_rows=1000)
    first, second, third = described.splits()
    with kafka_feed.reading(described, [first]) as reader:
        rows = kafka_feed.read_rows(reader, 5_000)
        reader.add_splits([second, third])
        assert _next(reader.snapshot())[second.id] == 0
        rows += kafka_feed.read_rows(reader, 30_500 - len(rows))
        kafka_feed.produce(servers, topic, [kafka_feed.record(40_000)], partition=2)
        rows += kafka_feed.read_rows(reader, 1)
        assert sorted(kafka_feed.ids(rows)) == [*range(30_500), 40_000]
        assert [n for n in kafka_feed.ids(rows) if n < 30_000] == list(range(30_000)), "in order"
        assert _next(reader.snapshot()) == {first.id: 30_000, second.id: 501, third.id: 1}


def test_reader_without_splits_begins_with_those_that_it_is_given(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(5)))
    described = kafka_feed.source(servers, topic)
    with kafka_feed.reading(described, []) as reader:
        assert reader.poll(0.05) is None
        reader.add_splits(described.splits())
        assert kafka_feed.ids(kafka_feed.read_rows(reader, 5)) == [0, 1, 2, 3, 4]


# Topics by pattern


def test_pattern_takes_new_topics_from_their_first_record_and_none_of_kafkas_own(
    servers: str,
    onceflow_kafka: KafkaServer,
    topics_to_be: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kafka_feed.Transactions(servers)  # so that __transaction_state is there
    stem = f"orders-{uuid.uuid4().hex[:8]}"
    described = _pattern(servers, f"(?:{stem}|__transaction).*", starting_offsets="latest")
    described.validate()
    assert described.splits() == []
    assert f"has no topics matching '(?:{stem}|__transaction).*' yet" in caplog.text
    for name, count in ((f"{stem}-a", 2), (f"{stem}-b", 3), (f"x{stem}", 4)):
        onceflow_kafka.create_topic(topics_to_be(name), 1)
        kafka_feed.produce(servers, name, map(kafka_feed.record, range(count)))
    found = described.discover([])
    assert _next(found) == {f"{stem}-a-0": 0, f"{stem}-b-0": 0}
    with kafka_feed.reading(described, found) as reader:
        assert sorted(kafka_feed.ids(kafka_feed.read_rows(reader, 5))) == [0, 0, 1, 1, 2]
    assert _next(described.splits()) == {f"{stem}-a-0": 2, f"{stem}-b-0": 3}, "it starts at the end"
    named = KafkaSource(servers, topic="__transaction_state", format="raw")
    assert len(named.splits()) == 1


@pytest.mark.only_proof
def test_topic_of_a_pattern_that_was_deleted_is_refused_by_name_or_left_out(
    servers: str,
    onceflow_kafka: KafkaServer,
    topics_to_be: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stem = f"orders-{uuid.uuid4().hex[:8]}"
    for name in (f"{stem}-a", f"{stem}-b"):
        onceflow_kafka.create_topic(topics_to_be(name), 1)
    known = _pattern(servers, f"{stem}.*").splits()
    kafka_feed.delete_topic(servers, f"{stem}-b")
    with pytest.raises(OffsetOutOfRange, match=f"{stem}-b-0: offset 0 .* no such topic any more"):
        _pattern(servers, f"{stem}.*").discover(known)
    with caplog.at_level(logging.WARNING, "onceflow.sources.kafka"):
        left = _pattern(servers, f"{stem}.*", fail_on_data_loss=False).discover(known)
    assert _next(left) == {f"{stem}-a-0": 0}
    assert f"{stem}-b-0" in caplog.text


def test_topic_that_the_source_names_no_longer_is_refused_with_its_offset(
    servers: str, kafka_topic: TopicFactory
) -> None:
    first, second = kafka_topic(1), kafka_topic(1)
    kafka_feed.produce(servers, second, map(kafka_feed.record, range(7)))
    both = KafkaSource(
        servers, topic=[first, second], schema=kafka_feed.SCHEMA, starting_offsets="latest"
    )
    known = both.splits()
    with pytest.raises(StateIncompatible, match=f"offset 7 of {second}-0.* reads topic {first}"):
        kafka_feed.source(servers, first).discover(known)


# Topics that were deleted and created again


def test_topic_created_again_with_more_records_is_refused_by_both_ids(
    onceflow_kafka: KafkaServer, servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(10)))
    described = kafka_feed.source(servers, topic, starting_offsets="latest")
    known = described.splits()
    kafka_feed.recreate_topic(onceflow_kafka, topic, 2)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(1000, 1050)))
    other = described.splits()
    old_id, new_id = (PartitionPosition.from_split(splits[0]).topic_id for splits in (known, other))
    assert old_id != new_id
    with pytest.raises(OffsetOutOfRange) as caught:
        described.discover(known)
    said = str(caught.value)
    assert f"{topic}-0: offset 10 was to be read next" in said
    assert old_id in said
    assert new_id in said
    assert "fail_on_data_loss=False" in said
    assert caught.value.retry == "never"


def test_topic_created_again_under_a_reader_with_an_end_is_refused_at_that_end(
    onceflow_kafka: KafkaServer, servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    for hundred in range(0, 500, 100):
        kafka_feed.produce(servers, topic, map(kafka_feed.record, range(hundred, hundred + 100)))
    # The client fetches a hundred records, and no more before they are taken.
    options = {"queued.min.messages": 1, "max.partition.fetch.bytes": 1000}
    described = kafka_feed.source(
        servers, topic, ending_offsets="latest", batch_rows=50, options=options
    )
    known = described.splits()
    with kafka_feed.reading(described, known) as reader:
        # A poll may end before the client has fetched fifty records.
        found = kafka_feed.ids(kafka_feed.read_rows(reader, 50))
        assert found == list(range(len(found)))
        assert len(found) < 100
        kafka_feed.recreate_topic(onceflow_kafka, topic, 1)
        kafka_feed.produce(servers, topic, map(kafka_feed.record, range(1000, 1500)))
        with pytest.raises(OffsetOutOfRange) as caught:
            kafka_feed.read_to_end(reader)
        assert _next(reader.snapshot()) == {f"{topic}-0": 500}, "it read the other topic"
    new_id = PartitionPosition.from_split(described.splits()[0]).topic_id
    old_id = PartitionPosition.from_split(known[0]).topic_id
    assert old_id in str(caught.value)
    assert new_id in str(caught.value)


def test_topic_deleted_behind_a_reader_that_has_its_last_record_ends_as_before(
    onceflow_kafka: KafkaServer, servers: str, topics_to_be: Callable[[str], str]
) -> None:
    topic = onceflow_kafka.create_topic(topics_to_be(f"onceflow-{uuid.uuid4().hex[:16]}"), 1)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(10)))
    described = kafka_feed.source(servers, topic, ending_offsets="latest", batch_rows=10)
    with kafka_feed.reading(described) as reader:
        assert kafka_feed.ids(kafka_feed.read_rows(reader, 10)) == list(range(10))
        kafka_feed.delete_topic(servers, topic)
        assert kafka_feed.read_to_end(reader) == []


def test_topic_created_again_is_read_from_its_first_record_where_loss_is_accepted(
    onceflow_kafka: KafkaServer,
    servers: str,
    kafka_topic: TopicFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = kafka_topic(3)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(10)))
    described = kafka_feed.source(
        servers, topic, fail_on_data_loss=False, starting_offsets="latest"
    )
    known = described.splits()
    kafka_feed.recreate_topic(onceflow_kafka, topic, 2)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(1000, 1050)))
    with caplog.at_level(logging.WARNING, "onceflow.sources.kafka"):
        now = described.discover(known)
    assert _next(now) == {f"{topic}-0": 0, f"{topic}-1": 0}
    assert "deleted and created again" in caplog.text
    assert described.discover(now) == now, "and that is where it stands from now on"
    with kafka_feed.reading(described, now) as reader:
        assert kafka_feed.ids(kafka_feed.read_rows(reader, 50)) == list(range(1000, 1050))


def test_topic_of_another_cluster_is_refused_by_both_clusters(
    servers: str, kafka_topic: TopicFactory
) -> None:
    described = kafka_feed.source(servers, kafka_topic(1))
    (here,) = map(PartitionPosition.from_split, described.splits())
    elsewhere = replace(here, cluster_id="AnotherClusterEntirely")
    with pytest.raises(OffsetOutOfRange, match=f"AnotherClusterEntirely.*{here.cluster_id}"):
        described.discover([elsewhere.to_split()])


def test_position_of_an_older_checkpoint_gets_its_ids_and_keeps_its_offset(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    described = kafka_feed.source(servers, topic)
    text = f'{{"topic":"{topic}","partition":0,"next":42,"stop":null}}'
    (position,) = described.discover([Split(f"{topic}-0", text.encode())])
    (here,) = described.splits()
    assert PartitionPosition.from_split(position) == replace(
        PartitionPosition.from_split(here), next=42
    )


def test_gap_behind_which_a_reader_goes_on_leaves_it_in_the_topic_that_is_there(
    onceflow_kafka: KafkaServer, servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(50)))
    described = kafka_feed.source(
        servers, topic, fail_on_data_loss=False, starting_offsets="latest"
    )
    known = described.splits()
    kafka_feed.recreate_topic(onceflow_kafka, topic, 1)
    kafka_feed.produce(servers, topic, map(kafka_feed.record, range(1000, 1010)))
    with kafka_feed.reading(described, known) as reader:
        assert kafka_feed.ids(kafka_feed.read_rows(reader, 10)) == list(range(1000, 1010))
        assert described.discover(reader.snapshot()) == reader.snapshot()


def test_brokers_are_asked_as_often_about_many_partitions_as_about_two(
    servers: str, kafka_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a request a partition, a topic of thousands of them would not start in time."""
    asked: list[object] = []
    ask = Brokers.ask

    def count(self: Brokers, *question: Any, **settings: Any) -> Any:
        asked.append(question)
        return ask(self, *question, **settings)

    monkeypatch.setattr(Brokers, "ask", count)
    counts: list[int] = []
    for partitions in (2, 40):
        described = kafka_feed.source(servers, kafka_topic(partitions))
        # A new partition may have no leader yet, and is asked about until it has one.
        described.latest_offsets(described.splits())
        asked.clear()
        splits = described.splits()
        described.latest_offsets(splits)
        assert len(described.discover(splits[:1])) == partitions
        counts.append(len(asked))
    # A request is repeated where a partition has no leader for a moment. One for each partition
    # would add 38.
    assert counts[1] < counts[0] + 19
