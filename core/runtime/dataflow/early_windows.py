"""Windows of aggregates that also emit their results before they are due.

An early result is emitted each time a key and window has received a number of records, or when an
interval has passed since the first change after the last such results. Each result replaces the
previous result of its key and window. The result of the due window is the last one. A batch causes
at most one early result of each key and window.

The list of changed windows is in memory only. After a restore each open window counts as changed,
so a table of the results is never behind by more than the interval, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from onceflow.core.plan.work import AggregateWindows
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator
from onceflow.core.state import AccumulatorColumn, KeyedStateStore
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.keys.key_columns import Ints, read_key_columns
from onceflow.core.state.keys.key_groups import hash_key_columns

RECORDS = "onceflow.records"
"""The column with the number of records of a key and window, if they decide on early results."""


class EarlyWindowAggregator(WindowAggregator):
    """An operator that emits windows like `WindowAggregator`, and early results of open windows.

    Used by the chain's thread.
    """

    def __init__(
        self,
        uid: str,
        work: AggregateWindows,
        store: KeyedStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
        key_groups: range,
        restored: Sequence[bytes] = (),
    ) -> None:
        assert work.early is not None
        self._early = work.early
        super().__init__(uid, work, store, input_schema, schema, key_groups, restored)
        self._timer = StateClock()
        self._changed: list[tuple[Ints, list[pa.Array]]] = []
        """Panes and keys that have changed since the last results of the interval."""
        self._all_changed = bool(self._panes)
        self._early_due_ms: int | None = None
        if self._all_changed:
            self._start_timer()

    def _list_totals(
        self, work: AggregateWindows, input_schema: pa.Schema
    ) -> list[AccumulatorColumn]:
        totals = super()._list_totals(work, input_schema)
        if self._early.records is not None:
            totals.append(AccumulatorColumn(RECORDS, "count", pa.int64()))
        return totals

    @property
    def due_in_s(self) -> float | None:
        """The seconds until windows or early results are due; None if there are none."""
        if self._early_due_ms is None:
            return super().due_in_s
        early_in_s = max(0, self._early_due_ms - self._timer.now_ms()) / 1000
        of_windows = super().due_in_s
        return early_in_s if of_windows is None else min(early_in_s, of_windows)

    def on_time(self) -> None:
        """Emit the windows that are due by the clock, and the early results."""
        super().on_time()
        if self._early_due_ms is not None and self._early_due_ms <= self._timer.now_ms():
            self._early_due_ms = None
            self._emit_changed_windows()

    def _emit_early(self, entries: Ints, now: int) -> None:
        changed, counts = np.unique(entries, return_counts=True)
        if self._early.records is not None:
            after = self._table.numbers(self._inputs.count, changed)
            has_come = after // self._early.records > (after - counts) // self._early.records
            self._emit_open(changed[has_come], now)
            changed = changed[~has_come]
        if self._early.interval_ms is not None and len(changed):
            panes = self._table.namespaces_of(changed)
            self._changed.append((panes, self._table.keys_of(changed)))
            if self._early_due_ms is None:
                self._start_timer()

    def _start_timer(self) -> None:
        if self._early.interval_ms is not None:
            self._early_due_ms = self._timer.now_ms() + self._early.interval_ms

    def _emit_changed_windows(self) -> None:
        """Emit the open windows that have changed since the last early results."""
        changed, self._changed = self._changed, []
        if self._all_changed and self._panes:
            entries = self._select(min(self._panes), max(self._panes) + 1)
        elif changed:
            panes = np.concatenate([panes for panes, _ in changed])
            parts = zip(*(keys for _, keys in changed), strict=True)
            columns = read_key_columns([pa.concat_arrays(arrays) for arrays in parts])
            hashes = hash_key_columns(columns)
            # Windows that are over by now have no entry any more.
            entries = np.unique(self._table.find(panes, columns, hashes))
            entries = entries[entries > 0]
        else:
            return
        self._all_changed = False
        self._emit_open(entries, self._watermark)
        self._table.finish(entries)

    def _emit_open(self, changed: Ints, now: int) -> None:
        """Emit the windows of these entries that are not due at `now`."""
        windows = self._windows
        starts = self._table.namespaces_of(changed)
        if not windows.overlap:
            ends = starts + windows.size_ms
            is_open = ends - 1 > now
            self._emit_panes(*self._not_fired(changed[is_open], ends[is_open], now))
            return
        panes = {self._pane_at(start) for start in np.unique(starts).tolist()}
        for end in windows.due(panes, now, MAX_WATERMARK):
            entries = self._select(windows.panes_of(end).start, windows.panes_of(end).stop)
            mine = entries[np.isin(entries, changed)]
            mine, _ = self._not_fired(mine, np.full(len(mine), end), now)
            if len(mine):
                self._emit_merged(entries, np.full(len(entries), end), np.isin(entries, mine))
