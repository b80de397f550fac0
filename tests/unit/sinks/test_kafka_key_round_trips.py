"""The round-trip matrix of the Kafka sink's keys and headers, in every format of keys.

A key is one column (`alone`), or a record of several: here the columns of a struct. Readers are
fastavro, Protobuf's runtime, jsonschema and Python's own `json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import types as arrow
from tests.support import record_cells, registered_readers
from tests.support.edge_values import BYTES, NESTED, SCALARS, TEXTS, invalid_text
from tests.support.exact_values import Clock, Instant, Local, Span, exact_values, same
from tests.support.source_encoders import is_beyond_python
from tests.unit.sinks.test_kafka_registered_round_trips import (
    may_refuse_json,
    may_refuse_protobuf,
    message_of_all,
)

from onceflow.clients.kafka.registry import SchemaKind
from onceflow.core.arrow.kinds import holds, is_bytes, is_text, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.formats.encoding import schema_text

NUMBER = pa.field("n", pa.int64(), nullable=False)
_TICKS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_ZONED = re.compile(r"(.+?)(?:Z|([+-])(\d\d)(\d\d))")


def _alone(column: record_cells.RecordColumn, name: str = "_key") -> pa.RecordBatch:
    """Return rows whose key is `column` itself."""
    numbers = pa.array(range(len(column.values)), pa.int64())
    schema = pa.schema([NUMBER, pa.field(name, column.type)])
    return pa.RecordBatch.from_arrays([numbers, column.values], schema=schema)


def _record(column: record_cells.RecordColumn) -> pa.RecordBatch:
    """Return rows whose key is a record of a number and `column`; the last one has no key."""
    numbers = pa.array(range(len(column.values)), pa.int64())
    fields = [NUMBER, pa.field(column.field, column.type)]
    # A null struct over a value that nobody may see.
    hidden = pa.array([*range(len(numbers)), 0], pa.int64())
    shown = pa.concat_arrays([column.values, column.values.slice(0, 1)])
    mask = pa.array([False] * len(numbers) + [True])
    keys = pa.StructArray.from_arrays([hidden, shown], fields=fields, mask=mask)
    schema = pa.schema([NUMBER, pa.field("_key", keys.type)])
    rows = pa.array(range(len(hidden)), pa.int64())
    return pa.RecordBatch.from_arrays([rows, keys], schema=schema)


def _unless_absent(read: Callable[[bytes], object]) -> Callable[[dict[str, Any]], object]:
    return lambda record: None if record["key"] is None else read(record["key"])


def _has_no_avro(kind: pa.DataType) -> bool:
    plain = to_plain_type(kind)
    return bool(
        arrow.is_uint64(plain)
        or arrow.is_float16(plain)
        or arrow.is_duration(plain)
        or arrow.is_interval(plain)
        or (arrow.is_decimal(plain) and not 0 <= plain.scale <= plain.precision)
    )


def _has_no_json(kind: pa.DataType) -> bool:
    return bool(arrow.is_duration(kind) or arrow.is_interval(kind))


_IN_SHORT = {f"{shape} of {name}" for shape in ("list", "struct", "map")
             for name in ("int64", "string")}  # fmt: skip
_GROUPS = record_cells.column_groups(
    [replace(edge, is_short=edge.name in _IN_SHORT) for edge in NESTED]
)
_IN_RECORDS = {"int64", "double", "string", "binary", "decimal128(38, 10)", "run ends of string"}
"""Scalars that are in records of keys, too; values have cells of all of them."""


def _is_in_record(column: record_cells.RecordColumn) -> bool:
    return column.edge.name in _IN_RECORDS or arrow.is_nested(column.type)


_FORMATS: dict[str, tuple[Callable[[pa.DataType], bool], Callable[[str], Any]]] = {
    "avro": (_has_no_avro, registered_readers.avro_reader),
    "json-schema": (_has_no_json, registered_readers.json_schema_reader),
}


@pytest.mark.parametrize("columns", _GROUPS)
@pytest.mark.parametrize("key_format", list(_FORMATS))
def test_a_key_by_a_schema_is_what_was_written_or_its_row_was_refused(
    key_format: str, columns: list[record_cells.RecordColumn]
) -> None:
    is_lacked, open_reader = _FORMATS[key_format]
    may_refuse = record_cells.may_refuse_stored if key_format == "avro" else may_refuse_json
    altered: dict[str, list[str]] = {}
    for column in columns:
        kind = column.type
        given: Any = {"key": "_key", "key_format": key_format}
        if holds(kind, is_lacked):
            for rows in (_alone(column), _record(column)):
                with pytest.raises(ConfigError, match="column"):
                    record_cells.write_records(rows, **given)
            continue
        parts = [(_alone(column), column.written)]
        if _is_in_record(column):
            parts.append((_record(column), _records_of(column)))
        for rows, values in parts:
            written = record_cells.write_records(rows, **given)
            text, key_type = written.texts["key"], rows.schema.field("_key").type
            read = partial(_read_key, key_format, open_reader(text), text, key_type)
            faults = record_cells.find_altered(written, values, _unless_absent(read), may_refuse)
            if faults:
                altered[column.edge.name] = faults
    assert altered == {}


def _records_of(column: record_cells.RecordColumn) -> list[object]:
    pairs = enumerate(column.written)
    return [*({"n": number, column.field: value} for number, value in pairs), None]


def _read_key(
    key_format: str, read: Callable[[bytes], Any], text: str, kind: pa.DataType, key: bytes
) -> object:
    if key_format == "avro":
        return registered_readers.read_stored(read(key), kind, json.loads(text))
    return registered_readers.read_document(read(key), kind)


@pytest.mark.parametrize("columns", _GROUPS)
def test_a_key_in_protobuf_is_what_was_written_or_its_row_was_refused(
    columns: list[record_cells.RecordColumn],
) -> None:
    alone = [column for column in columns if not arrow.is_struct(column.type)]
    required, taken = message_of_all(alone, required=True)
    optional, more = message_of_all(list(filter(_is_in_record, columns)), required=False)
    given: Any = {"key": "_key", "key_format": "protobuf"}
    altered: dict[str, list[str]] = {}
    for column in taken:
        # What JSON has no form for is no part of the value: the key is a column of its own.
        kind, name = column.type, column.field
        rows = _record_of_one(column)
        written = record_cells.write_records(rows, message=required, **given)
        read = registered_readers.protobuf_reader(required.text)
        faults = record_cells.find_altered(
            written,
            [*_present(column), None],
            _unless_absent(lambda key: registered_readers.read_field(read(key), name, kind)),
            partial(may_refuse_protobuf, kind),
        )
        if faults:
            altered[f"{column.edge.name}, alone"] = faults
    for column in more:
        rows = _record(column)
        key_type = rows.schema.field("_key").type
        written = record_cells.write_records(rows, message=optional, **given)
        read = registered_readers.protobuf_reader(optional.text)
        faults = record_cells.find_altered(
            written,
            _records_of(column),
            _unless_absent(lambda key: _members(read(key), key_type)),
            partial(may_refuse_protobuf, key_type),
        )
        if faults:
            altered[column.edge.name] = faults
    assert altered == {}


def _members(message: Any, kind: pa.DataType) -> dict[str, object]:
    return {one.name: registered_readers.read_field(message, one.name, one.type) for one in kind}


def _present(column: record_cells.RecordColumn) -> list[object]:
    return [value for value in column.written if value is not None]


def _record_of_one(column: record_cells.RecordColumn) -> pa.RecordBatch:
    """Return rows whose key is a struct of `column` alone, without its nulls; the last is null."""
    rows = [row for row, valid in enumerate(column.values.is_valid().to_pylist()) if valid]
    parts = [column.values.slice(row, 1) for row in [*rows, rows[0]]]
    mask = pa.array([False] * len(rows) + [True])
    fields = [pa.field(column.field, column.type, nullable=False)]
    keys = pa.StructArray.from_arrays([pa.concat_arrays(parts)], fields=fields, mask=mask)
    numbers = pa.array(range(len(keys)), pa.int64())
    schema = pa.schema([NUMBER, pa.field("_key", keys.type)])
    return pa.RecordBatch.from_arrays([numbers, keys], schema=schema)


def test_a_single_column_is_the_only_field_of_a_key_in_protobuf() -> None:
    """Zero, empty text and -0.0 are the same keys, though Protobuf leaves out what is zero."""
    for edge in SCALARS:
        if edge.name not in {"int64", "double", "string", "decimal128(38, 10)"}:
            continue
        values = edge.values.filter(
            pa.array([not _is_odd(value) for value in exact_values(edge.values)])
        )
        column = record_cells.RecordColumn(edge, "k")
        rows = pa.RecordBatch.from_arrays([values], names=["k"])
        schema = pa.schema([pa.field("k", edge.type, nullable=False)])
        message = record_cells.Message(schema_text(SchemaKind.PROTOBUF, schema, "row", alone=True))
        written = record_cells.write_records(rows, message=message, key="k", key_format="protobuf")
        read = registered_readers.protobuf_reader(message.text)
        faults = record_cells.find_altered(
            written,
            exact_values(values),
            _unless_absent(lambda key: registered_readers.read_field(read(key), "k", column.type)),
            lambda _: False,
        )
        assert faults == [], edge.name


def _is_odd(value: object) -> bool:
    # The column stays in the value, which is JSON.
    return isinstance(value, float) and not abs(value) < float("inf")


# --- keys without a registry --------------------------------------------------------------------


def _read_text_key(key: bytes, kind: pa.DataType) -> object:
    text, kind = key.decode(), to_plain_type(kind)
    if arrow.is_boolean(kind):
        return {"true": True, "false": False}[text]
    if arrow.is_integer(kind):
        return int(text)
    if arrow.is_floating(kind):
        narrow: Any = {16: np.float16, 32: np.float32, 64: np.float64}[kind.bit_width]
        return float(narrow(text))
    if arrow.is_decimal(kind):
        return Decimal(text)
    if arrow.is_date(kind):
        return registered_readers.read_day(text)
    if arrow.is_time(kind):
        return Clock(registered_readers.read_clock(text))
    if arrow.is_duration(kind):
        return Span(int(text) * _TICKS[kind.unit])
    return _read_text_moment(text) if arrow.is_timestamp(kind) else text


def _read_text_moment(text: str) -> object:
    zoned = _ZONED.fullmatch(text)
    if zoned is None:
        return registered_readers.read_moment(text)
    moment, sign, hours, minutes = zoned.groups()
    local = registered_readers.read_moment(moment)
    offset = 0 if sign is None else (int(hours) * 60 + int(minutes)) * 60 * 10**9
    assert isinstance(local, Local)
    return Instant(local.nanoseconds - (-offset if sign == "-" else offset))


@pytest.mark.parametrize("key_format", ["string", "raw", None])
def test_a_key_as_text_or_bytes_is_what_was_written_or_its_row_was_refused(
    key_format: str | None,
) -> None:
    altered: dict[str, list[str]] = {}
    for edge in SCALARS:
        column = record_cells.RecordColumn(edge, "_key")
        kind, plain = edge.type, to_plain_type(edge.type)
        given: Any = {"key": "_key", "key_format": key_format}
        if not _takes_plain_key(key_format, plain):
            with pytest.raises(ConfigError, match="'_key'"):
                record_cells.write_records(_alone(column), **given)
            continue
        written = record_cells.write_records(_alone(column), **given)
        is_octets = is_text(plain) or is_bytes(plain)
        values = [_as_octets(value) if is_octets else value for value in column.written]
        read: Callable[[bytes], object] = partial(_read_text_key, kind=kind)
        if key_format is None:
            read = partial(_read_json_key, kind=kind)
        if is_octets:
            read = bytes
        may_refuse = may_refuse_json if key_format is None else is_beyond_python
        faults = record_cells.find_altered(written, values, _unless_absent(read), may_refuse)
        if faults:
            altered[edge.name] = faults
    assert altered == {}


def _takes_plain_key(key_format: str | None, plain: pa.DataType) -> bool:
    if key_format == "raw":
        return is_text(plain) or is_bytes(plain)
    if key_format == "string":
        return not (is_bytes(plain) or arrow.is_interval(plain))
    return not _has_no_json(plain)


def _as_octets(value: Any) -> object:
    return value.encode() if isinstance(value, str) else value


def _read_json_key(key: bytes, kind: pa.DataType) -> object:
    return registered_readers.read_document(json.loads(key), kind)


def test_keys_of_several_columns_are_objects_of_json_with_null_for_null() -> None:
    fields = [edge for edge in SCALARS if edge.name in {"int64", "string", "binary", "date32[day]"}]
    for edge in fields:
        column = record_cells.RecordColumn(edge, "x")
        rows = _alone(column, "x")
        written = record_cells.write_records(rows, key=("n", "x"))
        kind = pa.struct(list(rows.schema))
        values = [{"n": at, "x": value} for at, value in enumerate(column.written)]
        read = _unless_absent(partial(_read_json_key, kind=kind))
        assert record_cells.find_altered(written, values, read, is_beyond_python) == []


def test_text_that_is_not_utf_8_makes_a_bad_row_as_a_key_in_text_or_json() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([0, 1]), invalid_text()], names=["n", "_key"])
    written = record_cells.write_records(rows, key="_key", key_format="string")
    assert (written.kept, list(written.refused)) == ([0], [1])
    written = record_cells.write_records(rows, key="_key", key_format="raw")
    assert [record["key"] for record in written.records] == [b"ok", b"\xed\xa0\x80"]


# --- headers ------------------------------------------------------------------------------------

_LISTED = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
_NAMES = [text for text in TEXTS if "\0" not in text]


@pytest.mark.parametrize("kind", [_LISTED, pa.map_(pa.string(), pa.binary())], ids=["list", "map"])
def test_headers_are_what_was_written_in_their_order_with_doubles_and_null(
    kind: pa.DataType,
) -> None:
    pairs: list[tuple[str, bytes | None]] = [("n", value) for value in (*BYTES, None)]
    pairs += [(name, name.encode()) for name in _NAMES]
    rows: list[list[tuple[str, bytes | None]] | None] = [
        *([pair] for pair in pairs),
        *(pairs, pairs[::-1], [("a", b"1"), ("b", None), ("a", b"1"), ("a", None)], [], None),
    ]
    given: list[Any] = [
        row and [{"key": name, "value": value} for name, value in row] if kind is _LISTED else row
        for row in rows
    ]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"v"] * len(rows)), pa.array(given, kind)], names=["value", "headers"]
    )
    written = record_cells.write_records(batch, format="raw")
    assert written.refused == {}
    shown = [
        record["headers"] and [(one["key"], one["value"]) for one in record["headers"]]
        for record in written.records
    ]
    # A record has a count of headers: none is null and the empty list alike.
    assert same(shown, [row or None for row in rows])


def test_a_header_s_name_that_the_client_would_cut_off_or_kafka_lacks_makes_a_bad_row() -> None:
    names = ["a", "a\0b", "\0", None, "b"]
    listed = [[{"key": "x", "value": b"1"}, {"key": name, "value": b"2"}] for name in names]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(range(len(names))), pa.array([b"v"] * len(names)), pa.array(listed, _LISTED)],
        names=["n", "value", "headers"],
    )
    written = record_cells.write_records(batch, format="raw", partition_column="n")
    assert written.kept == [0, 4]
    assert list(written.refused) == [1, 2, 3]
    assert "'a\\x00b'" in written.refused[1]
    octets = pa.list_(pa.struct([pa.field("key", pa.binary()), pa.field("value", pa.string())]))
    named = [[{"key": b"\xc3\xa9", "value": "\u00e9"}], [{"key": b"\xff", "value": "x"}]]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([0, 1]), pa.array([b"v"] * 2), pa.array(named, octets)],
        names=["n", "value", "headers"],
    )
    written = record_cells.write_records(batch, format="raw", partition_column="n")
    assert [record["headers"] for record in written.records] == [
        [{"key": "\u00e9", "value": "\u00e9".encode()}]
    ]
    assert list(written.refused) == [1]
