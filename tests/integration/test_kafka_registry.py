"""The Kafka source, a real broker, and a schema registry that is away when a new schema comes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from tests.integration.kafka_feed import CONTEXT, ids, produce, read_rows, read_to_end, reading
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_kafka_avro import PAYMENT, PAYMENT_WITH_FEE, framed

from onceflow.core.errors import SourceUnavailable
from onceflow.core.spi import Split
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.position import PartitionPosition

_AWAY = (503, {"error_code": 50003, "message": "leader is away"})


def _next(splits: Sequence[Split]) -> int:
    return PartitionPosition.from_split(splits[0]).next


@pytest.mark.parametrize("bounded", [False, True])
def test_records_that_wait_for_their_schema_are_behind_no_snapshot(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, *, bounded: bool
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic()
    with SchemaRegistryDouble() as registry:
        old = registry.keep(f"{topic}-value", PAYMENT)
        new = registry.keep(f"{topic}-value", PAYMENT_WITH_FEE)
        plain = [{"id": number, "account": "a"} for number in range(4)]
        rich = [{**row, "fee": 1.0, "note": None} for row in plain]
        first, second = framed(old, PAYMENT, plain[:2]), framed(new, PAYMENT_WITH_FEE, rich[2:])
        produce(servers, topic, first)
        described = KafkaSource(
            servers,
            topic=topic,
            format="avro",
            schema="id BIGINT NOT NULL",
            schema_registry=registry.url,
            batch_rows=2,
        )
        if bounded:
            produce(servers, topic, second)
            described = KafkaSource(
                servers,
                topic=topic,
                format="avro",
                schema="id BIGINT NOT NULL",
                schema_registry=registry.url,
                batch_rows=2,
                ending_offsets="latest",
            )
        with reading(described) as reader:
            assert ids(read_rows(reader, 2)) == [0, 1]
            registry.failing = _AWAY
            if not bounded:
                produce(servers, topic, second)
            asked = len(registry.asked)
            until = time.monotonic() + 60
            while len(registry.asked) < asked + 3:
                assert reader.poll(0.05) is None
                assert time.monotonic() < until
            # What is collected is not returned, so that a job that dies now reads it again.
            waiting = reader.snapshot()
            assert _next(waiting) == 2
            registry.failing = None
            assert ids(read_to_end(reader) if bounded else read_rows(reader, 2)) == [2, 3]
            assert _next(reader.snapshot()) == 4
        with reading(described, splits=waiting) as again:
            assert ids(read_rows(again, 2)) == [2, 3]


def test_registry_that_stays_away_fails_the_reader_and_names_the_record(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic()
    with SchemaRegistryDouble() as registry:
        schema_id = registry.keep(f"{topic}-value", PAYMENT)
        produce(servers, topic, framed(schema_id, PAYMENT, [{"id": 1, "account": "a"}]))
        described = KafkaSource(
            servers,
            topic=topic,
            format="avro",
            schema_registry=registry.url,
            deadline_s=3.0,
        )
        assert described.schema.names == ["id", "account"]
        splits = described.splits()
        registry.failing = _AWAY
        reader = described.reader(splits, CONTEXT)
        try:
            with pytest.raises(SourceUnavailable) as caught:
                read_rows(reader, 1, deadline_s=60)
        finally:
            reader.close()
    assert f"{topic}-0 offset 0 needs schema id {schema_id}" in str(caught.value)
