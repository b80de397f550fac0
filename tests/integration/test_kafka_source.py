"""The Kafka source against a real broker that stays up."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.kafka_feed import (
    CONTEXT,
    Transactions,
    delete_before,
    group_offsets,
    ids,
    produce,
    read_rows,
    read_to_end,
    reading,
    record,
    source,
)
from tests.support.drawn_seeds import draw_random

from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.spi import EndOfInput, Split
from onceflow.integration.pytest_plugin import TopicFactory

pytestmark = pytest.mark.usefixtures("each_reader")


def _position(split: Split) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(split.position)
    return found


def _next(splits: Any) -> list[int]:
    return [_position(split)["next"] for split in splits]


# Positions and replay


def test_every_record_is_read_once_from_whatever_snapshot_a_reader_starts(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(3)
    writer = Transactions(servers)
    number = 0
    expected: list[int] = []
    # Partition 0 holds markers and aborted records, 1 is plain, 2 is empty.
    for size in (1, 700, 3, 250):
        writer.write(topic, map(record, range(number, number + size)))
        expected += range(number, number + size)
        writer.commit()
        number += size
        writer.write(topic, map(record, range(1_000_000, 1_000_040)))
        writer.abort()
    produce(servers, topic, map(record, range(number, number + 1500)), partition=1)
    expected += range(number, number + 1500)

    described = source(servers, topic, ending_offsets="latest", batch_rows=97)
    snapshots: list[tuple[list[Split], list[int]]] = []
    seen: list[int] = []
    with reading(described) as reader:
        snapshots.append((list(reader.snapshot()), []))
        while not isinstance(batch := reader.poll(1.0), EndOfInput):
            if isinstance(batch, pa.RecordBatch):
                seen += batch.column("id").to_pylist()
                snapshots.append((list(reader.snapshot()), list(seen)))
    assert sorted(seen) == sorted(expected)

    chosen = [*draw_random().sample(snapshots, 6), snapshots[0], snapshots[-1]]
    for splits, before in chosen:
        with reading(described, splits) as reader:
            after = ids(read_to_end(reader))
        assert sorted(before + after) == sorted(expected), f"{splits}"


def test_records_of_a_partition_keep_their_order_over_batches(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(5000)))
    with reading(source(servers, topic, ending_offsets="latest", batch_rows=333)) as reader:
        assert ids(read_to_end(reader)) == list(range(5000))


def test_a_batch_never_holds_more_rows_than_it_may(servers: str, kafka_topic: TopicFactory) -> None:
    topic = kafka_topic(2)
    for partition in (0, 1):
        produce(servers, topic, map(record, range(2000)), partition=partition)
    with reading(source(servers, topic, ending_offsets="latest", batch_rows=700)) as reader:
        sizes: list[int] = []
        while not isinstance(batch := reader.poll(1.0), EndOfInput):
            if isinstance(batch, pa.RecordBatch):
                sizes.append(batch.num_rows)
    assert sum(sizes) == 4000
    assert max(sizes) <= 700


def test_large_records_end_a_batch_by_their_bytes(servers: str, kafka_topic: TopicFactory) -> None:
    topic = kafka_topic()
    large = b'{"id": 1, "account": "%s"}' % (b"x" * 100_000)
    produce(servers, topic, [large] * 1200)
    described = source(servers, topic, ending_offsets="latest", batch_bytes=1_000_000)
    with reading(described) as reader:
        sizes: list[int] = []
        while not isinstance(batch := reader.poll(1.0), EndOfInput):
            if isinstance(batch, pa.RecordBatch):
                sizes.append(batch.num_rows)
    assert sum(sizes) == 1200
    # One chunk of 500 messages may be under way when the bound is met.
    assert max(sizes) <= 510


# Transactions and bounded reading


def test_aborted_records_are_not_read(servers: str, kafka_topic: TopicFactory) -> None:
    topic = kafka_topic()
    writer = Transactions(servers)
    writer.write(topic, map(record, range(10)))
    writer.commit()
    writer.write(topic, map(record, range(10, 20)))
    writer.abort()
    writer.write(topic, map(record, range(20, 30)))
    writer.commit()
    with reading(source(servers, topic, ending_offsets="latest")) as reader:
        assert ids(read_to_end(reader)) == [*range(10), *range(20, 30)]


@pytest.mark.parametrize("last", ["commit", "abort"])
def test_bounded_partition_that_ends_in_a_marker_reaches_its_end(
    servers: str, kafka_topic: TopicFactory, last: str
) -> None:
    topic = kafka_topic()
    writer = Transactions(servers)
    writer.write(topic, map(record, range(5)))
    writer.commit() if last == "commit" else writer.abort()
    described = source(servers, topic, ending_offsets="latest")
    assert [_position(split)["stop"] for split in described.splits()] == [6]
    with reading(described) as reader:
        assert ids(read_to_end(reader)) == (list(range(5)) if last == "commit" else [])
        assert _next(reader.snapshot()) == [6]
        assert isinstance(reader.poll(0), EndOfInput)


@pytest.mark.only_proof
def test_idle_stream_stands_behind_the_last_marker(servers: str, kafka_topic: TopicFactory) -> None:
    topic = kafka_topic()
    writer = Transactions(servers)
    described = source(servers, topic)
    end = 0
    with reading(described) as reader:
        # Several times: the end may be met by a poll that waits, or be there when one begins.
        for rows in (5, *[0] * 10):
            writer.write(topic, map(record, range(5)))
            writer.commit() if rows else writer.abort()
            end += 6
            assert len(read_rows(reader, rows)) == rows
            until = time.monotonic() + 60.0
            while _next(reader.snapshot()) != [end]:
                assert reader.poll(0.05) is None
                assert time.monotonic() < until, reader.snapshot()
        taken = reader.snapshot()
    # So retention may delete all that was read, and no gap is seen.
    delete_before(servers, topic, end)
    produce(servers, topic, [record(9)])
    with reading(described, taken) as reader:
        assert ids(read_rows(reader, 1)) == [9]


def test_open_transaction_bounds_a_bounded_read_and_is_read_by_the_next(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(3)))
    writer = Transactions(servers)
    writer.write(topic, map(record, range(3, 6)))
    produce(servers, topic, map(record, range(6, 9)))
    described = source(servers, topic, ending_offsets="latest")
    with reading(described) as reader:
        assert ids(read_to_end(reader)) == [0, 1, 2]
        stopped_at = reader.snapshot()
    writer.commit()
    # The same job, now as a stream, goes on where the bounded read ended.
    with reading(source(servers, topic), stopped_at) as reader:
        assert ids(read_rows(reader, 6)) == list(range(3, 9))
        streamed = reader.snapshot()
    with pytest.raises(StateIncompatible, match="a stream without an end"):
        described.reader(streamed, CONTEXT)


def test_bounded_read_of_empty_partitions_ends(servers: str, kafka_topic: TopicFactory) -> None:
    topic = kafka_topic(4)
    produce(servers, topic, map(record, range(10)), partition=2)
    described = source(servers, topic, ending_offsets="latest")
    with reading(described) as reader:
        assert ids(read_to_end(reader)) == list(range(10))
    splits = [split for split in described.splits() if split.id != f"{topic}-2"]
    with reading(described, splits) as reader:
        assert isinstance(reader.poll(0), EndOfInput)


def test_bounded_read_leaves_out_what_was_written_after_it_was_planned(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    for partition in (0, 1):
        numbers = range(partition * 10_000, partition * 10_000 + 700 + partition)
        produce(servers, topic, map(record, numbers), partition=partition)
    described = source(servers, topic, ending_offsets="latest")
    planned = described.splits()
    for partition in (0, 1):
        produce(servers, topic, map(record, range(50_000, 55_000)), partition=partition)
    with reading(described, planned) as reader:
        found = ids(read_to_end(reader))
        assert _next(reader.snapshot()) == [700, 701]
    assert sorted(found) == [*range(700), *range(10_000, 10_701)]


def test_bounded_read_whose_first_records_were_deleted_reads_the_rest(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    writer = Transactions(servers)
    writer.write(topic, map(record, range(20)))
    writer.commit()
    delete_before(servers, topic, 15)
    with reading(source(servers, topic, ending_offsets="latest")) as reader:
        assert ids(read_to_end(reader)) == list(range(15, 20))


def test_reader_without_splits_ends_when_bounded_and_waits_when_not(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    with reading(source(servers, topic, ending_offsets="latest"), []) as reader:
        assert isinstance(reader.poll(0), EndOfInput)
        assert reader.snapshot() == []
    with reading(source(servers, topic), []) as reader:
        started = time.monotonic()
        assert reader.poll(0.1) is None
        assert time.monotonic() - started >= 0.09


# Where it starts and ends


def test_latest_start_reads_only_what_comes_after_it(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(10)))
    described = source(servers, topic, starting_offsets="latest")
    splits = described.splits()
    produce(servers, topic, map(record, range(10, 15)))
    with reading(described, splits) as reader:
        assert ids(read_rows(reader, 5)) == list(range(10, 15))


def test_explicit_starts_and_ends_bound_each_partition(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(3)
    for partition in range(3):
        produce(servers, topic, map(record, range(20)), partition=partition)
    described = source(
        servers,
        topic,
        starting_offsets={topic: {0: 5, 1: -2, 2: -1}},
        ending_offsets=json.dumps({topic: {"0": 9, "1": 2, "2": -1}}),
    )
    with reading(described) as reader:
        assert sorted(ids(read_to_end(reader))) == sorted([5, 6, 7, 8, 0, 1])


def test_start_at_a_time_reads_from_the_first_record_since(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    produce(servers, topic, map(record, range(5)))
    time.sleep(0.05)
    since = dt.datetime.now(dt.timezone.utc)
    time.sleep(0.05)
    produce(servers, topic, map(record, range(5, 8)))
    described = source(servers, topic, starting_offsets=since, ending_offsets="latest")
    with reading(described) as reader:
        assert ids(read_to_end(reader)) == [5, 6, 7]


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"starting_offsets": {"T": {0: 1}}}, r"nothing about partitions \[1\]"),
        ({"starting_offsets": {"T": {0: 1, 1: 0, 7: 0}}}, r"names partitions \[7\]"),
        ({"starting_offsets": {"T": {0: 4, 1: 0}}}, "starts at 4, but it ends at 3"),
        ({"ending_offsets": {"T": {0: 9, 1: 0}}}, "ends at 9, but only the offsets before 3"),
    ],
)
def test_explicit_offsets_that_do_not_fit_the_topic_are_refused(
    servers: str, kafka_topic: TopicFactory, settings: dict[str, Any], fragment: str
) -> None:
    topic = kafka_topic(2)
    produce(servers, topic, map(record, range(3)))
    mine = {name: {topic: offsets["T"]} for name, offsets in settings.items()}
    with pytest.raises(ConfigError, match=fragment):
        source(servers, topic, **mine).splits()


def test_missing_topic_is_named_together_with_the_nearest_one(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    with pytest.raises(ConfigError) as caught:
        source(servers, f"{topic}s").validate()
    assert f"topic '{topic}s' does not exist" in str(caught.value)
    assert f"(there: '{topic}'" in str(caught.value)
    source(servers, topic).validate()


def test_latest_offsets_say_how_far_a_job_is_behind(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    described = source(servers, topic, starting_offsets="earliest")
    at_first = described.splits()
    produce(servers, topic, map(record, range(7)))
    found = {one.split_id: one for one in described.latest_offsets(at_first)}
    assert {one.next for one in found.values()} == {0}
    assert sum(one.lag for one in found.values()) == 7
    behind = described.latest_offsets(source(servers, topic, starting_offsets="latest").splits())
    assert [one.lag for one in behind] == [0, 0]
    bounded = source(servers, topic, ending_offsets={topic: {0: 1, 1: 0}}).splits()
    assert sum(one.lag for one in described.latest_offsets(bounded)) == 1


# Waiting, publishing, closing


def test_poll_of_an_idle_topic_returns_in_time_and_a_record_ends_the_wait(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    with reading(source(servers, topic)) as reader:
        assert reader.poll(0.5) is None
        started = time.monotonic()
        assert reader.poll(0.05) is None
        assert time.monotonic() - started < 60.0
        produce(servers, topic, [record(1)])
        started = time.monotonic()
        assert ids(read_rows(reader, 1)) == [1]
        assert time.monotonic() - started < 60.0


def test_committed_positions_reach_the_group_even_when_the_reader_closes_at_once(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    for partition in (0, 1):
        produce(servers, topic, map(record, range(10)), partition=partition)
    group = f"group-{topic}"
    described = source(servers, topic, group_id=group, ending_offsets={topic: {0: 10, 1: 4}})
    reader = described.reader(described.splits(), CONTEXT)
    read_to_end(reader)
    assert group_offsets(servers, group, topic, 2) == [-1001, -1001]
    reader.commit(reader.snapshot())
    reader.close()
    reader.close()
    assert group_offsets(servers, group, topic, 2) == [10, 4]
    reader.commit([])


def test_commit_from_another_thread_reaches_the_group_while_the_reader_polls(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, map(record, range(10)))
    group = f"group-{topic}"
    with reading(source(servers, topic, group_id=group)) as reader:
        read_rows(reader, 10)
        committing = threading.Thread(target=reader.commit, args=(reader.snapshot(),))
        committing.start()
        until = time.monotonic() + 90
        while group_offsets(servers, group, topic, 1) != [10]:
            assert time.monotonic() < until
            reader.poll(0.02)
        committing.join()


def test_source_that_publishes_no_offsets_leaves_the_group_alone(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(servers, topic, [record(1)])
    described = source(servers, topic, group_id=f"group-{topic}", commit_offsets=False)
    with reading(described) as reader:
        read_rows(reader, 1)
        reader.commit(reader.snapshot())
    assert group_offsets(servers, f"group-{topic}", topic, 1) == [-1001]
