"""Rows to records without a broker: JSON, keys, headers, limits, and what is refused."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.errors import BadRow, ConfigError
from onceflow.core.spi import OnBadRow, RejectedRows
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka.encoder import RecordEncoder
from onceflow.sinks.kafka.records import facts_of, topics_in


def described(**settings: Any) -> KafkaSink:
    """Return a sink into topic "t" unless told otherwise."""
    given: dict[str, Any] = {"bootstrap_servers": "localhost:9092", "topic": "t", **settings}
    return KafkaSink(**given)


def encode(
    rows: pa.RecordBatch, *, on_bad_row: OnBadRow = OnBadRow.FAIL, **settings: Any
) -> tuple[list[dict[str, Any]], list[RejectedRows]]:
    """Return the records and what was rejected."""
    sink = described(**settings)
    bad_rows = BadRows(on_bad_row, rows.schema)
    encoder = RecordEncoder(sink.settings, rows.schema, bad_rows)
    records = encoder.encode(rows)
    assert facts_of(records).topics == sink.settings.topics
    return records.to_pylist(), list(bad_rows.take())


def one(column: pa.Array, **settings: Any) -> Any:
    """Return the JSON of the only value of `column`."""
    records, _ = encode(pa.record_batch([column], names=["x"]), **settings)
    return json.loads(records[0]["value"])["x"]


UTC = dt.timezone.utc
NOON = dt.datetime(2026, 1, 2, 12, 0, 0, 250_000)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([7], pa.uint64()), 7),
        (pa.array([2**63 - 1]), 2**63 - 1),
        (pa.array([None], pa.int32()), None),
        (pa.array([1.5]), 1.5),
        (pa.array([True]), True),
        (pa.array(['ü\u2028"\\']), 'ü\u2028"\\'),
        (pa.array(["a"], pa.large_string()), "a"),
        (pa.array(["a"]).dictionary_encode(), "a"),
        (pa.array([b"\x00\xff"]), "AP8="),
        (pa.array([Decimal("12345678901234567890.10")]), "12345678901234567890.10"),
        (pa.array([dt.date(2026, 1, 2)]), "2026-01-02"),
        (pa.array([NOON]), "2026-01-02T12:00:00.250000"),
        (pa.array([NOON.replace(tzinfo=UTC)]), "2026-01-02T12:00:00.250000Z"),
        (pa.array([NOON], pa.timestamp("ns")), "2026-01-02T12:00:00.250000"),
        (pa.array([dt.time(1, 2, 3)]), "01:02:03"),
        (pa.array([[1, None]]), [1, None]),
        (pa.array([{"a": 1, "b": [{"c": "d"}]}]), {"a": 1, "b": [{"c": "d"}]}),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), {"k": 1}),
        (pa.array([[[("k", 1)]]], pa.list_(pa.map_(pa.string(), pa.int64()))), [{"k": 1}]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_a_value_is_written_as_json(column: pa.Array, expected: Any) -> None:
    assert one(column) == expected


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.0, math.nan, 2.0]),
        pa.array([1.0, math.inf, 2.0]),
        pa.array([[1.0], [math.nan], []]),
        pa.array([0, 1, 2], pa.timestamp("ns")),
        pa.array([0, 2**62, 0], pa.timestamp("us")),
        pa.array([[], [("k", 1), ("k", 2)], []], pa.map_(pa.string(), pa.int64())),
    ],
    ids=["nan", "inf", "nested nan", "nanoseconds", "year 148,000", "doubled map key"],
)
def test_a_value_that_json_cannot_hold_is_a_bad_row_and_the_others_go_on(column: pa.Array) -> None:
    rows = pa.record_batch([pa.array([1, 2, 3]), column], names=["id", "x"])
    with pytest.raises(BadRow):
        encode(rows)
    records, rejected = encode(rows, on_bad_row=OnBadRow.DEAD_LETTER)
    kept = [json.loads(record["value"])["id"] for record in records]
    bad = [number for one in rejected for number in one.rows["id"].to_pylist()]
    assert 2 in bad or 3 in bad
    assert sorted([*kept, *bad]) == [1, 2, 3]
    assert all(reason for one in rejected for reason in one.reasons)
    assert all(one.rows.schema == rows.schema for one in rejected)


def test_keys_are_text_bytes_json_or_objects() -> None:
    rows = pa.record_batch(
        {
            "name": pa.array(["ü", None]),
            "raw": pa.array([b"\x00", None]),
            "number": pa.array([42, None], pa.int64()),
        }
    )
    for key, expected in (
        ("name", ["ü".encode(), None]),
        ("raw", [b"\x00", None]),
        ("number", [b"42", None]),
        (("name", "number"), ['{"name":"ü","number":42}'.encode(), b'{"name":null,"number":null}']),
        (None, [None, None]),
    ):
        records, _ = encode(rows, key=key)
        assert [record["key"] for record in records] == expected


def test_raw_rows_go_as_they_are_and_null_values_are_tombstones() -> None:
    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows = pa.record_batch(
        {
            "key": pa.array([b"k", None, b"d"]),
            "value": pa.array(["v", "", None]),
            "headers": pa.array([[{"key": "h", "value": b"1"}], [], None], header),
            "offset": pa.array([1, 2, 3]),
        }
    )
    records, _ = encode(rows, format="raw")
    assert [(record["key"], record["value"]) for record in records] == [
        (b"k", b"v"),
        (None, b""),
        (b"d", None),
    ]
    assert records[0]["headers"] == [{"key": "h", "value": b"1"}]
    assert records[1]["headers"] is None


def test_headers_may_be_a_map_and_are_not_part_of_the_value() -> None:
    rows = pa.record_batch(
        {
            "id": pa.array([1]),
            "h": pa.array([[("a", "x")]], pa.map_(pa.string(), pa.string())),
        }
    )
    ((record,), _) = encode(rows, headers="h")
    assert record["headers"] == [{"key": "a", "value": b"x"}]
    assert json.loads(record["value"]) == {"id": 1}


def test_rows_choose_their_topic_among_those_named() -> None:
    rows = pa.record_batch({"id": pa.array([1, 2, 3, 4]), "to": pa.array(["a", "b", "c", None])})
    records, rejected = encode(rows, topic=("a", "b"), topic_column="to", on_bad_row=OnBadRow.DROP)
    assert [record["topic"] for record in records] == ["a", "b"]
    assert json.loads(records[0]["value"]) == {"id": 1}
    reasons = [reason for one in rejected for reason in one.reasons]
    assert len(reasons) == 2
    assert "'c'" in reasons[0]
    sink = KafkaSink("localhost:9092", topic=("a", "b"), topic_column="to")
    encoder = RecordEncoder(sink.settings, rows.schema, BadRows(OnBadRow.DROP, rows.schema))
    assert topics_in(encoder.encode(rows.slice(0, 1))) == {"a"}


def test_a_partition_that_the_topic_does_not_have_is_a_bad_row_before_anything_is_decided() -> None:
    rows = pa.record_batch({"id": pa.array([1, 2, 3, 4]), "p": pa.array([0, 2, -1, None])})
    sink = KafkaSink("localhost:9092", topic="t", partition_column="p")
    bad_rows = BadRows(OnBadRow.DROP, rows.schema)
    encoder = RecordEncoder(sink.settings, rows.schema, bad_rows)
    encoder.know_partitions({"t": 2})
    assert [record["partition"] for record in encoder.encode(rows).to_pylist()] == [0, None]
    assert [one.rows["id"].to_pylist() for one in bad_rows.take()] == [[2, 3]]


def test_a_record_over_the_limit_is_a_bad_row_that_names_both_sizes() -> None:
    rows = pa.record_batch({"key": pa.array([b"k", b"k"]), "value": pa.array([b"x" * 900, b"x"])})
    options = {"kafka.message.max.bytes": 1000}
    with pytest.raises(BadRow, match=r"1001 bytes, over message.max.bytes=1000"):
        encode(rows, format="raw", options=options)
    records, rejected = encode(rows, format="raw", options=options, on_bad_row=OnBadRow.DEAD_LETTER)
    assert [record["value"] for record in records] == [b"x"]
    assert rejected[0].rows.num_rows == 1


def test_a_record_over_the_limit_is_a_bad_row_beside_lists_of_views() -> None:
    rows = pa.record_batch({"x": pa.array([["a" * 900], ["b"]], pa.list_(pa.string_view()))})
    options = {"kafka.message.max.bytes": 500}
    records, rejected = encode(rows, options=options, on_bad_row=OnBadRow.DEAD_LETTER)
    assert [record["value"] for record in records] == [b'{"x":["b"]}']
    assert rejected[0].rows["x"].to_pylist() == [["a" * 900]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bootstrap_servers": ""}, "bootstrap_servers is empty"),
        ({"topic": ""}, "at least one topic"),
        ({"topic": ("a", "b")}, "topic_column="),
        ({"topic": ("a", "a"), "topic_column": "t"}, "twice"),
        ({"delivery": "exactly-once"}, "choose one of exactly_once, at_least_once"),
        ({"format": "orc"}, "choose one of json, raw, avro"),
        ({"transaction_timeout_s": 0.5}, "is under 1"),
        ({"deadline_s": 0}, "is not positive"),
        ({"partitions": 0}, "partitions=0"),
        ({"options": {"acks": "1"}}, "always all"),
        ({"options": {"kafka.transactional.id": "x"}}, "derived from sink id"),
        ({"options": {"sasl.jaas.config": "x"}}, "is the Java client's"),
        ({"options": {"ssl.keystore.location": "a.jks"}}, "Java keystore"),
        ({"options": {"message.max.bytes": "1 MB"}}, "must be a whole number of bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_to_do(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        described(**settings)


@pytest.mark.parametrize(
    ("settings", "schema", "said"),
    [
        ({"key": "nope"}, {"id": pa.int64()}, "no column 'nope'"),
        ({"topic_column": "id"}, {"id": pa.int64()}, "must be a string"),
        ({"partition_column": "id"}, {"id": pa.string()}, "must be an integer"),
        ({"headers": "id"}, {"id": pa.string()}, "a list of structs"),
        ({"format": "raw"}, {"id": pa.int64()}, "no column 'value'"),
        ({"format": "raw"}, {"value": pa.binary(), "id": pa.int64()}, r"\['id'\] would be lost"),
        ({"format": "raw", "key": "k"}, {"value": pa.binary(), "k": pa.binary()}, "column 'key'"),
        ({}, {"d": pa.duration("s")}, "JSON cannot hold"),
        ({}, {"m": pa.map_(pa.int64(), pa.string())}, "JSON cannot hold"),
    ],
)
def test_rows_that_do_not_fit_the_settings_are_refused(
    settings: dict[str, Any], schema: dict[str, pa.DataType], said: str
) -> None:
    sink = described(**settings)
    rows = pa.schema(list(schema.items()))
    with pytest.raises(ConfigError, match=said):
        RecordEncoder(sink.settings, rows, BadRows(OnBadRow.FAIL, rows))


def test_secrets_are_not_printed() -> None:
    sink = KafkaSink("localhost:9092", topic="t", options={"sasl.password": "hunter2"})
    assert "hunter2" not in repr(sink)
    assert "hunter2" not in repr(sink.settings)
    assert "***" in repr(sink)


@pytest.mark.parametrize(
    "at",
    [
        pa.array([0, 2**58, 0]).view(pa.timestamp("us")),
        pa.array([0, -(2**58), 0]).view(pa.timestamp("us", "UTC")),
        pa.array([0, 2**30, 0], pa.int32()).view(pa.date32()),
    ],
    ids=str,
)
def test_an_instant_that_python_has_no_value_for_is_a_bad_row_and_no_restart(at: pa.Array) -> None:
    inside = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), at)
    for column in (at, inside):
        rows = pa.record_batch([pa.array([0, 1, 2]), column], names=["id", "at"])
        with pytest.raises(BadRow, match="years 1 to 9999"):
            encode(rows)
        records, rejected = encode(rows, on_bad_row=OnBadRow.DROP)
        assert [json.loads(record["value"])["id"] for record in records] == [0, 2]
        assert [one.rows.column("id").to_pylist() for one in rejected] == [[1]]
        assert "years 1 to 9999" in rejected[0].reasons[0]
