"""Aggregates of each `size` records of a key, a batch at a time.

The totals of a key's open window are stored in namespace 0. Within a batch, the windows of a key
have the namespaces 0, 1, 2, … in the order of its records. Full windows are emitted and removed;
the last window of the key, if it is not full, moves to namespace 0.

Invariants, between two batches:
    every entry is in namespace 0, and has 1 to `size` - 1 records
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue
from onceflow.core.plan.aggregates import AggregateInputs
from onceflow.core.plan.work import AggregateCounts
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator
from onceflow.core.runtime.dataflow.user_functions import call_user, user_error
from onceflow.core.state import AccumulatorColumn, KeyedStateStore, hash_keys
from onceflow.core.state.keys.key_columns import Ints, read_key_columns
from onceflow.core.state.keys.key_groups import Hashes, hash_key_columns
from onceflow.core.state.states.distinct_sets import OwnedSets

COUNT = "onceflow.count"
"""The column with the number of records of a window."""
ROWS_A_BATCH = 32_768
PARTS_ON_DISK = 64
"""The number of parts in which state on disk is read at the end of the input."""
_NONE: Ints = np.zeros(0, np.int64)


class CountAggregator(KeyedOperator):
    """An operator that emits the aggregates of each full window of a key.

    At the end of the input, it emits windows that are not full, too.
    """

    def __init__(
        self,
        uid: str,
        work: AggregateCounts,
        store: KeyedStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, store)
        self._key = work.key
        self._size = work.size
        self._schema = schema
        self._inputs = AggregateInputs(work.aggregates, input_schema)
        columns = [
            aggregate.total(name, input_schema) for name, aggregate in work.aggregates.items()
        ]
        self._count = len(columns)
        columns.append(AccumulatorColumn(COUNT, "count", pa.int64()))
        self._table = store.accumulators(
            "onceflow.counts",
            [input_schema.field(name).type for name in work.key],
            columns,
            namespaced=True,
        )
        self._sets = self._inputs.open_sets(store, work.key)
        self.dropped = store.finish_open()

    def process(self, batch: Batch) -> None:
        """Add the rows to the windows of their keys; emit the windows that become full."""
        rows = batch.rows
        if not rows.num_rows:
            return
        keys = [rows.column(name) for name in self._key]
        values = call_user(self.uid, lambda: self._inputs.read(rows))
        try:
            hashes = hash_keys(keys) if batch.hashes is None else batch.hashes
            windows = self._number_windows(keys, hashes)
            self._sets.add(rows, windows, keys, hashes, values)
            entries = self._table.fold(windows, keys, hashes, values)
        except BadStateValue as error:
            raise user_error(self.uid, error, rows, error.row) from error
        entries = np.unique(entries)
        is_full = self._table.numbers(self._count, entries) == self._size
        full, left = entries[is_full], entries[~is_full]
        self._emit(full[np.argsort(self._table.namespaces_of(full), kind="stable")])
        moved = left[self._table.namespaces_of(left) > 0]
        self._sets.remove_owned(self._sets_of(full))
        self._sets.move_owned(self._sets_of(moved), 0)
        fronts = self._move_to_front(moved)
        # The first row of each key is in namespace 0, so `entries` contains all entries used.
        gone = np.setdiff1d(np.concatenate([full, moved]), fronts)
        self._table.release(entries, gone)

    def flush(self) -> None:
        """Emit the windows that are not full, because no record follows."""
        for groups in self._table.split_groups(PARTS_ON_DISK):
            entries = self._table.select(0, 1, groups)
            self._emit(entries)
            self._table.release(entries, entries)
        self._sets.remove(0, 1)

    def _sets_of(self, entries: Ints) -> OwnedSets:
        """Return the sets of distinct values of these windows."""
        namespaces = self._table.namespaces_of(entries)
        return OwnedSets.of(namespaces, self._table.key_columns_of(entries))

    def _number_windows(self, keys: list[pa.Array], hashes: Hashes) -> Ints:
        """Return the number of each row's window within its key."""
        columns, fronts = read_key_columns(keys), np.zeros(len(hashes), np.int64)
        self._table.fetch(fronts, columns, hashes)
        entries = self._table.insert(fronts, columns, hashes)
        order = np.argsort(entries, kind="stable")
        in_order = entries[order]
        firsts = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
        counts = np.diff(np.r_[firsts, len(in_order)])
        ranks = np.empty(len(entries), np.int64)
        ranks[order] = np.arange(len(entries)) - np.repeat(firsts, counts)
        numbers: Ints = (self._table.numbers(self._count, entries) + ranks) // self._size
        return numbers

    def _move_to_front(self, moved: Ints) -> Ints:
        """Move these windows to namespace 0, in place of full ones; return their entries there."""
        if not len(moved):
            return _NONE
        columns = self._table.key_columns_of(moved)
        # The batch has filled the window in namespace 0 of each of these keys: it is in memory.
        fronts = self._table.insert(
            np.zeros(len(moved), np.int64), columns, hash_key_columns(columns)
        )
        self._table.regroup(moved, np.arange(len(moved)), _NONE, [], {}, fronts)
        return fronts

    def _emit(self, entries: Ints) -> None:
        totals = [self._table.values(index, entries) for index in range(self._count)]
        arrays = [
            cast_rows(array, field.type)
            for array, field in zip(
                [*self._table.keys_of(entries), *totals], self._schema, strict=True
            )
        ]
        made = pa.record_batch(arrays, schema=self._schema)
        for first in range(0, made.num_rows, ROWS_A_BATCH):
            self.emit(made.slice(first, ROWS_A_BATCH))
