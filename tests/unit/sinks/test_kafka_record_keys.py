"""Keys of records by a schema registry: what sink, source and Confluent's clients write and read.

A double of the registry, and messages by hand; a real registry and broker are in
tests/integration/test_schema_registry.py.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import pytest
from confluent_kafka import Message
from confluent_kafka.schema_registry import SchemaRegistryClient, topic_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.json_format import MessageToDict
from tests.support.protobuf_messages import message_class
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_kafka_avro import taken

from onceflow.core.errors import BadRecord, ConfigError, SinkError, SourceUnavailable
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka.encoder import RecordEncoder
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.value_formats import rows_of

ACCOUNT = pa.struct([pa.field("account", pa.string(), nullable=False), ("day", pa.date32())])
ROWS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("whole", ACCOUNT),
    ]
)
ROW: dict[str, Any] = {"id": 7, "name": "a", "whole": {"account": "x", "day": dt.date(2026, 1, 2)}}
NO_KEY: dict[str, Any] = {"id": 8, "name": None, "whole": None}
FORMATS = ("avro", "protobuf", "json-schema")
_AWAY = (503, {"error_code": 50003, "message": "leader is away"})


def written(
    url: str | None, rows: list[dict[str, Any]], schema: pa.Schema = ROWS, **given: Any
) -> list[Message]:
    """Return the records that a sink writes of `rows`."""
    if url is not None:
        given["schema_registry"] = url
    sink = KafkaSink("nowhere:1", topic="out", deadline_s=30.0, **given)
    encoder = RecordEncoder(sink.settings, schema, BadRows(OnBadRow.FAIL, schema))
    if sink.settings.asks_registry:
        encoder.ask_schema()
    records = encoder.encode(pa.RecordBatch.from_pylist(rows, schema=schema)).to_pylist()
    return messages([(record["key"], record["value"]) for record in records])


def messages(records: Sequence[tuple[bytes | None, bytes | None]]) -> list[Message]:
    return [
        Message(topic="out", partition=2, offset=at, key=key, value=value)
        for at, (key, value) in enumerate(records)
    ]


def source(url: str | None, **given: Any) -> KafkaSource:
    settings: dict[str, Any] = {"schema": "id BIGINT NOT NULL", "deadline_s": 30.0, **given}
    if url is not None:
        settings["schema_registry"] = url
    return KafkaSource("nowhere:1", topic="out", **settings)


def read(described: KafkaSource, records: list[Message]) -> list[dict[str, Any]]:
    rows = rows_of(described.settings)
    rows.add(records)
    batch = taken(rows)
    assert batch.schema == described.schema
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


def registered(registry: SchemaRegistryDouble, subject: str = "out-key") -> Any:
    status, kept = registry.answer("GET", f"subjects/{subject}/versions/latest")
    assert status == 200
    return kept


_COLUMNS = [{"id": 7, "name": "a"}, {"id": 8, "name": None}]
_STRUCTS = [{"account": "x", "day": dt.date(2026, 1, 2)}, None]


@pytest.mark.parametrize(
    ("key_format", "key", "expected"),
    [
        ("avro", "id", [7, 8]),
        ("avro", "name", ["a", None]),
        ("avro", "whole", _STRUCTS),
        ("avro", ["id", "name"], _COLUMNS),
        ("json-schema", "name", ["a", None]),
        ("json-schema", "whole", _STRUCTS),
        ("json-schema", ["id", "name"], _COLUMNS),
        # A message's only field; no message has no key.
        ("protobuf", "name", [{"name": "a"}, None]),
        ("protobuf", ["id", "name"], _COLUMNS),
    ],
)
def test_keys_that_the_sink_registers_and_writes_the_source_discovers_and_reads(
    registry: SchemaRegistryDouble, key_format: str, key: Any, expected: list[Any]
) -> None:
    records = written(registry.url, [ROW, NO_KEY], key=key, key_format=key_format)
    described = source(registry.url, key_format=key_format, include_metadata=True)
    assert described.schema.names[:3] == ["id", "_key", "_topic"]
    found = read(described, records)
    assert [row["_key"] for row in found] == expected
    assert [(row["id"], row["_offset"]) for row in found] == [(7, 0), (8, 1)]


def test_keys_are_what_confluents_own_clients_write_and_read(
    registry: SchemaRegistryDouble,
) -> None:
    """Under Confluent's names of subjects, for one value and for a record or message."""
    context = SerializationContext("out", MessageField.KEY)
    strategy = {"subject.name.strategy": topic_subject_name_strategy}
    value = b'{"id": 1}'
    with SchemaRegistryClient({"url": registry.url}) as client:

        def through(key_format: str, write: Any, key: Any) -> Any:
            records = messages([(write(key, context), value)])
            (row,) = read(source(registry.url, key_format=key_format), records)
            return row["_key"]

        serializer: Any = cast("Any", AvroSerializer)
        assert through("avro", serializer(client, '"string"', conf=strategy), "x") == "x"
        [record] = written(registry.url, [ROW], key="name", key_format="avro")
        reader: Any = cast("Any", AvroDeserializer)(client)
        assert reader(record.key(), context) == "a"
        union = '["null", {"type": "long", "logicalType": "timestamp-millis"}]'
        at = dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc)
        assert through("avro", serializer(client, union, conf=strategy), at) == at

        account = {"type": "object", "properties": {"a": {"type": "string"}}}
        text = json.dumps({"title": "A", **account})
        serializer = cast("Any", JSONSerializer)
        write = serializer(text, client, conf=strategy)
        assert through("json-schema", write, {"a": "x"}) == {"a": "x"}
        [record] = written(registry.url, [ROW], key=["id", "name"], key_format="json-schema")
        reader = cast("Any", JSONDeserializer)(registered(registry)["schema"])
        assert reader(record.key(), context) == {"id": 7, "name": "a"}

        make = message_class('syntax = "proto3"; message Key { string account = 1; }')
        write = cast("Any", ProtobufSerializer)(make, client, strategy)
        assert through("protobuf", write, make(account="x")) == {"account": "x"}
        registry.forget_subject("out-key")
        [record] = written(registry.url, [ROW], key="name", key_format="protobuf")
        make = message_class(registered(registry)["schema"])
        found = cast("Any", ProtobufDeserializer)(make, {})(record.key(), context)
        assert MessageToDict(found) == {"name": "a"}


def test_keys_as_text_and_bytes_ask_no_registry() -> None:
    records = written(None, [ROW, NO_KEY], key="name", key_format="string")
    assert [row["_key"] for row in read(source(None, key_format="string"), records)] == ["a", None]
    records = written(None, [ROW], key="id", key_format="string")
    assert [row["_key"] for row in read(source(None, key_format="raw"), records)] == [b"7"]
    records = written(None, [NO_KEY, ROW], key="name", key_format="raw")
    assert [row["_key"] for row in read(source(None, key_format="raw"), records)] == [None, b"a"]
    with pytest.raises(BadRecord, match=r"offset 0: its key: it is not text in UTF-8"):
        read(source(None, key_format="string"), messages([(b"\xff", b'{"id": 1}')]))


def test_a_key_that_a_source_hands_out_is_no_part_of_the_value_when_it_is_written_again(
    registry: SchemaRegistryDouble,
) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_key", ACCOUNT)])
    row = {"id": 7, "_key": ROW["whole"]}
    [record] = written(registry.url, [row], schema, key="_key", key_format="avro")
    assert record.value() == b'{"id":7}'
    assert read(source(registry.url, key_format="avro"), [record]) == [row]


def test_versions_of_a_key_in_one_batch_are_read_as_the_latest(
    registry: SchemaRegistryDouble,
) -> None:
    more = pa.schema([*ACCOUNT, pa.field("more", pa.int64())])
    old = written(registry.url, [ROW], key="whole", key_format="avro")
    new = written(
        registry.url,
        [{"account": "y", "day": None, "more": 5}],
        more,
        key=["account", "day", "more"],
        key_format="avro",
    )
    records = messages([(old[0].key(), b'{"id": 1}'), (new[0].key(), b'{"id": 2}')])
    found = read(source(registry.url, key_format="avro"), records)
    assert [row["_key"] for row in found] == [
        {"account": "x", "day": dt.date(2026, 1, 2), "more": None},
        {"account": "y", "day": None, "more": 5},
    ]


@pytest.mark.parametrize("key_format", FORMATS)
def test_a_bad_key_makes_a_bad_record_and_the_rows_keep_their_keys(
    registry: SchemaRegistryDouble, key_format: str
) -> None:
    rows = [{"id": at, "name": f"n{at}", "whole": None} for at in range(4)]
    good = written(registry.url, rows, key=["id", "name"], key_format=key_format)
    unknown = b"\0" + (99).to_bytes(4, "big") + b"\0"
    keys = [good[0].key(), None, b"plain", good[1].key(), unknown, good[2].key(), good[3].key()]
    values: list[bytes] = [b'{"id": %d}' % at for at in range(7)]
    values[5] = b"no json"
    records = messages(list(zip(keys, values, strict=True)))
    given: dict[str, Any] = {"key_format": key_format, "deadline_s": 0.2}
    described = source(registry.url, on_bad_record="dead_letter", **given)
    collected = rows_of(described.settings)
    collected.add(records)
    found = taken(collected).to_pylist()
    assert [(row["id"], row["_key"] and row["_key"]["name"]) for row in found[:3]] == [
        (0, "n0"),
        (1, None),
        (3, "n1"),
    ]
    assert found[-1] == {"id": 6, "_key": {"id": 3, "name": "n3"}}
    letters = {letter.offset: letter for letter in collected.refusals.take_letters()}
    assert "its key: it does not begin with a zero byte" in letters[2].reason
    assert (letters[2].key, letters[2].value) == (b"plain", b'{"id": 2}')
    if key_format != "json-schema":
        # An object says what it is without its schema.
        assert "its key: its schema id 99 is not known to the registry" in letters[4].reason
    assert letters.keys() == {2, 4, 5}
    with pytest.raises(BadRecord, match=r"out-2 offset 2: its key: it does not begin"):
        read(source(registry.url, **given), records[:4])


def test_a_registry_that_is_down_fails_by_name_for_keys_too(
    registry: SchemaRegistryDouble,
) -> None:
    records = written(registry.url, [ROW], key="name", key_format="avro")
    described = source(registry.url, key_format="avro", deadline_s=0.2)
    assert described.schema.field("_key").type == pa.string()
    registry.failing = _AWAY
    with pytest.raises(SourceUnavailable, match="out-2 offset 0 needs schema id 1, but the reg"):
        read(described, records)
    with pytest.raises(
        SourceUnavailable, match=r"leader is away.*did not answer within 0.2 s; start it"
    ):
        _ = source(registry.url, key_format="avro", deadline_s=0.2).schema
    sink = KafkaSink(
        "nowhere:1",
        topic="out",
        key="name",
        key_format="avro",
        schema_registry=registry.url,
        deadline_s=0.2,
    )
    encoder = RecordEncoder(sink.settings, ROWS, BadRows(OnBadRow.FAIL, ROWS))
    with pytest.raises(SinkError, match="leader is away"):
        encoder.ask_schema()


def test_settings_of_keys_that_contradict_each_other_are_refused_by_name(
    registry: SchemaRegistryDouble,
) -> None:
    url = registry.url
    for make, given, says in (
        (source, {"key_format": "raw", "format": "raw", "schema": None}, "column key; omit"),
        (source, {"key_format": "avro"}, "key_format='avro' needs schema_registry="),
        (source, {"key_subject": "s"}, "key_subject= needs key_format="),
        (source, {"key_format": "raw", "key_subject": "s"}, "no schema; omit key_subject="),
        (source, {"key_format": "string", "schema": "_key STRING"}, "and the value has one"),
    ):
        with pytest.raises(ConfigError, match=says):
            make(None, **cast("dict[str, Any]", given))
    with pytest.raises(ConfigError, match="'out-key'.*Give key_subject=, if it is another one"):
        _ = source(url, key_format="avro").schema
    registry.keep("keys", '{"type": "string"}', kind="JSON")
    with pytest.raises(ConfigError, match="subject 'keys': its latest version is JSON, but AVRO"):
        _ = source(url, key_format="avro", key_subject="keys").schema
    assert source(url, key_format="json-schema", key_subject="keys").schema.field(
        "_key"
    ) == pa.field("_key", pa.string())
    contradictions: tuple[tuple[dict[str, Any], str], ...] = (
        ({"key_format": "string"}, "needs key="),
        ({"key_format": "string", "key": ["id", "name"]}, "takes one column"),
        ({"key_format": "raw", "key": "id"}, "'id' is int64 and must be binary or text"),
        ({"key_format": "string", "key": "whole"}, "which cannot be written as text"),
        ({"key_format": "avro", "key": "id"}, "needs schema_registry="),
        ({"key_format": "raw", "key": (), "format": "raw"}, "omit key_format="),
    )
    for wrong, says in contradictions:
        with pytest.raises(ConfigError, match=says):
            written(None, [ROW], **wrong)
    with pytest.raises(ConfigError, match="give another key_subject=, or auto_register=True"):
        written(url, [ROW], key="id", key_format="avro", auto_register=False)
    registry.incompatible.add("out-key")
    with pytest.raises(ConfigError, match="'out-key'.*give another key_subject=, or register a"):
        written(url, [ROW], key="id", key_format="avro")
