"""Cells of Kafka's records in the round-trip matrix: columns that are written as a sink does.

Names of fields inside of values are letters, digits and _, which Avro and Protobuf demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast
from unittest.mock import patch

import pyarrow as pa
import pytest
from pyarrow import types as arrow
from tests.support.edge_values import NESTED, SCALARS, SHAPES, EdgeColumn
from tests.support.exact_values import Clock, Instant, Local, exact_values, same
from tests.support.source_encoders import is_beyond_python

from onceflow.clients.kafka.registry import KeptSchema, SchemaKind, schema_kind
from onceflow.core.arrow.kinds import to_plain_type
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import BadRows
from onceflow.formats.encoding import WrittenSchema
from onceflow.formats.protobuf.schema import compile_schema
from onceflow.formats.registry_schemas import header_of, indexes_of
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka.encoder import RecordEncoder
from onceflow.sinks.kafka.record_keys import build_schema_text
from onceflow.sinks.kafka.settings import KafkaSinkSettings

_RUN_ENDS = "run ends of string"


@dataclass(frozen=True)
class RecordColumn:
    """One column of the catalogue under names that every format takes."""

    edge: EdgeColumn
    field: str
    """The name of the column."""

    @cached_property
    def values(self) -> pa.Array:
        """The column."""
        values = self.edge.values
        renamed = rename_fields(values.type)
        return values if renamed == values.type else values.view(renamed)

    @cached_property
    def written(self) -> list[object]:
        """The exact values."""
        return exact_values(self.values)

    @property
    def type(self) -> pa.DataType:
        """The type of the column."""
        return self.values.type


def rename_fields(kind: pa.DataType) -> pa.DataType:
    """Return `kind` without the blank in the name of a field."""
    if arrow.is_struct(kind):
        return pa.struct(
            [
                pa.field(one.name.replace(" ", "_"), rename_fields(one.type), one.nullable)
                for one in kind
            ]
        )
    if arrow.is_map(kind):
        return pa.map_(kind.key_type, kind.item_field.with_type(rename_fields(kind.item_type)))
    if arrow.is_fixed_size_list(kind):
        item = kind.value_field.with_type(rename_fields(kind.value_type))
        return pa.list_(item, kind.list_size)
    if arrow.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(rename_fields(kind.value_type)))
    if arrow.is_list(kind):
        return pa.list_(kind.value_field.with_type(rename_fields(kind.value_type)))
    return kind


def _is_renamed(edge: EdgeColumn) -> bool:
    """Return whether the names inside of `edge` can be changed: Arrow casts no run ends inside."""
    return edge.name == _RUN_ENDS or not edge.name.endswith(_RUN_ENDS)


def _columns(edges: Iterable[EdgeColumn]) -> list[RecordColumn]:
    return [RecordColumn(edge, f"x{at}") for at, edge in enumerate(filter(_is_renamed, edges))]


def column_groups(nested: Iterable[EdgeColumn] = NESTED) -> list[Any]:
    """Return parameters of pytest: the columns of the short form, and slow ones for each shape.

    Those of `nested` that are short are in the short form.
    """
    short = [edge for edge in (*SCALARS, *nested) if edge.is_short]
    shapes = [
        pytest.param(_columns(_long_edges(shape)), id=shape, marks=pytest.mark.slow)
        for shape in SHAPES
    ]
    return [pytest.param(_columns(short), id="short form"), *shapes]


def _long_edges(shape: str) -> list[EdgeColumn]:
    return [edge for edge in NESTED if not edge.is_short and _shape_of(edge.name) == shape]


@cache
def _shape_of(name: str) -> str:
    # The longest: "list of list of int64" begins with "list", too.
    shapes = [shape for shape in SHAPES if name.startswith(f"{shape} of ")]
    return max(shapes, key=len, default="")


@dataclass(frozen=True)
class WrittenRecords:
    """The records that a sink made of a batch."""

    records: list[dict[str, Any]]
    """Key, value and headers of each record, in order."""
    kept: list[int]
    """The row that each of them is."""
    refused: dict[int, str]
    """Why a row is none, by its number."""
    texts: dict[str, str]
    """The schemas of keys and values, by `key` and `value`."""


@dataclass(frozen=True)
class Message:
    """A registered message that has a field for each column, so that one schema is compiled."""

    text: str

    @cached_property
    def descriptors(self) -> bytes:
        """The compiled form."""
        return compile_schema(KeptSchema(1, SchemaKind.PROTOBUF, self.text))


def write_records(
    rows: pa.RecordBatch, *, message: Message | None = None, **settings: Any
) -> WrittenRecords:
    """Return the records that a sink makes of `rows`, by its own schemas in place of a registry.

    Column `n` numbers the rows.

    With a `message` keys and values in Protobuf are written by that one.

    Raises:
        ConfigError: A column cannot be written.
    """
    texts: dict[str, str] = {}

    def resolve(of: KafkaSinkSettings, columns: pa.Schema) -> WrittenSchema:
        if of.schema_kind is SchemaKind.PROTOBUF:
            assert message is not None
            header, descriptors = header_of(1) + indexes_of((0,)), message.descriptors
            schema = WrittenSchema(header, message.text, descriptors)
        else:
            schema = WrittenSchema(header_of(1), build_schema_text(of, columns))
        texts["key" if of.is_key else "value"] = schema.text
        return schema

    with patch("onceflow.sinks.kafka.encoder.resolve_written_schema", resolve):
        return _write_records(rows, texts, settings)


def _write_records(
    rows: pa.RecordBatch, texts: dict[str, str], settings: dict[str, Any]
) -> WrittenRecords:
    kinds = (schema_kind(str(settings.get(name))) for name in ("format", "key_format"))
    if any(kinds):
        settings = {**settings, "schema_registry": "http://nowhere:1"}
    sink = KafkaSink("nowhere:1", topic="out", **settings)
    bad_rows = BadRows(OnBadRow.DEAD_LETTER, rows.schema)
    encoder = RecordEncoder(sink.settings, rows.schema, bad_rows)
    if sink.settings.asks_registry:
        encoder.ask_schema()
    refused: dict[int, str] = {}
    whole = encoder.encode(rows).to_pylist()
    rejected = list(bad_rows.take())
    if not rejected:
        return WrittenRecords(whole, list(range(rows.num_rows)), {}, texts)
    for part in rejected:
        refused |= dict(zip(part.rows.column("n").to_pylist(), part.reasons, strict=True))
    kept = [row for row in range(rows.num_rows) if row not in refused]
    assert len(kept) == len(whole)
    return WrittenRecords(whole, kept, refused, texts)


def find_altered(
    written: WrittenRecords,
    values: Sequence[object],
    read: Callable[[dict[str, Any]], object],
    may_refuse: Callable[[Any], bool],
) -> list[str]:
    """Return what is wrong: values that `read` reads as others, and rows refused without need."""
    faults: list[str] = []
    for row, record in zip(written.kept, written.records, strict=True):
        try:
            shown = read(record)
        except (AssertionError, ValueError, TypeError, LookupError) as error:
            faults.append(f"{_short(values[row])} cannot be read: {_short(error)}")
            continue
        if not same(shown, values[row]):
            faults.append(f"{_short(values[row])} was read as {_short(shown)}")
    for row, reason in written.refused.items():
        is_needed = may_refuse(values[row]) or _is_hidden(values[row], reason)
        if not is_needed or not reason:
            faults.append(f"{_short(values[row])} was refused: {_short(reason)}")
    return faults


def _is_hidden(value: object, reason: str) -> bool:
    """Return whether a row was refused for what is under a null, at which a cast of Arrow looks."""
    holds_null = value is None or any(_is_hidden(one, reason) for one in _inner(value))
    return holds_null and any(word in reason for word in (str(-(2**63)), "arrow.uuid"))


def _short(value: object) -> str:
    return repr(value)[:200]


def is_finer_than_python(value: object) -> bool:
    """Return whether a time inside of `value` has nanoseconds that are no microseconds."""
    match value:
        case Clock(nanoseconds=number) | Local(nanoseconds=number) | Instant(nanoseconds=number):
            return number % 1_000 != 0
        case _:
            return any(map(is_finer_than_python, _inner(value)))


def has_fine_clock(value: object) -> bool:
    """Return whether a time of day inside of `value` is finer than microseconds."""
    if isinstance(value, Clock):
        return value.nanoseconds % 1_000 != 0
    return any(map(has_fine_clock, _inner(value)))


def protobuf_lacks(value: object, kind: pa.DataType) -> bool:
    """Return whether `value` is, or holds, a null list or map, or a list or map with a null."""
    kind = to_plain_type(kind)
    if arrow.is_struct(kind):
        members = cast("dict[str, object]", value or {})
        return any(protobuf_lacks(members[one.name], one.type) for one in kind if members)
    if not arrow.is_nested(kind):
        return False
    inner = kind.item_type if arrow.is_map(kind) else kind.value_type
    return value is None or any(one is None or protobuf_lacks(one, inner) for one in _inner(value))


def _inner(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[object, object]", value).values())
    return list(cast("list[object]", value)) if isinstance(value, list) else []


def may_refuse_stored(value: object) -> bool:
    """Return whether a format that keeps times as numbers may refuse `value`."""
    return is_beyond_python(value) or has_fine_clock(value)
