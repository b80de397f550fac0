"""Values of Debezium's JSON by the schema beside them or an option, and updates of the key."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias

import fastavro
import pyarrow as pa
import pytest
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_kafka_formats import faults, source

from onceflow.core.errors import ConfigError

CONNECT = "org.apache.kafka.connect.data"
MICROS = {"type": "int64", "name": "io.debezium.time.MicroTimestamp"}
DECIMAL = {"type": "bytes", "name": f"{CONNECT}.Decimal", "parameters": {"scale": "2"}}
BYTES, TEXT = {"type": "bytes"}, {"type": "string"}
MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, 678000)
MICROSECONDS = 1_767_323_045_678_000


def change(
    row: dict[str, Any] | None,
    kinds: dict[str, dict[str, Any]] | None = None,
    *,
    before: dict[str, Any] | None = None,
    operation: str = "c",
) -> bytes:
    """Return an envelope, with a schema beside its payload if `kinds` has the columns' schemas."""
    payload = {"op": operation, "before": before, "after": row}
    if kinds is None:
        return json.dumps(payload).encode()
    fields = [{"field": name, **kind} for name, kind in kinds.items()]
    sides = [{"type": "struct", "fields": fields, "field": one} for one in ("before", "after")]
    schema = {"type": "struct", "fields": [*sides, {"type": "string", "field": "op"}]}
    return json.dumps({"schema": schema, "payload": payload}).encode()


def struct_of(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": [{"field": "a", **kind}]}


def list_of(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": kind}


def map_of(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "map", "keys": TEXT, "values": kind}


Wrap: TypeAlias = Callable[[Any], Any]

SHAPES: list[tuple[Wrap, Wrap, Wrap, Wrap]] = [
    (lambda kind: kind, lambda kind: kind, lambda value: value, lambda value: value),
    (lambda kind: pa.struct([("a", kind)]), struct_of, lambda v: {"a": v}, lambda v: {"a": v}),
    (pa.list_, list_of, lambda v: [v, None], lambda v: [v, None]),
    (lambda kind: pa.map_(pa.string(), kind), map_of, lambda v: {"k": v}, lambda v: [("k", v)]),
    (
        lambda kind: pa.struct([("a", pa.list_(pa.map_(pa.string(), kind)))]),
        lambda kind: struct_of(list_of(map_of(kind))),
        lambda value: {"a": [{"k": value}]},
        lambda value: {"a": [[("k", value)]]},
    ),
]


def read_one(kind: pa.DataType, value: Any, schema: Any = None, **given: Any) -> Any:
    """Return the value that a column of `kind` gets, or why the record is bad."""
    columns = pa.schema([pa.field("v", kind)])
    described = source("debezium-json", columns, on_bad_record="dead_letter", **given)
    message = change({"v": value}, None if schema is None else {"v": schema})
    rows, why = faults(described, [message])
    return rows[0]["v"] if rows else why[0]


@pytest.mark.parametrize(("shape", "written", "given", "expected"), SHAPES)
def test_a_schema_beside_the_payload_counts_inside_of_values(
    shape: Any, written: Any, given: Any, expected: Any
) -> None:
    kind, schema = shape(pa.timestamp("ms")), written(MICROS)
    assert read_one(kind, given(MICROSECONDS), schema) == expected(MOMENT)
    assert "finer than the column's unit" in read_one(kind, given(MICROSECONDS + 1), schema)
    for column, other, word in (
        (pa.string(), BYTES, "declare it BINARY"),
        (pa.string(), DECIMAL, "decimal.handling.mode=string"),
        (pa.binary(), DECIMAL, "declare it DECIMAL"),
        (pa.binary(), TEXT, "binary_handling_mode="),
        (pa.decimal128(8, 2), DECIMAL, "decimal.handling.mode=string"),
    ):
        # Four letters, so that the value itself could be read in each form.
        why = read_one(shape(column), given("0121"), written(other))
        assert word in why, why
        assert "column 'v'" in why
    assert read_one(shape(pa.binary()), given("0121"), written(BYTES)) == expected(b"\xd3]\xb5")
    assert read_one(shape(pa.string()), given("0121"), written(TEXT)) == expected("0121")
    price = read_one(shape(pa.decimal128(8, 2)), given("0121"), written(TEXT))
    assert price == expected(Decimal(121))


@pytest.mark.parametrize(("shape", "written", "given", "expected"), SHAPES)
def test_a_text_with_two_meanings_is_a_bad_record_until_an_option_says_which_one_holds(
    shape: Any, written: Any, given: Any, expected: Any
) -> None:
    decimal, octets = shape(pa.decimal128(8, 2)), shape(pa.binary())
    for text in ("0121", "1234", "1E+3", "00001234"):
        why = read_one(decimal, given(text))
        assert f"{text!r} may be a number, or bytes of a decimal in base64" in why
        assert "decimal_handling_mode='string'" in why
        read = read_one(decimal, given(text), decimal_handling_mode="string")
        assert read == expected(Decimal(text))
    for number in ("12.34", "-121", "121", 1234, 12.5):
        assert read_one(decimal, given(number)) == expected(Decimal(str(number)))
    for text in ("cafe", "0121", "CAFE1234"):
        why = read_one(octets, given(text))
        assert f"{text!r} may be bytes in base64, or in hexadecimal digits" in why
        in_base64 = expected(base64.b64decode(text))
        for mode in ("bytes", "base64"):
            assert read_one(octets, given(text), binary_handling_mode=mode) == in_base64
        read = read_one(octets, given(text), binary_handling_mode="hex")
        assert read == expected(bytes.fromhex(text))
        # The schema beside a payload says more than the option.
        read = read_one(octets, given(text), written(BYTES), binary_handling_mode="hex")
        assert read == in_base64
    assert read_one(octets, given("zz8=")) == expected(base64.b64decode("zz8="))
    assert read_one(octets, given("-_8="), binary_handling_mode="base64-url-safe") == expected(
        base64.urlsafe_b64decode("-_8=")
    )
    assert "column 'v'" in read_one(octets, given("caf"), binary_handling_mode="hex")


def test_a_value_that_was_not_sent_is_found_in_its_own_record_behind_a_bad_one() -> None:
    columns = pa.schema([pa.field("v", pa.string())])
    described = source("debezium-json", columns, on_bad_record="dead_letter")
    values = ["first", "__debezium_unavailable_value", "last"]
    rows, why = faults(described, [b"{", *(change({"v": value}) for value in values)])
    assert [row["v"] for row in rows] == ["first", "last"]
    assert len(why) == 2
    assert "column 'v' was not sent" in list(why.values())[1]


def test_a_key_that_says_which_row_is_deleted_is_held_to_the_same() -> None:
    columns = pa.schema([pa.field("v", pa.decimal128(8, 2)), pa.field("at", pa.timestamp("ms"))])
    described = source("debezium-json", columns, on_bad_record="dead_letter")
    deletion = change(None, operation="d")
    rows, why = faults(described, [deletion], [b'{"v": "0121"}'])
    assert not rows
    assert "may be a number, or bytes of a decimal in base64" in why[0]
    schema = {"type": "struct", "fields": [{"field": "at", **MICROS}]}
    key = json.dumps({"schema": schema, "payload": {"at": MICROSECONDS}}).encode()
    rows, why = faults(described, [deletion], [key])
    assert not why
    assert rows == [{"v": None, "at": MOMENT, "_op": "d"}]


def test_modes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="decimal_handling_mode='precise' is not one of string"):
        source("debezium-json", "v DECIMAL(8, 2)", decimal_handling_mode="precise")
    with pytest.raises(ConfigError, match="binary_handling_mode='hexa' is not one of bytes"):
        source("debezium-json", "v BINARY", binary_handling_mode="hexa")
    for option in ("decimal_handling_mode", "binary_handling_mode", "primary_key"):
        with pytest.raises(ConfigError, match=f"no changes of Debezium; omit {option}="):
            source("json", "v BIGINT", **{option: "hex"})
    with pytest.raises(ConfigError, match="primary_key= names 'w', but the columns are v"):
        source("debezium-json", "v BIGINT", primary_key=("v", "w"))


ANN = {"id": 1, "email": "ann@old", "name": "Ann"}
MOVED = {**ANN, "email": "ann@new"}
USER = "id BIGINT NOT NULL, email STRING, name STRING"


def in_json(before: Any, after: Any) -> bytes:
    return change(after, before=before, operation="u")


ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {
            "name": "before",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "Value",
                    "fields": [
                        {"name": "id", "type": "long"},
                        {"name": "email", "type": ["null", "string"]},
                        {"name": "name", "type": ["null", "string"]},
                    ],
                },
            ],
        },
        {"name": "after", "type": ["null", "Value"]},
        {"name": "op", "type": "string"},
    ],
}


@pytest.mark.parametrize("value_format", ["debezium-json", "debezium-avro"])
def test_an_update_that_changes_the_target_s_key_deletes_the_old_row(
    registry: SchemaRegistryDouble, value_format: str
) -> None:
    def encode(before: Any, after: Any) -> bytes:
        if value_format == "debezium-json":
            return in_json(before, after)
        schema_id = registry.keep("rows-value", ENVELOPE)
        buffer = io.BytesIO()
        envelope = {"before": before, "after": after, "op": "u"}
        module: Any = fastavro
        module.schemaless_writer(buffer, module.parse_schema(ENVELOPE), envelope)
        return b"\0" + schema_id.to_bytes(4, "big") + buffer.getvalue()

    given: dict[str, Any] = {"on_bad_record": "dead_letter", "primary_key": "email"}
    if value_format == "debezium-avro":
        given["schema_registry"] = registry.url
    described = source(value_format, USER, include_metadata=True, **given)
    values = [
        encode(ANN, {**ANN, "name": "Anne"}),
        encode(ANN, MOVED),
        encode({**ANN, "email": None}, MOVED),
        encode(None, MOVED),
    ]
    rows, why = faults(described, values)
    assert [(row["email"], row["name"], row["_op"], row["_offset"]) for row in rows] == [
        ("ann@old", "Anne", "u", 0),
        ("ann@old", "Ann", "d", 1),
        ("ann@new", "Ann", "u", 1),
    ]
    assert sorted(why) == [2, 3]
    for reason in why.values():
        assert "its 'before' has no 'email'" in reason
        assert "REPLICA IDENTITY to FULL" in reason


def test_an_update_without_before_keeps_the_table_s_own_key() -> None:
    described = source("debezium-json", USER, on_bad_record="dead_letter", primary_key=("id",))
    update = in_json(None, ANN)
    rows, why = faults(described, [update, update], [b'{"id": 1}', b'{"other": 1}'])
    assert rows == [{**ANN, "_op": "u"}]
    assert "its 'before' has no 'id'" in why[1]


def test_both_rows_of_an_update_are_left_out_if_one_is_bad() -> None:
    described = source(
        "debezium-json",
        "id BIGINT, day DATE",
        on_bad_record="dead_letter",
        primary_key=("id",),
    )
    good = in_json({"id": 1, "day": 1}, {"id": 2, "day": 1})
    bad = in_json({"id": 3, "day": 2_932_897}, {"id": 4, "day": 1})
    rows, why = faults(described, [bad, good])
    assert [(row["id"], row["_op"]) for row in rows] == [(1, "d"), (2, "u")]
    assert list(why) == [0]


@pytest.mark.parametrize("before", [None, {}, {"id": None}])
def test_a_delete_whose_before_says_nothing_deletes_the_row_of_its_key(before: Any) -> None:
    described = source("debezium-json", "id BIGINT, name STRING", on_bad_record="dead_letter")
    delete = change(None, before=before, operation="d")
    rows, why = faults(described, [delete, delete, delete], [b'{"id": 7}', b'{"other": 7}'])
    assert rows == [{"id": 7, "name": None, "_op": "d"}]
    assert sorted(why) == [1, 2]
