"""Running aggregates of many keys, updated a whole batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue
from onceflow.core.protocol.invariant import require
from onceflow.core.state.accumulator_columns import AccumulatorShape, Totals
from onceflow.core.state.canonical import StateRows
from onceflow.core.state.key_arena import decode_keys, encode_keys
from onceflow.core.state.key_columns import (
    BytesKeys,
    FixedKeys,
    Ints,
    KeyColumn,
    read_key_columns,
)
from onceflow.core.state.key_groups import Hashes, hash_key_columns, key_groups
from onceflow.core.state.running import Grouping, SumOverflow
from onceflow.core.state.slot_index import SlotIndex

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
