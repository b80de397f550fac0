"""Keys, headers and times of Kafka's records arrive as they were written, or the record is bad.

Each cell is a format of keys, a type, and all edges of its values, null at each level among them.
Encoders that are not the product's write them, and they are read as a job reads them, beside a
value.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE as NO_CLOCK
from pyarrow import types as arrow
from tests.conformance.test_source_values import KnownSchemas, may_refuse_json
from tests.support.edge_values import BYTES, LONG_TEXTS, TEXTS
from tests.support.exact_values import exact_values, same
from tests.support.record_cells import RecordColumn, column_groups, is_finer_than_python
from tests.support.registered_readers import compiled_message
from tests.support.source_encoders import (
    NotWritable,
    avro_schema,
    avro_writer,
    frame,
    is_beyond_python,
    protobuf_field,
    set_field,
    to_avro,
    to_json,
)

from onceflow.clients.kafka.registry import KeptSchema, SchemaKind
from onceflow.core.spi.dead_letters import DeadLetter
from onceflow.formats.registry_schemas import KEY_SCHEMA_ID
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.decoded_rows import Rows
from onceflow.sources.kafka.settings import KafkaSettings
from onceflow.sources.kafka.value_formats import rows_of


class KeptSubject:
    """A subject of a registry with one version."""

    def __init__(self, kept: KeptSchema) -> None:
        self.kind = kept.kind
        self._kept = kept

    def read_latest(self) -> KeptSchema:
        """Return the version."""
        return self._kept


def keep(schema: Any, kind: SchemaKind) -> KeptSchema:
    return KeptSchema(1, kind, schema if isinstance(schema, str) else json.dumps(schema))


@contextmanager
def source(kept: KeptSchema, key_format: str) -> Generator[KafkaSource, None, None]:
    """Yield a source whose keys are of the schema `kept`, which no registry is asked for."""
    schemas = KnownSchemas(kept)
    schemas.header = KEY_SCHEMA_ID
    subject = nullcontext(KeptSubject(kept))
    with (
        patch("onceflow.sources.kafka.registered.open_subject", return_value=subject),
        patch.object(KafkaSettings, "open_key_schemas", return_value=schemas),
    ):
        yield KafkaSource(
            "nowhere:1",
            topic="rows",
            format="csv",
            schema="v BIGINT",
            on_bad_record="dead_letter",
            key_format=key_format,
            schema_registry="http://nowhere:1",
        )


def read_registered(
    kept: KeptSchema, key_format: str, keys: Sequence[bytes | None]
) -> list[tuple[bool, Any]]:
    """Return what `read_keys` returns of keys by the schema `kept`."""
    with source(kept, key_format) as described:
        return read_keys(described, keys)


def take(rows: Rows, records: Sequence[Message]) -> tuple[pa.RecordBatch, list[DeadLetter]]:
    """Return the rows of `records`, and those that are bad."""
    rows.add(list(records))
    assert rows.ready()
    batch = rows.take()
    batch.validate(full=True)
    return batch, rows.refusals.take_letters()


def read_keys(described: KafkaSource, keys: Sequence[bytes | None]) -> list[tuple[bool, Any]]:
    """Return for each key whether its record became a row, and the key or why it is bad."""
    records = [
        Message(topic="rows", partition=0, offset=at, key=key, value=b"%d" % at)
        for at, key in enumerate(keys)
    ]
    batch, letters = take(rows_of(described.settings), records)
    numbers: list[int] = batch.column("v").to_pylist()
    found = dict(zip(numbers, exact_values(batch.column("_key")), strict=True))
    reasons = {letter.offset: letter.reason for letter in letters}
    assert len(found) + len(reasons) == len(keys)
    return [(False, reasons[at]) if at in reasons else (True, found[at]) for at in range(len(keys))]


def find_faults(
    results: Sequence[tuple[bool, Any]], values: Sequence[Any], may_refuse: Any
) -> list[str]:
    """Return what is wrong: keys that arrived as others, and those refused without need."""
    faults: list[str] = []
    for value, (is_row, result) in zip(values, results, strict=True):
        if is_row and not same(result, value):
            faults.append(f"{value!r:.100} arrived as {result!r:.100}")
        elif not is_row and not (may_refuse(value) and result.startswith("its key: ")):
            faults.append(f"{value!r:.100} was refused: {result:.200}")
    return faults


# --- Avro ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", column_groups())
def test_keys_in_avro_arrive_exactly(
    columns: list[RecordColumn],
) -> None:
    altered: dict[str, list[str]] = {}
    for column in columns:
        try:
            schema: Any = avro_schema(column.type)
        except NotWritable:
            continue
        kept = keep(schema, SchemaKind.AVRO)
        write = avro_writer(schema)
        values: list[Any] = []
        keys: list[bytes | None] = []
        for value in column.written:
            try:
                keys.append(frame(1, write(to_avro(value, column.type))))
            except NotWritable:
                continue
            values.append(value)
        results = read_registered(kept, "avro", [*keys, None])
        faults = find_faults(results, [*values, None], is_beyond_python)
        if faults:
            altered[column.edge.name] = faults
    assert altered == {}


def test_a_key_with_a_date_or_time_that_python_does_not_have_is_a_bad_record() -> None:
    """As such a value does: functions, and several sinks, see keys as values of Python."""
    for logical, number in (("date", 2_932_897), ("timestamp-micros", 253_402_300_800 * 10**6)):
        schema = {"type": "int" if logical == "date" else "long", "logicalType": logical}
        write = avro_writer(schema)
        keys = [frame(1, write(one)) for one in (number - 1, number, -1)]
        results = read_registered(keep(schema, SchemaKind.AVRO), "avro", keys)
        assert [is_row for is_row, _ in results] == [True, False, True]
        assert "its key: column '_key'" in results[1][1]
        assert "years 1 to 9999" in results[1][1]


# --- Protobuf -----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", column_groups())
def test_keys_in_protobuf_arrive_exactly(
    columns: list[RecordColumn],
) -> None:
    """One message has a field for each column, of which a key has one: one schema is compiled."""
    fields: list[str] = []
    taken: list[RecordColumn] = []
    for column in columns:
        try:
            fields.append(protobuf_field(column.type, column.field, len(fields) + 1))
        except NotWritable:
            continue
        taken.append(column)
    if not taken:
        return
    head = 'syntax = "proto3"; import "google/protobuf/timestamp.proto";'
    text = f"{head} message Key {{ {' '.join(fields)} }}"
    message_type = compiled_message(text)
    values: list[tuple[str, Any]] = []
    keys: list[bytes | None] = []
    for column in taken:
        for value in column.written:
            message = message_type()
            try:
                set_field(message, column.field, value)
            except NotWritable:
                continue
            keys.append(frame(1, b"\0" + message.SerializeToString()))
            values.append((column.field, value))
    results = read_registered(keep(text, SchemaKind.PROTOBUF), "protobuf", [*keys, None])
    assert results[-1] == (True, None)
    members = [
        (is_row, found[name] if is_row else found)
        for (is_row, found), (name, _) in zip(results[:-1], values, strict=True)
    ]
    assert find_faults(members, [value for _, value in values], _may_refuse_protobuf) == []


def _may_refuse_protobuf(value: Any) -> bool:
    return is_beyond_python(value) or is_finer_than_python(value)


# --- JSON Schema --------------------------------------------------------------------------------

_CONNECT = {
    pa.int8(): "int8",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
}


def json_schema(kind: pa.DataType) -> dict[str, Any]:
    """Return the schema of values of `kind`.

    Raises:
        NotWritable: A schema does not say that values are of it.
    """
    if arrow.is_struct(kind):
        properties = {one.name: _or_null(one.type) for one in kind}
        return {"type": "object", "properties": properties}
    if arrow.is_map(kind):
        return {"type": "object", "additionalProperties": _or_null(kind.item_type)}
    if arrow.is_list(kind):
        return {"type": "array", "items": _or_null(kind.value_type)}
    if kind in _CONNECT:
        return {"type": "integer", "connect.type": _CONNECT[kind]}
    for known, schema in (
        (pa.bool_(), {"type": "boolean"}),
        (pa.float32(), {"type": "number", "connect.type": "float32"}),
        (pa.float64(), {"type": "number"}),
        (pa.string(), {"type": "string"}),
        (pa.binary(), {"type": "string", "connect.type": "bytes"}),
        (pa.date32(), {"type": "string", "format": "date"}),
        (pa.timestamp("us", "UTC"), {"type": "string", "format": "date-time"}),
    ):
        if kind == known:
            return schema
    raise NotWritable(f"JSON Schema: {kind}")


def _or_null(kind: pa.DataType) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, json_schema(kind)]}


@pytest.mark.parametrize("columns", column_groups())
def test_keys_by_json_schema_arrive_exactly(
    columns: list[RecordColumn],
) -> None:
    altered: dict[str, list[str]] = {}
    for column in columns:
        kind = column.type
        try:
            schema = _or_null(kind)
        except NotWritable:
            continue
        keys: list[bytes | None] = []
        for value in column.written:
            document = json.dumps(to_json(value, kind), ensure_ascii=False).encode()
            keys.append(frame(1, document))
        results = read_registered(keep(schema, SchemaKind.JSON), "json-schema", [*keys, None])
        values = [*column.written, None]
        faults = find_faults(results, values, partial(may_refuse_json, kind))
        if faults:
            altered[column.edge.name] = faults
    assert altered == {}


def test_a_key_with_more_digits_than_microseconds_is_a_bad_record_unless_they_are_zeros() -> None:
    kind = pa.timestamp("us", "UTC")
    inside = pa.struct([pa.field("at", pa.list_(kind))])
    for shape, wrap in ((kind, '"%s"'), (inside, '{"at": [null, "%s"]}')):
        kept = keep(_or_null(shape), SchemaKind.JSON)
        texts = [
            "2026-01-02T03:04:05.123456000Z",
            "2026-01-02T03:04:05.1234567Z",
            "2026-01-02T00:00:00Z",
        ]
        keys = [frame(1, (wrap % text).encode()) for text in texts]
        results = read_registered(kept, "json-schema", keys)
        assert [is_row for is_row, _ in results] == [True, False, True]
        assert "2026-01-02T03:04:05.1234567Z is finer than the column's unit, us" in results[1][1]


@pytest.mark.parametrize(
    "document", [b'1,"_key":2', b'1,"x":3', b"1}", b"", b" ", b"1 2", b'"a', b"01", b"\xff", b"1,"]
)
def test_a_key_that_is_no_one_document_is_a_bad_record(
    document: bytes,
) -> None:
    kept = keep({"type": "integer"}, SchemaKind.JSON)
    keys = [frame(1, b" 7\n"), frame(1, document), None, frame(1, b"8")]
    results = read_registered(kept, "json-schema", keys)
    assert [is_row for is_row, _ in results] == [True, False, True, True]
    assert [results[at][1] for at in (0, 2, 3)] == [7, None, 8]
    assert results[1][1].startswith("its key: ")


def test_a_key_of_a_message_without_fields_is_an_empty_struct() -> None:
    kept = keep('syntax = "proto3"; message Key {}', SchemaKind.PROTOBUF)
    keys = [frame(1, b"\0"), None, frame(1, b"\0")]
    results = read_registered(kept, "protobuf", keys)
    assert results == [(True, {}), (True, None), (True, {})]


@pytest.mark.parametrize("key_format", ["string", "raw"])
def test_keys_as_text_and_bytes_arrive_exactly_and_no_key_is_null(key_format: str) -> None:
    described = KafkaSource(
        "nowhere:1",
        topic="rows",
        format="csv",
        schema="v BIGINT",
        on_bad_record="dead_letter",
        key_format=key_format,
    )
    texts = [*TEXTS, *LONG_TEXTS]
    keys: list[bytes | None] = [*(text.encode() for text in texts), None, *BYTES]
    results = read_keys(described, keys)
    for key, (is_row, found) in zip(keys, results, strict=True):
        if key_format == "raw" or key is None:
            assert (is_row, found) == (True, key)
            continue
        try:
            text = key.decode()
        except UnicodeDecodeError:
            assert not is_row
            assert "UTF-8" in found
        else:
            assert (is_row, found) == (True, text)


def _pylists(batch: pa.RecordBatch, *names: str) -> list[list[Any]]:
    return [batch.column(name).to_pylist() for name in names]


# --- no value -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value_format", ["json", "csv", "raw"])
def test_a_record_without_a_value_is_null_in_raw_and_else_a_bad_record_that_keeps_its_key(
    value_format: str,
) -> None:
    given: Any = {} if value_format == "raw" else {"schema": "v BIGINT", "key_format": "raw"}
    described = KafkaSource(
        "nowhere:1", topic="rows", format=value_format, on_bad_record="dead_letter", **given
    )
    value = b'{"v": 1}' if value_format == "json" else b"1"
    pairs = [(b"a", value), (b"b", None), (None, None), (None, value), (b"", value)]
    records = [
        Message(topic="rows", partition=0, offset=at, key=key, value=given)
        for at, (key, given) in enumerate(pairs)
    ]
    batch, letters = take(rows_of(described.settings), records)
    if value_format == "raw":
        assert list(zip(*_pylists(batch, "key", "value"), strict=True)) == pairs
        assert letters == []
        return
    assert batch.column("_key").to_pylist() == [b"a", None, b""]
    assert [(letter.offset, letter.key, letter.value) for letter in letters] == [
        (1, b"b", None),
        (2, None, None),
    ]
    assert all("tombstone" in letter.reason for letter in letters)


# --- headers and times --------------------------------------------------------------------------

_SHORTLY = int(dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc).timestamp() * 1000)
TIMES = (
    *(0, 1, 999, 1_000, _SHORTLY, _SHORTLY + 1, 2**31, 253_402_300_799_999),
    *(-2, -999, -1_000, -86_400_001, -62_135_596_800_000),
)
"""Milliseconds since 1970 that Python has, the first and the last one among them."""
UNTIMELY = (253_402_300_800_000, -62_135_596_800_001, 2**63 - 1, -(2**63), _SHORTLY * 1_000)


def read_raw(records: Sequence[Message]) -> tuple[list[dict[str, Any]], list[DeadLetter]]:
    """Return raw rows with their headers, as Spark's format reads them."""
    described = KafkaSource("nowhere:1", topic="rows", format="raw", on_bad_record="dead_letter")
    settings = replace(described.settings, include_headers=True)
    batch, letters = take(rows_of(settings), records)
    words = batch.column("timestamp").view(pa.int64()).to_pylist()
    rows: list[dict[str, Any]] = batch.drop_columns(["timestamp"]).to_pylist()
    return [{**row, "timestamp": word} for row, word in zip(rows, words, strict=True)], letters


def _record(at: int, **given: Any) -> Message:
    return Message(topic="rows", partition=0, offset=at, value=b"v", **given)


def test_headers_arrive_in_their_order_with_doubles_and_null() -> None:
    pairs: list[tuple[str, bytes | None]] = [("n", value) for value in (*BYTES, None)]
    pairs += [(name, name.encode()) for name in TEXTS if "\0" not in name]
    headers: list[list[tuple[str, bytes | None]] | None] = [
        *([pair] for pair in pairs),
        *(pairs, pairs[::-1], [("a", b"1"), ("b", None), ("a", b"1"), ("a", None)], None),
    ]
    rows, letters = read_raw([_record(at, headers=one) for at, one in enumerate(headers)])
    assert letters == []
    shown = [
        row["headers"] and [(one["key"], one["value"]) for one in row["headers"]] for row in rows
    ]
    assert shown == headers


@pytest.mark.parametrize("clock", [TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, NO_CLOCK])
def test_times_of_records_are_exact_to_the_millisecond_or_the_record_is_bad(clock: int) -> None:
    times = [*TIMES, -1, *UNTIMELY]
    records = [_record(at, timestamp=(clock, one)) for at, one in enumerate(times)]
    rows, letters = read_raw(records)
    assert {row["timestampType"] for row in rows} == {clock - 1}
    found = {row["offset"]: row["timestamp"] for row in rows}
    if clock == NO_CLOCK:
        assert found == dict.fromkeys(range(len(times)))
        assert letters == []
        return
    # -1 is Kafka's word for none.
    assert found == {at: None if one == -1 else one for at, one in enumerate([*TIMES, -1])}
    assert [letter.offset for letter in letters] == list(range(len(TIMES) + 1, len(times)))
    for letter, untimely in zip(letters, UNTIMELY, strict=True):
        assert f"its time, {untimely} ms since 1970, is" in letter.reason


@pytest.mark.parametrize("value_format", ["json", "csv", "json-schema"])
def test_times_beside_a_value_are_exact_or_the_record_is_bad(
    value_format: str,
) -> None:
    given: Any = {"schema_registry": "http://nowhere:1"} if value_format == "json-schema" else {}
    described = KafkaSource(
        "nowhere:1",
        topic="rows",
        format=value_format,
        schema="v BIGINT",
        include_metadata=True,
        key_format="raw",
        on_bad_record="dead_letter",
        **given,
    )
    times = [*TIMES, -1, *UNTIMELY]
    value = {"csv": b"7", "json": b'{"v": 7}'}.get(value_format, frame(1, b'{"v": 7}'))
    records = [
        Message(
            topic="rows",
            partition=0,
            offset=at,
            key=b"%d" % at,
            value=value,
            timestamp=(TIMESTAMP_CREATE_TIME, one),
        )
        for at, one in enumerate(times)
    ]
    batch, letters = take(rows_of(described.settings), records)
    words = batch.column("_timestamp").view(pa.int64()).to_pylist()
    assert words == [*TIMES, None]
    assert batch.column("_key").to_pylist() == [b"%d" % at for at in range(len(words))]
    assert [letter.offset for letter in letters] == list(range(len(words), len(times)))
