"""The conversion of a table's rows to the state that a job would have made of these rows.

Keys are hashed and encoded like those of a stream with the same columns. Values are encoded by the
serializer of the columns' types. So a job can read both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.spi.bad_rows import quote_row
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape
from onceflow.core.state.aggregates.kinds_of_totals import totals_of
from onceflow.core.state.api import descriptors
from onceflow.core.state.keys.key_codec import (
    add_length,
    decode_key,
    encode_key,
    encode_map_key,
    encode_python_keys,
)
from onceflow.core.state.keys.key_columns import check_key_type, python_row_keys, read_key_columns
from onceflow.core.state.keys.key_groups import check_max_parallelism, hash_keys, key_groups
from onceflow.core.state.keys.key_index import encode_keys
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.snapshots.state_meta import StateKind, StateMeta
from onceflow.core.state.states.operator_state import Mode, Saved
from onceflow.core.state.types.serializers import Serializer, serializer_of
from onceflow.core.state.types.type_names import PYTHON_FORMAT, python_type_of

BUCKETS = 16
"""The number of ranges of key groups with separate files: a slot reads only files of its range."""


@dataclass(frozen=True, slots=True)
class StateOfTable:
    """A keyed state, and the columns from which it is created."""

    name: str
    kind: StateKind
    key: tuple[str, ...]
    value: str = "value"
    map_key: str = ""
    value_type: str | None = None
    """The type's name in the job's descriptor; None for the type of the column."""
    map_key_type: str | None = None
    aggregates: Mapping[str, descriptors.AggregateOp] | None = None
    """The aggregate in each column, for `running`."""


@dataclass(frozen=True, slots=True)
class UnkeyedStateOfTable:
    """A state that is not kept by key, and the columns from which it is created.

    Each row becomes one element or entry.
    """

    name: str
    mode: Mode
    value: str = "value"
    map_key: str = ""
    """The column of the map's keys, for a broadcast state."""
    value_type: str | None = None
    map_key_type: str | None = None


@dataclass(frozen=True, slots=True)
class UnkeyedEncoder:
    """An encoder of the rows of a table as elements of a state without a key."""

    mode: Mode
    described: Saved
    """The state, without elements."""
    elements: Callable[[pa.RecordBatch], list[bytes]]
    """A function that returns a batch's elements. It raises BadStateValue if a value is null or
    not of its type, and names the column."""

    def of(self, elements: Iterable[bytes]) -> Saved:
        """Return the state with `elements`.

        Raises:
            BadStateValue: A key occurs twice; names it.
        """
        held = list(elements)
        if self.mode == "broadcast":
            keys = held[::2]
            if len(set(keys)) < len(keys):
                twice = next(key for key, times in Counter(keys).items() if times > 1)
                raise BadStateValue(
                    f"map key {decode_key(twice)!r} occurs more than once in the DataFrame, but"
                    f" state {self.described.name!r} has one entry for it: group the DataFrame by"
                    " it first"
                )
        return msgspec.structs.replace(self.described, elements=held)


def make_unkeyed_encoder(table: UnkeyedStateOfTable, schema: pa.Schema) -> UnkeyedEncoder:
    """Return an encoder of elements for a table with columns `schema`.

    Raises:
        ConfigError: A column is missing, or a state cannot have its type.
    """
    descriptors.check_state_name(table.name)
    _check_columns(table.name, [table.value, *filter(None, [table.map_key])], schema)
    value = _make_column_encoder(schema.field(table.value), table.value_type)
    if table.mode != "broadcast":
        described = Saved(table.name, "", value.signature, [])
        return UnkeyedEncoder(table.mode, described, lambda rows: value.encode(rows, table.value))
    map_key = _make_column_encoder(schema.field(table.map_key), table.map_key_type)

    def entries(rows: pa.RecordBatch) -> list[bytes]:
        keys = map(encode_map_key, _read_not_null(rows, table.map_key))
        pairs = zip(keys, value.encode(rows, table.value), strict=True)
        return [part for pair in pairs for part in pair]

    described = Saved(table.name, map_key.signature, value.signature, [])
    return UnkeyedEncoder(table.mode, described, entries)


def _check_columns(state: str, names: Iterable[str], schema: pa.Schema) -> None:
    for name in names:
        if name not in schema.names:
            raise ConfigError(
                f"state {state!r} needs column {name!r}, but the DataFrame has only"
                f" {', '.join(schema.names)}"
            )


@dataclass(frozen=True, slots=True)
class StateEncoder:
    """An encoder of the rows of a table as rows of a keyed state."""

    meta: StateMeta
    key: tuple[str, ...]
    max_parallelism: int
    row_keys: Callable[[pa.RecordBatch], pa.Array]
    row_values: Callable[[pa.RecordBatch], pa.Array]

    def rows(self, batch: pa.RecordBatch) -> StateRows:
        """Return the batch's rows.

        Raises:
            BadStateValue: A key or value is null or not of its type; names the column.
        """
        hashes = hash_keys([batch.column(name) for name in self.key], self.key)
        groups = key_groups(hashes, self.max_parallelism)
        return StateRows(groups, self.row_keys(batch), self.row_values(batch))


def make_encoder(table: StateOfTable, schema: pa.Schema, max_parallelism: int) -> StateEncoder:
    """Return an encoder of a state's rows for a table with columns `schema`.

    Raises:
        ConfigError: A column is missing, cannot be a key, or a state cannot have its type.
    """
    check_max_parallelism(max_parallelism)
    descriptors.check_state_name(table.name)
    values = list(table.aggregates) if table.aggregates else [table.value]
    _check_columns(table.name, (*table.key, *values, *filter(None, [table.map_key])), schema)
    for name in table.key:
        check_key_type(schema.field(name).type, name)
    if table.kind == "accumulators":
        return _make_aggregates_encoder(table, schema, max_parallelism)
    value = _make_column_encoder(
        schema.field(table.value), table.value_type, list_of=table.kind == "list"
    )
    signature = value.signature
    if table.kind == "map":
        map_key = _make_column_encoder(schema.field(table.map_key), table.map_key_type)
        signature = f"{map_key.signature} -> {signature}"

        def row_keys(batch: pa.RecordBatch) -> pa.Array:
            inner = _read_not_null(batch, table.map_key)
            pairs = zip(_keys(batch, table.key), inner, strict=True)
            return pa.array(
                [add_length(encode_key(k)) + encode_map_key(m) for k, m in pairs], pa.large_binary()
            )
    else:

        def row_keys(batch: pa.RecordBatch) -> pa.Array:
            return encode_python_keys(_keys(batch, table.key))

    def row_values(batch: pa.RecordBatch) -> pa.Array:
        return pa.array(value.encode(batch, table.value), pa.large_binary())

    meta = StateMeta(table.name, table.kind, signature)
    return StateEncoder(meta, table.key, max_parallelism, row_keys, row_values)


# --- keys and values -----------------------------------------------------------------------------


def _read_not_null(batch: pa.RecordBatch, name: str) -> list[Any]:
    column = batch.column(name)
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise BadStateValue(
            f"column {name!r} is null in a row: {quote_row(batch, row)[:300]}; filter"
            " such rows: a key without a value has no state"
        )
    return list(column.to_pylist())


def _keys(batch: pa.RecordBatch, names: Sequence[str]) -> list[Any]:
    return python_row_keys([batch.column(name) for name in names], names)


@dataclass(frozen=True, slots=True)
class _ColumnEncoder:
    """Encodes a column's values as a state's type."""

    signature: str
    serializer: Serializer[Any]
    check: Callable[[bytes], object] | None
    """A decoder like the job's, which raises if the job could not read a value. None if the
    column's type rules that out."""
    is_list: bool
    plain: Callable[[Any], Any]

    def encode(self, batch: pa.RecordBatch, name: str) -> list[bytes]:
        values = map(self.plain, _read_not_null(batch, name))
        try:
            if not self.is_list:
                return [self._bytes(value) for value in values]
            lists = ([self._bytes(element) for element in value] for value in values)
            return [msgspec.msgpack.encode(elements) for elements in lists]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadStateValue(
                f"column {name!r} holds a value that does not fit {self.signature}: {error}"
            ) from error

    def _bytes(self, value: Any) -> bytes:
        data = self.serializer.encode(value)
        if self.check is not None:
            self.check(data)
        return data


def _make_column_encoder(
    column: pa.Field, type_name: str | None, *, list_of: bool = False
) -> _ColumnEncoder:
    kind = column.type
    if list_of:
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise ConfigError(f"a list state needs an array, but column {column.name!r} is {kind}")
        kind = kind.value_type
    name = type_name or _name_type(kind, column.name)
    python = Any if name == "any" else python_type_of(name)
    # A user's class is stored as a mapping of its fields, so its name is enough.
    serializer = serializer_of(Any if python is None else python)
    check = serializer.decode if type_name and python is not None else None
    return _ColumnEncoder(
        f"{PYTHON_FORMAT}{name}", serializer, check, list_of, _make_plain(column.type)
    )


def _name_type(kind: pa.DataType, column: str) -> str:
    if pa.types.is_struct(kind):
        raise ConfigError(
            f"column {column!r} is a struct: set valueType= to the name of its class in the job, or"
            " to any"
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list[{_name_type(kind.value_type, column)}]"
    if pa.types.is_map(kind):
        return f"dict[{_name_type(kind.key_type, column)},{_name_type(kind.item_type, column)}]"
    signature = serializer_of(kind).signature
    return signature.removeprefix(PYTHON_FORMAT)


def _make_plain(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that converts the maps in a value of `kind` from pairs to dicts."""
    if pa.types.is_map(kind):
        item = _make_plain(kind.item_type)
        return lambda pairs: {key: item(value) for key, value in pairs}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = _make_plain(kind.value_type)
        return lambda values: [element(value) for value in values]
    if pa.types.is_struct(kind):
        fields = {field.name: _make_plain(field.type) for field in kind}
        return lambda row: {
            name: None if row[name] is None else plain(row[name]) for name, plain in fields.items()
        }
    return lambda value: value


# --- running aggregates --------------------------------------------------------------------------


def _make_aggregates_encoder(
    table: StateOfTable, schema: pa.Schema, max_parallelism: int
) -> StateEncoder:
    columns = [
        descriptors.AccumulatorColumn(name, op, _total_type(schema.field(name).type, op))
        for name, op in (table.aggregates or {}).items()
    ]
    key_types = tuple(schema.field(name).type for name in table.key)
    shape = AccumulatorShape(table.name, key_types, tuple(columns))

    def row_keys(batch: pa.RecordBatch) -> pa.Array:
        return encode_keys(read_key_columns([batch.column(n) for n in table.key], table.key))

    def row_values(batch: pa.RecordBatch) -> pa.Array:
        records = np.zeros(batch.num_rows, shape.totals_type)
        for index, column in enumerate(columns):
            rows = batch.num_rows
            # The column has final sums and counts, which are stored like last values.
            totals = totals_of(
                replace(column, op="last") if column.op in ("sum", "count") else column
            )
            totals.reserve(1, rows + 1)
            totals.put(np.arange(1, rows + 1), batch.column(column.name))
            records[f"t{index}"] = totals.totals[1 : rows + 1]
            records[f"s{index}"] = totals.seen[1 : rows + 1]
        kind = pa.binary(records.dtype.itemsize)
        data = pa.py_buffer(records.tobytes())
        return pa.Array.from_buffers(kind, len(records), [None, data]).cast(pa.large_binary())

    return StateEncoder(shape.meta, table.key, max_parallelism, row_keys, row_values)


def _total_type(kind: pa.DataType, op: descriptors.AggregateOp) -> pa.DataType:
    if op == "count" or pa.types.is_integer(kind):
        return pa.int64()
    if op == "sum" and pa.types.is_decimal(kind):
        return pa.decimal128(descriptors.DIGITS_MAX, kind.scale)
    return pa.float64() if pa.types.is_floating(kind) else kind


# --- buckets -------------------------------------------------------------------------------------


def buckets_of(max_parallelism: int) -> list[range]:
    """Return the ranges of key groups that have separate files."""
    count = min(BUCKETS, max_parallelism)
    edges = [number * max_parallelism // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def split_by_bucket(rows: StateRows, buckets: Sequence[range]) -> Iterator[tuple[int, StateRows]]:
    """Yield the rows of each bucket that has any."""
    for number, groups in enumerate(buckets):
        inside = rows.within(groups)
        if len(inside):
            yield number, inside


def find_repeated_key(chunks: Iterable[pa.Array]) -> bytes | None:
    """Return a row key that occurs more than once, or None if there is none."""
    keys = pa.chunked_array(list(chunks), pa.large_binary())
    if pc.count_distinct(keys).as_py() == len(keys):
        return None
    counted = pc.value_counts(keys)
    first = pc.index(pc.greater(counted.field("counts"), 1), True).as_py()
    return bytes(counted.field("values")[first].as_py())
