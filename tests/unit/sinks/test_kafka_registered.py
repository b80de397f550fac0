"""What the Kafka sink writes by registered schemas is what readers of those make of it."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, cast

import fastavro
import pyarrow as pa
import pytest
from tests.support.schema_registry_double import SchemaRegistryDouble

from onceflow.core.bad_rows import BadRows
from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.spi import OnBadRow
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


@pytest.fixture
def registry() -> Iterator[SchemaRegistryDouble]:
    with SchemaRegistryDouble() as double:
        yield double


def encoder(schema: pa.Schema, url: str, **given: Any) -> RecordEncoder:
    settings: dict[str, Any] = {"format": "avro", "deadline_s": 30.0, **given}
    sink = KafkaSink("nowhere:1", topic="out", schema_registry=url, **settings)
    found = RecordEncoder(sink.settings, schema, BadRows(OnBadRow.FAIL, schema))
    found.ask_schema()
    return found


def written(found: RecordEncoder, schema: pa.Schema, rows: list[dict[str, Any]]) -> list[bytes]:
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    return found.encode(batch).column("value").to_pylist()


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
    with pytest.raises(ConfigError, match=r"needs fields \['id'\]"):
        encoder(pa.schema([pa.field("name", pa.string())]), registry.url, **given)
    with pytest.raises(ConfigError, match="Register a schema there"):
        encoder(rows, registry.url, auto_register=False, subject="none")


def test_schema_that_may_not_follow_is_refused_with_what_to_do(
    registry: SchemaRegistryDouble,
) -> None:
    registry.incompatible.add("out-value")
    with pytest.raises(ConfigError, match=r"incompatible.*may not follow the subject's versions"):
        encoder(ROWS, registry.url)


def test_registry_that_is_away_fails_the_attempt_and_not_the_job(
    registry: SchemaRegistryDouble,
) -> None:
    registry.failing = (503, {"error_code": 50003, "message": "leader is away"})
    with pytest.raises(SinkError, match="leader is away"):
        encoder(ROWS, registry.url, deadline_s=0.1)


@pytest.mark.parametrize(
    ("column", "fragment"),
    [
        (pa.field("two words", pa.int64()), "a name that Avro does not allow"),
        (pa.field("n", pa.uint64()), "which Avro does not have"),
        (pa.field("n", pa.duration("s")), "which Avro does not have"),
    ],
)
def test_columns_that_avro_does_not_have_are_refused_before_the_registry_is_asked(
    column: pa.Field, fragment: str
) -> None:
    schema = pa.schema([column])
    sink = KafkaSink("nowhere:1", topic="out", format="avro", schema_registry="http://nowhere:1")
    with pytest.raises(ConfigError) as caught:
        RecordEncoder(sink.settings, schema, BadRows(OnBadRow.FAIL, schema))
    assert fragment in str(caught.value)
