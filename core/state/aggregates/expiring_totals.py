"""Time to live of running aggregates: when each key was last used is one more of its totals.

Invariants:
    expired  <=>  time of last use + ttl <= now;  a key that has expired is as one never seen
    now never goes back in one process, whatever the machine's clock does
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.state.aggregates.totals import Totals
from onceflow.core.state.api.clock import StateClock
from onceflow.core.state.api.descriptors import StateTtlConfig
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.snapshots.canonical import StateRows


class Expiry:
    """Which keys of a table have expired; `used` is its column of last uses."""

    def __init__(
        self, ttl: StateTtlConfig, used: Totals, layout: np.dtype[Any], place: int
    ) -> None:
        """`layout` is that of a key's encoded totals, of which `used` is the one at `place`."""
        self.clock = StateClock()
        self._ttl = ttl
        self._used = used
        self._layout = layout
        self._place = f"t{place}"

    def expired(self, slots: slice | Ints) -> npt.NDArray[np.bool_]:
        """Tell for each slot whether its key has expired; one that is new has."""
        return self._long_ago(self._used.totals[slots])

    def use(self, slots: Ints) -> None:
        """Take these slots as used just now."""
        self._used.totals[slots] = self.clock.now_ms()
        self._used.seen[slots] = 1

    def expired_rows(self, values: pa.Array) -> npt.NDArray[np.bool_]:
        """Tell for each of a snapshot's values whether its key has expired."""
        rows = np.frombuffer(b"".join(values.to_pylist()), self._layout)
        return self._long_ago(rows[self._place])

    def alive(self, chunks: Iterable[StateRows]) -> Iterable[StateRows]:
        """Return what a full snapshot holds of these rows; any thread may iterate over it."""
        return self._alive(chunks) if self._ttl.cleanup_full_snapshot else chunks

    def _alive(self, chunks: Iterable[StateRows]) -> Iterator[StateRows]:
        for rows in chunks:
            alive = ~self.expired_rows(rows.values)
            mask = pa.array(alive)
            yield StateRows(rows.groups[alive], rows.keys.filter(mask), rows.values.filter(mask))

    def _long_ago(self, used_ms: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return used_ms <= self.clock.now_ms() - self._ttl.ttl_ms
