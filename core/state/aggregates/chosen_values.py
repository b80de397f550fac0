"""Totals that are one of the values that an entry has seen: the least, greatest, first or last one.

The values are in the arena of `byte_values`:

    min, max of text and bytes      the value's bytes
    earliest, latest                8 bytes with the order of the value, big-endian, sign inverted;
                                    then the value's bytes

Text is ordered by its Unicode code points, which is the order of its UTF-8 bytes. The order of an
earliest or latest value is the event time of its record in ms, or 0 if there is none. Of values
with equal orders, the one that arrived first is the earliest, and the one that arrived last is the
latest. Nulls are skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.state.aggregates.byte_values import BytesTotals
from onceflow.core.state.aggregates.running import Grouping, accumulate
from onceflow.core.state.aggregates.totals import Results
from onceflow.core.state.keys.key_columns import BytesKeys, Ints, read_bytes
from onceflow.core.state.keys.key_index import to_binary, to_fixed_binary

ORDER_BYTES = 8
_SIGN = np.uint64(1 << 63)
_LATER = np.iinfo(np.int64).max


class ChosenValues(BytesTotals):
    """The chosen value of one column in each entry."""

    @property
    def _has_orders(self) -> bool:
        return self.column.op in ("earliest", "latest")

    @property
    def _is_least(self) -> bool:
        return self.column.op in ("min", "earliest")

    def run(
        self, group: Grouping, values: pa.Array | npt.NDArray[Any] | None
    ) -> tuple[Results, npt.NDArray[Any], npt.NDArray[Any]]:
        """Return each row's result, and each segment's new total and flag. Changes no total."""
        stored, chosen = self._choose(group, self._to_stored(values))
        totals, seen = self._append(group, stored, group.lasts(chosen))
        rows = group.in_row_order(chosen)
        indices = pa.array(rows, mask=rows < 0)
        return self._from_stored(stored.take(indices)), totals, seen

    def fold(self, entries: Ints, values: pa.Array | npt.NDArray[Any] | None) -> None:
        """Add a value to each of `entries`, which may repeat, in row order."""
        self._fold_stored(entries, self._to_stored(values))

    def merge(self, entries: Ints, into: Ints, count: int) -> ChosenValues:
        """Return new totals with entries 1 to `count`; see `Totals.merge`."""
        merged = type(self)(self.column)
        merged.reserve(1, count + 1)
        merged._fold_stored(into, self._take_stored(entries))
        return merged

    def values(self, entries: Ints) -> pa.Array:
        """Return the value of each entry; null if it has none."""
        return self._from_stored(self._take_stored(entries))

    def no_results(self) -> Results:
        """Return the results of a batch without rows."""
        return pa.array([], self.column.type)

    def _fold_stored(self, entries: Ints, data: pa.Array) -> None:
        if not len(entries):
            return
        group = Grouping.of(entries)
        stored, chosen = self._choose(group, data)
        totals, seen = self._append(group, stored, group.lasts(chosen))
        self.totals[group.entries], self.seen[group.entries] = totals, seen

    def _choose(self, group: Grouping, data: pa.Array) -> tuple[pa.Array, Ints]:
        """Return the stored values of the entries and rows, and the index of each position's one.

        The index is negative if the entry has seen no value.
        """
        stored = pa.concat_arrays([self._take_stored(group.entries), data])
        every, before = len(stored), len(group.entries)
        # Rank and number in one integer: among equal ranks, the value that arrived first is lower.
        positions = self._rank(stored) * every + np.arange(every)
        none = _LATER if self._is_least else -1
        positions[stored.is_null().to_numpy(zero_copy_only=False)] = none
        ufunc = np.minimum if self._is_least else np.maximum
        best = accumulate(ufunc, group, positions[:before], positions[before:])
        return stored, np.where(best == none, -1, best % every)

    def _rank(self, stored: pa.Array) -> Ints:
        """Return the rank of each value in the order of all; equal ones have equal ranks."""
        if not self._has_orders:
            ranks = pc.rank(stored, tiebreaker="dense")
            numbers: Ints = ranks.to_numpy(zero_copy_only=False).astype(np.int64)
            return numbers
        nothing = pa.scalar(bytes(ORDER_BYTES), pa.large_binary())
        rows = read_bytes(stored.fill_null(nothing))
        loads: npt.NDArray[Any] = np.ndarray(
            (len(rows.data) - ORDER_BYTES + 1,), ">u8", rows.data, strides=(1,)
        )
        orders = loads[rows.starts].astype(np.uint64)
        if len(orders) and (orders == orders[0]).all():
            return np.zeros(len(orders), np.int64)
        return np.unique(orders, return_inverse=True)[1].astype(np.int64)

    def _append(
        self, group: Grouping, stored: pa.Array, chosen: Ints
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Append the chosen values that are new. Return each segment's total and flag."""
        self._pack_if_full()
        totals = self.totals[group.entries]
        is_new = chosen >= len(group.entries)
        first = self._arena.append(stored.take(pa.array(chosen[is_new])))
        totals[is_new] = first + np.arange(np.count_nonzero(is_new))
        return totals, (chosen >= 0).astype(np.uint8)

    def _take_stored(self, entries: Ints) -> pa.Array:
        """Return the bytes of each entry; null if it has no value."""
        mask = self.seen[entries] == 0
        return self._arena.view().take(pa.array(self.totals[entries], mask=mask))

    def _to_stored(self, values: pa.Array | npt.NDArray[Any] | None) -> pa.Array:
        """Return the bytes of values, which may be a struct of orders and values."""
        if not self._has_orders:
            return self._cast(values).cast(pa.large_binary())
        orders = np.zeros(0 if values is None else len(values), np.int64)
        if isinstance(values, pa.StructArray):
            orders = values.field(0).to_numpy()
            values = values.field(1)
        array = self._cast(values)
        prefixes = to_fixed_binary((orders.view(np.uint64) ^ _SIGN).astype(">u8"))
        nothing = pa.scalar(b"", pa.large_binary())
        joined: pa.Array = pc.binary_join_element_wise(prefixes, _to_bytes(array), nothing)
        return joined

    def _from_stored(self, stored: pa.Array) -> pa.Array:
        return (
            decode_chosen(stored, self.column.type)
            if self._has_orders
            else cast_rows(stored, self.column.type)
        )


def decode_chosen(stored: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values of type `kind` whose orders and bytes are `stored`; null for a null."""
    is_null = stored.is_null()
    width = _width(kind)
    nothing = pa.scalar(bytes(ORDER_BYTES + (width or 0)), pa.large_binary())
    rows = read_bytes(stored.fill_null(nothing))
    lengths = rows.lengths - ORDER_BYTES
    values = to_binary(BytesKeys(rows.data, rows.starts + ORDER_BYTES, lengths))
    if width is None:
        decoded = cast_rows(values, kind)
    elif pa.types.is_boolean(kind):
        decoded = pa.array(np.frombuffer(_data(values), np.uint8) != 0)
    else:
        decoded = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(_data(values))])
    return pc.if_else(is_null, pa.scalar(None, kind), decoded) if stored.null_count else decoded


def _to_bytes(array: pa.Array) -> pa.Array:
    """Return the bytes of each value, as a large_binary array with the same nulls."""
    kind, width = array.type, _width(array.type)
    if width is None:
        return array.cast(pa.large_binary())
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    # A copy, so that the buffers begin with the first value.
    array = pa.concat_arrays([array, array[:0]])
    _, data = array.buffers()[-2:]
    part = b"" if data is None else data.to_pybytes()[array.offset * width :][: len(array) * width]
    whole = pa.Array.from_buffers(pa.binary(width), len(array), [None, pa.py_buffer(part)])
    fixed: pa.Array = whole.cast(pa.large_binary())
    if array.null_count:
        fixed = pc.if_else(array.is_valid(), fixed, pa.scalar(None, pa.large_binary()))
    return fixed


def _width(kind: pa.DataType) -> int | None:
    """Return the number of bytes of a value, or None if values have different lengths."""
    types = pa.types
    if types.is_boolean(kind):
        return 1
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if is_text or types.is_binary(kind) or types.is_large_binary(kind):
        return None
    return int(kind.bit_width) // 8


def _data(values: pa.Array) -> bytes:
    """Return the bytes of all rows of a large_binary array that `to_binary` made."""
    data = values.buffers()[2]
    return b"" if data is None else data.to_pybytes()
