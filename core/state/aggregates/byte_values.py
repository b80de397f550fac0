"""Bytes of any length as totals of a table: the value of each entry.

The values are in an arena, and an entry's total is the index of its value there. Values are only
appended, so a snapshot can share the arena. Values that no entry has any more are dropped when the
arena is copied into a new one.

Invariants:
    value 0 of an arena is empty: entries without a value have it
    values <= 2 * entries + SPARE_VALUES, after each `put`
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue
from onceflow.core.state.aggregates.totals import Totals
from onceflow.core.state.api.descriptors import AccumulatorColumn
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_index import enlarge

SPARE_VALUES = 4096
"""The number of values without an entry that may be kept in addition to one for each entry."""


class ValueArena:
    """Values of any length, stored one after the other."""

    def __init__(self) -> None:
        self._data = np.zeros(1 << 12, np.uint8)
        self._offsets = np.zeros(1024, np.int64)
        self.count = 1

    def append(self, values: pa.Array) -> int:
        """Append `values`, a large_binary array without nulls.

        Return the index of the first one.
        """
        first, rows = self.count, len(values)
        if not rows:
            return first
        _, offset_buffer, data_buffer = values.buffers()
        every: Ints = np.frombuffer(cast("Any", offset_buffer), np.int64)
        offsets = every[values.offset : values.offset + rows + 1]
        start, stop = int(offsets[0]), int(offsets[-1])
        used = int(self._offsets[first])
        self._data = enlarge(self._data, used, used + stop - start)
        if stop > start:
            data = np.frombuffer(cast("Any", data_buffer), np.uint8)[start:stop]
            self._data[used : used + stop - start] = data
        self._offsets = enlarge(self._offsets, first + 1, first + rows + 1)
        # The values' own offsets, moved by the distance that their bytes have moved.
        self._offsets[first + 1 : first + rows + 1] = offsets[1:] + (used - start)
        self.count = first + rows
        return first

    def view(self) -> pa.Array:
        """Return all values, as a large_binary array that later changes do not affect."""
        used = int(self._offsets[self.count])
        offsets = pa.py_buffer(self._offsets[: self.count + 1])
        buffers = [None, offsets, pa.py_buffer(self._data[:used])]
        return pa.Array.from_buffers(pa.large_binary(), self.count, buffers)


class BytesTotals(Totals):
    """The last value of a column of text or bytes in each entry."""

    def __init__(self, column: AccumulatorColumn) -> None:
        super().__init__(column)
        self._arena = ValueArena()
        self._end = 1

    def reserve(self, used: int, needed: int) -> None:
        """Make room for `needed` entries. Those from `used` on have no value."""
        super().reserve(used, needed)
        self._end = needed

    def keep(self, entries: Ints) -> None:
        """Keep only these entries, renumbered from 1 in the given order."""
        super().keep(entries)
        self._end = len(entries) + 1
        self._pack()

    def values(self, entries: Ints) -> pa.Array:
        """Return the value of each entry; null if it has none."""
        positions, seen = self.totals[entries], self.seen[entries]
        mask = None if seen.all() else seen == 0
        values = self._arena.view().take(pa.array(positions, mask=mask))
        return cast_rows(values, self.column.type)

    def put(self, entries: Ints, values: pa.Array | npt.NDArray[Any]) -> None:
        """Set the values of distinct entries; a null means no value.

        Raises:
            BadStateValue: `values` cannot be cast to the column's type.
        """
        try:
            array = values if isinstance(values, pa.Array) else pa.array(values)
            data = array.cast(pa.large_binary())
        except pa.ArrowException as error:
            raise BadStateValue(
                f"column {self.column.name!r} cannot take its values as {self.column.type}: {error}"
            ) from error
        self.seen[entries] = 1
        if data.null_count:
            self.seen[entries] = data.is_valid().to_numpy(zero_copy_only=False)
            data = data.fill_null(b"")
        self.put_bytes(entries, data)

    def put_bytes(self, entries: Ints, data: pa.Array) -> None:
        """Set the values of distinct entries to `data`, a large_binary array without nulls."""
        first = self._arena.append(data)
        self.totals[entries] = np.arange(first, first + len(data))
        self._pack_if_full()

    def take_merged(self, entries: Ints, merged: Totals) -> None:
        """Set the totals of distinct entries to those of the entries 1, 2, … of `merged`."""
        assert isinstance(merged, BytesTotals)
        every = merged.totals[1 : len(entries) + 1]
        self.put_bytes(entries, merged.bytes_at().take(pa.array(every)))
        self.seen[entries] = merged.seen[1 : len(entries) + 1]

    def bytes_at(self) -> pa.Array:
        """Return the values that the totals are indices of.

        Later changes do not affect the result.
        """
        return self._arena.view()

    def _pack_if_full(self) -> None:
        if self._arena.count > 2 * self._end + SPARE_VALUES:
            self._pack()

    def _pack(self) -> None:
        """Drop the values that no entry has any more."""
        kept = ValueArena()
        kept.append(self._arena.view().take(pa.array(self.totals[1 : self._end])))
        # Value i now belongs to entry i; entry 0 keeps the empty value 0.
        self.totals[1 : self._end] = np.arange(1, self._end)
        self._arena = kept
