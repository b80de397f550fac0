"""The reader of a query over Kafka, called as Spark calls it, without a query.

`test_kafka_stream` has the same guarantees in queries, which start a process for each reader.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from tests.integration import kafka_feed
from tests.integration.kafka_feed import record

from onceflow.connectors.spark.arrow_rows import spark_schema
from onceflow.connectors.spark.readers.kafka_stream import KafkaStreamReader
from onceflow.core.errors import OffsetOutOfRange
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources.kafka.value_formats import schema_of_rows

pytestmark = pytest.mark.integration


class Query:
    """A query over one topic that is started anew for each batch, from the offsets that it kept."""

    def __init__(self, servers: str, topic: str) -> None:
        self._servers, self._topic = servers, topic
        self._offsets = ""

    def run_batch(self, **settings: Any) -> list[int]:
        """Return the ids of the records that a new reader of the query reads."""
        described = kafka_feed.source(self._servers, self._topic, **settings).settings
        schema = spark_schema(schema_of_rows(described))
        reader = KafkaStreamReader(described, schema)
        try:
            start = json.loads(self._offsets) if self._offsets else reader.initialOffset()
            end = reader.latestOffset(start)
            tasks = reader.partitions(start, end)
            # Executors read with copies of the reader.
            copy: KafkaStreamReader = pickle.loads(pickle.dumps(reader))
            ids = [row for task in tasks for rows in copy.read(task) for row in _list_ids(rows)]
            reader.commit(end)
        finally:
            reader.stop()
        self._offsets = json.dumps(end)
        return ids


def _list_ids(rows: Any) -> list[int]:
    ids: list[int] = rows["id"].to_pylist()
    return ids


def test_a_topic_created_again_is_refused_until_loss_is_accepted(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic()
    query = Query(servers, topic)
    kafka_feed.produce(servers, topic, map(record, range(10)))
    assert query.run_batch() == list(range(10))
    kafka_feed.recreate_topic(onceflow_kafka, topic, 1)
    # The new topic has at least as many records. Only its id differs.
    kafka_feed.produce(servers, topic, map(record, range(100, 120)))
    with pytest.raises(OffsetOutOfRange, match="deleted and created again"):
        query.run_batch()
    assert query.run_batch(fail_on_data_loss=False) == list(range(100, 120))


def test_deleted_records_are_refused_until_loss_is_accepted(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic()
    query = Query(servers, topic)
    kafka_feed.produce(servers, topic, map(record, range(10)))
    assert query.run_batch() == list(range(10))
    kafka_feed.produce(servers, topic, map(record, range(10, 40)))
    kafka_feed.delete_before(servers, topic, 20)
    # The process keeps its client, which may have fetched the records before their deletion.
    # Another rack makes another client.
    with pytest.raises(OffsetOutOfRange, match=r"10 offsets \(10 to 19\) were deleted"):
        query.run_batch(options={"client.rack": "another"})
    accepted: dict[str, Any] = {"fail_on_data_loss": False, "options": {"client.rack": "a third"}}
    assert query.run_batch(**accepted) == list(range(20, 40))
