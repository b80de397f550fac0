"""The round-trip matrix of the Kafka sink's Avro: fastavro gets what was written.

It reads bare numbers and bytes, and this module makes dates, times and decimals of them by the
schema, because Python's own end at the year 9999.
"""

from __future__ import annotations

import io
import json
from decimal import Decimal
from typing import Any, cast

import fastavro
import pyarrow as pa
import pytest
from tests.support.edge_values import NESTED, SCALARS, EdgeColumn, parameters, rows_one_by_one
from tests.support.exact_values import Clock, Day, Instant, Local, exact_values, same

from onceflow.clients.kafka.registry import SchemaKind
from onceflow.core.errors import ConfigError
from onceflow.formats import encoding
from onceflow.formats.faulty_parts import ENCODING_ERRORS

_NANOSECONDS = {"millis": 10**6, "micros": 10**3, "nanos": 1}


def without_logical_types(node: Any) -> Any:
    """Return a schema whose values fastavro reads as numbers and bytes."""
    if isinstance(node, list):
        branches: list[Any] = [*cast("Any", node)]
        return [without_logical_types(part) for part in branches]
    if isinstance(node, dict):
        kept = cast("dict[str, Any]", node).items()
        return {key: without_logical_types(part) for key, part in kept if key != "logicalType"}
    return node


def read_value(value: Any, node: Any) -> object:
    """Return what a number or bytes stand for by the schema."""
    if value is None:
        return None
    if isinstance(node, list):
        branches: list[Any] = [*cast("Any", node)]
        (node,) = [part for part in branches if part != "null"]
    if not isinstance(node, dict):
        return value
    schema = cast("dict[str, Any]", node)
    match schema["type"]:
        case "record":
            return {
                field["name"]: read_value(value[field["name"]], field["type"])
                for field in schema["fields"]
            }
        case "array":
            return [read_value(item, schema["items"]) for item in value]
        case "map":
            return {key: read_value(item, schema["values"]) for key, item in value.items()}
        case _:
            return read_logical(value, schema)


def read_logical(value: Any, schema: dict[str, Any]) -> object:
    """Return the date, time or decimal that a bare value stands for."""
    logical = str(schema.get("logicalType", ""))
    if logical == "decimal":
        unscaled = int.from_bytes(value, "big", signed=True)
        sign, digits = int(unscaled < 0), tuple(map(int, str(abs(unscaled))))
        return Decimal((sign, digits, -int(schema.get("scale", 0))))
    if logical == "date":
        return Day(value)
    for start, made in (("time-", Clock), ("timestamp-", Instant), ("local-timestamp-", Local)):
        if logical.startswith(start):
            return made(value * _NANOSECONDS[logical.removeprefix(start)])
    return value


@pytest.mark.parametrize("edge", parameters([*SCALARS, *NESTED]))
def test_a_value_in_avro_is_what_was_written_or_its_row_was_refused(edge: EdgeColumn) -> None:
    columns = pa.schema([pa.field("x", edge.type)])
    try:
        text = encoding.schema_text(SchemaKind.AVRO, columns, "row", alone=False)
        encode = encoding.value_encoder(
            SchemaKind.AVRO, columns, encoding.WrittenSchema(b"", text), alone=False
        )
    except ConfigError:
        return
    schema = json.loads(text)
    parsed = fastavro.parse_schema(without_logical_types(schema))
    altered: list[str] = []
    for row, meant in zip(rows_one_by_one(edge.values), exact_values(edge.values), strict=True):
        try:
            (data,) = encode([row])
        except ENCODING_ERRORS:
            continue
        assert data is not None
        stream = io.BytesIO(data)
        read = cast("Any", fastavro).schemaless_reader(stream, parsed, None)
        assert not stream.read(), "bytes are left"
        shown = read_value(read, schema)
        if not same(shown, {"x": meant}):
            altered.append(f"{meant!r} was read as {shown!r}")
    assert altered == []


@pytest.mark.parametrize(
    ("kind", "cast"),
    [
        (pa.decimal128(5, -2), r"decimal\(7, 0\)"),
        (pa.decimal128(3, 5), r"decimal\(5, 5\)"),
        (pa.list_(pa.decimal256(50, -3)), r"decimal\(53, 0\)"),
    ],
)
def test_a_decimal_that_avro_has_no_schema_for_is_refused_with_one_that_holds_it(
    kind: pa.DataType, cast: str
) -> None:
    with pytest.raises(ConfigError, match=rf"column 'x(\[\])?' is .*{cast}"):
        encoding.schema_text(SchemaKind.AVRO, pa.schema([pa.field("x", kind)]), "row", alone=False)


def test_columns_that_avro_lacks_are_these_alone() -> None:
    refused: list[str] = []
    for edge in SCALARS:
        columns = pa.schema([pa.field("x", edge.type)])
        try:
            encoding.schema_text(SchemaKind.AVRO, columns, "row", alone=False)
        except ConfigError:
            refused.append(edge.name)
    assert refused == [
        "uint64",
        "halffloat",
        "decimal128(5, -2)",
        "decimal128(3, 5)",
        "decimal256(50, -3)",
        "duration[s]",
        "duration[ms]",
        "duration[us]",
        "duration[ns]",
        "month_day_nano_interval",
    ]
