"""Text and bytes as totals of a table: the last value of each slot.

A slot's total is where its value is in an arena, which is only ever added to: a snapshot shares it.
What no slot has any more is left behind when the arena is made anew.

Invariants:
    value 0 of an arena is empty: that of a slot without any
    values <= 2 * slots + SPARE_VALUES, after each `put`
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue
from onceflow.core.state.aggregates.totals import Totals
from onceflow.core.state.aggregates.wide_totals import wide_totals_of
from onceflow.core.state.api.descriptors import AccumulatorColumn
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.slot_index import grown

BYTES_TYPES = (pa.string(), pa.binary())
SPARE_VALUES = 4096


def is_of_bytes(column: AccumulatorColumn) -> bool:
    """Tell whether a column's values have no fixed size."""
    return column.type in BYTES_TYPES


def totals_of(column: AccumulatorColumn) -> Totals:
    """Return the totals of a column, without a slot."""
    if is_of_bytes(column):
        return BytesTotals(column)
    return wide_totals_of(column) or Totals(column)


class ValueArena:
    """Values of any length, one after the other."""

    def __init__(self) -> None:
        self._data = np.zeros(1 << 12, np.uint8)
        self._offsets = np.zeros(1024, np.int64)
        self.count = 1

    def append(self, values: pa.Array) -> int:
        """Put `values`, a large_binary array without nulls, at the end; return where they begin."""
        first, rows = self.count, len(values)
        if not rows:
            return first
        _, offset_buffer, data_buffer = values.buffers()
        every: Ints = np.frombuffer(cast("Any", offset_buffer), np.int64)
        offsets = every[values.offset : values.offset + rows + 1]
        start, stop = int(offsets[0]), int(offsets[-1])
        used = int(self._offsets[first])
        self._data = grown(self._data, used, used + stop - start)
        if stop > start:
            data = np.frombuffer(cast("Any", data_buffer), np.uint8)[start:stop]
            self._data[used : used + stop - start] = data
        self._offsets = grown(self._offsets, first + 1, first + rows + 1)
        self._offsets[first + 1 : first + rows + 1] = offsets[1:] + (used - start)
        self.count = first + rows
        return first

    def view(self) -> pa.Array:
        """Return every value as of now and for ever, as a large_binary array."""
        used = int(self._offsets[self.count])
        offsets = pa.py_buffer(self._offsets[: self.count + 1])
        buffers = [None, offsets, pa.py_buffer(self._data[:used])]
        return pa.Array.from_buffers(pa.large_binary(), self.count, buffers)


class BytesTotals(Totals):
    """The last value of a column of text or bytes in every slot."""

    def __init__(self, column: AccumulatorColumn) -> None:
        super().__init__(column)
        self._arena = ValueArena()
        self._end = 1

    def reserve(self, used: int, needed: int) -> None:
        """Make room for `needed` slots, those from `used` on being without any value."""
        super().reserve(used, needed)
        self._end = needed

    def keep(self, slots: Ints) -> None:
        """Keep these slots alone, renumbered from 1 in the order given."""
        super().keep(slots)
        self._end = len(slots) + 1
        self._pack()

    def values(self, slots: Ints) -> pa.Array:
        """Return the value of each slot; null where there is none."""
        places, seen = self.totals[slots], self.seen[slots]
        mask = None if seen.all() else seen == 0
        return self._arena.view().take(pa.array(places, mask=mask)).cast(self.column.type)

    def put(self, slots: Ints, values: pa.Array | npt.NDArray[Any]) -> None:
        """Make `values` those of distinct slots; a null is no value.

        Raises:
            BadStateValue: They cannot be cast to the column's type.
        """
        try:
            array = values if isinstance(values, pa.Array) else pa.array(values)
            data = array.cast(pa.large_binary())
        except pa.ArrowException as error:
            raise BadStateValue(
                f"column {self.column.name!r} cannot take its values as {self.column.type}: {error}"
            ) from error
        self.seen[slots] = 1
        if data.null_count:
            self.seen[slots] = data.is_valid().to_numpy(zero_copy_only=False)
            data = data.fill_null(b"")
        self.put_bytes(slots, data)

    def put_bytes(self, slots: Ints, data: pa.Array) -> None:
        """Make `data`, a large_binary array without nulls, the values of distinct slots."""
        first = self._arena.append(data)
        self.totals[slots] = np.arange(first, first + len(data))
        if self._arena.count > 2 * self._end + SPARE_VALUES:
            self._pack()

    def bytes_at(self) -> pa.Array:
        """Return what the totals are places in, as of now and for ever."""
        return self._arena.view()

    def _pack(self) -> None:
        """Leave behind what no slot has any more."""
        kept = ValueArena()
        kept.append(self._arena.view().take(pa.array(self.totals[1 : self._end])))
        self.totals[1 : self._end] = np.arange(1, self._end)
        self._arena = kept
