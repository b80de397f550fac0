"""A schema's id is that of its context in the registry, and stands before the value."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Message
from tests.support.protobuf_messages import message_class
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_kafka_avro import framed, messages, source, taken

from onceflow.core.errors import BadRecord
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.value_formats import rows_of

CONTEXT = ":.other:payments"


def record_of(*names: str) -> dict[str, Any]:
    fields = [{"name": name, "type": "long"} for name in names]
    return {"type": "record", "name": "Pair", "fields": fields}


def read(described: KafkaSource, given: list[Message]) -> list[dict[str, Any]]:
    rows = rows_of(described.settings)
    rows.add(given)
    return taken(rows).to_pylist()


def test_a_record_is_decoded_by_the_schema_of_its_own_context(
    registry: SchemaRegistryDouble,
) -> None:
    swapped, own = record_of("b", "a"), record_of("a", "b")
    assert registry.keep("else-value", swapped) == registry.keep(f"{CONTEXT}-value", own) == 1
    values = messages([*framed(1, own, [{"a": 1, "b": 2}])])
    for schema in (None, "a BIGINT, b BIGINT"):
        given: dict[str, Any] = {} if schema is None else {"schema": schema}
        described = source(registry.url, subject=f"{CONTEXT}-value", **given)
        assert read(described, values) == [{"a": 1, "b": 2}]


def test_a_schema_that_only_a_context_has_is_found_with_what_it_refers_to(
    registry: SchemaRegistryDouble,
) -> None:
    inner = record_of("a", "b")
    registry.keep("inner", {**inner, "fields": inner["fields"][::-1]})
    registry.keep(":.other:inner", inner)
    outer = {"type": "record", "name": "Outer", "fields": [{"name": "pair", "type": "Pair"}]}
    schema_id = registry.keep(f"{CONTEXT}-value", outer, references={"Pair": ("inner", 1)})
    assert schema_id == 2
    whole = {**outer, "fields": [{"name": "pair", "type": inner}]}
    values = messages([*framed(2, whole, [{"pair": {"a": 1, "b": 2}}])])
    described = source(registry.url, subject=f"{CONTEXT}-value", deadline_s=1.0)
    assert read(described, values) == [{"pair": {"a": 1, "b": 2}}]


def test_a_key_is_decoded_by_the_schema_of_its_own_context(registry: SchemaRegistryDouble) -> None:
    own = record_of("a", "b")
    registry.keep("else-key", record_of("b", "a"))
    registry.keep(f"{CONTEXT}-key", own)
    described = source(
        registry.url,
        format="json",
        schema="id BIGINT",
        key_format="avro",
        key_subject=f"{CONTEXT}-key",
    )
    (key,) = framed(1, own, [{"a": 1, "b": 2}])
    message = Message(topic="payments", partition=2, offset=0, key=key, value=b'{"id": 1}')
    assert read(described, [message]) == [{"id": 1, "_key": {"a": 1, "b": 2}}]


def test_a_schema_of_a_subject_that_is_named_by_the_record_s_type_is_found(
    registry: SchemaRegistryDouble,
) -> None:
    registry.keep("Pair", record_of("a", "b"))
    values = messages([*framed(1, record_of("a", "b"), [{"a": 1, "b": 2}])])
    assert read(source(registry.url, schema="a BIGINT"), values) == [{"a": 1}]


@pytest.mark.parametrize("value_format", ["avro", "protobuf"])
def test_an_id_in_a_header_is_told_at_once_and_the_registry_is_not_asked(
    registry: SchemaRegistryDouble, value_format: str
) -> None:
    if value_format == "avro":
        registry.keep("payments-value", record_of("a", "b"))
        (good,) = framed(1, record_of("a", "b"), [{"a": 1, "b": 2}])
    else:
        text = 'syntax = "proto3"; message Pair { int64 a = 1; int64 b = 2; }'
        registry.keep("payments-value", text, kind="PROTOBUF")
        body: bytes = message_class(text)(a=1, b=2).SerializeToString()
        good = b"\0\0\0\0\1\0" + body
    described = source(registry.url, format=value_format, deadline_s=60.0, on_bad_record="drop")
    rows = rows_of(described.settings)
    registry.asked.clear()
    # Payloads that begin with a zero byte and look like ids, one of them a known one.
    payloads = [b"\0\0\0\0\1\0\2\4", b"\0\0\0\x09\x09\0", b"\0\1\2\3\4\0", b"\2\4"]
    started = time.monotonic()
    rows.add(
        [
            *messages([good]),
            *(
                Message(
                    topic="payments",
                    partition=2,
                    offset=at,
                    value=payload,
                    headers=[("__value_schema_id", b"\1" + bytes(16))],
                )
                for at, payload in enumerate(payloads, 1)
            ),
        ]
    )
    found = taken(rows).to_pylist()
    assert found == [{"a": 1, "b": 2}]
    assert time.monotonic() - started < 30
    assert len(registry.asked) <= 1
    assert not [asked for asked in registry.asked if "ids/1?" not in asked]
    failing = source(registry.url, format=value_format)
    rows = rows_of(failing.settings)
    header: list[tuple[str, str | bytes | None]] = [("other", None), ("__value_schema_id", b"")]
    rows.add([Message(topic="payments", partition=2, offset=7, value=good, headers=header)])
    with pytest.raises(BadRecord, match="offset 7: its schema id is in the record's header __val"):
        taken(rows)
