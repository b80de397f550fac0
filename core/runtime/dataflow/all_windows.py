"""Aggregates of windows without a key: each subtask aggregates its rows, and one subtask merges.

`PreAggregator` runs in the chain of the operator before it. It replaces each batch by a row for
each pane (see `protocol.watermarks.PaneWindows`), and has no state. So it needs no snapshot, and
event time does not pass its rows. `WindowMerger` has the state: it takes these rows as
`WindowAggregator` takes records. If rows cannot be aggregated first, `RowGatherer` sends them as
they are.

A row of a pane:

    `ALL`           0, the key: one subtask gets all rows
    `PANE`          the start of the pane, in ms since 1970
    `RECORDS`       the number of records
    the signature of the table of totals
                    the totals, encoded as in snapshots. With other aggregates, the column has
                    another name, so that rows on their way are not misread after a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.core.errors import BadStateValue
from onceflow.core.plan.aggregates import AggregateInputs
from onceflow.core.plan.all_windows import (
    ALL,
    PANE,
    RECORDS,
    make_gathered_schema,
    make_pane_shape,
)
from onceflow.core.plan.windows import pane_windows
from onceflow.core.plan.work import MergeWindows, PreAggregateWindows
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.runtime.dataflow.user_functions import call_user, user_error
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator, read_times
from onceflow.core.state import KeyedStateStore
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.aggregates.running import SumOverflow
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_groups import Hashes


class RowGatherer(RunningOperator):
    """An operator that adds the column `ALL`."""

    def process(self, batch: Batch) -> None:
        """Emit the rows with the column."""
        self.emit(batch.rows.append_column(ALL, _zeros(batch.rows.num_rows)))


class PreAggregator(RunningOperator):
    """An operator that replaces each batch by the totals of its panes."""

    def __init__(
        self, uid: str, work: PreAggregateWindows, input_schema: pa.Schema, schema: pa.Schema
    ) -> None:
        super().__init__(uid)
        self._owner = work.uid
        self._time = work.time
        self._windows = pane_windows(work.windows, 0)
        self._schema = schema
        self._inputs = AggregateInputs(work.aggregates, input_schema)
        self._shape = make_pane_shape(work.aggregates, input_schema)

    def process(self, batch: Batch) -> None:
        """Emit one row for each pane of the batch."""
        rows = batch.rows
        if not rows.num_rows:
            return
        windows = self._windows
        since = read_times(self._owner, rows, self._time) - windows.offset_ms
        starts = since - since % windows.pane_ms + windows.offset_ms
        values = call_user(self._owner, lambda: self._inputs.read(rows))
        self._emit_totals(rows, starts, values)

    def _emit_totals(self, rows: pa.RecordBatch, starts: Ints, values: Mapping[str, Any]) -> None:
        """Emit one row for each pane, or several rows if an intermediate sum does not fit."""
        table = AccumulatorTable(self._shape, f"operator {self._owner!r}", 1)
        try:
            entries = table.fold(starts, [_zeros(rows.num_rows)], None, values)
        except BadStateValue as error:
            if not isinstance(error.__cause__, SumOverflow):
                raise user_error(self._owner, error, rows, error.row) from error
            # The sum of one row fits. The merged sums have more digits.
            half = rows.num_rows // 2
            for first, stop in ((0, half), (half, rows.num_rows)):
                of_half = {name: v.slice(first, stop - first) for name, v in values.items()}
                self._emit_totals(rows.slice(first, stop - first), starts[first:stop], of_half)
            return
        panes, counts = np.unique(entries, return_counts=True)
        columns = [
            _zeros(len(panes)),
            pa.array(table.namespaces_of(panes)),
            pa.array(counts),
            table.encode(panes).cast(pa.large_binary()),
        ]
        self.emit(pa.record_batch(columns, schema=self._schema))


class WindowMerger(WindowAggregator):
    """An operator that merges the totals of panes, and emits windows like `WindowAggregator`."""

    def __init__(
        self,
        uid: str,
        work: MergeWindows,
        store: KeyedStateStore,
        schema: pa.Schema,
        key_groups: range,
        restored: Sequence[bytes] = (),
    ) -> None:
        rows = make_gathered_schema(work.records)
        super().__init__(uid, work, store, rows, schema, key_groups, restored)
        self._shape = make_pane_shape(work.aggregates, work.records)

    def _read_panes(self, rows: pa.RecordBatch) -> Ints:
        starts: Ints = rows.column(PANE).to_numpy()
        return (starts - self._windows.offset_ms) // self._windows.pane_ms

    def _fold(self, starts: Ints, rows: pa.RecordBatch, hashes: Hashes | None) -> Ints:
        encoded = rows.columns[-1]
        return self._table.merge_encoded(starts, [rows.column(ALL)], hashes, encoded, self._shape)

    def _to_readable(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        table = AccumulatorTable(self._shape, f"operator {self.uid!r}", 1)
        # A namespace for each row: two rows may be of one pane.
        numbers, keys = np.arange(rows.num_rows), [rows.column(ALL)]
        entries = table.merge_encoded(numbers, keys, None, rows.columns[-1], self._shape)
        totals = [table.values(index, entries) for index in range(self._inputs.count)]
        starts = rows.column(PANE).cast(pa.timestamp("ms", "UTC"))
        columns = [starts, rows.column(RECORDS), *totals]
        return pa.record_batch(columns, ["part_start", "records", *self._inputs.names])

    def _count_records(self, rows: pa.RecordBatch) -> int:
        records: Ints = rows.column(RECORDS).to_numpy()
        return int(records.sum())


def _zeros(count: int) -> pa.Array:
    return pa.array(np.zeros(count, np.int64))
