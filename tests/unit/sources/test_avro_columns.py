"""Avro records read in columns are what fastavro, which reads them one by one, makes of them."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
from typing import Any, cast

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from fastavro.schema import SchemaParseException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.arrow_values import python_rows

from onceflow.core.errors import ConfigError
from onceflow.formats.avro.columns import AvroRecords
from onceflow.formats.avro.cursors import Cursors
from onceflow.formats.avro.schema import columns_of, parse_avro, record_of

_HEADER = b"\0\0\0\0\7"
UTC = dt.timezone.utc


def encoded(schema: Any, rows: list[dict[str, Any]]) -> list[bytes]:
    parsed = fastavro.parse_schema(json.loads(json.dumps(schema)))
    found: list[bytes] = []
    for row in rows:
        stream = io.BytesIO()
        stream.write(_HEADER)
        cast("Any", fastavro).schemaless_writer(stream, parsed, row)
        found.append(stream.getvalue())
    return found


def read(schema: Any, values: list[bytes]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the rows that can be read, and the faults of the others."""
    record = record_of(parse_avro(json.dumps(schema)), what="the test's schema")
    cursors = Cursors(values, skip_bytes=len(_HEADER))
    columns = columns_of(record)
    rows = np.arange(len(values), dtype=np.int64)
    members = AvroRecords(record, frozenset(columns.names)).columns(cursors, rows)
    batch = pa.RecordBatch.from_arrays([members[name] for name in columns.names], schema=columns)
    good = [row not in cursors.faults for row in range(len(values))]
    batch = batch.filter(pa.array(good, pa.bool_()))
    batch.validate(full=True)
    return python_rows(batch), cursors.faults


def _record(*fields: tuple[str, Any], name: str = "row") -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": field, "type": kind} for field, kind in fields],
    }


_TEXT = st.text("aé€😀\0 z", max_size=12)
_SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("boolean", st.booleans()),
    ("int", st.integers(-(2**31), 2**31 - 1)),
    ("long", st.integers(-(2**63), 2**63 - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("string", _TEXT),
    ("bytes", st.binary(max_size=12)),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 3},
        st.decimals(-(10**16), 10**16, places=3),
    ),
    (
        {"type": "long", "logicalType": "timestamp-micros"},
        st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(UTC)),
    ),
    ({"type": "int", "logicalType": "date"}, st.dates()),
]


@st.composite
def _types(draw: st.DrawFn, depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
    """Draw a type and what its values are."""
    shape = draw(st.sampled_from(["scalar", "scalar", "null", "array", "map", "record"]))
    if depth == 0 or shape == "scalar":
        scalar: tuple[Any, st.SearchStrategy[Any]] = draw(st.sampled_from(_SCALARS))
        return scalar
    kind, values = draw(_types(depth - 1))
    match shape:
        case "null":
            if isinstance(kind, list):
                return cast("Any", kind), values
            branches: list[Any] = list(draw(st.permutations(["null", kind])))
            return branches, st.none() | values
        case "array":
            return {"type": "array", "items": kind}, st.lists(values, max_size=4)
        case "map":
            return {"type": "map", "values": kind}, st.dictionaries(_TEXT, values, max_size=3)
        case _:
            name = f"r{draw(st.integers(0, 10**9))}"
            described = _record(("a", kind), ("b", "long"), name=name)
            both = st.fixed_dictionaries({"a": values, "b": st.integers(-9, 9)})
            return described, both


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_records_of_random_schemas_are_read_as_fastavro_reads_them(data: st.DataObject) -> None:
    kinds = [data.draw(_types(2)) for _ in range(data.draw(st.integers(1, 3)))]
    schema = _record(*((f"f{at}", kind) for at, (kind, _) in enumerate(kinds)))
    row = st.fixed_dictionaries({f"f{at}": values for at, (_, values) in enumerate(kinds)})
    rows = data.draw(st.lists(row, max_size=6))
    try:
        values = encoded(schema, rows)
    except SchemaParseException:
        return  # two records of one name
    found, faults = read(schema, values)
    assert (found, faults) == (rows, {})
    # What is cut off, or goes on, is a fault of its own record and changes no other.
    if not rows:
        return
    bad = data.draw(st.integers(0, len(rows) - 1))
    cut = data.draw(st.integers(1, 3))
    values[bad] = values[bad] + b"\1" * cut if cut > 1 else values[bad][:-1]
    if len(values[bad]) < len(_HEADER):
        return
    found, faults = read(schema, values)
    others = [row for at, row in enumerate(rows) if at != bad]
    assert set(faults) == {bad}
    assert found == others


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_any_bytes_are_read_or_refused_and_nothing_hangs(bodies: list[bytes]) -> None:
    schema = _record(
        ("a", ["null", "string"]),
        ("b", {"type": "array", "items": {"type": "map", "values": "double"}}),
        ("c", {"type": "enum", "name": "e", "symbols": ["x", "y"]}),
        ("d", {"type": "fixed", "name": "f", "size": 3}),
        ("e", {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}),
        ("f", {"type": "int", "logicalType": "time-millis"}),
        ("g", "boolean"),
    )
    found, faults = read(schema, [_HEADER + body for body in bodies])
    assert len(found) + len(faults) == len(bodies)


_NOTHING = {
    "null": ("null", None),
    "record": (_record(name="none"), dict[str, Any]()),
    "record of null": (_record(("n", "null"), name="nulls"), {"n": None}),
    "fixed": ({"type": "fixed", "name": "zero", "size": 0}, b""),
}


@pytest.mark.parametrize("item", _NOTHING)
def test_an_array_has_as_many_items_as_were_written_though_none_has_a_byte(item: str) -> None:
    kind, value = _NOTHING[item]
    schema = _record(
        ("id", "long"),
        ("a", {"type": "array", "items": kind}),
        ("b", ["null", {"type": "map", "values": {"type": "array", "items": "null"}}]),
    )
    rows: list[dict[str, Any]] = [
        {"id": 1, "a": [value] * 3, "b": {"x": [None] * 300, "y": []}},
        {"id": 2, "a": [], "b": None},
        {"id": 3, "a": [value] * 65_536, "b": {}},
        {"id": 4, "a": [value] * 65_537, "b": None},
        {"id": 5, "a": [value], "b": None},
    ]
    found, faults = read(schema, encoded(schema, rows))
    assert faults == {3: "more than 65536 items of no bytes in field 'a'"}
    assert found == [row for row in rows if row["id"] != 4]


def test_logical_types_become_arrow_s_own() -> None:
    schema = _record(
        ("day", {"type": "int", "logicalType": "date"}),
        ("ms", {"type": "long", "logicalType": "timestamp-millis"}),
        ("local", {"type": "long", "logicalType": "local-timestamp-micros"}),
        ("time", {"type": "int", "logicalType": "time-millis"}),
        (
            "price",
            {
                "type": "fixed",
                "name": "p",
                "size": 6,
                "logicalType": "decimal",
                "precision": 12,
                "scale": 2,
            },
        ),
        ("kind", {"type": "enum", "name": "k", "symbols": ["IN", "OUT"]}),
        ("either", ["null", "long", "string"]),
    )
    row = {
        "day": dt.date(1969, 7, 20),
        "ms": dt.datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
        "local": dt.datetime(1950, 1, 2, 3, 4, 5, 678901),
        "time": dt.time(23, 59, 59, 999000),
        "price": decimal.Decimal("-1234.56"),
        "kind": "OUT",
        "either": "text",
    }
    found, faults = read(schema, encoded(schema, [row, {**row, "either": None}]))
    assert faults == {}
    assert found == [
        {**row, "either": {"member0": None, "member1": "text"}},
        {**row, "either": None},
    ]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "it ends in the middle of field 'id'"),
        (b"\x80" * 11, "a number takes more than ten bytes in field 'id'"),
        (b"\x02\x08abc", "it ends in the middle of field 'name'"),
        (b"\x02\x01abc", "it ends in the middle of field 'name'"),
        (b"\x02\x04\xff\xfe", "no UTF-8 text (invalid start byte) in field 'name'"),
        (b"\x02\x02a\x00", "it has bytes after its last field"),
    ],
)
def test_record_that_cannot_be_read_says_where(body: bytes, why: str) -> None:
    schema = _record(("id", "long"), ("name", "string"))
    good = encoded(schema, [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
    found, faults = read(schema, [good[0], _HEADER + body, good[1]])
    assert faults == {1: why}
    assert [row["id"] for row in found] == [1, 2]


def test_type_that_contains_itself_is_refused_by_name() -> None:
    node = _record(("next", ["null", "node"]), name="node")
    with pytest.raises(ConfigError, match="node contains itself"):
        parse_avro(json.dumps(node))
