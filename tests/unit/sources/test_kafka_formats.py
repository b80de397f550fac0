"""The source's rows of CSV, JSON Schema and Debezium's envelopes, by messages built by hand."""

from __future__ import annotations

import base64
import datetime as dt
import json
import struct
import uuid
from collections.abc import Sequence
from decimal import Decimal
from hashlib import md5
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Message
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_kafka_avro import framed, taken

from onceflow.core.errors import BadRecord, ConfigError
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.decoded_rows import Rows
from onceflow.sources.kafka.value_formats import rows_of


def source(value_format: str, schema: Any = None, **given: Any) -> KafkaSource:
    settings: dict[str, Any] = {"deadline_s": 30.0, **given}
    return KafkaSource("nowhere:1", topic="rows", format=value_format, schema=schema, **settings)


def collected(
    described: KafkaSource, values: Sequence[bytes | None], keys: Sequence[bytes | None] = ()
) -> Rows:
    rows = rows_of(described.settings)
    keyed = [*keys, *[None] * (len(values) - len(keys))]
    rows.add(
        [
            Message(topic="rows", partition=1, offset=at, key=key, value=value)
            for at, (key, value) in enumerate(zip(keyed, values, strict=True))
        ]
    )
    return rows


def read(described: KafkaSource, values: Sequence[bytes | None]) -> list[dict[str, Any]]:
    return taken(collected(described, values)).to_pylist()


def faults(
    described: KafkaSource, values: Sequence[bytes | None], keys: Sequence[bytes | None] = ()
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the rows that could be read, and the reasons of the others by their offsets."""
    rows = collected(described, values, keys)
    found = taken(rows).to_pylist()
    return found, {letter.offset or 0: letter.reason for letter in rows.refusals.take_letters()}


CSV = "id BIGINT NOT NULL, name STRING, price DECIMAL(8, 2), at TIMESTAMP, ok BOOLEAN"


def test_lines_of_csv_are_fields_by_their_order() -> None:
    at = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)
    values = [b"1,ann,12.50,2026-01-02T03:04:05Z,true", b'2,"a, ""b""",,,\r\n', b'3,"",0.01,,false']
    assert read(source("csv", CSV), values) == [
        {"id": 1, "name": "ann", "price": Decimal("12.50"), "at": at, "ok": True},
        {"id": 2, "name": 'a, "b"', "price": None, "at": None, "ok": None},
        {"id": 3, "name": "", "price": Decimal("0.01"), "at": None, "ok": False},
    ]


def test_lines_that_are_bad_change_no_other_and_say_why() -> None:
    values = [
        b"1,a,1.00,,",
        None,
        b"x,a,1.00,,",
        b"4,a",
        b",a,1.00,,",
        b"",
        b"6,a,1.00,,\n7,b,2.00,,",
        b'7,"two\nlines",1.00,,',
        b'8,"open,1.00,,',
        b'9",b,1.00,,',
        b"10,z,1.00,,",
    ]
    found, why = faults(source("csv", CSV, on_bad_record="dead_letter"), values)
    assert [(row["id"], row["name"]) for row in found] == [(1, "a"), (7, "two\nlines"), (10, "z")]
    assert sorted(why) == [1, 2, 3, 4, 5, 6, 8, 9]
    assert "tombstone" in why[1]
    assert "CSV conversion error to int64" in why[2]
    assert "Expected 5 columns, got 2" in why[3]
    assert "column 'id' is NOT NULL" in why[4]
    assert why[5] == "it is empty"
    assert why[6] == "it holds 2 lines instead of one"


@pytest.mark.parametrize(
    ("kind", "line", "why"),
    [
        (pa.float64(), b"1e400", "column 'v' (double): '1e400' is outside the range of the column"),
        (pa.float32(), b"-1e39", "column 'v' (float): '-1e39' is outside the range of the column"),
        (pa.int64(), b"0x10", "column 'v' (int64): '0x10' is hexadecimal"),
        (pa.int64(), b"0XFFFFFFFFFFFFFFFF", "is hexadecimal; write it in decimal digits"),
        (pa.uint8(), b"0x1F", "is hexadecimal"),
        (pa.string(), b'"x"y', "a quote does not enclose a whole field"),
        (pa.string(), b'"x" ', "a quote does not enclose a whole field"),
        (pa.string(), b'"x', "it is never closed"),
        (pa.string(), b'"x"""y"', "a quote does not enclose a whole field"),
    ],
)
def test_a_field_that_arrow_reads_as_another_value_is_a_bad_record(
    kind: pa.DataType, line: bytes, why: str
) -> None:
    """Whole batches are read at once, and value by value beside a line that cannot be."""
    given = source("csv", pa.schema([("v", kind), ("n", pa.int64())]), on_bad_record="dead_letter")
    for others in ([b"1,1", b"1,2"], [b"1,1", b'1,"2\n"', b"1,2"]):
        found, faulty = faults(given, [others[0], line + b",9", *others[1:]])
        assert [row["n"] for row in found] == [1, 2]
        assert list(faulty) == ([1] if len(others) == 2 else [1, 2])
        assert why in faulty[1]


def test_words_for_infinity_and_quotes_inside_of_fields_are_read_as_they_are() -> None:
    numbers = source("csv", "v DOUBLE, w FLOAT")
    found = read(numbers, [b"inf,-Infinity", b"1e308,INF"])
    inf = float("inf")
    assert found == [{"v": inf, "w": -inf}, {"v": 1e308, "w": inf}]
    texts = source("csv", "v STRING, w STRING")
    assert read(texts, [b'0x10,"0x""10"', b'x"y,a"b"']) == [
        {"v": "0x10", "w": '0x"10'},
        {"v": 'x"y', "w": 'a"b"'},
    ]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.float16(), pa.string_view()])
def test_columns_that_no_csv_field_holds_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="which no CSV field holds"):
        source("csv", pa.schema([("v", kind)]))


ORDER = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "cents": {"oneOf": [{"type": "null"}, {"type": "integer", "connect.type": "int32"}]},
        "note": {"type": ["string", "null"]},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"$ref": "#/definitions/tag"}},
        "to": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    "required": ["id", "note", "tags"],
    "definitions": {"tag": {"type": "string"}},
}


def test_columns_of_json_schema_are_the_registered_properties(
    registry: SchemaRegistryDouble,
) -> None:
    schema_id = registry.keep("rows-value", ORDER, kind="JSON")
    described = source("json-schema", schema_registry=registry.url, on_bad_record="dead_letter")
    assert described.schema == pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("cents", pa.int32()),
            pa.field("note", pa.string()),
            pa.field("day", pa.date32()),
            pa.field("tags", pa.list_(pa.string()), nullable=False),
            pa.field("to", pa.struct([pa.field("city", pa.string())])),
        ]
    )
    header = b"\0" + schema_id.to_bytes(4, "big")
    whole: dict[str, Any] = {
        "id": 1,
        "cents": 5,
        "note": "n",
        "day": "2026-01-02",
        "tags": ["a"],
        "to": {},
    }
    values = [
        header + json.dumps(whole).encode(),
        b'{"id": 2, "tags": []}',
        header + b'{"id": "3", "tags": []}',
        header + b'{"id": 4, "tags": [], "later": 1}',
    ]
    found, why = faults(described, values)
    day = dt.date(2026, 1, 2)
    assert found[0] == {**whole, "day": day, "to": {"city": None}}
    assert found[1]["id"] == 4
    assert "does not begin with a zero byte" in why[1]
    assert why[2].startswith("column 'id' (int64): Expected `int`, got `str`")
    assert why[2].endswith("found '3'")
    # With columns of one's own the registry is not asked at all.
    assert read(source("json-schema", "id BIGINT"), values[:1]) == [{"id": 1}]


@pytest.mark.parametrize(
    ("schema", "fragment"),
    [
        ({"type": "string"}, "columns can only be made of objects"),
        ({"type": "object", "properties": {"a": {}}}, "property 'a' has no one Arrow type"),
        (
            {
                "type": "object",
                "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "integer"}]}},
            },
            "property 'a' has no one Arrow type",
        ),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}},
            "contains itself",
        ),
    ],
)
def test_json_schema_without_columns_is_refused_by_name(
    registry: SchemaRegistryDouble, schema: Any, fragment: str
) -> None:
    registry.keep("rows-value", schema, kind="JSON")
    with pytest.raises(ConfigError) as caught:
        _ = source("json-schema", schema_registry=registry.url).schema
    assert fragment in str(caught.value)
    assert "give schema=" in str(caught.value)


USER = "id BIGINT NOT NULL, name STRING NOT NULL, born DATE"


def envelope(operation: str, before: Any, after: Any, *, schema: bool = False) -> bytes:
    payload = {"op": operation, "before": before, "after": after, "ts_ms": 1, "source": {"lsn": 7}}
    return json.dumps(
        {"schema": {"type": "struct"}, "payload": payload} if schema else payload
    ).encode()


@pytest.mark.parametrize("schema", [False, True])
def test_changes_are_rows_with_what_they_do(*, schema: bool) -> None:
    ann = {"id": 1, "name": "ann", "born": 19000}
    day = dt.date(1970, 1, 1) + dt.timedelta(days=19000)
    values = [
        envelope("r", None, ann, schema=schema),
        envelope("c", None, {**ann, "id": 2}, schema=schema),
        envelope("u", ann, {**ann, "name": "bea"}, schema=schema),
        envelope("d", {"id": 2, "name": None}, None, schema=schema),
        None,
        envelope("d", None, None, schema=schema),
    ]
    keys = [
        *[None] * 5,
        json.dumps({"schema": {}, "payload": {"id": 3}} if schema else {"id": 3}).encode(),
    ]
    described = source("debezium-json", USER, include_metadata=True)
    assert described.schema.names[:4] == ["id", "name", "born", "_op"]
    found = taken(collected(described, values, keys)).to_pylist()
    assert [
        tuple(row[name] for name in ("id", "name", "born", "_op", "_offset")) for row in found
    ] == [
        (1, "ann", day, "r", 0),
        (2, "ann", day, "c", 1),
        (1, "bea", day, "u", 2),
        (2, None, None, "d", 3),
        (3, None, None, "d", 5),
    ]


def _change_beside_schema(kinds: dict[str, Any], row: dict[str, Any], operation: str) -> bytes:
    """Return a change as Kafka Connect's JSON converter writes it unless it is told otherwise."""
    fields = [{"field": name, **kind} for name, kind in kinds.items()]
    sides = [{"type": "struct", "fields": fields, "field": one} for one in ("before", "after")]
    before, after = (row, None) if operation == "d" else (None, row)
    payload = {"op": operation, "before": before, "after": after}
    schema = {"type": "struct", "fields": [*sides, {"type": "string", "field": "op"}]}
    return json.dumps({"schema": schema, "payload": payload}).encode()


def _semantic(name: str, kind: str = "int64") -> dict[str, Any]:
    return {"type": kind, "optional": True, "name": name}


_PRECISIONS = [
    ("io.debezium.time.Timestamp", 10**3),
    ("io.debezium.time.MicroTimestamp", 10**6),
    ("io.debezium.time.NanoTimestamp", 10**9),
    ("org.apache.kafka.connect.data.Timestamp", 10**3),
]


@pytest.mark.parametrize(("name", "per_second"), _PRECISIONS)
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_the_same_in_whatever_unit_debezium_writes_them(
    name: str, per_second: int, unit: str
) -> None:
    """Debezium chooses the unit by the column's precision; its schema says which."""
    columns = pa.schema([pa.field("id", pa.int64()), pa.field("at", pa.timestamp(unit))])
    kinds = {"id": {"type": "int64"}, "at": _semantic(name)}
    given = source("debezium-json", columns, on_bad_record="dead_letter")
    row = {"id": 1, "at": 1_700_000_000 * per_second}
    found, why = faults(given, [_change_beside_schema(kinds, row, one) for one in "cd"])
    assert not why
    assert [row["at"] for row in found] == [dt.datetime(2023, 11, 14, 22, 13, 20)] * 2
    # One step more, which a coarser column does not hold.
    row = {"id": 1, "at": 1_700_000_000 * per_second + 1}
    found, why = faults(given, [_change_beside_schema(kinds, row, "c")])
    is_coarser = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit] < per_second
    assert [row["id"] for row in found] == ([] if is_coarser else [1])
    assert ("is finer than the column's unit" in why.get(0, "")) is is_coarser


def test_decimals_in_base64_and_days_as_instants_are_bad_records_by_their_schema() -> None:
    """Three bytes of a number may be digits in base64, too: 1234 is -10028.08, and not 1234."""
    kinds = {"n": _semantic("org.apache.kafka.connect.data.Decimal", "bytes")}
    columns = "n DECIMAL(10, 2)"
    given = source("debezium-json", columns, on_bad_record="dead_letter")
    changes = [_change_beside_schema(kinds, {"n": one}, "c") for one in ("1234", "AJY=")]
    found, why = faults(given, changes)
    assert (found, list(why)) == ([], [0, 1])
    assert "set Debezium's decimal.handling.mode=string" in why[0]
    assert "decimals as text with decimal.handling.mode=string" in why[1]
    days = {"at": _semantic("io.debezium.time.Date", "int32")}
    given = source("debezium-json", "at TIMESTAMP_NTZ", on_bad_record="dead_letter")
    found, why = faults(given, [_change_beside_schema(days, {"at": 19_000}, "c")])
    assert found == []
    assert "was written in days (io.debezium.time.Date)" in why[0]


@pytest.mark.parametrize("key", [b"{}", b'{"other": 7}', b'{"payload": {"id": null}}'])
def test_a_delete_whose_key_names_no_column_is_a_bad_record(key: bytes) -> None:
    given = source("debezium-json", "id BIGINT NOT NULL", on_bad_record="dead_letter")
    found, why = faults(given, [envelope("d", None, None)], [key])
    assert found == []
    assert "the record's key has none of the columns" in why[0]


def test_envelopes_that_are_no_change_of_a_row_are_bad_records() -> None:
    good = {"id": 1, "name": "ann"}
    values = [
        envelope("c", None, good),
        envelope("c", None, {"id": 1}),
        envelope("u", good, None),
        envelope("d", None, None),
        envelope("t", None, None),
        envelope("x", None, good),
        b'{"id": 1}',
        b"{",
        envelope("c", None, {"id": "one", "name": "ann"}),
        envelope("u", good, {"id": 1, "name": "__debezium_unavailable_value"}),
        envelope("d", {"id": 9}, None),
    ]
    described = source("debezium-json", USER, on_bad_record="dead_letter")
    found, why = faults(described, values)
    assert [(row["id"], row["_op"]) for row in found] == [(1, "c"), (9, "d")]
    fragments = {
        1: "missing required field `name`",
        2: "it has no 'after'",
        3: "REPLICA IDENTITY",
        4: "truncated",
        5: "its op is 'x'",
        6: "it is not a Debezium envelope",
        7: "truncated",
        8: "column 'id' (int64): Expected `int`, got `str`",
        9: "column 'name' was not sent",
    }
    assert why.keys() == fragments.keys()
    for offset, fragment in fragments.items():
        assert fragment in why[offset]


USER_AVRO = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {
            "name": "seen",
            "type": {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"},
        },
    ],
}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {"name": "before", "type": ["null", USER_AVRO], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {
            "name": "source",
            "type": {
                "type": "record",
                "name": "Source",
                "fields": [{"name": "lsn", "type": "long"}],
            },
        },
        {"name": "op", "type": "string"},
    ],
}


def test_changes_in_avro_are_rows_by_the_registered_envelope(
    registry: SchemaRegistryDouble,
) -> None:
    schema_id = registry.keep("rows-value", ENVELOPE)
    ann = {"id": 1, "name": "ann", "seen": 1_000_001}

    def change(operation: str, before: Any, after: Any) -> bytes:
        row = {"op": operation, "before": before, "after": after, "source": {"lsn": 3}}
        return framed(schema_id, ENVELOPE, [row])[0]

    values = [
        change("c", None, ann),
        change("u", ann, {**ann, "name": None}),
        None,
        change("d", ann, None),
        change("d", None, None),
        change("t", None, None),
        change("u", ann, {**ann, "name": "__debezium_unavailable_value"}),
    ]
    described = source("debezium-avro", schema_registry=registry.url, on_bad_record="dead_letter")
    assert described.schema.field("seen").type == pa.timestamp("us")
    found, why = faults(described, values)
    seen = dt.datetime(1970, 1, 1, 0, 0, 1, 1)
    assert found == [
        {"id": 1, "name": "ann", "seen": seen, "_op": "c"},
        {"id": 1, "name": None, "seen": seen, "_op": "u"},
        {"id": 1, "name": "ann", "seen": seen, "_op": "d"},
    ]
    assert sorted(why) == [4, 5, 6]


def test_changes_of_before_a_column_was_added_have_its_default_as_the_table_has(
    registry: SchemaRegistryDouble,
) -> None:
    old = registry.keep("rows-value", ENVELOPE)
    latest = json.loads(json.dumps(ENVELOPE))
    plan = {"name": "plan", "type": "string", "default": "free"}
    latest["fields"][0]["type"][1]["fields"].insert(1, plan)
    registry.keep("rows-value", latest)
    described = source("debezium-avro", schema_registry=registry.url)
    ann = {"id": 1, "name": "ann", "seen": 0}
    change = {"op": "c", "before": None, "after": ann, "source": {"lsn": 3}}
    (row,) = read(described, framed(old, ENVELOPE, [change]))
    assert (row["id"], row["plan"], row["name"], row["_op"]) == (1, "free", "ann", "c")


@pytest.mark.parametrize("value_format", ["csv", "debezium-json"])
def test_bad_record_names_its_place_in_each_format(value_format: str) -> None:
    with pytest.raises(BadRecord, match=r"rows-1 offset 1: "):
        read(source(value_format, "id BIGINT"), [None if value_format != "csv" else b"1", b"{"])


WORD = "__debezium_unavailable_value"
POINT_OF_POSTGIS = bytes.fromhex("0101000020E6100000000000FC83D797C1000000FC83D797C1")


def not_sent(word: bytes) -> dict[str, tuple[str, Any]]:
    """Return the forms of `word`, each with the type of its column."""
    text, numbers = word.decode(errors="replace"), list(struct.unpack(f"{len(word)}b", word))
    texts = [str(uuid.UUID(bytes=md5(word).digest(), version=3))]
    return {
        "text": ("STRING", text),
        "texts": ("ARRAY<STRING>", [text]),
        "bytes": ("ARRAY<BINARY>", [base64.b64encode(word).decode()]),
        "integers": ("ARRAY<BIGINT>", numbers),
        "small integers": ("ARRAY<INT>", numbers),
        "numbers": ("ARRAY<DOUBLE>", numbers),
        "uuids": ("ARRAY<STRING>", texts),
        "hstore": ("MAP<STRING, STRING>", {text: text}),
        "hstore as json": ("STRING", f'{{"{text}":"{text}"}}'),
        "inside": ("STRUCT<a: ARRAY<STRING>>", {"a": ["x", text]}),
        "geometry": (
            "STRUCT<wkb: BINARY, srid: INT>",
            {"wkb": base64.b64encode(POINT_OF_POSTGIS).decode(), "srid": 4326},
        ),
    }


@pytest.mark.parametrize(
    ("placeholder", "word"),
    [(WORD, WORD.encode()), ("n/a", b"n/a"), ("hex:80ff41", b"\x80\xffA")],
)
@pytest.mark.parametrize("form", not_sent(b"x"))
def test_a_large_value_that_debezium_was_not_told_is_never_written_whatever_its_type(
    form: str, placeholder: str, word: bytes
) -> None:
    kind, value = not_sent(word)[form]
    described = source(
        "debezium-json",
        f"id BIGINT NOT NULL, large {kind}",
        on_bad_record="dead_letter",
        unavailable_value_placeholder=placeholder,
    )
    values = [
        envelope("u", None, {"id": 1, "large": None}),
        envelope("u", None, {"id": 2, "large": value}),
        envelope("u", None, {"id": 3, "large": value[:-1] if isinstance(value, list) else None}),
    ]
    found, why = faults(described, values)
    assert [row["id"] for row in found] == [1, 3]
    assert "column 'large' was not sent" in why[1]


def test_a_large_value_under_another_word_is_never_written_from_avro(
    registry: SchemaRegistryDouble,
) -> None:
    schema_id = registry.keep("rows-value", ENVELOPE)
    rows = [{"id": at, "name": name, "seen": 0} for at, name in enumerate(["n/a", WORD])]
    changes = [{"op": "u", "before": None, "after": row, "source": {"lsn": 3}} for row in rows]
    described = source(
        "debezium-avro",
        schema_registry=registry.url,
        on_bad_record="dead_letter",
        unavailable_value_placeholder="n/a",
    )
    found, why = faults(described, framed(schema_id, ENVELOPE, changes))
    assert [row["name"] for row in found] == [WORD]
    assert "column 'name' was not sent (n/a)" in why[0]


@pytest.mark.parametrize("placeholder", ["", "hex:", "hex:0", "hex:xy"])
def test_a_placeholder_that_stands_for_no_value_is_refused(placeholder: str) -> None:
    with pytest.raises(ConfigError, match="unavailable_value_placeholder"):
        source("debezium-json", USER, unavailable_value_placeholder=placeholder)


def test_a_placeholder_for_a_format_that_is_not_debezium_s_is_refused() -> None:
    with pytest.raises(ConfigError, match="omit unavailable_value_placeholder="):
        source("json", "id BIGINT", unavailable_value_placeholder="n/a")


BEYOND = 253_402_300_800_000_000
"""Microseconds from 1970 to the year 10000."""


@pytest.mark.parametrize(
    ("value_format", "kind", "good", "bad"),
    [
        ("json", "TIMESTAMP", "2020-01-01T00:00:00Z", "9999-12-31T23:59:59-05:00"),
        ("json", "TIMESTAMP", 0, BEYOND),
        ("json", "TIMESTAMP", 0, -(2**62)),
        ("json", "TIMESTAMP_NTZ", 0, BEYOND),
        ("json", "DATE", 0, 2**31 - 1),
        ("json", "ARRAY<TIMESTAMP>", [0], [0, BEYOND]),
        ("json", "STRUCT<a: TIMESTAMP>", {"a": 0}, {"a": BEYOND}),
        ("json", "MAP<STRING, TIMESTAMP>", {"a": 0}, {"a": BEYOND}),
        ("debezium-json", "TIMESTAMP", 0, BEYOND),
        ("debezium-json", "DATE", 0, -(2**31)),
        ("json", pa.timestamp("ns"), 0, -(2**63)),
        ("json", pa.list_(pa.timestamp("ns")), [0], [0, -(2**63)]),
        ("csv", pa.timestamp("ns"), "2020-01-01T00:00:00", "1677-09-21T00:12:43.145224192"),
        ("csv", "TIMESTAMP_NTZ", "2020-01-01T00:00:00", "10000-01-01T00:00:00"),
        ("csv", "TIMESTAMP", "2020-01-01T00:00:00Z", "9999-12-31T23:59:59-05:00"),
    ],
)
def test_an_instant_that_python_has_no_value_for_is_a_bad_record(
    value_format: str, kind: str | pa.DataType, good: Any, bad: Any
) -> None:
    def message(number: int, value: Any) -> bytes:
        row = {"id": number, "at": value}
        if value_format == "csv":
            return f"{number},{value}".encode()
        return json.dumps(row).encode() if value_format == "json" else envelope("c", None, row)

    columns = {"id": "BIGINT", "at": kind}
    described = source(value_format, columns, on_bad_record="dead_letter")
    values = [message(0, good), message(1, bad), message(2, good)]
    found, why = faults(described, values)
    assert [row["id"] for row in found] == [0, 2]
    assert list(why) == [1]
    assert "years 1 to 9999" in why[1] or "invalid value" in why[1]
    with pytest.raises(BadRecord, match="rows-1 offset 1"):
        read(source(value_format, columns), values)


def test_an_instant_of_avro_that_python_has_no_value_for_is_a_bad_record(
    registry: SchemaRegistryDouble,
) -> None:
    kind = {"type": "long", "logicalType": "timestamp-micros"}
    schema = {"type": "record", "name": "R", "fields": [{"name": "at", "type": kind}]}
    schema_id = registry.keep("rows-value", schema)
    values = framed(schema_id, schema, [{"at": 0}])
    values += [values[0][:5] + zigzag(BEYOND), values[0]]
    described = source("avro", schema_registry=registry.url, on_bad_record="dead_letter")
    found, why = faults(described, values)
    assert len(found) == 2
    assert list(why) == [1]
    assert "years 1 to 9999" in why[1]


def zigzag(number: int) -> bytes:
    """Return a long of Avro."""
    left, data = (number << 1) ^ (number >> 63), bytearray()
    while left > 0x7F:
        data.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*data, left])


def test_instants_of_nanoseconds_in_json_are_exact_or_bad_records() -> None:
    nanoseconds = pa.schema(
        [("at", pa.timestamp("ns", "UTC")), ("all", pa.list_(pa.timestamp("ns")))]
    )
    values = [
        b'{"at": "2020-01-01T00:00:00.000000001Z", "all": ["2020-01-01T00:00:00.1234567"]}',
        b'{"at": "2020-01-01T05:30:00.1234567895+05:30"}',
        b'{"at": "2020-01-01T05:30:00.123456789+05:30", "all": null}',
        b'{"at": "2020-01-01T00:00:00.999999999Z"}',
    ]
    described = source("json", nanoseconds, on_bad_record="dead_letter")
    rows = collected(described, values)
    batch = taken(rows)
    first = 1_577_836_800_000_000_000
    assert batch.column("at").cast(pa.int64()).to_pylist() == [
        first + 1,
        first + 123_456_789,
        first + 999_999_999,
    ]
    assert batch.column("all").flatten().cast(pa.int64()).to_pylist() == [first + 123_456_700]
    assert "finer than the column's unit, ns" in rows.refusals.take_letters()[0].reason
    found, why = faults(
        source("json", "at TIMESTAMP", on_bad_record="dead_letter"),
        [b'{"at": "2020-01-01T00:00:00.123456000Z"}', b'{"at": "2020-01-01T00:00:00.1234567Z"}'],
    )
    assert [row["at"].microsecond for row in found] == [123_456]
    assert "finer than the column's unit, us" in why[1]


@pytest.mark.parametrize("schema", [False, True])
def test_instants_of_debezium_that_are_finer_than_their_column_are_bad_records(
    schema: bool,
) -> None:
    def change(operation: str, number: int, digits: str) -> bytes:
        at = f"2020-01-01T00:00:00.{digits}Z"
        row = {"id": number, "at": at, "all": [at]}
        deletes = operation == "d"
        before, after = (row, None) if deletes else (None, row)
        return envelope(operation, before, after, schema=schema)

    values = [
        change("c", 0, "123456"),
        change("u", 1, "1234567"),
        change("c", 2, "1234560"),
        change("d", 3, "1234567"),
        change("d", 4, "000001"),
    ]
    columns = "id BIGINT, at TIMESTAMP, all ARRAY<TIMESTAMP>"
    found, why = faults(source("debezium-json", columns, on_bad_record="dead_letter"), values)
    kept = [(row["id"], row["at"].microsecond) for row in found]
    assert kept == [(0, 123_456), (2, 123_456), (4, 1)]
    for reason in (why[1], why[3]):
        assert "column 'at'" in reason
        assert "finer than the column's unit" in reason


@pytest.mark.parametrize(
    ("value_format", "value"),
    [("raw", b"x"), ("json", b'{"v": 1}'), ("csv", b"1"), ("debezium-json", None)],
)
def test_a_record_whose_time_python_does_not_have_is_a_bad_record_and_minus_one_is_no_time(
    value_format: str, value: bytes | None
) -> None:
    """A producer may take microseconds for milliseconds, and its topic be of an old broker."""
    is_raw = value_format == "raw"
    described = source(
        value_format,
        None if is_raw else "v BIGINT",
        include_metadata=not is_raw,
        on_bad_record="dead_letter",
    )
    stamps = [1_000, 1_700_000_000_000_000, -1, 253_402_300_800_000, -62_135_596_800_001, 2_000]
    body = envelope("c", None, {"v": 1}) if value is None else value
    rows = rows_of(described.settings)
    rows.add(
        [
            Message(topic="rows", partition=1, offset=at, value=body, timestamp=(1, stamp))
            for at, stamp in enumerate(stamps)
        ]
    )
    times = taken(rows).column("timestamp" if is_raw else "_timestamp").to_pylist()
    assert [time and time.timestamp() for time in times] == [1.0, None, 2.0]
    letters = rows.refusals.take_letters()
    assert [letter.offset for letter in letters] == [1, 3, 4]
    assert (
        "its time, 1700000000000000 ms since 1970, is a date or time outside" in letters[0].reason
    )


def test_a_byte_order_mark_is_no_part_of_a_line_wherever_it_stands_in_the_batch() -> None:
    mark = "\ufeff".encode()
    described = source("csv", "name STRING, n BIGINT")
    values = [mark + b"a,1", b"b,2", mark + b"c,3", mark + b'"d\n",4']
    assert [row["name"] for row in read(described, values)] == ["a", "b", "c", "d\n"]
