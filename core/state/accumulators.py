"""Running aggregates of many keys, updated a whole batch at a time.

Nulls among the values are skipped. A sum starts at 0; a minimum or maximum is null until the first
value that is not. Of floating point numbers NaN is the largest, as in Spark and Postgres: it
becomes the maximum, and the minimum only while there is nothing else.

Encoded totals of a key (checkpoint format): 8 bytes little-endian a column, in order, then for each
column a byte: 1 when it has seen a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.protocol.invariant import require
from onceflow.core.state.canonical import StateMeta, StateRows, aggregates_of
from onceflow.core.state.descriptors import AccumulatorColumn, check_state_name
from onceflow.core.state.key_columns import (
    BytesKeys,
    FixedKeys,
    Ints,
    KeyColumn,
    check_key_type,
    read_key_columns,
)
from onceflow.core.state.key_groups import Hashes, hash_key_columns, key_groups
from onceflow.core.state.running import (
    Grouping,
    SumOverflow,
    accumulate,
    running_count,
    running_sum,
)
from onceflow.core.state.slot_index import SlotIndex, decode_keys, encode_keys, grown


@dataclass(frozen=True, slots=True)
class AccumulatorShape:
    """What a table holds: its key columns and its aggregates. Checked when it is made."""

    name: str
    key_types: tuple[pa.DataType, ...]
    columns: tuple[AccumulatorColumn, ...]

    def __post_init__(self) -> None:
        check_state_name(self.name)
        names = [column.name for column in self.columns]
        if not self.key_types or not names or len(set(names)) < len(names):
            raise ConfigError(
                f"accumulators {self.name!r} need a key and aggregates with names of their own;"
                f" got {len(self.key_types)} key columns and the aggregates {names}"
            )
        for index, key_type in enumerate(self.key_types):
            check_key_type(key_type, f"{index} of {self.name}")
        for column in self.columns:
            _check_column(column, self.name)

    @property
    def meta(self) -> StateMeta:
        """How a snapshot describes the table."""
        aggregates = ",".join(f"{c.name}={c.op}({c.type})" for c in self.columns)
        keys = ",".join(_key_kind(key_type) for key_type in self.key_types)
        return StateMeta(self.name, "accumulators", f"accumulators/1:[{keys}]{aggregates}")

    @property
    def totals_type(self) -> np.dtype[Any]:
        """The layout of a key's encoded totals."""
        totals = [(f"t{i}", _dtype(c).newbyteorder("<")) for i, c in enumerate(self.columns)]
        return np.dtype([*totals, *((f"s{i}", np.uint8) for i in range(len(totals)))])

    def carried(self, found: StateMeta, values: pa.Array) -> pa.Array:
        """Return encoded totals for this shape from `values`, which are those of `found`.

        An aggregate that `found` has is taken over; one that it has not is as before any record.
        """
        old_names = list(aggregates_of(found)[1].items())
        flags = [(f"s{i}", np.uint8) for i in range(len(old_names))]
        layout = np.dtype([*((f"t{i}", "V8") for i in range(len(old_names))), *flags])
        before = np.frombuffer(b"".join(values.to_pylist()), layout)
        after = np.zeros(len(before), self.totals_type)
        mine = aggregates_of(self.meta)[1].items()
        for index, (column, one) in enumerate(zip(self.columns, mine, strict=True)):
            total = after[f"t{index}"]
            if one in old_names:
                place = old_names.index(one)
                total[:] = np.ascontiguousarray(before[f"t{place}"]).view(total.dtype)
                after[f"s{index}"] = before[f"s{place}"]
            else:
                total[:] = start_of(column)
        kind = pa.binary(after.dtype.itemsize)
        return pa.Array.from_buffers(kind, len(after), [None, pa.py_buffer(after.tobytes())])

    def empty_keys(self) -> tuple[KeyColumn, ...]:
        """Return key columns of these types, without a row."""
        return read_key_columns([pa.array([], key_type) for key_type in self.key_types])


def _check_column(column: AccumulatorColumn, table: str) -> None:
    kind, types = column.type, pa.types
    fine = kind in (pa.int64(), pa.float64())
    if column.op in ("min", "max"):
        fine = fine or types.is_timestamp(kind) or types.is_date32(kind)
    if column.op == "count":
        fine = kind == pa.int64()
    if column.op not in ("sum", "count", "min", "max") or not fine:
        raise ConfigError(
            f"aggregate {column.name!r} of {table!r} cannot be {column.op}({kind}): sum takes int64"
            " and float64, count gives int64, min and max also take timestamps and date32"
        )


def _key_kind(key_type: pa.DataType) -> str:
    types = pa.types
    if types.is_dictionary(key_type):
        return _key_kind(key_type.value_type)
    if types.is_integer(key_type):
        return "integer"
    if types.is_decimal(key_type):
        return f"decimal({key_type.scale})"
    for kind, matches in (
        ("boolean", types.is_boolean),
        ("date", types.is_date),
        ("timestamp", types.is_timestamp),
    ):
        if matches(key_type):
            return kind
    return "string" if "string" in str(key_type) else "binary"


def _dtype(column: AccumulatorColumn) -> np.dtype[Any]:
    return np.dtype(np.float64 if pa.types.is_floating(column.type) else np.int64)


def start_of(column: AccumulatorColumn) -> float | int:
    """Return the total of an aggregate that has seen no value."""
    floating = pa.types.is_floating(column.type)
    limits = np.iinfo(np.int64)
    starts: dict[str, float | int] = {
        "sum": 0,
        "count": 0,
        "min": np.nan if floating else limits.max,
        "max": -np.inf if floating else limits.min,
    }
    return starts[column.op]


class Totals:
    """One aggregate's total in every slot, and whether it has seen a value."""

    def __init__(self, column: AccumulatorColumn) -> None:
        self.column = column
        self._floating = pa.types.is_floating(column.type)
        self._start = start_of(column)
        self.totals = np.full(1024, self._start, _dtype(column))
        self.seen = np.zeros(1024, np.uint8)

    def reserve(self, used: int, needed: int) -> None:
        """Make room for `needed` slots, those from `used` on being without any value."""
        if needed > len(self.totals):
            self.totals = grown(self.totals, used, needed)
            self.seen = grown(self.seen, used, needed)
        self.totals[used:needed] = self._start
        self.seen[used:needed] = 0

    def keep(self, slots: Ints) -> None:
        """Keep these slots alone, renumbered from 1 in the order given."""
        self.totals[1 : len(slots) + 1] = self.totals[slots]
        self.seen[1 : len(slots) + 1] = self.seen[slots]

    def run(
        self, group: Grouping, values: pa.Array | npt.NDArray[Any] | None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return each row's result, and each segment's new total and flag; changes nothing.

        Raises:
            SumOverflow: A sum does not fit.
        """
        totals, seen = self.totals[group.slots], self.seen[group.slots]
        if values is None:
            places = running_count(group, totals, None)
            return group.in_row_order(places), group.lasts(places), np.ones_like(seen)
        data, valid = self._physical(values)
        if self.column.op == "count":
            places = running_count(group, totals, valid)
        elif self.column.op == "sum" and not self._floating:
            places = running_sum(group, totals, data)
        else:
            places = accumulate(self._ufunc(), group, totals, data)
        out = self._logical(group.in_row_order(places))
        if valid is None:
            return out, group.lasts(places), np.ones_like(seen)
        so_far = accumulate(np.maximum, group, seen, valid.astype(np.uint8))
        if self.column.op in ("min", "max") and not so_far.all():
            out = np.ma.MaskedArray(out, mask=group.in_row_order(so_far) == 0)
        return out, group.lasts(places), group.lasts(so_far)

    def _ufunc(self) -> np.ufunc:
        if self.column.op == "sum":
            return np.add
        if self.column.op == "max":
            return np.maximum
        return np.fmin if self._floating else np.minimum

    def _physical(
        self, values: pa.Array | npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
        """Return the values as this column's numbers, with a neutral one for each null."""
        try:
            array = values if isinstance(values, pa.Array) else pa.array(values)
            valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
            if self.column.op == "count":
                return np.zeros(0, np.int64), valid
            if array.type != self.column.type:
                array = array.cast(self.column.type)
        except pa.ArrowException as error:
            raise BadStateValue(
                f"aggregate {self.column.name!r} cannot take its values as {self.column.type}:"
                f" {error}; cast the column first"
            ) from error
        if pa.types.is_date32(self.column.type):
            array = array.view(pa.int32()).cast(pa.int64())
        elif not self._floating:
            array = array.view(pa.int64())
        if valid is not None:
            neutral = -0.0 if self._floating and self.column.op == "sum" else self._start
            array = array.fill_null(pa.scalar(neutral, array.type))
        return array.to_numpy(zero_copy_only=False), valid

    def no_results(self) -> npt.NDArray[Any]:
        """Return the results of a batch without rows."""
        return self._logical(self.totals[:0].copy())

    def _logical(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if pa.types.is_timestamp(self.column.type):
            return numbers.view(f"datetime64[{self.column.type.unit}]")
        if pa.types.is_date32(self.column.type):
            return numbers.astype("datetime64[D]")
        return numbers


CHUNK_SLOTS = 65_536


class AccumulatorTable:
    """Running aggregates by key, in numpy arrays; owned by the subtask's thread."""

    def __init__(self, shape: AccumulatorShape, label: str, max_parallelism: int) -> None:
        self.shape = shape
        self._label = label
        self._max_parallelism = max_parallelism
        self._index = SlotIndex(shape.empty_keys())
        self._kinds = tuple(type(column) for column in shape.empty_keys())
        self._columns = tuple(Totals(column) for column in shape.columns)

    def __len__(self) -> int:
        """The number of keys in memory."""
        return len(self._index)

    def update(
        self,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        values: Mapping[str, pa.Array | npt.NDArray[Any]],
    ) -> dict[str, npt.NDArray[Any]]:
        """Return, by aggregate, the running value after each row, and keep the new totals.

        `keys` are the key columns, `hashes` what `hash_keys` gives for them if known already, and
        `values` one column for each aggregate, by its name; a count without one counts rows.
        Results are in row order; a minimum or maximum that has seen no value yet is masked.

        Raises:
            BadStateValue: A sum left 64 bits (names table, aggregate and key), a key is null, or
                values cannot be cast to the aggregate's type. No total has changed.
        """
        columns = self._read(keys)
        if hashes is None:
            hashes = hash_key_columns(columns)
        if not len(hashes):
            return {column.column.name: column.no_results() for column in self._columns}
        slots = self._resolve(columns, hashes)
        group = Grouping.of(slots)
        results: dict[str, npt.NDArray[Any]] = {}
        changes: list[tuple[Totals, npt.NDArray[Any], npt.NDArray[Any]]] = []
        for column in self._columns:
            name = column.column.name
            given = values.get(name)
            require(
                given is not None or column.column.op == "count",
                f"update of {self.shape.name!r} has no values for {name!r}",
            )
            try:
                results[name], totals, seen = column.run(group, given)
            except SumOverflow as overflow:
                raise self._overflow(name, keys, overflow.row) from overflow
            changes.append((column, totals, seen))
        for column, totals, seen in changes:
            column.totals[group.slots] = totals
            column.seen[group.slots] = seen
        self._updated(group.slots)
        return results

    def view(self) -> AccumulatorView:
        """Return the table as of now: copies the totals, shares the keys, which never change."""
        return self.view_of(slice(1, self._index.end))

    def view_of(self, slots: slice | Ints) -> AccumulatorView:
        """Return some of the slots as of now."""
        return AccumulatorView(
            self.shape,
            self._max_parallelism,
            tuple(_part(column, slots) for column in self._index.slot_keys()),
            self._index.slot_hashes()[slots],
            tuple(column.totals[slots].copy() for column in self._columns),
            tuple(column.seen[slots].copy() for column in self._columns),
        )

    def load(self, rows: StateRows) -> None:
        """Take rows of a snapshot; their keys are not in the table yet."""
        columns = decode_keys(rows.keys, self.shape.empty_keys())
        hashes = hash_key_columns(columns)
        slots = self._resolve(columns, hashes)
        self._put(slots, rows.values.cast(pa.large_binary()))

    def _read(self, keys: Sequence[pa.Array]) -> tuple[KeyColumn, ...]:
        columns = read_key_columns(keys)
        require(
            tuple(type(column) for column in columns) == self._kinds,
            f"{self.shape.name!r} is keyed by {self.shape.key_types}, got {[k.type for k in keys]}",
        )
        return columns

    def _resolve(self, columns: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's slot; new ones have totals before this returns."""
        used = self._index.end
        slots, _ = self._index.resolve(columns, hashes)
        if self._index.end > used:
            for column in self._columns:
                column.reserve(used, self._index.end)
        return slots

    def _put(self, slots: Ints, values: pa.Array) -> None:
        """Set the totals of `slots` to encoded ones."""
        layout = self.shape.totals_type
        data = b"".join(values.to_pylist())
        decoded = np.frombuffer(data, layout)
        for index, column in enumerate(self._columns):
            column.totals[slots] = decoded[f"t{index}"]
            column.seen[slots] = decoded[f"s{index}"]

    def _updated(self, slots: Ints) -> None:
        """Hear which slots have new totals."""

    def _overflow(self, column: str, keys: Sequence[pa.Array], row: int) -> BadStateValue:
        key = tuple(array[row].as_py() for array in keys)
        return BadStateValue(
            f"the running sum {column!r} in state {self.shape.name!r} of {self._label} leaves 64"
            f" bits at key {key[0] if len(key) == 1 else key!r}; sum as float64 or in larger units",
            row=row,
        )


@dataclass(frozen=True, slots=True)
class AccumulatorView:
    """An `AccumulatorTable` as of one moment; any thread may read it."""

    shape: AccumulatorShape
    max_parallelism: int
    keys: tuple[KeyColumn, ...]
    hashes: Hashes
    totals: tuple[npt.NDArray[Any], ...]
    seen: tuple[npt.NDArray[Any], ...]

    def rows(self) -> Iterator[StateRows]:
        """Yield every key with its encoded totals, some ten thousand at a time."""
        for start in range(0, len(self.hashes), CHUNK_SLOTS):
            yield self.rows_of(slice(start, start + CHUNK_SLOTS))

    def rows_of(self, slots: slice) -> StateRows:
        """Return the rows of some of the keys, by their place in this view."""
        chosen = tuple(_part(column, slots) for column in self.keys)
        hashes = self.hashes[slots]
        records = np.zeros(len(hashes), self.shape.totals_type)
        for index, (totals, seen) in enumerate(zip(self.totals, self.seen, strict=True)):
            records[f"t{index}"] = totals[slots]
            records[f"s{index}"] = seen[slots]
        kind = pa.binary(records.dtype.itemsize)
        values = pa.Array.from_buffers(kind, len(records), [None, pa.py_buffer(records.tobytes())])
        groups = key_groups(hashes, self.max_parallelism)
        return StateRows(groups, encode_keys(chosen), values)


def _part(column: KeyColumn, slots: slice | Ints) -> KeyColumn:
    if isinstance(column, FixedKeys):
        return FixedKeys(tuple(plane[slots] for plane in column.words))
    return BytesKeys(column.data, column.starts[slots], column.lengths[slots])
