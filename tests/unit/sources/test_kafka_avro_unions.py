"""Branches of unions in Avro records: each goes to the branch of its own name, or to none."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_kafka_avro import framed, messages, source, taken

from onceflow.sources.kafka.value_formats import rows_of


def _enum(name: str, *symbols: str, **given: Any) -> dict[str, Any]:
    return {"type": "enum", "name": name, "symbols": list(symbols) or ["A"], **given}


def _fixed(name: str, **given: Any) -> dict[str, Any]:
    return {"type": "fixed", "name": name, "size": 2, **given}


def _record(name: str, *more: dict[str, Any], **given: Any) -> dict[str, Any]:
    fields = [{"name": "n", "type": "int"}, *more]
    return {"type": "record", "name": name, "fields": fields, **given}


def _row(union: list[Any]) -> dict[str, Any]:
    return {"type": "record", "name": "Row", "fields": [{"name": "v", "type": union}]}


_ADDED = {"name": "m", "type": "int", "default": 7}


@pytest.mark.parametrize(
    ("before", "after", "values", "expected"),
    [
        pytest.param(
            [_enum("Color", "RED"), _enum("Size", "S")],
            [_enum("Color", "RED"), _enum("Size", "S", "M")],
            ["RED", "S"],
            [(0, "RED"), (1, "S")],
            id="an enum that has got a symbol, behind another enum",
        ),
        pytest.param(
            [_enum("Old", "A", "B"), _enum("New", "A", "B")],
            [_enum("New", "A", "B"), _enum("Old", "A", "B")],
            [("Old", "A"), ("New", "B")],
            [(1, "A"), (0, "B")],
            id="two enums of the same symbols in another order",
        ),
        pytest.param(
            [_fixed("Head"), _fixed("Tail")],
            [_fixed("Tail"), _fixed("Head")],
            [("Head", b"hh"), ("Tail", b"tt")],
            [(1, b"hh"), (0, b"tt")],
            id="two fixed of one size in another order",
        ),
        pytest.param(
            [_record("home.Address"), _record("work.Address")],
            [_record("work.Address", _ADDED), _record("home.Address", _ADDED)],
            [("home.Address", {"n": 1}), ("work.Address", {"n": 2})],
            [(1, {"n": 1, "m": 7}), (0, {"n": 2, "m": 7})],
            id="two records of one short name that have got a field",
        ),
        pytest.param(
            ["string", _record("home.Address")],
            ["string", _record("work.Address")],
            ["s", {"n": 1}],
            [(0, "s"), (1, {"n": 1})],
            id="a record that has moved to another namespace",
        ),
        pytest.param(
            ["null", _record("Other"), _record("Address")],
            ["null", _record("Other"), _record("Place", aliases=["Address"])],
            [("Address", {"n": 1}), ("Other", {"n": 2}), None],
            [(1, {"n": 1}), (0, {"n": 2}), None],
            id="a record that is renamed, with its old name as an alias",
        ),
        pytest.param(
            [_enum("x.Other", "A"), _enum("x.Color", "A")],
            [_enum("x.Other", "A"), _enum("x.Hue", "A", aliases=["Color"])],
            [("x.Color", "A")],
            [(1, "A")],
            id="an enum that is renamed, with its old name as an alias in its namespace",
        ),
        pytest.param(
            [_fixed("Other"), _fixed("Hash")],
            [_fixed("Other"), _fixed("Digest", aliases=["Hash"])],
            [("Hash", b"hh")],
            [(1, b"hh")],
            id="a fixed that is renamed, with its old name as an alias",
        ),
    ],
)
def test_a_branch_is_read_as_the_branch_of_its_own_name(
    registry: SchemaRegistryDouble,
    before: list[Any],
    after: list[Any],
    values: list[Any],
    expected: list[tuple[int, Any] | None],
) -> None:
    schema_id = registry.keep("payments-value", _row(before))
    registry.keep("payments-value", _row(after))
    rows = rows_of(source(registry.url).settings)
    rows.add(messages(framed(schema_id, _row(before), [{"v": value} for value in values])))
    assert [_branch(row["v"]) for row in taken(rows).to_pylist()] == expected


@pytest.mark.parametrize("named", [_enum, _fixed, _record])
def test_a_branch_whose_name_the_latest_schema_does_not_have_makes_a_bad_record(
    registry: SchemaRegistryDouble, named: Any
) -> None:
    before = _row([named("First"), named("Second")])
    schema_id = registry.keep("payments-value", before)
    registry.keep("payments-value", _row([named("Third"), named("First")]))
    value = {"enum": "A", "fixed": b"hh", "record": {"n": 1}}[named("x")["type"]]
    rows = rows_of(source(registry.url, on_bad_record="dead_letter").settings)
    written = [{"v": ("Second", value)}, {"v": ("First", value)}]
    rows.add(messages(framed(schema_id, before, written)))
    assert [_branch(row["v"]) for row in taken(rows).to_pylist()] == [(1, value)]
    (letter,) = rows.refusals.take_letters()
    assert "Second where the schema that is read has no such branch" in letter.reason


def test_a_map_with_a_null_record_of_required_fields_is_read_as_other_columns(
    registry: SchemaRegistryDouble,
) -> None:
    union = [{"type": "map", "values": ["null", _record("Part")]}, "null"]
    schema_id = registry.keep("payments-value", _row(union))
    columns = pa.schema([("v", pa.map_(pa.string(), pa.struct([("n", pa.int64())])))])
    rows = rows_of(source(registry.url, schema=columns).settings)
    given: list[dict[str, Any]] = [{"v": {"a": {"n": 1}, "b": None}}, {"v": None}, {"v": {}}]
    rows.add(messages(framed(schema_id, _row(union), given)))
    batch = taken(rows)
    assert batch.to_pylist() == [{"v": [("a", {"n": 1}), ("b", None)]}, {"v": None}, {"v": []}]


@pytest.mark.parametrize("digits", [{"precision": 0}, {"precision": 100}, {}])
def test_bytes_with_digits_that_no_column_has_do_not_hide_the_other_fields(
    registry: SchemaRegistryDouble, digits: dict[str, int]
) -> None:
    amount = {"type": "bytes", "logicalType": "decimal", **digits}
    schema = _record("Row", {"name": "amount", "type": amount})
    plain = _record("Row", {"name": "amount", "type": "bytes"})
    schema_id = registry.keep("payments-value", schema)
    given = framed(schema_id, plain, [{"n": 1, "amount": b"\1\2"}])
    for described, expected in (
        (source(registry.url, schema="n INT"), {"n": 1}),
        (source(registry.url), {"n": 1, "amount": b"\1\2"}),
    ):
        rows = rows_of(described.settings)
        rows.add(messages(given))
        assert taken(rows).to_pylist() == [expected]


def _branch(value: dict[str, Any] | None) -> tuple[int, Any] | None:
    """Return the number of the branch that is set, and its value."""
    if value is None:
        return None
    ((name, branch),) = ((name, one) for name, one in value.items() if one is not None)
    return int(name.removeprefix("member")), branch
