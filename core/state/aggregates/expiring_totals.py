"""The time to live of running aggregates: the time of a key's last use is one of its totals.

Invariants:
    expired  <=>  time of last use + ttl <= now
    an expired key counts as never seen
    now never goes back in one process, whatever the machine's clock does
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.state.aggregates.accumulator_shape import read_records
from onceflow.core.state.aggregates.totals import Totals
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.api.descriptors import StateTtlConfig
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.snapshots.canonical import StateRows


class Expiry:
    """Finds the expired keys of a table; `used` is its column of last uses."""

    def __init__(
        self, ttl: StateTtlConfig, used: Totals, layout: np.dtype[Any], index: int
    ) -> None:
        """Set up.

        `layout` is the layout of a key's encoded totals; `used` is its column number `index`.
        """
        self.clock = StateClock()
        self._ttl = ttl
        self._used = used
        self._layout = layout
        self._field = f"t{index}"

    def have_expired(self, entries: slice | Ints) -> npt.NDArray[np.bool_]:
        """Return True for each entry whose key has expired. A new key counts as expired."""
        return self._is_long_ago(self._used.totals[entries])

    def mark_used(self, entries: Ints) -> None:
        """Set the time of these entries' last use to now."""
        self._used.totals[entries] = self.clock.now_ms()
        self._used.seen[entries] = 1

    def are_rows_expired(self, values: pa.Array) -> npt.NDArray[np.bool_]:
        """Return True for each of a snapshot's values whose key has expired."""
        rows = read_records(values, self._layout)
        return self._is_long_ago(rows[self._field])

    def filter_alive(self, chunks: Iterable[StateRows]) -> Iterable[StateRows]:
        """Return the rows that belong to a full snapshot; any thread may iterate over them."""
        return self._filter_alive(chunks) if self._ttl.cleanup_full_snapshot else chunks

    def _filter_alive(self, chunks: Iterable[StateRows]) -> Iterator[StateRows]:
        for rows in chunks:
            alive = ~self.are_rows_expired(rows.values)
            mask = pa.array(alive)
            yield StateRows(rows.groups[alive], rows.keys.filter(mask), rows.values.filter(mask))

    def _is_long_ago(self, used_ms: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return used_ms <= self.clock.now_ms() - self._ttl.ttl_ms
