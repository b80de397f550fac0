"""The source's rows of Avro values, with a double of the schema registry and messages by hand."""

from __future__ import annotations

import datetime as dt
import io
import json
import ssl
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka import Message
from tests.support.arrow_values import python_rows
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_avro_columns import encoded

from onceflow.core.errors import BadRecord, ConfigError, SourceUnavailable
from onceflow.core.runtime.transport.certificates import Authority
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.decoded_rows import Rows
from onceflow.sources.kafka.value_formats import rows_of

PAYMENT = {
    "type": "record",
    "name": "Payment",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "account", "type": "string"},
    ],
}
PAYMENT_WITH_FEE: dict[str, Any] = {
    **PAYMENT,
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "account", "type": "string"},
        {"name": "fee", "type": "double", "default": 0.25},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}


def framed(schema_id: int, schema: Any, rows: list[dict[str, Any]]) -> list[bytes]:
    header = b"\0" + schema_id.to_bytes(4, "big")
    return [header + value[len(header) :] for value in encoded(schema, rows)]


def source(url: Any, **given: Any) -> KafkaSource:
    settings: dict[str, Any] = {"format": "avro", "deadline_s": 30.0, **given}
    return KafkaSource("nowhere:1", topic="payments", schema_registry=url, **settings)


def messages(values: Sequence[bytes | None], *, first: int = 0) -> list[Message]:
    return [
        Message(topic="payments", partition=2, offset=first + at, value=value)
        for at, value in enumerate(values)
    ]


def taken(rows: Rows) -> pa.RecordBatch:
    """Return the batch once its schemas are there."""
    until = time.monotonic() + 60
    while not rows.ready():
        assert time.monotonic() < until
        time.sleep(0.002)
    return rows.take()


def read(described: KafkaSource, values: Sequence[bytes | None]) -> list[dict[str, Any]]:
    rows = rows_of(described.settings)
    rows.add(messages(values))
    return taken(rows).to_pylist()


def test_columns_are_those_of_the_subject_s_latest_version(registry: SchemaRegistryDouble) -> None:
    registry.keep("payments-value", PAYMENT)
    registry.keep("payments-value", PAYMENT_WITH_FEE)
    described = source(registry.url)
    assert described.schema == pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("account", pa.string(), nullable=False),
            pa.field("fee", pa.float64(), nullable=False),
            pa.field("note", pa.string()),
        ]
    )
    # Asked for once: a version that comes later is not this start's.
    registry.keep("payments-value", PAYMENT)
    assert described.schema.names == ["id", "account", "fee", "note"]


def test_records_of_several_versions_in_one_batch_are_read_as_the_latest_in_their_order(
    registry: SchemaRegistryDouble,
) -> None:
    old = registry.keep("payments-value", PAYMENT)
    new = registry.keep("payments-value", PAYMENT_WITH_FEE)
    row = {"id": 0, "account": "a"}
    rich = {**row, "fee": 9.5, "note": "x"}
    values: list[bytes | None] = []
    for number in range(7):
        if number % 3:
            values += framed(old, PAYMENT, [{**row, "id": number}])
        else:
            values += framed(new, PAYMENT_WITH_FEE, [{**rich, "id": number}])
    found = read(source(registry.url), values)
    assert [one["id"] for one in found] == list(range(7))
    assert found[0] == {**rich, "id": 0}
    assert found[1] == {"id": 1, "account": "a", "fee": 0.25, "note": None}


def test_fields_that_are_removed_widened_or_renamed_are_read_by_avro_s_rules(
    registry: SchemaRegistryDouble,
) -> None:
    written = {
        "type": "record",
        "name": "Payment",
        "fields": [
            {"name": "gone", "type": {"type": "map", "values": "string"}},
            {"name": "id", "type": "int"},
            {"name": "ratio", "type": "float"},
            {"name": "konto", "type": "bytes"},
        ],
    }
    latest = {
        "type": "record",
        "name": "Payment",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "ratio", "type": "double"},
            {"name": "account", "type": "string", "aliases": ["konto"]},
        ],
    }
    old = registry.keep("payments-value", written)
    registry.keep("payments-value", latest)
    row = {"gone": {"a": "b"}, "id": 7, "ratio": 0.5, "konto": b"acct"}
    assert read(source(registry.url), framed(old, written, [row])) == [
        {"id": 7, "ratio": 0.5, "account": "acct"}
    ]


def _record(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def _field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


_PART = _record("part", _field("a", "int"), _field("b", "string"))
_PART_OF_MORE = _record(
    "part",
    _field("b", "string"),
    _field("z", "long", aliases=["a"]),
    _field("n", ["int", "null"], default=7),
    _field("r", _record("inner", _field("m", {"type": "map", "values": "int"})),
           default={"m": {"k": 1}}),
)  # fmt: skip
_MADE, _GONE = _record("made", _field("id", "int")), _record("gone", _field("id", "int"))
_ROW = {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("before", "after", "values"),
    [
        (_PART, _PART_OF_MORE, [_ROW]),
        (["null", _PART], ["null", _PART_OF_MORE], [_ROW, None]),
        ({"type": "array", "items": _PART}, {"type": "array", "items": _PART_OF_MORE},
         [[], [_ROW, _ROW], [_ROW]]),
        (["null", {"type": "array", "items": ["null", _PART]}],
         ["null", {"type": "array", "items": ["null", _PART_OF_MORE]}], [[_ROW, None], None, []]),
        ({"type": "map", "values": _PART}, {"type": "map", "values": _PART_OF_MORE},
         [{"k": _ROW, "l": _ROW}, {}]),
        ({"type": "map", "values": ["null", _PART]},
         {"type": "map", "values": ["null", _PART_OF_MORE]}, [{"k": _ROW, "l": None}, {}]),
        (["null", {"type": "map", "values": ["null", _PART]}],
         ["null", {"type": "map", "values": ["null", _PART_OF_MORE]}], [{"k": None}, None]),
        # Branches of a union that hold the same, in another order, and with a new one in front.
        ([_MADE, _GONE], [_GONE, _MADE], [("made", {"id": 1}), ("gone", {"id": 2})]),
        ([_MADE, _GONE], ["null", _record("new", _field("id", ["int", "null"])), _MADE, _GONE],
         [("made", {"id": 1}), ("gone", {"id": 2})]),
        (["null", "string", "long"], ["null", "long", "string"], ["t", 5, None]),
        (["null", "string", "long"], ["null", "double", "long", "string"], ["t", 5, None]),
        ("int", ["null", "string", "long"], [5]),
        (["null", "int"], ["null", "string", "int"], [5, None]),
        ({"type": "array", "items": [_MADE, _GONE]}, {"type": "array", "items": [_GONE, _MADE]},
         [[("made", {"id": 1}), ("gone", {"id": 2})], []]),
    ],
)  # fmt: skip
def test_what_changed_inside_of_values_is_read_as_fastavro_reads_it(
    registry: SchemaRegistryDouble, before: Any, after: Any, values: list[Any]
) -> None:
    old = _record("row", _field("id", "long"), _field("v", before))
    new = _record("row", _field("v", after), _field("id", "long"))
    schema_id = registry.keep("payments-value", old)
    registry.keep("payments-value", new)
    written = framed(schema_id, old, [{"id": at, "v": one} for at, one in enumerate(values)])
    expected: list[Any] = [
        cast("Any", fastavro).schemaless_reader(
            io.BytesIO(one[5:]), fastavro.parse_schema(old), fastavro.parse_schema(new),
            return_record_name=True, return_record_name_override=True,
        )
        for one in written
    ]  # fmt: skip
    rows = rows_of(source(registry.url).settings)
    rows.add(messages(written))
    batch = taken(rows)
    found = python_rows(batch)
    assert [row["id"] for row in found] == list(range(len(values)))
    assert [_by_name(row["v"], after) for row in found] == [row["v"] for row in expected]


def _items_of(kind: Any) -> Any:
    # A union of null and an array stands for the array, whose items are of one branch.
    return [] if isinstance(kind, list) else kind["items"]


def _by_name(value: Any, branches: Any) -> Any:
    """Return `value` with the branch of a union that is set, as fastavro gives it."""
    if isinstance(value, list):
        return [_by_name(one, _items_of(branches)) for one in cast("Any", value)]
    if not isinstance(value, dict):
        return value
    members = cast("dict[str, Any]", value)
    if not any(name.startswith("member") for name in members):
        return members
    (name,) = [name for name, one in members.items() if one is not None]
    branch: Any = [branch for branch in branches if branch != "null"][
        int(name.removeprefix("member"))
    ]
    return members[name] if isinstance(branch, str) else (branch["name"], members[name])


def test_a_branch_and_a_null_that_the_latest_schema_does_not_have_make_bad_records(
    registry: SchemaRegistryDouble,
) -> None:
    inside = {"type": "array", "items": ["null", "int", "string"]}
    old = _record("row", _field("id", "long"), _field("v", inside))
    schema_id = registry.keep("payments-value", old)
    latest = {"type": "array", "items": "int"}
    registry.keep("payments-value", _record("row", _field("id", "long"), _field("v", latest)))
    given = [{"id": 0, "v": [1, 2]}, {"id": 1, "v": [1, "x"]}, {"id": 2, "v": [None]}]
    rows = rows_of(source(registry.url, on_bad_record="dead_letter").settings)
    rows.add(messages([*framed(schema_id, old, given), *framed(schema_id, old, given[:1])]))
    assert taken(rows).to_pylist() == [{"id": 0, "v": [1, 2]}] * 2
    letters = {letter.offset: letter.reason for letter in rows.refusals.take_letters()}
    assert "field 'v': it has a value of string where the schema that is read" in letters[1]
    assert "it has null where the schema that is read has a value" in letters[2]


@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        (["bytes", "null"], "\u00ff", b"\xff"),
        ({"type": "array", "items": "bytes"}, ["\u00ff"], [b"\xff"]),
        ({"type": "map", "values": {"type": "fixed", "name": "f", "size": 2}}, {"k": "\u00ffa"},
         {"k": b"\xffa"}),
        ({"type": "array", "items": {"type": "bytes", "logicalType": "decimal", "precision": 5,
                                     "scale": 2}}, ["\u0001\u0000"], [Decimal("2.56")]),
        (_record("q", _field("a", "bytes"), _field("n", "int", default=7)), {"a": "\u00ff"},
         {"a": b"\xff", "n": 7}),
        (["int", "string"], 7, {"member0": 7, "member1": None}),
        (["string", "int"], 7, {"member0": None, "member1": 7}),
        ("double", "Infinity", float("inf")),
    ],
)  # fmt: skip
def test_a_default_of_any_type_is_the_value_that_the_schema_means(
    registry: SchemaRegistryDouble, kind: Any, default: Any, expected: Any
) -> None:
    old = _record("row", _field("id", "long"))
    schema_id = registry.keep("payments-value", old)
    added = _field("v", kind, default=default)
    registry.keep("payments-value", _record("row", _field("id", "long"), added))
    rows = rows_of(source(registry.url).settings)
    rows.add(messages(framed(schema_id, old, [{"id": 1}])))
    assert python_rows(taken(rows)) == [{"id": 1, "v": expected}]


def test_an_integer_is_not_read_as_a_float_of_16_bits_which_makes_infinity_of_it(
    registry: SchemaRegistryDouble,
) -> None:
    schema_id = registry.keep("payments-value", PAYMENT)
    columns = pa.schema([("id", pa.float16())])
    rows = rows_of(source(registry.url, schema=columns, on_bad_record="dead_letter").settings)
    rows.add(messages(framed(schema_id, PAYMENT, [{"id": 70_000, "account": "a"}])))
    assert taken(rows).num_rows == 0
    (letter,) = rows.refusals.take_letters()
    assert "written as int64 and is read as halffloat" in letter.reason


def test_a_default_that_is_no_value_of_its_field_is_refused_by_name(
    registry: SchemaRegistryDouble,
) -> None:
    registry.keep("payments-value", _record("row", _field("v", "float", default=1e39)))
    with pytest.raises(ConfigError, match="field 'v' has the default 1e.39, which is no value of"):
        rows_of(source(registry.url).settings)


@pytest.mark.parametrize(
    "broken",
    [
        _record("row", _field("v", [])),
        {"type": "record", "name": "row", "fields": [{"type": "int"}]},
        _record("row", _field("v", {"type": "bytes", "logicalType": "decimal", "precision": "x"})),
    ],
)
def test_a_schema_of_a_record_that_is_none_makes_bad_records_and_no_attempt_that_fails_for_ever(
    registry: SchemaRegistryDouble, broken: dict[str, Any]
) -> None:
    good = registry.keep("payments-value", PAYMENT)
    described = source(registry.url, on_bad_record="dead_letter")
    assert described.schema.names == ["id", "account"]
    bad = registry.keep("payments-value", broken)
    rows = rows_of(described.settings)
    row = {"id": 1, "account": "a"}
    value = b"\0" + bad.to_bytes(4, "big") + b"\0"
    rows.add(messages([value, *framed(good, PAYMENT, [row])]))
    assert taken(rows).to_pylist() == [row]
    (letter,) = rows.refusals.take_letters()
    assert f"its schema id {bad}" in letter.reason


def test_columns_of_the_user_s_own_are_taken_by_name_and_checked(
    registry: SchemaRegistryDouble,
) -> None:
    schema_id = registry.keep("any", PAYMENT_WITH_FEE)
    row = {"id": 300, "account": "a", "fee": 1.0, "note": None}
    value = framed(schema_id, PAYMENT_WITH_FEE, [row])
    described = source(registry.url, schema="note STRING, id SMALLINT, later INT")
    assert read(described, value) == [{"note": None, "id": 300, "later": None}]
    for schema, why in [
        ("id TINYINT", "a value does not fit int8"),
        ("note STRING NOT NULL", "column 'note' is NOT NULL and has no value"),
        ("account BIGINT", "it was written as string and is read as int64"),
        ("later INT NOT NULL", "column 'later': its schema has no such field"),
    ]:
        with pytest.raises(BadRecord) as caught:
            read(source(registry.url, schema=schema), value)
        assert str(caught.value).startswith("payments-2 offset 0: ")
        assert why in str(caught.value)


def test_bad_records_are_left_out_with_their_origin_and_the_others_stay_in_order(
    registry: SchemaRegistryDouble,
) -> None:
    schema_id = registry.keep("payments-value", PAYMENT)
    json_id = registry.keep("other", {"type": "object"}, kind="JSON")
    good = framed(schema_id, PAYMENT, [{"id": n, "account": "a"} for n in range(3)])
    values = [
        good[0],
        None,
        b'{"id": 1}',
        good[1],
        good[1][:-1],
        b"\0" + json_id.to_bytes(4, "big") + b"{}",
        good[2],
    ]
    described = source(registry.url, on_bad_record="dead_letter", include_metadata=True)
    rows = rows_of(described.settings)
    rows.add(messages(values, first=50))
    found = taken(rows).to_pylist()
    assert [(one["id"], one["_offset"]) for one in found] == [(0, 50), (1, 53), (2, 56)]
    letters = rows.refusals.take_letters()
    assert [(letter.topic, letter.partition, letter.offset) for letter in letters] == [
        ("payments", 2, offset) for offset in (51, 52, 54, 55)
    ]
    assert [letter.value for letter in letters] == [values[at] for at in (1, 2, 4, 5)]
    for letter, why in zip(
        letters,
        ["tombstone", "does not begin with a zero byte", "in the middle of", "it is JSON"],
        strict=True,
    ):
        assert why in letter.reason


def test_schemas_that_are_known_are_read_while_the_registry_is_away_and_a_new_one_is_waited_for(
    registry: SchemaRegistryDouble,
) -> None:
    old = registry.keep("payments-value", PAYMENT)
    rows = rows_of(source(registry.url, schema="id BIGINT").settings)
    rows.add(messages(framed(old, PAYMENT, [{"id": 1, "account": "a"}])))
    assert taken(rows).num_rows == 1
    registry.failing = (503, {"error_code": 50003, "message": "leader is away"})
    new = registry.keep("payments-value", PAYMENT_WITH_FEE)
    rows.add(messages(framed(old, PAYMENT, [{"id": 2, "account": "a"}])))
    assert taken(rows).num_rows == 1
    asked = len(registry.asked)
    row = {"id": 3, "account": "a", "fee": 0.0, "note": None}
    rows.add(messages(framed(new, PAYMENT_WITH_FEE, [row])))
    until = time.monotonic() + 60
    while len(registry.asked) < asked + 2:
        assert not rows.ready()
        assert time.monotonic() < until
        time.sleep(0.002)
    registry.failing = None
    assert taken(rows).to_pylist() == [{"id": 3}]


def test_registry_that_stays_away_ends_the_attempt_and_names_the_first_record(
    registry: SchemaRegistryDouble,
) -> None:
    schema_id = registry.keep("payments-value", PAYMENT)
    registry.failing = (503, {"error_code": 50003, "message": "leader is away"})
    rows = rows_of(source(registry.url, schema="id BIGINT", deadline_s=0.2).settings)
    rows.add(messages(framed(schema_id, PAYMENT, [{"id": 1, "account": "a"}]), first=41))
    with pytest.raises(SourceUnavailable) as caught:
        taken(rows)
    assert f"payments-2 offset 41 needs schema id {schema_id}" in str(caught.value)
    assert "leader is away" in str(caught.value)


def test_id_that_the_registry_never_knows_makes_a_bad_record(
    registry: SchemaRegistryDouble,
) -> None:
    known = registry.keep("payments-value", PAYMENT)
    row = {"id": 1, "account": "a"}
    values = [*framed(known, PAYMENT, [row]), *framed(77, PAYMENT, [row])]
    with pytest.raises(BadRecord) as caught:
        read(source(registry.url, schema="id BIGINT", deadline_s=0.2), values)
    assert "payments-2 offset 1: its schema id 77 is not known to the registry" in str(caught.value)
    dropping = source(registry.url, schema="id BIGINT", deadline_s=0.2, on_bad_record="drop")
    assert read(dropping, values) == [{"id": 1}]


def test_schemas_that_refer_to_others_are_read_with_them(registry: SchemaRegistryDouble) -> None:
    money = {
        "type": "record",
        "name": "Money",
        "namespace": "shop",
        "fields": [{"name": "cents", "type": "long"}],
    }
    registry.keep("money", money)
    order = {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [{"name": "price", "type": "Money"}],
    }
    schema_id = registry.keep("payments-value", order, references={"shop.Money": ("money", 1)})
    whole = {**order, "fields": [{"name": "price", "type": money}]}
    assert read(source(registry.url), framed(schema_id, whole, [{"price": {"cents": 5}}])) == [
        {"price": {"cents": 5}}
    ]


def test_user_and_password_are_a_reference_and_are_printed_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REGISTRY_USER", "ledger:s3cret")
    with SchemaRegistryDouble(user="ledger:s3cret") as registry:
        registry.keep("payments-value", PAYMENT)
        options = {"url": registry.url, "basic.auth.user.info": "${env:REGISTRY_USER}"}
        described = source(options)
        assert described.schema.names == ["id", "account"]
        wrong = source({**options, "basic.auth.user.info": "ledger:wr0ng"})
        with pytest.raises(ConfigError) as caught:
            _ = wrong.schema
        assert "Check basic.auth.user.info" in str(caught.value)
        for shown in (repr(described), repr(wrong), str(caught.value)):
            assert "s3cret" not in shown
            assert "wr0ng" not in shown


def test_registry_behind_tls_is_trusted_by_its_authority_alone(tmp_path: Path) -> None:
    now = dt.datetime.now(dt.timezone.utc)
    authority = Authority(now - dt.timedelta(hours=1), now + dt.timedelta(hours=1))
    certificate, key = authority.issue("localhost")
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    (tmp_path / "server.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    with SchemaRegistryDouble(tls=context) as registry:
        registry.keep("payments-value", PAYMENT)
        options = {"url": registry.url, "ssl.ca.location": str(tmp_path / "ca.pem")}
        assert source(options).schema.names == ["id", "account"]
        with pytest.raises(SourceUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            _ = source(registry.url, deadline_s=0.1).schema


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"schema_registry": None}, "needs schema_registry="),
        ({"schema_registry": "localhost:8081"}, "is not the URL of a registry"),
        ({"schema_registry": "http://me:pw@localhost"}, "contains a user"),
        ({"schema_registry": {"max.retries": 3, "url": "http://x"}}, "deadline_s="),
        ({"schema_registry": {"ssl.truststore.location": "a", "url": "http://x"}}, "PEM"),
        ({"format": "json", "schema": "id INT"}, "uses no schema registry"),
        ({"topic": ["a", "b"]}, "give subject=, or schema="),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_give(
    settings: dict[str, Any], fragment: str
) -> None:
    given: dict[str, Any] = {
        "topic": "payments",
        "format": "avro",
        "schema_registry": "http://localhost:8081",
        **settings,
    }
    with pytest.raises(ConfigError) as caught:
        KafkaSource("nowhere:1", **given)
    assert fragment in str(caught.value)
    assert "pw@" not in str(caught.value)


def test_subject_that_is_not_there_says_what_to_give(registry: SchemaRegistryDouble) -> None:
    with pytest.raises(ConfigError, match=r"payments-value.* not found.*Give subject="):
        _ = source(registry.url).schema
    registry.keep("elsewhere", json.dumps("string"))
    with pytest.raises(ConfigError, match="is not an Avro record"):
        _ = source(registry.url, subject="elsewhere").schema


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int32())])
def test_a_list_that_does_not_fit_takes_no_other_record_of_its_batch_with_it(
    registry: SchemaRegistryDouble, kind: pa.DataType
) -> None:
    items = {"type": "array", "items": "long"}
    schema = {"type": "record", "name": "R", "fields": [{"name": "v", "type": items}]}
    values = framed(
        registry.keep("payments-value", schema),
        schema,
        [{"v": [1]}, {"v": [2, 2**40]}, {"v": []}, {"v": [3]}],
    )
    columns = pa.schema([("v", kind)])
    rows = rows_of(source(registry.url, schema=columns, on_bad_record="dead_letter").settings)
    rows.add(messages(values))
    assert taken(rows).to_pylist() == [{"v": [1]}, {"v": []}, {"v": [3]}]
    assert [letter.offset for letter in rows.refusals.take_letters()] == [1]
