"""The operator that keeps the first or the last record of each key.

It emits at most one record for each key and batch. Each emitted record replaces the earlier ones of
its key: a sink with keys then has the kept record of every key. Without a column to order by, the
first record of a key is emitted once and never replaced.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue
from onceflow.core.plan.work import Deduplicate, Keep
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator
from onceflow.core.runtime.dataflow.ordering import rank_values, require_values
from onceflow.core.runtime.dataflow.user_functions import user_error
from onceflow.core.state import AccumulatorColumn, KeyedStateStore
from onceflow.core.state.aggregates.running import Grouping
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.states.kept_rows import plan_column

_STATE = "onceflow.kept"


class Deduplicator(KeyedOperator):
    """An operator that emits the first or last record of each key. Used by the chain's thread.

    The state of a key is the value that its kept record is ordered by. Without a column to order
    by, it is a mark that the first record was emitted; the last record needs no state.
    """

    def __init__(
        self, uid: str, work: Deduplicate, store: KeyedStateStore, input_schema: pa.Schema
    ) -> None:
        super().__init__(uid, store)
        self._key, self._by, self._keep = work.key, work.by, work.keep
        column = AccumulatorColumn(_STATE, "last", pa.bool_())
        if work.by is not None:
            self._order = plan_column(input_schema.field(work.by))
            column = self._order.of_table
        self._table = store.accumulators(
            "deduplicate",
            [input_schema.field(name).type for name in work.key],
            [column],
            ttl=work.ttl,
        )
        self._cleaned_a_record = work.ttl.cleanup_incrementally if work.ttl is not None else 0
        self.dropped = store.finish_open()

    def process(self, batch: Batch) -> None:
        """Emit the rows of the batch that are now the kept ones of their keys."""
        rows = batch.rows
        if not rows.num_rows:
            return
        keys = [rows.column(name) for name in self._key]
        try:
            if self._by is not None:
                require_values(rows, self._by, "deduplicate")
            group = self._table.group(keys, batch.hashes)
        except BadStateValue as error:
            raise user_error(self.uid, error, rows, error.row) from error
        positions, is_kept = self._choose(rows, group)
        chosen, entries = group.order[positions[is_kept]], group.entries[is_kept]
        if len(chosen):
            if self._by is not None or self._keep is Keep.FIRST:
                self._table.put(0, entries, self._values(rows, chosen))
            self.emit(rows.take(pa.array(np.sort(chosen))))
        self._table.finish(group.entries)
        if self._cleaned_a_record:
            self.store.clean(self._cleaned_a_record * rows.num_rows)

    def _choose(self, rows: pa.RecordBatch, group: Grouping) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the best position of each key in this batch, and True if it is to be emitted."""
        is_first = self._keep is Keep.FIRST
        before = self._table.values(0, group.entries)
        is_new = before.is_null().to_numpy(zero_copy_only=False)
        if self._by is None:
            if is_first:
                return group.firsts, is_new
            return group.firsts + group.counts - 1, np.ones_like(is_new)
        ranks = rank_values([self._order.from_table(before), rows.column(self._by)])
        old, ranks = ranks[: len(before)], ranks[len(before) :][group.order]
        pick = np.minimum if is_first else np.maximum
        best = pick.reduceat(ranks, group.firsts)
        # Among equal values, take the record that arrived first, or last.
        numbers = np.arange(len(ranks))
        is_best = ranks == group.spread(best)
        candidates = np.where(is_best, numbers, len(ranks) if is_first else -1)
        positions: Ints = pick.reduceat(candidates, group.firsts)
        return positions, is_new | (best < old if is_first else best >= old)

    def _values(self, rows: pa.RecordBatch, chosen: Ints) -> pa.Array:
        if self._by is None:
            return pa.array(np.ones(len(chosen), np.bool_))
        return self._order.to_table(rows.column(self._by).take(pa.array(chosen)))
