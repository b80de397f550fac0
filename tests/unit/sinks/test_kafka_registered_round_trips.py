"""The round-trip matrix of the Kafka sink's Protobuf, JSON Schema and raw values.

Each value is encoded as a writer of the sink does it, by a schema that the sink registers,
and is read by Confluent's deserializers, Protobuf's runtime and jsonschema.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import types as arrow
from tests.support import registered_readers
from tests.support.edge_values import SCALARS, invalid_text
from tests.support.exact_values import exact_values
from tests.support.record_cells import (
    Message,
    RecordColumn,
    WrittenRecords,
    column_groups,
    find_altered,
    has_fine_clock,
    is_finer_than_python,
    protobuf_lacks,
    write_records,
)
from tests.support.source_encoders import is_beyond_python, is_not_finite

from onceflow.clients.kafka.registry import SchemaKind
from onceflow.core.arrow.kinds import holds, is_bytes, is_list, is_text, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.formats.encoding import schema_text

NUMBER = pa.field("n", pa.int64(), nullable=False)


def _rows(column: RecordColumn) -> pa.RecordBatch:
    fields = [NUMBER, pa.field(column.field, column.type)]
    numbers = pa.array(range(len(column.values)), pa.int64())
    return pa.RecordBatch.from_arrays([numbers, column.values], schema=pa.schema(fields))


def list_unnamed(written: WrittenRecords, name: str) -> list[str]:
    """Return the reasons of bad rows that do not begin the path of the fault with column `name`."""
    begins = (f"column '{name}'", f"column '{name}.", f"column '{name}[]")
    return [why for why in written.refused.values() if not any(begin in why for begin in begins)]


# --- Protobuf -----------------------------------------------------------------------------------


def protobuf_takes(kind: pa.DataType, *, inside: bool = False) -> bool:
    """Return whether the documents say that Protobuf has fields of `kind`."""
    plain = to_plain_type(kind)
    if arrow.is_map(plain) or is_list(plain):
        item = plain.item_type if arrow.is_map(plain) else plain.value_type
        return not inside and protobuf_takes(item, inside=True)
    if arrow.is_struct(plain):
        return all(protobuf_takes(one.type) for one in plain)
    return bool(
        arrow.is_boolean(plain)
        or arrow.is_integer(plain)
        or arrow.is_float32(plain)
        or arrow.is_float64(plain)
        or arrow.is_decimal(plain)
        or arrow.is_date(plain)
        or arrow.is_time(plain)
        or arrow.is_timestamp(plain)
        or is_text(plain)
        or is_bytes(plain)
    )


def may_refuse_protobuf(kind: pa.DataType, value: Any) -> bool:
    return is_beyond_python(value) or has_fine_clock(value) or protobuf_lacks(value, kind)


def message_of_all(
    columns: Sequence[RecordColumn], *, required: bool
) -> tuple[Message, list[RecordColumn]]:
    """Return a message with a field for each of `columns` that Protobuf has, and those columns.

    A column is then written by the field of its name: one schema is compiled instead of many.
    """
    taken = [column for column in columns if protobuf_takes(column.type)]
    for column in columns:
        if column not in taken:
            schema = pa.schema([pa.field(column.field, column.type)])
            with pytest.raises(ConfigError, match="which Protobuf does not have"):
                schema_text(SchemaKind.PROTOBUF, schema, "row", alone=False)
    fields = [pa.field(one.field, one.type, nullable=not required) for one in taken]
    text = schema_text(SchemaKind.PROTOBUF, pa.schema([NUMBER, *fields]), "row", alone=False)
    return Message(text), taken


@pytest.mark.parametrize("columns", column_groups())
def test_a_value_in_protobuf_is_what_was_written_or_its_row_was_refused(
    columns: list[RecordColumn],
) -> None:
    message, taken = message_of_all(columns, required=False)
    read = registered_readers.protobuf_reader(message.text)
    altered: dict[str, list[str]] = {}
    for column in taken:
        kind, name = column.type, column.field
        written = write_records(_rows(column), message=message, format="protobuf")
        faults = find_altered(
            written,
            column.written,
            lambda record: registered_readers.read_field(read(record["value"]), name, kind),
            lambda value: may_refuse_protobuf(kind, value),
        )
        faults += list_unnamed(written, name)
        if faults:
            altered[column.edge.name] = faults
    assert altered == {}


_LISTS = pa.struct([pa.field("tags", pa.list_(pa.int64()))])


_EMPTY_AND_NULL: list[tuple[pa.DataType, Any, str]] = [
    (pa.list_(pa.int64()), [[], None], "x"),
    (pa.map_(pa.string(), pa.int64()), [[], None], "x"),
    (_LISTS, [{"tags": []}, {"tags": None}], "x.tags"),
    (pa.list_(_LISTS), [[{"tags": []}], [{"tags": []}, {"tags": None}]], "x[].tags"),
    (pa.map_(pa.string(), _LISTS), [[], [("k", {"tags": None})]], "x.*.tags"),
]


@pytest.mark.parametrize(("kind", "values", "path"), _EMPTY_AND_NULL)
def test_a_null_list_or_map_in_protobuf_is_a_bad_row_and_an_empty_one_is_written(
    kind: pa.DataType, values: list[Any], path: str
) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([0, 1]), pa.array(values, kind)], names=["n", "x"])
    message = Message(schema_text(SchemaKind.PROTOBUF, rows.schema, "row", alone=False))
    written = write_records(rows, message=message, format="protobuf")
    assert (written.kept, list(written.refused)) == ([0], [1])
    assert f"column '{path}': a null " in written.refused[1]


def test_columns_that_protobuf_lacks_are_these_alone() -> None:
    assert [edge.name for edge in SCALARS if not protobuf_takes(edge.type)] == [
        "halffloat",
        "duration[s]",
        "duration[ms]",
        "duration[us]",
        "duration[ns]",
        "month_day_nano_interval",
        "null",
    ]


# --- JSON Schema --------------------------------------------------------------------------------


def _json_takes(kind: pa.DataType) -> bool:
    return not holds(kind, lambda one: bool(arrow.is_duration(one) or arrow.is_interval(one)))


def may_refuse_json(value: Any) -> bool:
    return is_beyond_python(value) or is_not_finite(value) or is_finer_than_python(value)


@pytest.mark.parametrize("columns", column_groups())
def test_a_value_by_json_schema_is_what_was_written_or_its_row_was_refused(
    columns: list[RecordColumn],
) -> None:
    """Every document also fits the schema that the sink has registered, and its formats."""
    altered: dict[str, list[str]] = {}
    for column in columns:
        kind, name = column.type, column.field
        if not _json_takes(kind):
            with pytest.raises(ConfigError, match="which JSON does not have"):
                write_records(_rows(column), format="json-schema")
            continue
        written = write_records(_rows(column), format="json-schema")
        read = registered_readers.json_schema_reader(written.texts["value"])
        faults = find_altered(
            written,
            column.written,
            lambda record: registered_readers.read_document(read(record["value"])[name], kind),
            may_refuse_json,
        )
        faults += list_unnamed(written, name)
        if faults:
            altered[column.edge.name] = faults
    assert altered == {}


def test_a_batch_of_bad_rows_alone_is_a_batch_of_no_records() -> None:
    hidden = pa.array([[float("nan")]], pa.list_(pa.float64()))
    rows = pa.RecordBatch.from_arrays([pa.array([0]), hidden], names=["n", "x"])
    written = write_records(rows, format="json", partition_column="n")
    assert (written.records, list(written.refused)) == ([], [0])


_FINE = pa.time64("ns")


@pytest.mark.parametrize("form", ["avro", "json", "json-schema", "protobuf"])
@pytest.mark.parametrize(
    ("kind", "value", "path"),
    [
        (pa.struct([("a", pa.struct([("b", _FINE)]))]), {"a": {"b": 1}}, "x.a.b"),
        (pa.list_(pa.struct([("a", _FINE)])), [{"a": 0}, {"a": 1}], "x[].a"),
        (pa.map_(pa.string(), pa.struct([("a", _FINE)])), [("k", {"a": 1})], "x.*.a"),
        (pa.map_(pa.string(), pa.int64()), [("k", 1), ("k", 2)], "x"),
    ],
)
def test_a_bad_row_names_the_whole_path_of_the_part_that_does_not_fit(
    form: str, kind: pa.DataType, value: Any, path: str
) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([0]), pa.array([value], kind)], names=["n", "x"])
    text = schema_text(SchemaKind.PROTOBUF, rows.schema, "row", alone=False)
    written = write_records(rows, message=Message(text), format=form)
    assert f"column '{path}': " in written.refused[0]


@pytest.mark.parametrize("form", ["avro", "json", "json-schema", "protobuf"])
def test_a_type_that_a_format_lacks_is_refused_with_its_whole_path(form: str) -> None:
    inner = pa.struct([("tags", pa.map_(pa.string(), pa.duration("s")))])
    rows = pa.RecordBatch.from_arrays(
        [pa.array([0]), pa.nulls(1, pa.list_(inner))], names=["n", "x"]
    )
    with pytest.raises(ConfigError, match=re.escape("column 'x[].tags.*' is duration[s]")):
        write_records(rows, format=form)


# --- raw ----------------------------------------------------------------------------------------


def _octets(value: object) -> object:
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("name", ["key", "value"])
def test_raw_keys_and_values_are_the_bytes_of_the_column_or_it_is_refused(name: str) -> None:
    other = "value" if name == "key" else "key"
    for edge in SCALARS:
        constant = pa.array([b"o"] * len(edge.values))
        rows = pa.RecordBatch.from_arrays([edge.values, constant], names=[name, other])
        plain = to_plain_type(edge.type)
        if not (is_text(plain) or is_bytes(plain)):
            with pytest.raises(ConfigError, match=f"column '{name}' .* binary or string"):
                write_records(rows, format="raw")
            continue
        written = write_records(rows, format="raw")
        assert written.refused == {}
        expected = [_octets(value) for value in exact_values(edge.values)]
        assert [record[name] for record in written.records] == expected, edge.name
        assert {record[other] for record in written.records} == {b"o"}


@pytest.mark.parametrize("value_format", ["json", "json-schema", "avro", "protobuf"])
def test_text_that_is_not_utf_8_makes_a_bad_row_and_raw_writes_its_bytes(
    value_format: str,
) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([0, 1]), invalid_text()], names=["n", "value"])
    message = Message('syntax = "proto3"; message Row { int64 n = 1; optional string value = 2; }')
    written = write_records(rows, message=message, format=value_format)
    assert (written.kept, list(written.refused)) == ([0], [1])
    assert "utf-8" in written.refused[1].lower() or "utf8" in written.refused[1].lower()
    raw = write_records(rows, format="raw", partition_column="n")
    assert [record["value"] for record in raw.records] == [b"ok", b"\xed\xa0\x80"]
