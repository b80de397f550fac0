"""The round-trip matrix of Kafka's records on a real broker: keys, values, headers and times.

The cells without a broker are in tests/unit/sinks and tests/conformance. Here a sink commits what
another client reads, and a source reads what another client wrote.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.conformance.test_source_keys import TIMES, UNTIMELY
from tests.integration.kafka_feed import CONTEXT, read_to_end, reading, source
from tests.integration.kafka_sink_kit import KafkaJob, messages
from tests.support.edge_values import BYTES, TEXTS
from tests.support.octet_producer import OctetProducer
from tests.support.registered_readers import (
    avro_reader,
    json_schema_reader,
    protobuf_reader,
    read_field,
)
from tests.support.schema_registry_double import SchemaRegistryDouble

from onceflow.core.protocol.committables import Committed
from onceflow.core.spi import EndOfInput
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import KafkaSink
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.reader import KafkaReader

_HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


def _commit(sink: KafkaSink, rows: pa.RecordBatch, topic: str, directory: Path) -> None:
    job = KafkaJob(sink, directory=directory, sink_id=f"j.{topic[-16:]}", schema=rows.schema)
    with job:
        job.check()
        committable = job.prepare(1, rows)
        assert job.committer().commit(committable) == Committed()


@pytest.mark.parametrize("form", ["avro", "protobuf", "json-schema"])
def test_committed_keys_and_values_are_what_other_clients_read(
    servers: str, kafka_topic: TopicFactory, tmp_path: Path, form: str
) -> None:
    topic = kafka_topic()
    texts: list[str | None] = [*TEXTS, None]
    numbers = range(len(texts))
    columns = {"n": pa.array(numbers, pa.int64()), "x": pa.array(texts)}
    rows = pa.RecordBatch.from_arrays(
        [*columns.values(), pa.array(texts)], names=[*columns, "_key"]
    )
    with SchemaRegistryDouble() as registry:
        formats: Any = {"format": form, "key_format": form}
        sink = KafkaSink(servers, topic=topic, key="_key", schema_registry=registry.url, **formats)
        _commit(sink, rows, topic, tmp_path)
        kept = [
            cast("Any", registry.answer("GET", f"subjects/{topic}-{part}/versions/latest")[1])
            for part in ("key", "value")
        ]
    opens = {"avro": avro_reader, "protobuf": protobuf_reader, "json-schema": json_schema_reader}
    read_key, read_value = (opens[form](one["schema"]) for one in kept)
    found = messages(servers, topic)
    for at, (message, text) in enumerate(zip(found, texts, strict=True)):
        key, value = message.key(), read_value(cast("bytes", message.value()))
        if form == "protobuf":
            value = {name: read_field(value, name, column.type) for name, column in columns.items()}
        assert value == {"n": at, "x": text}
        if text is None:
            assert key is None
            continue
        shown = read_key(cast("bytes", key))
        assert (read_field(shown, "_key", pa.string()) if form == "protobuf" else shown) == text


def test_committed_raw_records_and_headers_are_what_another_client_reads(
    servers: str, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic()
    octets: list[bytes | None] = [*BYTES, None]
    names = [text for text in TEXTS if "\0" not in text]
    headers: list[list[tuple[str, bytes | None]] | None] = [
        [(name, name.encode()) for name in names],
        [("n", value) for value in octets],
        [("a", b"1"), ("b", None), ("a", b"1"), ("a", None), ("a", b"")],
        *cast("Any", [[("", b"")]] * (len(octets) - 4)),
        None,
    ]
    listed: list[Any] = [
        row and [{"key": name, "value": value} for name, value in row] for row in headers
    ]
    rows = pa.RecordBatch.from_arrays(
        [pa.array(octets[::-1]), pa.array(octets), pa.array(listed, _HEADERS)],
        names=["key", "value", "headers"],
    )
    _commit(KafkaSink(servers, topic=topic, format="raw"), rows, topic, tmp_path)
    found = messages(servers, topic)
    assert [message.key() for message in found] == octets[::-1]
    assert [message.value() for message in found] == octets
    assert [message.headers() for message in found] == headers


# --- what other clients write -------------------------------------------------------------------


def _read_raw(servers: str, topic: str, **given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return raw rows with headers, their times as milliseconds, and why records are bad."""
    described = KafkaSource(
        servers,
        topic=topic,
        format="raw",
        ending_offsets="latest",
        on_bad_record="dead_letter",
        **given,
    )
    settings = replace(described.settings, include_headers=True)
    reader = KafkaReader(settings, described.splits(), CONTEXT)
    rows: list[dict[str, Any]] = []
    try:
        while not isinstance(batch := reader.poll(0.2), EndOfInput):
            if batch is None:
                continue
            words = batch.column("timestamp").view(pa.int64()).to_pylist()
            shown = batch.drop_columns(["timestamp"]).to_pylist()
            rows += [{**row, "timestamp": word} for row, word in zip(shown, words, strict=True)]
        reasons = [letter.reason for letter in reader.take_rejected()]
    finally:
        reader.close()
    return rows, reasons


def test_headers_of_other_clients_arrive_and_a_name_that_is_no_text_makes_a_bad_record(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    good: list[list[tuple[bytes, bytes | None]]] = [
        [(text.encode(), text.encode()) for text in TEXTS if "\0" not in text],
        [(b"n", octets) for octets in BYTES],
        [(b"a", b"1"), (b"b", None), (b"a", b"1"), (b"a", None), (b"a", b"")],
    ]
    with OctetProducer(servers) as producer:
        producer.produce(topic, b"0", headers=good[0])
        producer.produce(topic, b"1", headers=[(b"a", b"1"), (b"\xff\xfe", b"2")])
        producer.produce(topic, b"2", headers=good[1])
        for _ in range(20):
            producer.produce(topic, b"3", headers=[(b"\xed\xa0\x80", None), (b"a", b"")])
        producer.produce(topic, b"4", headers=good[2])
        producer.produce(topic, None, key=b"k")
    rows, reasons = _read_raw(servers, topic)
    assert [row["value"] for row in rows] == [b"0", b"2", b"4", None]
    shown = [
        row["headers"] and [(one["key"].encode(), one["value"]) for one in row["headers"]]
        for row in rows
    ]
    assert shown == [*good, None]
    assert len(reasons) == 21
    assert all("its headers: " in reason and "UTF-8" in reason for reason in reasons)


def test_a_header_s_name_that_is_no_text_changes_nothing_where_headers_are_not_read(
    servers: str, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    with SchemaRegistryDouble() as registry, OctetProducer(servers) as producer:
        fields = [{"name": "id", "type": "long"}]
        schema = {"type": "record", "name": "Row", "fields": fields}
        schema_id = registry.keep(f"{topic}-value", schema)
        # Many, because Python calls a method in another way once it has done so often.
        for number in range(60):
            value = b"\0" + schema_id.to_bytes(4, "big") + bytes([2 * number])
            producer.produce(topic, value, headers=[(b"\xff", b"")])
        producer.flush()
        described = source(
            servers,
            topic,
            format="avro",
            schema="id BIGINT NOT NULL",
            schema_registry=registry.url,
            ending_offsets="latest",
        )
        with reading(described) as reader:
            assert [row["id"] for row in read_to_end(reader)] == list(range(60))


@pytest.mark.parametrize("native", [False, None], ids=["objects", "installed"])
def test_times_of_records_are_those_that_the_producer_wrote(
    onceflow_kafka: KafkaServer, *, native: bool | None
) -> None:
    # A broker refuses times of the future unless it is told otherwise.
    limits = {"message.timestamp.after.max.ms": str(2**63 - 1)}
    topic = onceflow_kafka.create_topic(f"times-{uuid.uuid4().hex}", config=limits)
    servers = onceflow_kafka.bootstrap_servers
    times = [one for one in (*TIMES, *UNTIMELY, -1) if one]
    with OctetProducer(servers) as producer:
        for at, one in enumerate(times):
            producer.produce(topic, b"%d" % at, timestamp_ms=one)
    described = KafkaSource(
        servers,
        topic=topic,
        format="raw",
        ending_offsets="latest",
        on_bad_record="drop",
        native=native,
    )
    with reading(described) as reader:
        rows: list[Any] = []
        while not isinstance(batch := reader.poll(0.2), EndOfInput):
            if isinstance(batch, pa.RecordBatch):
                words = batch.column("timestamp").view(pa.int64()).to_pylist()
                rows += zip(batch.column("offset").to_pylist(), words, strict=True)
    expected = [
        (at, None if one == -1 else one) for at, one in enumerate(times) if one not in UNTIMELY
    ]
    assert rows == expected
