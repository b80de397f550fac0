"""Structs in JSON become columns member by member, with the rows that dictionaries give."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.support.drawn_seeds import draw_random

from onceflow.core.errors import ConfigError
from onceflow.formats.json.columns import (
    column_reader,
    converter_of,
    converter_of_members,
    late_fault_of,
    record_type,
    record_type_of_members,
)

PLACE = pa.struct(
    [pa.field("city", pa.string()), pa.field("at", pa.timestamp("ms")), pa.field("n", pa.int8())]
)
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field(
            "order",
            pa.struct(
                [
                    pa.field("total", pa.decimal128(9, 2)),
                    pa.field("from", PLACE),
                    pa.field("tags", pa.list_(pa.struct([pa.field("tag", pa.string())]))),
                    pa.field("paid", pa.bool_(), nullable=False),
                ]
            ),
        ),
        pa.field("to", PLACE),
    ]
)


def make_value(kind: pa.DataType, rng: random.Random, *, nullable: bool) -> Any:
    if nullable and rng.random() < 0.3:
        return None
    if pa.types.is_struct(kind):
        members = [field for field in kind if not field.nullable or rng.random() < 0.8]
        return {
            field.name: make_value(field.type, rng, nullable=field.nullable) for field in members
        }
    if pa.types.is_list(kind):
        return [make_value(kind.value_type, rng, nullable=True) for _ in range(rng.randrange(3))]
    if pa.types.is_string(kind):
        return rng.choice(["", "Bern", "Zürich"])
    if pa.types.is_timestamp(kind):
        return f"2024-01-0{rng.randint(1, 9)}T00:00:00.{rng.randrange(1000):03}"
    if pa.types.is_decimal(kind):
        return f"{rng.randrange(1000)}.{rng.randrange(100):02}"
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    return rng.randrange(100)


@pytest.mark.parametrize("rows", [0, 1, 7, 200])
def test_structs_have_the_rows_that_dictionaries_have(rows: int) -> None:
    rng = draw_random()
    whole = pa.struct(list(SCHEMA))
    texts = [
        json.dumps(make_value(whole, rng, nullable=False), ensure_ascii=False).encode()
        for _ in range(rows)
    ]
    read = column_reader(len(SCHEMA))
    expected, made = (
        [
            convert(column.type)(values)
            for column, values in zip(
                SCHEMA, read([msgspec.json.decode(text, type=kind) for text in texts]), strict=True
            )
        ]
        for kind, convert in (
            (record_type(SCHEMA), converter_of),
            (record_type_of_members(SCHEMA), converter_of_members),
        )
    )
    for one, other in zip(expected, made, strict=True):
        other.validate(full=True)
        assert one.equals(other)


def test_a_fault_in_a_struct_shows_the_value_as_it_was_written() -> None:
    schema = pa.schema([pa.field("to", PLACE)])
    text = b'{"to": {"city": "Bern", "at": "2024-01-01T00:00:00.0005"}}'
    record: Any = msgspec.json.decode(text, type=record_type_of_members(schema))
    fault = late_fault_of([record.c0], schema, [converter_of_members(PLACE)])
    assert fault is not None
    assert "'to'" in fault
    assert "{'city': 'Bern', 'at': datetime" in fault


@pytest.mark.parametrize("kind", [pa.struct([]), pa.struct([("to", pa.struct([]))])])
def test_a_struct_without_members_is_read(kind: pa.DataType) -> None:
    decoded = msgspec.json.Decoder(record_type_of_members(pa.schema([("place", kind)])))
    texts = [b'{"place": {"to": {"city": "Bern"}}}', b'{"place": null}']
    records: list[Any] = [decoded.decode(text) for text in texts]
    rows = converter_of_members(kind)([record.c0 for record in records]).to_pylist()
    assert rows == [{"to": {}} if kind.num_fields else {}, None]


@pytest.mark.parametrize("type_of", [record_type, record_type_of_members])
@pytest.mark.parametrize("wrapper", ["", "list", "struct"])
def test_a_struct_that_names_a_member_twice_is_refused(
    type_of: Callable[[pa.Schema], object], wrapper: str
) -> None:
    doubled = pa.struct([("a", pa.int64()), ("a", pa.string())])
    kinds = {"": doubled, "list": pa.list_(doubled), "struct": pa.struct([("s", doubled)])}
    with pytest.raises(ConfigError, match=r"column 'place.*member 'a' more than once"):
        type_of(pa.schema([("place", kinds[wrapper])]))
