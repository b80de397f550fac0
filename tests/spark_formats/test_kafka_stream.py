"""Spark queries over Kafka: what they read, where batches end, and what they refuse."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.integration.kafka_feed import (
    Transactions,
    add_partitions,
    delete_before,
    group_offsets,
    produce,
    record,
    recreate_topic,
)
from tests.spark_formats.source_formats import KafkaFormat
from tests.support.stream_queries import run_to_end
from tests.support.waiting import await_true

from onceflow.connectors.spark.readers.kafka_offsets import StreamOffsets
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer

pytestmark = [pytest.mark.spark, pytest.mark.integration]

SCHEMA = "id BIGINT, account STRING"


class Query:
    """One query from a topic into a directory of Parquet, started and started again."""

    def __init__(self, spark: SparkSession, servers: str, directory: Path) -> None:
        spark.dataSource.register(KafkaFormat)
        self.spark, self.servers, self.directory = spark, servers, directory

    def stream(self, topic: str, **options: Any) -> DataFrame:
        given = {"servers": self.servers, "topic": topic, "schema": SCHEMA, **options}
        return self.spark.readStream.format("test-kafka").options(**given).load()

    def start(self, frame: DataFrame, *, available_now: bool = True) -> StreamingQuery:
        writer = (
            frame.writeStream.format("parquet")
            .option("path", str(self.directory / "out"))
            .option("checkpointLocation", str(self.directory / "checkpoint"))
        )
        if available_now:
            return writer.trigger(availableNow=True).start()
        return writer.start()

    def run(self, topic: str, **options: Any) -> list[dict[str, Any]]:
        """Return the progress of a query that read what there was."""
        query = run_to_end(lambda: self.start(self.stream(topic, **options)))
        return [json.loads(progress.json) for progress in query.recentProgress]

    def ids(self) -> Counter[int]:
        frame = self.spark.read.parquet(str(self.directory / "out"))
        return Counter(row.id for row in frame.select("id").collect())


@pytest.fixture
def query(spark: SparkSession, onceflow_kafka: KafkaServer, tmp_path: Path) -> Query:
    return Query(spark, onceflow_kafka.bootstrap_servers, tmp_path)


@pytest.mark.only_proof
def test_each_record_is_read_once_over_restarts_limits_and_new_partitions(
    query: Query, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    produce(query.servers, topic, map(record, range(300)), partition=0)
    produce(query.servers, topic, map(record, range(300, 700)), partition=1)
    progress = query.run(topic, offsets_most="400")
    batches = [one["numInputRows"] for one in progress if one["numInputRows"]]
    assert sum(batches) == 700
    assert max(batches) <= 400
    add_partitions(query.servers, topic, 3)
    produce(query.servers, topic, map(record, range(700, 800)), partition=2)
    produce(query.servers, topic, map(record, range(800, 850)), partition=0)
    query.run(topic, starting_offsets="latest")
    assert query.ids() == Counter(range(850))


def test_raw_records_have_the_columns_of_sparks_own_source(
    query: Query, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    producer = Producer({"bootstrap.servers": query.servers})
    headers: list[tuple[str, str | bytes | None]] = [("trace", b"\x01\x02"), ("empty", None)]
    # Of today: retention deletes records of long ago, at a moment of the broker's choice.
    at_ms = int(time.time()) * 1000 + 123
    producer.produce(topic, key=b"k", value=b"v", headers=headers, timestamp=at_ms)
    producer.produce(topic, key=None, value=None, timestamp=at_ms + 1)
    assert producer.flush(20) == 0
    frame = (
        query.spark.read.format("test-kafka")
        .options(servers=query.servers, topic=topic, headers="1")
        .load()
    )
    kinds = {field.name: field.dataType.simpleString() for field in frame.schema}
    assert kinds == {
        "key": "binary",
        "value": "binary",
        "topic": "string",
        "partition": "int",
        "offset": "bigint",
        "timestamp": "timestamp",
        "timestampType": "int",
        "headers": "array<struct<key:string,value:binary>>",
    }
    first, second = frame.orderBy("offset").collect()
    assert (bytes(first.key), bytes(first.value), first.topic) == (b"k", b"v", topic)
    assert (first.partition, first.offset, first.timestampType) == (0, 0, 0)
    assert first.timestamp.timestamp() == at_ms / 1000
    assert [(header.key, header.value and bytes(header.value)) for header in first.headers] == [
        ("trace", b"\x01\x02"),
        ("empty", None),
    ]
    assert (second.key, second.value, second.headers) == (None, None, None)


@pytest.mark.only_proof
def test_a_batch_read_goes_from_one_place_to_another_and_is_cut_into_tasks(
    query: Query, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    for partition in range(2):
        values = map(record, range(partition * 100, partition * 100 + 100))
        produce(query.servers, topic, values, partition=partition)
    frame = (
        query.spark.read.format("test-kafka")
        .options(
            servers=query.servers,
            topic=topic,
            schema=SCHEMA,
            starting_offsets=json.dumps({topic: {"0": 90, "1": -2}}),
            ending_offsets=json.dumps({topic: {"0": -1, "1": 40}}),
            tasks_least="5",
        )
        .load()
    )
    assert frame.rdd.getNumPartitions() >= 5
    found = sorted(row.id for row in frame.collect())
    assert found == [*range(90, 100), *range(100, 140)]


@pytest.mark.servers
def test_a_batch_read_of_an_empty_topic_has_no_rows(
    query: Query, kafka_topic: TopicFactory
) -> None:
    given = {"servers": query.servers, "topic": kafka_topic(), "schema": SCHEMA}
    assert query.spark.read.format("test-kafka").options(**given).load().collect() == []


@pytest.mark.only_proof
def test_a_topic_that_is_replaced_under_a_batch_read_stops_it(
    query: Query, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    for partition in range(2):
        produce(query.servers, topic, map(record, range(10)), partition=partition)
    given = {"servers": query.servers, "topic": topic, "schema": SCHEMA, "tasks_least": "2"}
    frame = query.spark.read.format("test-kafka").options(**given).load()
    # One task after the other, of one plan.
    rows = frame.toLocalIterator()
    assert next(rows).id == 0
    recreate_topic(onceflow_kafka, topic, 2)
    for partition in range(2):
        produce(query.servers, topic, map(record, range(100, 120)), partition=partition)
    with pytest.raises(Exception, match="deleted and created again"):
        list(rows)


@pytest.mark.servers
def test_records_of_aborted_and_open_transactions_are_not_read(
    query: Query, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    transactions = Transactions(query.servers)
    transactions.write(topic, map(record, range(10)))
    transactions.commit()
    transactions.write(topic, map(record, range(10, 20)))
    transactions.abort()
    transactions.write(topic, map(record, range(20, 30)))
    transactions.commit()
    held = Transactions(query.servers)
    held.write(topic, map(record, range(30, 40)))
    query.run(topic)
    assert query.ids() == Counter([*range(10), *range(20, 30)])
    held.commit()
    query.run(topic)
    assert query.ids() == Counter([*range(10), *range(20, 40)])


@pytest.mark.servers
def test_a_topic_created_again_under_its_name_stops_the_query(
    query: Query, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(query.servers, topic, map(record, range(10)))
    query.run(topic)
    recreate_topic(onceflow_kafka, topic, 1)
    # As many as before: only the topic's id tells that these are others.
    produce(query.servers, topic, map(record, range(100, 120)))
    with pytest.raises(StreamingQueryException, match="deleted and created again"):
        query.run(topic)
    query.run(topic, fail_on_data_loss="false")
    assert query.ids() == Counter([*range(10), *range(100, 120)])


@pytest.mark.servers
def test_records_deleted_before_they_were_read_stop_the_query_by_their_offsets(
    query: Query, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(query.servers, topic, map(record, range(10)))
    query.run(topic)
    produce(query.servers, topic, map(record, range(10, 40)))
    delete_before(query.servers, topic, 20)
    # The client that a worker keeps may have fetched them before they were deleted, and then has
    # them still: other settings have another client.
    with pytest.raises(StreamingQueryException, match=r"10 offsets \(10 to 19\) were deleted"):
        query.run(topic, rack="another")
    query.run(topic, rack="a third", fail_on_data_loss="false")
    assert query.ids() == Counter([*range(10), *range(20, 40)])


@pytest.mark.servers
def test_a_topic_that_is_gone_is_named(query: Query) -> None:
    with pytest.raises(StreamingQueryException, match="topic 'nowhere' does not exist"):
        query.run("nowhere")


@pytest.mark.servers
def test_offsets_are_published_after_the_sink_has_them_and_progress_tells_the_lag(
    query: Query, kafka_topic: TopicFactory
) -> None:
    topic, group = kafka_topic(), "published-by-spark"
    produce(query.servers, topic, map(record, range(100)))
    running = query.start(
        query.stream(topic, group_id=group, offsets_most="60"), available_now=False
    )
    try:
        # The last batch is published when the one after it is planned.
        await_true(lambda: group_offsets(query.servers, group, topic, 1) == [60], "first batch")
        produce(query.servers, topic, map(record, range(100, 110)))
        await_true(lambda: group_offsets(query.servers, group, topic, 1) == [100], "second batch")
        progress = [json.loads(one.json)["sources"][0] for one in running.recentProgress]
        first = next(one for one in progress if one["numInputRows"] == 60)
        end, latest = (StreamOffsets.of(first[one]) for one in ("endOffset", "latestOffset"))
        (read,), (there,) = end.positions.values(), latest.positions.values()
        assert there.next - read.next == 40
    finally:
        running.stop()
    query.run(topic, group_id=group)
    assert query.ids() == Counter(range(110))
