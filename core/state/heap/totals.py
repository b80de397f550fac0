"""Running aggregates in the slot's memory that track the changes since a snapshot.

The owner's thread counts *intervals*: a snapshot ends one and begins the next. Each entry stores
the number of the interval of its last change, by which the changes since any snapshot are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape
from onceflow.core.state.aggregates.accumulators import AccumulatorTable, AccumulatorView
from onceflow.core.state.api.descriptors import StateTtlConfig
from onceflow.core.state.heap.tables import LayerLimits
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_index import enlarge
from onceflow.core.state.snapshots.canonical import StateRows


@dataclass(frozen=True, slots=True)
class ChangedTotals:
    """The changed keys of a table. Any thread may read it."""

    there: AccumulatorView
    gone: AccumulatorView
    """The removed keys, without totals."""

    def __len__(self) -> int:
        return len(self.there.hashes) + len(self.gone.hashes)

    def rows(self) -> Iterator[StateRows]:
        """Yield the rows of a layer. A removed key has no value."""
        yield from self.there.rows()
        for rows in self.gone.rows():
            yield replace(rows, values=pa.nulls(len(rows), rows.values.type))


class HeapTotals(AccumulatorTable):
    """The totals of a state. A snapshot copies those that it writes."""

    def __init__(
        self,
        shape: AccumulatorShape,
        label: str,
        max_parallelism: int,
        limits: LayerLimits | None,
        ttl: StateTtlConfig | None = None,
    ) -> None:
        """Create an empty table. If `limits` is None, changes are never tracked."""
        super().__init__(shape, label, max_parallelism, ttl)
        self._limits = limits
        self._interval = 1
        self._changed_in: npt.NDArray[np.uint32] = np.zeros(1024, np.uint32)
        self._ended_by: dict[CheckpointId, int] = {}
        """The interval that the snapshot of each checkpoint ended."""
        self._packed_in = 0
        """The last interval in which removed keys were dropped, without a record of which."""
        self._is_quiet = False
        """True if few of the keys were changed in the interval that ended last."""

    def freeze(self, checkpoint: CheckpointId) -> None:
        """Begin a new interval: later changes belong to it, and not to `checkpoint`."""
        limits = self._limits
        if limits is not None:
            changed = np.count_nonzero(self._changed_in[1 : self._index.end] == self._interval)
            is_large = len(self) >= limits.entries_min
            self._is_quiet = is_large and int(changed) <= len(self) * limits.changed_share_max
        self._ended_by[checkpoint] = self._interval
        self._interval += 1

    def is_tracked(self) -> bool:
        """Return True if the changes after the last `freeze` are worth tracking."""
        return self._is_quiet

    def find_changes(self, base: CheckpointId) -> ChangedTotals | None:
        """Return the changes since the snapshot of `base`, or None if they are not known.

        Must be called after `freeze`, before the next change.
        """
        since = self._ended_by.get(base)
        if since is None or since < self._packed_in or not self._is_quiet:
            return None
        changed = 1 + np.flatnonzero(self._changed_in[1 : self._index.end] > since)
        removed = self._removed[changed]
        return ChangedTotals(self.view_of(changed[~removed]), self.view_of(changed[removed]))

    def forget_changes(self, base: CheckpointId) -> None:
        """Forget the intervals of snapshots before `base`, on which no snapshot builds any more."""
        self._ended_by = {
            checkpoint: at for checkpoint, at in self._ended_by.items() if checkpoint >= base
        }

    def _mark_changed(self, entries: Ints) -> None:
        self._changed_in[entries] = self._interval

    def _reserve(self, used: int, end: int) -> None:
        super()._reserve(used, end)
        self._changed_in = enlarge(self._changed_in, used, end)
        self._changed_in[used:end] = 0

    def _keep_only(self, entries: Ints) -> None:
        super()._keep_only(entries)
        # The numbers now belong to other entries, and are not needed: all are of this interval or
        # earlier.
        self._packed_in = self._interval
