"""Every value of every column type arrives from Kafka as it was written, or the record is bad.

Each cell is a format, a column type and all edges of its values. An encoder that is not the
product's writes them. What the job gets is exactly the value, or a bad record that says why. A
value that Python has is never refused, and neither is a type that the documents list for its
format (`docs/reference/source-types.md`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pyarrow as pa
import pytest
from confluent_kafka import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import types as arrow
from tests.support.edge_values import NESTED, SCALARS, SHAPES, EdgeColumn, parameters
from tests.support.exact_values import Instant, Local, exact_values, same
from tests.support.source_encoders import (
    NotWritable,
    avro_schema,
    avro_writer,
    csv_line,
    debezium_change,
    debezium_change_beside_schema,
    frame,
    is_beyond_python,
    is_not_finite,
    json_record,
    message_writer,
    protobuf_schema,
    to_avro,
    to_json,
)
from tests.unit.sources.test_kafka_fetched import fetched

from onceflow.clients.kafka.registry import CompiledSchema, KeptSchema, SchemaKind
from onceflow.core.arrow.kinds import holds
from onceflow.core.errors import ConfigError
from onceflow.formats.avro.decoder import AvroDecoder, as_member, avro_record
from onceflow.formats.avro.schema import columns_of
from onceflow.formats.debezium.avro import DebeziumAvroDecoder, columns_of_change
from onceflow.formats.debezium.changes import UnavailableValues, schema_of_changes
from onceflow.formats.decoding import BatchDecoder
from onceflow.formats.protobuf.decoder import ProtobufDecoder
from onceflow.formats.protobuf.schema import (
    columns_of_message,
    compile_schema,
    message_of,
)
from onceflow.formats.registry_schemas import VALUE_SCHEMA_ID, SchemaCache
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.decoded_rows import DecodedRows, Rows
from onceflow.sources.kafka.fetched import FetchedRecords
from onceflow.sources.kafka.settings import ValueFormat
from onceflow.sources.kafka.value_formats import rows_of

_REASONS = ("'v'", "years 1 to 9999", "Timestamp", "JSON is malformed", "CSV column #1")
"""Words of which each reason of a bad record has one: the column, or what is wrong."""
_NATIVE_ROWS = 64
"""The native decoder takes no fewer records at once."""


@dataclass(frozen=True)
class Cell:
    """One column of the catalogue, with names that every format takes."""

    kind: pa.DataType
    values: Sequence[Any]

    @property
    def columns(self) -> pa.Schema:
        return pa.schema([pa.field("v", self.kind)])


def cell_of(edge: EdgeColumn) -> Cell:
    return Cell(_rename_type(edge.type), list(map(_rename_fields, exact_values(edge.values))))


def _rename_type(kind: pa.DataType) -> pa.DataType:
    """Return `kind` without the blank in a field's name, which Avro and Protobuf have not."""
    if arrow.is_struct(kind):
        return pa.struct(
            [
                pa.field(field.name.replace(" ", "_"), _rename_type(field.type), field.nullable)
                for field in kind
            ]
        )
    if arrow.is_map(kind):
        return pa.map_(kind.key_type, kind.item_field.with_type(_rename_type(kind.item_type)))
    if arrow.is_list(kind):
        return pa.list_(kind.value_field.with_type(_rename_type(kind.value_type)))
    if arrow.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_rename_type(kind.value_type)))
    return kind


def _rename_fields(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_rename_fields, cast("Sequence[Any]", value)))
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {key.replace(" ", "_"): _rename_fields(one) for key, one in entries.items()}
    return value


def source(value_format: str, **given: Any) -> KafkaSource:
    return KafkaSource(
        "nowhere:1",
        topic="rows",
        format=value_format,
        on_bad_record="dead_letter",
        **given,
    )


def read(
    described: KafkaSource,
    values: Sequence[bytes | None],
    *,
    keys: Sequence[bytes | None] | None = None,
    column: str = "v",
) -> list[tuple[bool, Any]]:
    """Return for each record whether it became a row, and its value or why it is bad."""
    return _collect(rows_of(described.settings), _messages(values, keys), column)


def _messages(
    values: Sequence[bytes | None], keys: Sequence[bytes | None] | None = None
) -> list[Message]:
    pairs = zip(values, keys or [None] * len(values), strict=True)
    return [
        Message(topic="rows", partition=0, offset=at, value=value, key=key)
        for at, (value, key) in enumerate(pairs)
    ]


def read_buffers(described: KafkaSource, values: Sequence[bytes]) -> list[tuple[bool, Any]]:
    """Return the same of records that the native reader has fetched."""
    many = [*values] * (1 + _NATIVE_ROWS // len(values))
    records = fetched(many, b"\n")
    return _collect(rows_of(described.settings), records, "v", step=2)[: len(values)]


def _collect(
    rows: Rows, records: list[Message] | FetchedRecords, column: str, *, step: int = 1
) -> list[tuple[bool, Any]]:
    rows.add(records)
    assert rows.ready()
    batch = rows.take()
    batch.validate(full=True)
    found = iter(exact_values(batch.column(batch.schema.get_field_index(column))))
    reasons = {letter.offset: letter.reason for letter in rows.refusals.take_letters()}
    return [
        (False, reasons[offset]) if offset in reasons else (True, next(found))
        for offset in range(0, step * len(records), step)
    ]


def check(
    results: Sequence[tuple[bool, Any]],
    values: Sequence[Any],
    may_refuse: Callable[[Any], bool],
) -> None:
    """Raise AssertionError unless each value arrived, or is one that the format may refuse."""
    for value, (is_row, result) in zip(values, results, strict=True):
        if is_row:
            assert same(result, value), f"{value!r} was written, and {result!r} arrived"
        else:
            assert may_refuse(value), f"{value!r} was refused: {result}"
            assert any(word in result for word in _REASONS), result


def writable(
    cell: Cell, encode: Callable[[Any, pa.DataType], bytes]
) -> tuple[list[Any], list[bytes]]:
    """Return the values that the format has a form for, and their records."""
    values: list[Any] = []
    records: list[bytes] = []
    for value in cell.values:
        try:
            records.append(encode(value, cell.kind))
        except NotWritable:
            continue
        values.append(value)
    return values, records


def may_refuse_json(kind: pa.DataType, value: Any) -> bool:
    # Arrow reads no zero inside of a value as a decimal whose scale is above its precision.
    is_odd = arrow.is_nested(kind) and holds(kind, _has_scale_above_precision)
    return is_odd or is_beyond_python(value) or is_not_finite(value)


def _has_scale_above_precision(kind: pa.DataType) -> bool:
    return bool(arrow.is_decimal(kind) and kind.scale > kind.precision)


# --- which types a format takes -----------------------------------------------------------------


def _json_takes(kind: pa.DataType) -> bool:
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        return _json_takes(kind.value_type)
    if arrow.is_map(kind):
        return _json_takes(kind.item_type)
    if arrow.is_struct(kind):
        return all(_json_takes(field.type) for field in kind)
    if arrow.is_dictionary(kind):
        return kind.index_type.bit_width >= 32 and _json_takes(kind.value_type)
    return bool(
        arrow.is_integer(kind)
        or arrow.is_boolean(kind)
        or arrow.is_decimal(kind)
        or arrow.is_timestamp(kind)
        or arrow.is_date32(kind)
        or (arrow.is_floating(kind) and not arrow.is_float16(kind))
        or kind in (pa.string(), pa.large_string(), pa.string_view())
        or kind in (pa.binary(), pa.large_binary())
    )


def _csv_takes(kind: pa.DataType) -> bool:
    if arrow.is_dictionary(kind):
        return kind.index_type == pa.int32()
    return bool(
        arrow.is_integer(kind)
        or arrow.is_boolean(kind)
        or arrow.is_decimal(kind)
        or arrow.is_timestamp(kind)
        or arrow.is_date(kind)
        or arrow.is_time(kind)
        or arrow.is_duration(kind)
        or arrow.is_null(kind)
        or (arrow.is_floating(kind) and not arrow.is_float16(kind))
        or kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
        or arrow.is_fixed_size_binary(kind)
    )


ALL = [*parameters(SCALARS), *parameters(NESTED)]


def _has_two_levels(edge: EdgeColumn) -> bool:
    twofold = (shape for shape, levels in SHAPES.items() if len(levels) > 1)
    return any(edge.name.startswith(f"{shape} of ") for shape in twofold)


WITH_ONE_LEVEL = [
    *parameters(SCALARS),
    *parameters(replace(one, is_short=one.is_short and not _has_two_levels(one)) for one in NESTED),
]
"""The same, for a form whose second level is the code of another form, too."""


def describe(
    value_format: str, columns: pa.Schema, takes: Callable[[pa.DataType], bool], **given: Any
) -> KafkaSource | None:
    """Return the source, or None where it refuses the type, which the format must not take."""
    if takes(columns.field("v").type):
        return source(value_format, schema=columns, **given)
    with pytest.raises(ConfigError, match="'v"):
        source(value_format, schema=columns, **given)
    return None


JSON_FORMS: dict[str, tuple[str, Callable[[Any, pa.DataType], bytes], dict[str, Any]]] = {
    "json": ("json", json_record, {}),
    "json-schema": (
        "json-schema",
        lambda value, kind: frame(1, json_record(value, kind)),
        {"schema_registry": "http://nowhere:1"},
    ),
    "debezium-json": (
        "debezium-json",
        debezium_change,
        {"decimal_handling_mode": "string", "binary_handling_mode": "base64"},
    ),
    "debezium-json with schema": ("debezium-json", debezium_change_beside_schema, {}),
}


@pytest.mark.parametrize("edge", ALL)
@pytest.mark.parametrize("form", ["json", "debezium-json with schema"])
def test_values_of_json_arrive_exactly(edge: EdgeColumn, form: str) -> None:
    _check_json(edge, form)


@pytest.mark.parametrize("edge", WITH_ONE_LEVEL)
@pytest.mark.parametrize("form", ["json-schema", "debezium-json"])
def test_values_of_json_in_other_frames_arrive_exactly(edge: EdgeColumn, form: str) -> None:
    _check_json(edge, form)


def _check_json(edge: EdgeColumn, form: str) -> None:
    value_format, encode, options = JSON_FORMS[form]
    cell = cell_of(edge)
    described = describe(value_format, cell.columns, _json_takes, **options)
    if described is None:
        return
    values, records = writable(cell, encode)
    check(read(described, records), values, partial(may_refuse_json, cell.kind))
    if form == "json":
        check(read_buffers(described, records), values, partial(may_refuse_json, cell.kind))


@pytest.mark.parametrize("edge", ALL)
def test_values_of_csv_arrive_exactly(edge: EdgeColumn) -> None:
    cell = cell_of(edge)
    columns = pa.schema([("n", pa.int64()), ("v", cell.kind)])
    described = describe("csv", columns, _csv_takes)
    if described is None:
        return
    values, records = writable(cell, csv_line)
    check(read(described, records), values, _may_refuse_csv)
    # One by one, which is another way than a whole batch.
    alone = [read(described, [record])[0] for record in records[:8]]
    check(alone, values[:8], _may_refuse_csv)


def _may_refuse_csv(value: Any) -> bool:
    # Arrow reads no time of the second in which 64 bits of nanoseconds begin.
    is_first = isinstance(value, Local | Instant) and value.nanoseconds < 10**9 - 2**63
    return is_beyond_python(value) or (is_first and value.nanoseconds >= -(2**63))


class KnownSchemas(SchemaCache):
    """Schemas by id that were fetched before: what a reader has after its first batch."""

    def __init__(self, *schemas: KeptSchema) -> None:
        self.header = VALUE_SCHEMA_ID
        self._schemas = {schema.id: schema for schema in schemas}

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Ask nothing."""

    def ready(self) -> bool:
        """Return True."""
        return True

    def __getitem__(self, schema_id: int) -> KeptSchema:
        """Return a schema."""
        return self._schemas[schema_id]


def decode(
    decoder: BatchDecoder, columns: pa.Schema, values: Sequence[bytes]
) -> list[tuple[bool, Any]]:
    """Return what a decoder makes of `values`, in the form of `read`."""
    given = source("csv", schema="v BIGINT").settings
    return _collect(DecodedRows(given, columns, decoder), _messages(values), columns.names[0])


@pytest.mark.parametrize("edge", ALL)
def test_values_of_avro_arrive_exactly(edge: EdgeColumn) -> None:
    cell = cell_of(edge)
    try:
        schema: Any = avro_schema(cell.kind)
    except NotWritable:
        return
    row = {"type": "record", "name": "R", "fields": [{"name": "v", "type": schema}]}
    kept, write = KeptSchema(1, SchemaKind.AVRO, json.dumps(row)), avro_writer(row)

    def encode(value: Any, kind: pa.DataType) -> bytes:
        return frame(1, write({"v": to_avro(value, kind)}))

    values, records = writable(cell, encode)
    reader = avro_record(kept)
    registered = columns_of(reader)
    schemas = KnownSchemas(kept)
    found = decode(AvroDecoder(registered, reader, schemas), registered, records)
    check(found, values, is_beyond_python)
    fitted = decode(AvroDecoder(cell.columns, None, schemas), cell.columns, records)
    check(fitted, values, partial(_may_not_fit, cell.kind))


@pytest.mark.parametrize("edge", WITH_ONE_LEVEL)
def test_values_of_keys_and_of_debezium_in_avro_arrive_exactly(edge: EdgeColumn) -> None:
    cell = cell_of(edge)
    try:
        schema: Any = avro_schema(cell.kind)
    except NotWritable:
        return
    key, write_key = KeptSchema(1, SchemaKind.AVRO, json.dumps(schema)), avro_writer(schema)
    values, records = writable(cell, lambda value, kind: frame(1, write_key(to_avro(value, kind))))
    member = partial(as_member, name="v")
    columns = columns_of(member(key))
    decoder = AvroDecoder(columns, member(key), KnownSchemas(key), member)
    check(decode(decoder, columns, records), values, is_beyond_python)
    row = {"type": "record", "name": "R", "fields": [{"name": "v", "type": schema}]}
    sides = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "R"]}]
    fields = [*sides, {"name": "op", "type": "string"}]
    envelope = {"type": "record", "name": "E", "fields": fields}
    kept, write = KeptSchema(2, SchemaKind.AVRO, json.dumps(envelope)), avro_writer(envelope)

    def encode(value: Any, kind: pa.DataType) -> bytes:
        change = {"before": None, "after": {"v": to_avro(value, kind)}, "op": "c"}
        return frame(2, write(change))

    values, records = writable(cell, encode)
    rows = columns_of_change(avro_record(kept))
    unavailable = UnavailableValues("not sent")
    changes = DebeziumAvroDecoder(rows, KnownSchemas(kept), unavailable, avro_record(kept))
    check(decode(changes, schema_of_changes(rows), records), values, is_beyond_python)


def _may_not_fit(kind: pa.DataType, value: Any) -> bool:
    # No float of Avro is read as one of 16 bits.
    return is_beyond_python(value) or holds(kind, arrow.is_float16)


@pytest.mark.parametrize("edge", ALL)
def test_values_of_protobuf_arrive_exactly(edge: EdgeColumn) -> None:
    cell = cell_of(edge)
    try:
        text = protobuf_schema(cell.kind)
    except NotWritable:
        return
    write = message_writer(text)
    values, records = writable(cell, lambda value, _: frame(1, b"\0" + write(value)))
    kept = KeptSchema(1, SchemaKind.PROTOBUF, text)
    compiled = CompiledSchema(kept, compile_schema(kept))
    schemas = KnownSchemas(kept)
    described = [cell.columns]
    if not holds(cell.kind, lambda kind: kind == pa.timestamp("ns", "UTC")):
        described.append(columns_of_message(message_of(compiled.descriptors)))
    for columns in described:
        decoder = ProtobufDecoder(columns, compiled, None, schemas)
        check(decode(decoder, columns, records), values, is_beyond_python)


def test_raw_keys_values_headers_and_times_arrive_exactly() -> None:
    octets = next(edge for edge in SCALARS if edge.name == "binary")
    values: list[bytes | None] = octets.values.to_pylist()
    described = source("raw")
    keys = values[::-1]
    assert [result for _, result in read(described, values, keys=keys, column="value")] == values
    assert [result for _, result in read(described, values, keys=keys, column="key")] == keys
    texts = next(edge for edge in SCALARS if edge.name == "string").values.to_pylist()
    lines = [b"1"] * len(texts)
    by_text = source("csv", schema="v BIGINT", key_format="string")
    encoded = [None if text is None else text.encode() for text in texts]
    assert [one for _, one in read(by_text, lines, keys=encoded, column="_key")] == texts


# --- drawn values -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_drawn_decimals_and_times_arrive_exactly(data: st.DataObject) -> None:
    """Decimals of any digits and moments of any unit, in a column whose type is drawn, too."""
    width, most = data.draw(st.sampled_from([(128, 38), (256, 76)]))
    precision = data.draw(st.integers(1, most))
    scale = data.draw(st.integers(0, precision))
    make = pa.decimal128 if width == 128 else pa.decimal256
    numbers = data.draw(st.lists(st.integers(1 - 10**precision, 10**precision - 1), max_size=5))
    words = b"".join(number.to_bytes(width // 8, "little", signed=True) for number in numbers)
    kind = make(precision, scale)
    decimals = pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(words)])
    unit = data.draw(st.sampled_from(["s", "ms", "us", "ns"]))
    zone = data.draw(st.sampled_from([None, "UTC"]))
    ticks = data.draw(st.lists(st.integers(-(2**62), 2**62), max_size=5))
    moments = pa.array(ticks, pa.int64()).view(pa.timestamp(unit, zone))
    for column in (decimals, moments):
        cell = Cell(column.type, exact_values(column))
        for value_format, encode, options in JSON_FORMS.values():
            values, records = writable(cell, encode)
            described = source(value_format, schema=cell.columns, **options)
            check(read(described, records), values, partial(may_refuse_json, cell.kind))
        values, records = writable(cell, csv_line)
        lines = source("csv", schema=pa.schema([("n", pa.int64()), ("v", cell.kind)]))
        check(read(lines, records), values, _may_refuse_csv)


def test_the_encoders_write_what_is_meant() -> None:
    """A matrix of values that no encoder writes would be green, too."""
    takes = {edge.name for edge in SCALARS if _json_takes(edge.type)}
    assert {"int64", "decimal256(76, 38)", "timestamp[ns]", "string", "binary"} <= takes
    for edge in SCALARS:
        if edge.name in takes:
            assert len(writable(cell_of(edge), json_record)[0]) == len(edge.values)
    assert to_json(True, pa.bool_()) is True
    assert ValueFormat.JSON.value == "json"
