"""Source and sink with a real schema registry, and the double held to what that one answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient, topic_subject_name_strategy
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from tests.integration.kafka_feed import ids, produce, read_to_end, reading
from tests.support.apicurio import apicurio
from tests.support.protobuf_messages import message_class
from tests.support.schema_registry_double import SchemaRegistryDouble

from onceflow.clients.kafka.registry import (
    RegistryRefusal,
    SchemaKind,
    SchemaRegistry,
    deadline,
    registry_settings,
)
from onceflow.core.errors import ConfigError
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import BadRows
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka.encoder import RecordEncoder
from onceflow.sources import KafkaSource

pytestmark = pytest.mark.slow

_WAIT_S = 60.0
_ROWS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
_PAYMENT = json.dumps({"type": "record", "name": "P", "fields": [{"name": "id", "type": "long"}]})


@pytest.fixture(scope="module")
def registry_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("apicurio")
    with apicurio(directory) as url:
        yield url


def _values(url: str, topic: str, value_format: Any, schema: pa.Schema, count: int) -> list[bytes]:
    """Return the values that a sink writes of `count` rows."""
    records = _records(url, topic, schema, count, format=value_format)
    return [record["value"] for record in records]


def _records(
    url: str, topic: str, schema: pa.Schema, count: int, **given: Any
) -> list[dict[str, bytes]]:
    """Return what a sink writes of `count` rows."""
    sink = KafkaSink(
        "nowhere:1",
        topic=topic,
        schema_registry=url,
        deadline_s=_WAIT_S,
        **given,
    )
    encoder = RecordEncoder(sink.settings, schema, BadRows(OnBadRow.FAIL, schema))
    encoder.ask_schema()
    rows = [{"id": number, "name": None if number % 2 else "a"} for number in range(count)]
    found: list[dict[str, bytes]] = encoder.encode(
        pa.RecordBatch.from_pylist(rows, schema=schema)
    ).to_pylist()
    return found


@pytest.mark.parametrize("value_format", ["avro", "protobuf", "json-schema"])
def test_what_the_sink_registers_and_writes_the_source_discovers_and_reads(
    registry_url: str,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    value_format: str,
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic()
    produce(servers, topic, _values(registry_url, topic, value_format, _ROWS, 5))
    described = KafkaSource(
        servers,
        topic=topic,
        format=value_format,
        schema_registry=registry_url,
        ending_offsets="latest",
    )
    assert described.schema == _ROWS
    with reading(described) as reader:
        rows = read_to_end(reader)
    assert ids(rows) == list(range(5))
    assert [row["name"] for row in rows] == ["a", None, "a", None, "a"]


@pytest.mark.parametrize("key_format", ["avro", "protobuf", "json-schema"])
@pytest.mark.parametrize("key", ["id", ["id", "name"]], ids=["number", "columns"])
def test_keys_that_the_sink_registers_and_writes_the_source_discovers_and_reads(
    registry_url: str,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    key_format: str,
    key: Any,
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic()
    records = _records(registry_url, topic, _ROWS, 5, key=key, key_format=key_format)
    producer = Producer({"bootstrap.servers": servers})
    for record in records:
        producer.produce(topic, key=record["key"], value=record["value"], partition=0)
    assert producer.flush(60) == 0
    described = KafkaSource(
        servers,
        topic=topic,
        schema="id BIGINT NOT NULL, name STRING",
        key_format=key_format,
        schema_registry=registry_url,
        ending_offsets="latest",
    )
    with reading(described) as reader:
        rows = read_to_end(reader)
    assert ids(rows) == list(range(5))
    alone = key == "id" and key_format != "protobuf"
    assert [row["_key"] for row in rows] == [
        row["id"] if alone else {name: row[name] for name in ([key] if key == "id" else key)}
        for row in rows
    ]


@pytest.mark.parametrize(
    ("value_format", "refused"),
    [
        ("avro", _ROWS.append(pa.field("fee", pa.float64(), nullable=False))),
        ("protobuf", _ROWS.set(1, pa.field("name", pa.int64()))),
    ],
)
def test_schema_that_may_not_follow_its_subject_is_refused_at_the_start(
    registry_url: str, kafka_topic: TopicFactory, value_format: str, refused: pa.Schema
) -> None:
    topic = kafka_topic()
    _values(registry_url, topic, value_format, _ROWS, 1)
    _require_backward(registry_url, f"{topic}-value")
    with pytest.raises(ConfigError, match="may not follow the subject's versions"):
        _values(registry_url, topic, value_format, refused, 0)
    # A column that may be null has a default, and may follow.
    _values(registry_url, topic, value_format, _ROWS.append(pa.field("fee", pa.float64())), 0)
    fewer = pa.schema([_ROWS.field("id")])
    if value_format == "avro":
        _values(registry_url, topic, value_format, fewer, 0)
    else:
        # This registry lets no field of Protobuf go, whatever is reserved for it.
        with pytest.raises(ConfigError, match="may not follow the subject's versions"):
            _values(registry_url, topic, value_format, fewer, 0)


def test_schemas_that_confluents_protobuf_serializer_registers_are_read(
    registry_url: str, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic()
    text = (
        'syntax = "proto3"; import "money.proto"; message Order { int64 id = 1; Money price = 2; }'
    )
    money = 'syntax = "proto3"; message Money { int64 cents = 1; }'
    make = message_class(text, money=money)
    with SchemaRegistryClient({"url": registry_url}) as client:
        # Its constructor has another name, which type checkers do not find.
        serializer: Any = cast("Any", ProtobufSerializer)(
            make, client, {"subject.name.strategy": topic_subject_name_strategy}
        )
        context = SerializationContext(topic, MessageField.VALUE)
        values = [serializer(make(id=at, price={"cents": at}), context) for at in range(3)]
    produce(servers, topic, [value for value in values if value is not None])
    described = KafkaSource(
        servers,
        topic=topic,
        format="protobuf",
        schema_registry=registry_url,
        ending_offsets="latest",
    )
    with reading(described) as reader:
        rows = read_to_end(reader)
    assert [(row["id"], row["price"]) for row in rows] == [(at, {"cents": at}) for at in range(3)]


def _require_backward(url: str, subject: str) -> None:
    with SchemaRegistryClient({"url": url}) as client:
        client.set_compatibility(subject, "BACKWARD")


_PAYMENT_MESSAGE = """syntax = "proto3";

message P {
  int64 id = 1;
}
"""


@pytest.mark.parametrize(
    ("kind", "text"),
    [(SchemaKind.AVRO, _PAYMENT), (SchemaKind.PROTOBUF, _PAYMENT_MESSAGE)],
    ids=["avro", "protobuf"],
)
def test_the_double_answers_as_the_real_registry_does(
    registry_url: str, kafka_topic: TopicFactory, kind: SchemaKind, text: str
) -> None:
    subject = f"{kafka_topic()}-value"

    def answers(url: str) -> list[object]:
        registry = SchemaRegistry(registry_settings(url))
        until = deadline(_WAIT_S)
        first = registry.register(subject, kind, text, until=until)
        again = registry.register(subject, kind, text, until=until)
        latest, kept = (
            registry.latest(subject, until=until),
            registry.schema(first, subject, until=until),
        )
        found = registry.look_up(subject, kind, text, until=until)
        refused: list[object] = [
            _refusal(lambda: registry.schema(99_999, subject, until=deadline(0.0))),
            _refusal(lambda: registry.latest("nobody's", until=until)),
        ]
        registry.close()
        same = [again == first, latest == kept, latest.id == first, found == first]
        return [*same, latest.kind, latest.text.split(), *refused]

    with SchemaRegistryDouble() as double:
        assert answers(double.url) == answers(registry_url)


def _refusal(ask: Callable[[], object]) -> tuple[int, bool]:
    with pytest.raises(RegistryRefusal) as caught:
        ask()
    return caught.value.status, caught.value.unknown
