"""Running aggregates in the slot's memory, which know what has changed since a snapshot.

The owner's thread counts *intervals*: a snapshot ends one and begins the next. Each entry has the
number of the interval in which it was changed last, so that the changes since any snapshot are
found by a look at these numbers.
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
    """Which keys of a table have changed. Any thread may read it."""

    there: AccumulatorView
    gone: AccumulatorView
    """Keys without totals."""

    def __len__(self) -> int:
        return len(self.there.hashes) + len(self.gone.hashes)

    def rows(self) -> Iterator[StateRows]:
        """Yield the rows of a layer: a key that is gone has no value."""
        yield from self.there.rows()
        for rows in self.gone.rows():
            yield replace(rows, values=pa.nulls(len(rows), rows.values.type))


class HeapTotals(AccumulatorTable):
    """All totals of a state. A snapshot copies those that it writes."""

    def __init__(
        self,
        shape: AccumulatorShape,
        label: str,
        max_parallelism: int,
        limits: LayerLimits | None,
        ttl: StateTtlConfig | None = None,
    ) -> None:
        """Without `limits` changes are never told apart."""
        super().__init__(shape, label, max_parallelism, ttl)
        self._limits = limits
        self._interval = 1
        self._changed_in: npt.NDArray[np.uint32] = np.zeros(1024, np.uint32)
        self._ended_by: dict[CheckpointId, int] = {}
        """The interval that the snapshot of a checkpoint ended."""
        self._packed_in = 0
        """The last interval in which removed keys were dropped: nobody knows which."""
        self._is_quiet = False
        """Whether few of the keys were changed in the interval that ended last."""

    def freeze(self, checkpoint: CheckpointId) -> None:
        """Begin a new interval: what is changed from now on comes after `checkpoint`."""
        limits = self._limits
        if limits is not None:
            changed = np.count_nonzero(self._changed_in[1 : self._index.end] == self._interval)
            is_large = len(self) >= limits.entries_min
            self._is_quiet = is_large and int(changed) <= len(self) * limits.changed_share_max
        self._ended_by[checkpoint] = self._interval
        self._interval += 1

    def is_tracked(self) -> bool:
        """Tell whether it is worth its while to know what changes after the last `freeze`."""
        return self._is_quiet

    def find_changes(self, base: CheckpointId) -> ChangedTotals | None:
        """Return what was changed since the snapshot of `base`; None if that is not known.

        Called after `freeze`, before anything else is changed.
        """
        since = self._ended_by.get(base)
        if since is None or since < self._packed_in or not self._is_quiet:
            return None
        changed = 1 + np.flatnonzero(self._changed_in[1 : self._index.end] > since)
        removed = self._removed[changed]
        return ChangedTotals(self.view_of(changed[~removed]), self.view_of(changed[removed]))

    def forget_changes(self, base: CheckpointId) -> None:
        """Forget when snapshots before that of `base` were taken: none builds on them any more."""
        self._ended_by = {one: at for one, at in self._ended_by.items() if one >= base}

    def _mark_changed(self, entries: Ints) -> None:
        self._changed_in[entries] = self._interval

    def _reserve(self, used: int, end: int) -> None:
        super()._reserve(used, end)
        self._changed_in = enlarge(self._changed_in, used, end)
        self._changed_in[used:end] = 0

    def _keep_only(self, entries: Ints) -> None:
        super()._keep_only(entries)
        # The numbers are of other entries now, and nobody asks for them: all are of this interval
        # or of earlier ones.
        self._packed_in = self._interval
