"""The rows of a snapshot's states as columns, typed if the snapshot names the type.

    value          key_group, key, value
    list           key_group, key, value (an array)
    map            key_group, key, map_key, value; one row for each entry
    accumulators   key_group, key, value (a struct of the aggregates)
    any other      key_group, key, value as the bytes in the snapshot

A key of several columns is a struct with fields _1, _2, …. The form of a value depends on its type:

    a builtin type of Python                  a typed column
    any other type, such as a dataclass       the JSON of its MessagePack
    written by a user's serializer            bytes

A value that expires is shown without the time of its last use. It is included until it is cleaned,
even if it has expired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow.exact_arrays import array_of
from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.decoding import msgpack_decoder
from onceflow.core.errors import StateIncompatible
from onceflow.core.state.aggregates.accumulator_shape import (
    MEMBER,
    NAMESPACE,
    AccumulatorShape,
    decode_totals,
    split_set,
)
from onceflow.core.state.aggregates.chosen_values import decode_chosen
from onceflow.core.state.aggregates.kinds_of_totals import totals_of
from onceflow.core.state.api.descriptors import AccumulatorColumn, AggregateOp
from onceflow.core.state.keys.key_codec import decode_key
from onceflow.core.state.keys.key_index import decode_keys, to_key_array
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.snapshots.state_meta import StateMeta, aggregates_of
from onceflow.core.state.states.ttl import STAMP_BYTES
from onceflow.core.state.stores.entries import split_map_row_key
from onceflow.core.state.types.serializers import TTL_PREFIX, serializer_of
from onceflow.core.state.types.type_names import DECIMAL, PYTHON_FORMAT, StateType, state_type

ValueForm: TypeAlias = Literal["typed", "json", "binary"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a state's rows."""

    name: str
    type: pa.DataType
    values: Callable[[StateRows], pa.Array]


@dataclass(frozen=True, slots=True)
class StateColumns:
    """The conversion of the rows of one state to batches."""

    meta: StateMeta
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns of each batch."""
        group = pa.field("key_group", pa.int32())
        return pa.schema([group, *(pa.field(column.name, column.type) for column in self.columns)])

    def batch(self, rows: StateRows) -> pa.RecordBatch:
        """Return `rows` as columns.

        Raises:
            StateIncompatible: A value does not fit its column's type; names the column.
            StateCorrupt: The bytes are no key or value.
        """
        groups = pa.array(rows.groups).cast(pa.int32())
        arrays = [self._column(column, rows) for column in self.columns]
        return pa.record_batch([groups, *arrays], schema=self.schema)

    def _column(self, column: Column, rows: StateRows) -> pa.Array:
        try:
            return column.values(rows)
        except (pa.ArrowException, msgspec.MsgspecError, OverflowError, ValueError) as error:
            raise StateIncompatible(
                f"{column.name} of state {self.meta.name!r} ({self.meta.kind}"
                f" {self.meta.signature}) does not fit {column.type}: {error}; read it with"
                " valueFormat=json or valueFormat=binary"
            ) from error


def columns_of(meta: StateMeta, sample: bytes | None, form: ValueForm) -> StateColumns:
    """Return the conversion of rows of `meta` to columns; `sample` is the row key of any row.

    The sample gives the type of keys; without one, keys are text. `meta` has the types of
    accumulators.
    """
    if meta.kind == "accumulators":
        return StateColumns(meta, _of_accumulators(meta))
    if meta.kind == "map":
        key, map_key = (None, None) if sample is None else split_map_row_key(sample)
        outer, inner = key_type_of(key), key_type_of(map_key)
        columns = (
            Column("key", outer, lambda rows: key_column([k for k, _ in _pairs(rows)], outer)),
            Column("map_key", inner, lambda rows: key_column([k for _, k in _pairs(rows)], inner)),
            _values(meta.signature.partition(" -> ")[2], form),
        )
        return StateColumns(meta, columns)
    if meta.kind in ("value", "list"):
        kind = key_type_of(None if sample is None else decode_key(sample))
        values = _values(meta.signature, form)
        if meta.kind == "list":
            values = _elements(meta.signature, form)
        return StateColumns(
            meta, (Column("key", kind, lambda rows: _decode_keys(rows, kind)), values)
        )
    return StateColumns(
        meta,
        (
            Column("key", pa.binary(), lambda rows: rows.keys.cast(pa.binary())),
            Column("value", pa.binary(), lambda rows: rows.values.cast(pa.binary())),
        ),
    )


def key_type_of(key: Any) -> pa.DataType:
    """Return the column type for keys of the type of `key`, or text if `key` is None."""
    if issubclass(type(key), tuple):
        return pa.struct([(f"_{n}", key_type_of(part)) for n, part in enumerate(key, 1)])
    if isinstance(key, datetime):
        return pa.timestamp("us", None if key.tzinfo is None else "UTC")
    return next((kind for python, kind in _KEY_TYPES if isinstance(key, python)), pa.string())


_KEY_TYPES: tuple[tuple[type[Any], pa.DataType], ...] = (
    (bool, pa.bool_()),
    (int, pa.int64()),
    (bytes, pa.binary()),
    (date, pa.date32()),
    (Decimal, DECIMAL),
)
"""The types of columns by class. A subclass is before its base."""


# --- keys ----------------------------------------------------------------------------------------


def _decode_keys(rows: StateRows, kind: pa.DataType) -> pa.Array:
    return key_column(list(map(decode_key, rows.keys.to_pylist())), kind)


def _pairs(rows: StateRows) -> list[tuple[Any, Any]]:
    return list(map(split_map_row_key, rows.keys.to_pylist()))


def key_column(keys: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return keys as a column of type `kind`, which `key_type_of` returned for one of them."""
    return array_of([_as_field(key) for key in keys], kind)


def _as_field(key: Any) -> Any:
    if not issubclass(type(key), tuple):
        return key
    return {f"_{n}": _as_field(part) for n, part in enumerate(key, 1)}


# --- values --------------------------------------------------------------------------------------


def _values(signature: str, form: ValueForm) -> Column:
    value_type = value_type_of(signature, form)
    return Column(
        "value", value_type.arrow, lambda rows: _array(rows.values.to_pylist(), value_type)
    )


def _elements(signature: str, form: ValueForm) -> Column:
    value_type = value_type_of(signature, form)
    kind = pa.list_(value_type.arrow)
    decode = msgpack_decoder(list[bytes]).decode

    def values(rows: StateRows) -> pa.Array:
        lists = [decode(value) for value in rows.values.to_pylist()]
        return array_of([list(map(value_type.value, elements)) for elements in lists], kind)

    return Column("value", kind, values)


def _array(values: Sequence[bytes], value_type: StateType) -> pa.Array:
    return array_of([value_type.value(value) for value in values], value_type.arrow)


def value_type_of(signature: str, form: ValueForm) -> StateType:
    """Return the column's type for values of `signature`, with the decoder of stored bytes."""
    if signature.startswith(TTL_PREFIX):
        kept = value_type_of(signature.removeprefix(TTL_PREFIX), form)
        return StateType(kept.arrow, lambda data: kept.value(data[STAMP_BYTES:]))
    if form == "binary" or not signature.startswith(PYTHON_FORMAT):
        return StateType(pa.binary(), lambda data: data)
    if form == "typed":
        value_type = state_type(signature.removeprefix(PYTHON_FORMAT))
        if value_type is not None:
            return value_type
    return StateType(pa.string(), json_of)


def json_of(data: bytes) -> str:
    """Return the JSON of a value's MessagePack. Values without a JSON form become text."""
    value = serializer_of(Any).decode(data)
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (OverflowError, TypeError, ValueError):
        return json.dumps(value, default=str)


# --- running aggregates --------------------------------------------------------------------------

_AGGREGATE = re.compile(rf"({'|'.join(get_args(AggregateOp))})\((.*)")
_DECIMAL = re.compile(r"decimal128\((\d+), (-?\d+)\)")
_ZONED = re.compile(r"timestamp\[(\w+), tz=(.*)\]")


def shape_of_meta(meta: StateMeta) -> AccumulatorShape:
    """Return the columns of a table of accumulators, from the description in its snapshot."""
    keys, aggregates = aggregates_of(meta)
    kinds = keys.partition("[")[2].removesuffix("]").split(",")
    columns: list[AccumulatorColumn] = []
    for name, text in aggregates.items():
        match = _AGGREGATE.fullmatch(text)
        if match is None:
            raise StateIncompatible(f"state {meta.name!r} has an aggregate {name}={text}")
        kind, of_set = split_set(match[2])
        columns.append(AccumulatorColumn(name, match[1], _arrow_type(kind), of_set))  # type: ignore[arg-type]
    namespaced = kinds[0] == NAMESPACE
    member_type = None
    if kinds[-2:-1] == [MEMBER]:
        *kinds, _, member = kinds
        member_type = _key_type(member)
    key_types = tuple(map(_key_type, kinds[namespaced:]))
    return AccumulatorShape(meta.name, key_types, tuple(columns), namespaced, member_type)


def _arrow_type(text: str) -> pa.DataType:
    if zoned := _ZONED.fullmatch(text):
        return pa.timestamp(zoned[1], zoned[2])
    if decimal := _DECIMAL.fullmatch(text):
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    kind: pa.DataType = pa.type_for_alias(text)
    return kind


def _key_type(kind: str) -> pa.DataType:
    if kind.startswith("decimal("):
        return pa.decimal128(38, int(kind[8:-1]))
    if kind.startswith("timestamp("):
        return pa.timestamp(kind[10:-1], "UTC")
    kinds: dict[str, pa.DataType] = {
        "integer": pa.int64(),
        "boolean": pa.bool_(),
        "date": pa.date32(),
        "string": pa.string(),
        "binary": pa.binary(),
    }
    if kind not in kinds:
        raise StateIncompatible(
            f"a checkpoint has keys of type {kind!r}, which this version cannot read: read it"
            " with the version that wrote it"
        )
    return kinds[kind]


def _read_key_type(kept: pa.DataType) -> pa.DataType:
    """Return the column's type for keys stored as `kept`. Instants have Spark's unit."""
    return pa.timestamp("us", kept.tz) if pa.types.is_timestamp(kept) else kept


def _of_accumulators(meta: StateMeta) -> tuple[Column, ...]:
    shape = shape_of_meta(meta)
    kinds = [_read_key_type(kept) for kept in shape.all_key_types]
    many = len(kinds) > 1
    fields = [(f"_{n}", key_kind) for n, key_kind in enumerate(kinds, 1)]
    key_type = pa.struct(fields) if many else next(iter(kinds))
    value_type = pa.struct([(column.name, column.result_type) for column in shape.columns])

    def keys(rows: StateRows) -> pa.Array:
        read = decode_keys(rows.keys.cast(pa.large_binary()), shape.empty_keys())
        exact = [to_key_array(*pair) for pair in zip(read, shape.all_key_types, strict=True)]
        arrays = [
            array if array.type == kind else array.cast(kind, safe=array.type.unit != "ns")
            for array, kind in zip(exact, kinds, strict=True)
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(key_type)) if many else arrays[0]

    def values(rows: StateRows) -> pa.Array:
        records, texts = decode_totals(rows.values, shape.totals_type, shape.of_bytes)
        next_text = iter(texts)
        arrays = [
            _texts(records, n, column, next(next_text))
            if column.has_bytes
            else _totals(records, n, column)
            for n, column in enumerate(shape.columns)
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(value_type))

    return (Column("key", key_type, keys), Column("value", value_type, values))


def _texts(records: Any, index: int, column: AccumulatorColumn, texts: pa.Array) -> pa.Array:
    seen = pa.array(records[f"s{index}"] != 0)
    values: pa.Array = pc.if_else(seen, texts, pa.scalar(None, texts.type))
    if column.op in ("earliest", "latest"):
        return decode_chosen(values, column.type)
    return cast_rows(values, column.type)


def _totals(records: Any, index: int, column: AccumulatorColumn) -> pa.Array:
    totals, rows = totals_of(column), len(records)
    totals.reserve(1, rows + 1)
    totals.totals[1 : rows + 1] = records[f"t{index}"]
    totals.seen[1 : rows + 1] = records[f"s{index}"]
    return totals.values(np.arange(1, rows + 1))
