"""The base class of operators with keyed state, and the operator of running aggregates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from onceflow.core.errors import BadStateValue
from onceflow.core.plan.aggregates import AggregateInputs
from onceflow.core.plan.work import Emission, RunAggregates
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.runtime.dataflow.user_functions import call_user, user_error
from onceflow.core.state import KeyedStateStore, StateWriter
from onceflow.core.state.aggregates.running import Grouping
from onceflow.core.state.aggregates.totals import Results, to_typed_array
from onceflow.core.state.api.descriptors import LIFE
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.states.distinct_sets import OwnedSets
from onceflow.core.state.stores.keyed_store import PendingKeyedSnapshot as FrozenState


class KeyedOperator(RunningOperator):
    """An operator with keyed state."""

    def __init__(self, uid: str, store: KeyedStateStore) -> None:
        super().__init__(uid)
        self.store = store
        self.dropped: tuple[str, ...] = ()
        """Descriptions of restored state that this operator does not use, for messages."""
        self.described: dict[str, str] = {}
        """The settings that its snapshots record; see `operator_descriptions`."""

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze the current keyed state."""
        self._before_snapshot(checkpoint)
        return self._pending(self.store.snapshot(checkpoint))

    def savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze the current keyed state for writing in the canonical form."""
        self._before_snapshot(checkpoint)
        return self._pending(self.store.savepoint(checkpoint))

    def native_savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze the current keyed state for writing in full in the backend's own form."""
        self._before_snapshot(checkpoint)
        return self._pending(self.store.native_savepoint(checkpoint))

    def _before_snapshot(self, checkpoint: CheckpointId) -> None:
        """Do the work that still belongs to `checkpoint`."""

    def _pending(self, pending: FrozenState) -> PendingSnapshot:
        uid, described = self.uid, self.described

        def upload(writer: StateWriter) -> OperatorSnapshot:
            return OperatorSnapshot(uid, keyed=pending.upload(writer), described=described)

        return PendingSnapshot(uid, upload, pending.discard)

    def on_completed(self, checkpoint: CheckpointId) -> None:
        """Let the backend build on the files of `checkpoint`."""
        self.store.notify_completed(checkpoint)

    def on_aborted(self, checkpoint: CheckpointId) -> None:
        """Keep the backend from building on the files of `checkpoint`."""
        self.store.notify_aborted(checkpoint)

    def close(self) -> None:
        """Close the state."""
        self.store.close()


def with_event_time(pending: PendingSnapshot, elements: tuple[bytes, ...]) -> PendingSnapshot:
    """Return a snapshot that also stores the event time, `RestoredEventTime.elements`."""

    def upload(writer: StateWriter) -> OperatorSnapshot:
        done = pending.upload(writer)
        return replace(done, lists={**done.lists, EVENT_TIME: elements})

    return PendingSnapshot(pending.uid, upload, pending.discard)


class AggregateRunner(KeyedOperator):
    """An operator that adds running aggregates as columns, a batch at a time."""

    def __init__(
        self, uid: str, work: RunAggregates, store: KeyedStateStore, input_schema: pa.Schema,
        schema: pa.Schema,
    ) -> None:  # fmt: skip
        super().__init__(uid, store)
        self._key = work.key
        self._schema = schema
        self._emission = work.emit
        self._inputs = AggregateInputs(work.aggregates, input_schema)
        columns = [
            aggregate.total(name, input_schema) for name, aggregate in work.aggregates.items()
        ]
        has_sets = any(column.set_name for column in columns)
        self._life = len(columns) if has_sets and work.ttl is not None else None
        """The number of the column with the life of each key, or None if there is none."""
        if self._life is not None:
            columns.append(LIFE)
        self._table = store.accumulators(
            "running",
            [input_schema.field(name).type for name in work.key],
            columns,
            ttl=work.ttl,
        )
        # After the totals: a refusal for another type of a counted column must name the count.
        self._sets = self._inputs.open_sets(store, work.key)
        if self._life is not None:
            self._table.on_forget = self._forget_sets
        self._cleaned_a_record = work.ttl.cleanup_incrementally if work.ttl is not None else 0
        self.dropped = store.finish_open()

    def process(self, batch: Batch) -> None:
        """Emit the batch with its aggregate columns."""
        rows = batch.rows
        values = call_user(self.uid, lambda: self._inputs.read(rows))
        keys = [rows.column(name) for name in self._key]
        try:
            group = self._table.group(keys, batch.hashes)
            self._sets.add(rows, self._read_lives(group), keys, batch.hashes, values)
            running = self._table.update_group(group, keys, values)
        except BadStateValue as error:
            raise user_error(self.uid, error, rows, error.row) from error
        if self._emission is Emission.BATCH and rows.num_rows:
            rows, running = _take_lasts(group, rows, running)
        results = [to_typed_array(running[name], self._schema.field(name).type) for name in running]
        arrays = [*rows.columns, *results]
        self.emit(pa.record_batch(arrays, schema=self._schema))
        if self._cleaned_a_record:
            self.store.clean(self._cleaned_a_record * batch.rows.num_rows)

    def _read_lives(self, group: Grouping) -> Ints:
        """Return the life of each row's key, in row order. It is 0 if keys do not expire."""
        expiry, column = self._table.expiry, self._life
        if expiry is None or column is None:
            return np.zeros(len(group.order), np.int64)
        lives = self._table.numbers(column, group.entries)
        is_new = ~self._table.has_values(column, group.entries)
        # An earlier life of the key began before its last use, and so before now.
        lives[is_new] = expiry.clock.now_ms()
        self._table.put(column, group.entries[is_new], lives[is_new])
        return group.in_row_order(group.spread(lives))

    def _forget_sets(self, entries: Ints) -> None:
        """Remove the distinct values of these keys, which have expired."""
        assert self._life is not None
        mine = entries[self._table.has_values(self._life, entries)]
        lives = self._table.numbers(self._life, mine)
        self._sets.remove_owned(OwnedSets.of(lives, self._table.key_columns_of(mine)))


def _take_lasts(
    group: Grouping, rows: pa.RecordBatch, running: Mapping[str, Results]
) -> tuple[pa.RecordBatch, dict[str, Results]]:
    """Return the last row of each key, in row order, and its results."""
    lasts = np.sort(group.lasts(group.order))
    indices = pa.array(lasts)
    taken = {
        name: results.take(indices) if isinstance(results, pa.Array) else results[lasts]
        for name, results in running.items()
    }
    return rows.take(indices), taken
