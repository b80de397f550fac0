"""Tests that readers of registered schemas read back what the Kafka sink has written."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from typing import Any, cast

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.json_format import MessageToDict
from tests.support.protobuf_messages import framed, message_class
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_avro_columns import read

from onceflow.core.errors import BadRow, ConfigError, SinkError
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka.encoder import RecordEncoder

UTC = dt.timezone.utc
ROWS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int8()),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("at", pa.timestamp("ms", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("day", pa.date32()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("more", pa.struct([pa.field("x", pa.float64(), nullable=False)])),
        pa.field("counts", pa.map_(pa.string(), pa.int32())),
        pa.field("raw", pa.binary()),
    ]
)
ROW: dict[str, Any] = {
    "id": 1,
    "small": -3,
    "price": Decimal("-12.34"),
    "at": dt.datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
    "local": dt.datetime(2026, 1, 2, 3, 4, 5, 678901),
    "day": dt.date(2026, 1, 2),
    "tags": ["a", None],
    "more": {"x": 0.5},
    "counts": {"k": 7},
    "raw": b"\0\xff",
}
EMPTY: dict[str, Any] = {**dict.fromkeys(ROWS.names), "id": 2}


def encoder(schema: pa.Schema, url: str, **given: Any) -> RecordEncoder:
    settings: dict[str, Any] = {"format": "avro", "deadline_s": 30.0, **given}
    sink = KafkaSink("nowhere:1", topic="out", schema_registry=url, **settings)
    found = RecordEncoder(sink.settings, schema, BadRows(OnBadRow.FAIL, schema))
    found.ask_schema()
    return found


def written(found: RecordEncoder, schema: pa.Schema, rows: list[dict[str, Any]]) -> list[bytes]:
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    return found.encode(batch).column("value").to_pylist()


MORE = pa.schema(
    [
        *ROWS,
        pa.field("ok", pa.bool_(), nullable=False),
        pa.field("big", pa.uint64()),
        pa.field("time", pa.time64("us")),
        pa.field("places", pa.list_(pa.struct([pa.field("at", pa.timestamp("us", "UTC"))]))),
        pa.field("by_id", pa.map_(pa.int64(), pa.struct([pa.field("name", pa.string())]))),
    ]
)
MORE_OF_ROW: dict[str, Any] = {
    "tags": ["a", "b"],
    "ok": True,
    "big": 2**64 - 1,
    "time": dt.time(3, 4, 5),
    "places": [{"at": ROW["at"]}, {"at": None}],
    "by_id": [(7, {"name": "x"})],
}


def parsed(registry: SchemaRegistryDouble, value: bytes, subject: str = "out-value") -> Any:
    """Return what Confluent's deserializer makes of `value`."""
    make = message_class(registered(registry, subject)["schema"])
    context = SerializationContext("out", MessageField.VALUE)
    return cast("Any", ProtobufDeserializer)(make, {})(value, context)


def test_rows_become_protobuf_messages_of_the_schema_that_is_registered(
    registry: SchemaRegistryDouble,
) -> None:
    full = {**ROW, **MORE_OF_ROW}
    lists: dict[str, Any] = {"tags": [], "counts": [], "places": [], "by_id": []}
    empty = {**dict.fromkeys(MORE.names), "id": 2, "ok": False, **lists}
    found = written(encoder(MORE, registry.url, format="protobuf"), MORE, [full, empty])
    kept = registered(registry, "out-value")
    assert (kept["schemaType"], kept["version"]) == ("PROTOBUF", 1)
    assert found[0][:6] == b"\0" + kept["id"].to_bytes(4, "big") + b"\0"
    one, two = (MessageToDict(parsed(registry, value)) for value in found)
    assert one == {
        "id": "1",
        "small": -3,
        "price": "-12.34",
        "at": "2026-01-02T03:04:05.678Z",
        "local": "2026-01-02T03:04:05.678901",
        "day": "2026-01-02",
        "tags": ["a", "b"],
        "more": {"x": 0.5},
        "counts": {"k": 7},
        "raw": "AP8=",
        "ok": True,
        "big": str(2**64 - 1),
        "time": "03:04:05",
        "places": [{"at": "2026-01-02T03:04:05.678Z"}, {}],
        "byId": {"7": {"name": "x"}},
    }
    assert two == {"id": "2"}
    # The same rows, the same schema: nothing is registered anew.
    encoder(MORE, registry.url, format="protobuf")
    assert registered(registry, "out-value")["version"] == 1


def test_fields_of_protobuf_keep_their_numbers_when_columns_come_and_go(
    registry: SchemaRegistryDouble,
) -> None:
    def numbers(*columns: str) -> dict[str, tuple[int, int]]:
        inner = pa.struct([pa.field(name, pa.int64()) for name in columns])
        schema = pa.schema([*inner, pa.field("inner", inner)])
        encoder(schema, registry.url, format="protobuf")
        message = message_class(registered(registry, "out-value")["schema"]).DESCRIPTOR
        fields = message.fields_by_name
        inside = fields["inner"].message_type.fields_by_name
        return {name: (fields[name].number, inside[name].number) for name in columns}

    assert numbers("a", "b", "c") == {"a": (1, 1), "b": (2, 2), "c": (3, 3)}
    assert numbers("c", "a") == {"c": (3, 3), "a": (1, 1)}
    text = registered(registry, "out-value")["schema"]
    assert text.count("reserved 2;") == text.count('reserved "b";') == 2
    # What b was must never be read as another column, also not as a new b.
    assert numbers("d", "c", "b") == {"d": (5, 4), "c": (3, 3), "b": (6, 5)}
    assert 'reserved "a";' in registered(registry, "out-value")["schema"]


def test_without_registering_rows_are_the_message_of_the_latest_version_that_is_named(
    registry: SchemaRegistryDouble,
) -> None:
    latest = """
    syntax = "proto3";
    message Other { string text = 1; }
    message Kept {
      enum Kind { NEW = 0; OLD = 1; }
      string name = 1; int64 id = 2; Kind kind = 3; Inner inner = 4;
    }
    message Inner { int64 x = 1; }
    """
    schema_id = registry.keep("kept", latest, kind="PROTOBUF")
    given = {"format": "protobuf", "auto_register": False, "subject": "kept"}
    rows = pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("kind", pa.string()),
            pa.field("inner", pa.struct([pa.field("x", pa.int32())])),
        ]
    )
    named = encoder(rows, registry.url, message="Kept", **given)
    [value] = written(named, rows, [{"id": 5, "kind": "OLD", "inner": {"x": 1}}])
    kept = message_class(latest, "Kept")(id=5, kind=1, inner={"x": 1})
    assert value == framed(schema_id, kept, b"\x02\x02")
    assert not any(one.startswith("POST") for one in registry.asked)
    bad = [{"id": 5, "kind": "LOST", "inner": None}]
    with pytest.raises(BadRow, match="LOST"):
        written(named, rows, bad)
    with pytest.raises(ConfigError, match=r"message Other has no fields for columns \['id'"):
        encoder(rows, registry.url, **given)
    deeper = rows.set(2, pa.field("inner", pa.struct([pa.field("y", pa.int32())])))
    with pytest.raises(ConfigError, match=r"message Inner has no fields for columns \['y'\]"):
        encoder(deeper, registry.url, message="Kept", **given)
    with pytest.raises(ConfigError, match=r"subject 'kept': message='Lost' names 0"):
        encoder(rows, registry.url, message="Lost", **given)
    with pytest.raises(ConfigError, match="Register a schema there"):
        encoder(rows, registry.url, format="protobuf", auto_register=False, subject="none")
    registry.keep("kept", {"type": "string"}, kind="JSON")
    with pytest.raises(ConfigError, match="subject 'kept': its latest version is JSON"):
        encoder(rows, registry.url, **given)


def test_a_registered_message_that_contains_itself_is_written_as_deep_as_the_columns_go(
    registry: SchemaRegistryDouble,
) -> None:
    latest = """
    syntax = "proto3";
    message Node {
      string name = 1; Node parent = 2; repeated Node children = 3; map<string, Pair> pairs = 4;
    }
    message Pair { Node left = 1; Node right = 2; }
    """
    schema_id = registry.keep("out-value", latest, kind="PROTOBUF")
    leaf = pa.struct([pa.field("name", pa.string(), nullable=False)])
    rows = pa.schema(
        [
            pa.field("name", pa.string(), nullable=False),
            pa.field("parent", pa.struct([*leaf, pa.field("parent", leaf)])),
            pa.field("children", pa.list_(leaf)),
            pa.field("pairs", pa.map_(pa.string(), pa.struct([pa.field("left", leaf)]))),
        ]
    )
    row: dict[str, Any] = {
        "name": "a",
        "parent": {"name": "b", "parent": {"name": "c"}},
        "children": [{"name": "d"}, {"name": "e"}],
        "pairs": {"f": {"left": {"name": "g"}}},
    }
    found = encoder(rows, registry.url, format="protobuf", auto_register=False)
    given = [{**row, "pairs": list(row["pairs"].items())}]
    assert written(found, rows, given) == [framed(schema_id, message_class(latest, "Node")(**row))]


def registered(registry: SchemaRegistryDouble, subject: str) -> Any:
    status, kept = registry.answer("GET", f"subjects/{subject}/versions/latest")
    assert status == 200
    return kept


def test_rows_become_avro_records_of_the_schema_that_is_registered_once(
    registry: SchemaRegistryDouble,
) -> None:
    assert written(encoder(ROWS, registry.url), ROWS, []) == []
    values = written(encoder(ROWS, registry.url), ROWS, [ROW, EMPTY])
    kept = registered(registry, "out-value")
    assert kept["version"] == 1
    parsed = fastavro.parse_schema(json.loads(kept["schema"]))
    found: list[Any] = []
    for value in values:
        assert value[:5] == b"\0" + kept["id"].to_bytes(4, "big")
        found.append(cast("Any", fastavro).schemaless_reader(io.BytesIO(value[5:]), parsed, None))
    assert found == [ROW, EMPTY]


def test_rows_become_json_objects_of_the_schema_that_is_registered(
    registry: SchemaRegistryDouble,
) -> None:
    values = written(encoder(ROWS, registry.url, format="json-schema"), ROWS, [ROW])
    kept = registered(registry, "out-value")
    assert kept["schemaType"] == "JSON"
    described = json.loads(kept["schema"])
    assert described["required"] == ["id"]
    assert described["properties"].keys() == json.loads(values[0][5:]).keys()
    assert values[0][:5] == b"\0" + kept["id"].to_bytes(4, "big")


_AT = dt.datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


def _logical(kind: str, logical: str, **more: int) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


@pytest.mark.parametrize(
    ("kind", "registered_as", "value", "expected"),
    [
        (pa.timestamp("ms", "UTC"), _logical("long", "timestamp-micros"), _AT, _AT),
        (pa.timestamp("us", "UTC"), _logical("long", "timestamp-millis"), _AT, _AT),
        (pa.timestamp("us", "UTC"), _logical("long", "timestamp-millis"),
         _AT.replace(microsecond=1), BadRow),
        (pa.list_(pa.timestamp("us", "UTC")),
         {"type": "array", "items": _logical("long", "timestamp-millis")},
         [_AT.replace(microsecond=1)], BadRow),
        (pa.time64("us"), _logical("int", "time-millis"), dt.time(1, 2, 3), dt.time(1, 2, 3)),
        (pa.float64(), "int", 99.99, ConfigError),
        (pa.float64(), "float", 1e39, BadRow),
        (pa.float64(), "float", 0.5, 0.5),
        (pa.int64(), "int", 2**40, BadRow),
        (pa.int64(), ["null", "double"], 2**53 + 1, BadRow),
        (pa.int64(), "boolean", 5, ConfigError),
        (pa.decimal128(9, 3), "long", Decimal("1.5"), ConfigError),
        (pa.decimal128(9, 3), _logical("bytes", "decimal", precision=5, scale=2),
         Decimal("1.500"), Decimal("1.50")),
        (pa.decimal128(9, 3), _logical("bytes", "decimal", precision=5, scale=2),
         Decimal("1.005"), BadRow),
        (pa.date32(), _logical("long", "timestamp-millis"), dt.date(2026, 1, 2), ConfigError),
        (pa.int64(), ["null", "string", "long"], 5, 5),
    ],
)  # fmt: skip
def test_a_value_is_written_as_the_registered_avro_schema_means_it_or_refused(
    registry: SchemaRegistryDouble, kind: pa.DataType, registered_as: Any, value: Any, expected: Any
) -> None:
    field = {"name": "v", "type": registered_as}
    latest = {"type": "record", "name": "Kept", "fields": [field]}
    registry.keep("out-value", latest)
    rows = pa.schema([pa.field("v", kind)])
    if expected in (BadRow, ConfigError):
        with pytest.raises(expected, match="column 'v'" if expected is ConfigError else "encoded"):
            written(encoder(rows, registry.url, auto_register=False), rows, [{"v": value}])
        return
    [body] = written(encoder(rows, registry.url, auto_register=False), rows, [{"v": value}])
    schema = fastavro.parse_schema(latest)
    read: Any = cast("Any", fastavro).schemaless_reader(io.BytesIO(body[5:]), schema, None)
    assert read == {"v": expected}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (pa.float64(), "float v = 1;", 1e39),
        (pa.list_(pa.float64()), "repeated float v = 1;", [1e39]),
        (pa.int64(), "float v = 1;", 2**24 + 1),
        (pa.int64(), "double v = 1;", 2**53 + 1),
        (pa.int64(), "bool v = 1;", 5),
    ],
)
def test_a_value_that_protobuf_writes_as_another_one_is_a_bad_row(
    registry: SchemaRegistryDouble, kind: pa.DataType, field: str, value: Any
) -> None:
    registry.keep("out-value", f'syntax = "proto3"; message M {{ {field} }}', kind="PROTOBUF")
    rows = pa.schema([pa.field("v", kind)])
    found = encoder(rows, registry.url, format="protobuf", auto_register=False)
    with pytest.raises(BadRow, match="the row cannot be encoded"):
        written(found, rows, [{"v": value}])


def test_without_registering_rows_are_written_by_the_subject_s_latest_version(
    registry: SchemaRegistryDouble,
) -> None:
    latest = {
        "type": "record",
        "name": "Kept",
        "fields": [
            {"name": "name", "type": "string", "default": "?"},
            {"name": "id", "type": "long"},
        ],
    }
    schema_id = registry.keep("kept", latest)
    rows = pa.schema([pa.field("id", pa.int64())])
    given = {"auto_register": False, "subject": "kept"}
    [value] = written(encoder(rows, registry.url, **given), rows, [{"id": 5}])
    assert value == b"\0" + schema_id.to_bytes(4, "big") + b"\x02?" + b"\x0a"
    assert not any(one.startswith("POST") for one in registry.asked)
    with pytest.raises(ConfigError, match=r"no fields for columns \['lost'\]"):
        encoder(rows.append(pa.field("lost", pa.int8())), registry.url, **given)
    with pytest.raises(ConfigError, match=r"requires fields \['id'\]"):
        encoder(pa.schema([pa.field("name", pa.string())]), registry.url, **given)
    with pytest.raises(ConfigError, match="Register a schema there"):
        encoder(rows, registry.url, auto_register=False, subject="none")


@pytest.mark.parametrize("value_format", ["avro", "protobuf"])
def test_schema_that_may_not_follow_is_refused_with_what_to_do(
    registry: SchemaRegistryDouble, value_format: str
) -> None:
    registry.incompatible.add("out-value")
    with pytest.raises(ConfigError, match=r"incompatible.*may not follow the subject's versions"):
        encoder(ROWS, registry.url, format=value_format)


@pytest.mark.parametrize("value_format", ["avro", "protobuf"])
def test_registry_that_is_away_fails_the_attempt_and_not_the_job(
    registry: SchemaRegistryDouble, value_format: str
) -> None:
    registry.failing = (503, {"error_code": 50003, "message": "leader is away"})
    with pytest.raises(SinkError, match="leader is away"):
        encoder(ROWS, registry.url, format=value_format, deadline_s=0.1)


@pytest.mark.parametrize(
    ("value_format", "column", "fragment"),
    [
        ("avro", pa.field("two words", pa.int64()), "a name that Avro does not allow"),
        ("avro", pa.field("n", pa.uint64()), "which Avro does not have"),
        ("avro", pa.field("n", pa.duration("s")), "which Avro does not have"),
        ("protobuf", pa.field("two words", pa.int64()), "a name that Protobuf does not allow"),
        ("protobuf", pa.field("n", pa.duration("s")), "which Protobuf does not have"),
        ("protobuf", pa.field("n", pa.list_(pa.list_(pa.int8()))), "which Protobuf does not have"),
        (
            "protobuf",
            pa.field("n", pa.map_(pa.float32(), pa.int8())),
            "whose keys Protobuf does not have",
        ),
    ],
)
def test_columns_that_a_format_does_not_have_are_refused_before_the_registry_is_asked(
    value_format: Any, column: pa.Field, fragment: str
) -> None:
    schema = pa.schema([column])
    sink = KafkaSink(
        "nowhere:1", topic="out", format=value_format, schema_registry="http://nowhere:1"
    )
    with pytest.raises(ConfigError) as caught:
        RecordEncoder(sink.settings, schema, BadRows(OnBadRow.FAIL, schema))
    assert fragment in str(caught.value)


@pytest.mark.parametrize("value_format", ["json", "json-schema", "avro", "protobuf"])
@pytest.mark.parametrize("where", ["column", "list", "struct", "map"])
def test_a_time_of_day_finer_than_microseconds_is_a_bad_row_and_never_cut_off(
    registry: SchemaRegistryDouble, value_format: str, where: str
) -> None:
    fine = pa.time64("ns")
    kind = {
        "column": fine,
        "list": pa.list_(fine),
        "struct": pa.struct([("t", fine)]),
        "map": pa.map_(pa.string(), fine),
    }[where]

    def wrap(time: object) -> object:
        return {"column": time, "list": [time]}.get(where, {"t": time})

    columns = pa.schema([("at", kind)])
    given: Any = {"format": value_format}
    if value_format != "json":
        given["schema_registry"] = registry.url
    sink = KafkaSink("nowhere:1", topic="out", **given)
    bad_rows = BadRows(OnBadRow.DEAD_LETTER, columns)
    found = RecordEncoder(sink.settings, columns, bad_rows)
    found.ask_schema()
    nanoseconds = [86_399_999_999_000, 86_399_999_999_999]
    times = pa.array(nanoseconds).view(fine)
    batch = pa.RecordBatch.from_arrays([pa.array(map(wrap, times), kind)], schema=columns)
    (value,) = found.encode(batch).column("value").to_pylist()
    assert b"23:59:59.999999" in value or value_format == "avro"
    (rejected,) = bad_rows.take()
    assert "would lose data: 86399999999999" in rejected.reasons[0]


WRAPPED = """
syntax = "proto3";
import "google/protobuf/wrappers.proto";
message Wrapped {
  google.protobuf.FloatValue float = 1;
  google.protobuf.DoubleValue double = 2;
  google.protobuf.BoolValue bool = 3;
  map<bool, int64> by_bool = 4;
}
"""


@pytest.mark.parametrize(
    ("field", "kind", "good", "bad"),
    [
        ("float", pa.float64(), 0.5, 1e39),
        ("double", pa.int64(), 2**53, 2**53 + 1),
        ("bool", pa.int64(), None, 5),
        ("by_bool", pa.map_(pa.int64(), pa.int64()), [], [(5, 1), (6, 2)]),
    ],
)
def test_what_a_wrapper_or_a_key_of_a_map_does_not_hold_makes_a_bad_row(
    registry: SchemaRegistryDouble, field: str, kind: pa.DataType, good: Any, bad: Any
) -> None:
    """Protobuf itself makes infinity, another number or `true` of it, and of two keys one."""
    registry.keep("out-value", WRAPPED, kind="PROTOBUF")
    columns = pa.schema([(field, kind)])
    given: Any = {"format": "protobuf", "auto_register": False}
    sink = KafkaSink("nowhere:1", topic="out", schema_registry=registry.url, **given)
    bad_rows = BadRows(OnBadRow.DEAD_LETTER, columns)
    found = RecordEncoder(sink.settings, columns, bad_rows)
    found.ask_schema()
    batch = pa.RecordBatch.from_pylist([{field: good}, {field: bad}], schema=columns)
    assert found.encode(batch).num_rows == 1
    (rejected,) = bad_rows.take()
    assert "which" in rejected.reasons[0] or "is not a bool" in rejected.reasons[0]


_SINGLE = {"type": "record", "name": "Single", "fields": [{"name": "x", "type": "float"}]}
_DOUBLE = {"type": "record", "name": "Double", "fields": [{"name": "x", "type": "double"}]}
_DAY = {"type": "int", "logicalType": "date"}
_KIND = {"type": "enum", "name": "Kind", "symbols": ["a", "b"]}


@pytest.mark.parametrize(
    ("union", "kind", "value", "member"),
    [
        (["float", "long"], pa.int64(), 2**53 + 1, "member1"),
        (["null", "double", "long"], pa.int64(), 2**53 + 1, "member1"),
        (["null", "long", _DAY], pa.date32(), dt.date(2024, 1, 1), "member1"),
        (["null", _DAY, "long"], pa.int64(), 5, "member1"),
        (["int", "long"], pa.int64(), 5, "member1"),
        (["double", "float"], pa.float32(), 0.5, "member1"),
        (["null", _SINGLE, _DOUBLE], pa.struct([("x", pa.float64())]), {"x": 0.1}, "member1"),
        (["null", _KIND, "string"], pa.string(), "c", "member1"),
        (["null", "long", _KIND], pa.string(), "a", "member1"),
        (["null", _KIND, "bytes", "long"], pa.int64(), None, None),
    ],
)
@pytest.mark.parametrize("where", ["field", "array", "map", "record"])
def test_a_value_is_written_as_the_branch_of_its_column_s_type(
    registry: SchemaRegistryDouble,
    where: str,
    union: Any,
    kind: pa.DataType,
    value: Any,
    member: str | None,
) -> None:
    """Left to itself fastavro looks at the value: it takes a float for a long, and rounds it."""
    inner = {"type": "record", "name": "Inner", "fields": [{"name": "k", "type": union}]}
    node, column = {
        "field": (union, kind),
        "array": ({"type": "array", "items": union}, pa.list_(kind)),
        "map": ({"type": "map", "values": union}, pa.map_(pa.string(), kind)),
        "record": (inner, pa.struct([("k", kind)])),
    }[where]

    def wrap(one: Any) -> Any:
        return {"field": one, "array": [one]}.get(where, {"k": one})

    latest = {"type": "record", "name": "Kept", "fields": [{"name": "v", "type": node}]}
    registry.keep("out-value", latest)
    rows = pa.schema([pa.field("v", column)])
    found = encoder(rows, registry.url, auto_register=False)
    records, faults = read(latest, written(found, rows, [{"v": wrap(value)}]))
    count = len(union) - ("null" in union)
    members = {f"member{at}": None for at in range(count)}
    expected = wrap(None if member is None else {**members, member: value})
    assert (records, faults) == ([{"v": expected}], {})


def test_a_decimal_with_more_scale_than_digits_in_the_subject_s_schema_is_refused_by_name(
    registry: SchemaRegistryDouble,
) -> None:
    amount = {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 3}
    fields = [{"name": "amount", "type": amount}]
    registry.keep("out-value", {"type": "record", "name": "Row", "fields": fields})
    columns = pa.schema([pa.field("amount", pa.decimal128(2, 3), nullable=False)])
    with pytest.raises(ConfigError, match="nothing can be written by the subject's schema"):
        encoder(columns, registry.url, auto_register=False)
