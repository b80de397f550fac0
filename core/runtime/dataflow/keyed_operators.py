"""The operators with keyed state as they run: a function of one's own, and running aggregates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import pyarrow as pa

from onceflow.core.errors import BadStateValue
from onceflow.core.functions import Record
from onceflow.core.graph import ProcessKeyed, RunAggregates
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_context import FunctionContext, SideOutputs
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.user_functions import (
    batch_of,
    call_user,
    call_user_on_records,
    keys_of,
    user_error,
)
from onceflow.core.state import AccumulatorColumn, KeyedStateStore, StateWriter
from onceflow.core.state.api import PendingSnapshot as FrozenState
from onceflow.core.state.timers import DomainTimers


class KeyedOperator(RunningOperator):
    """An operator with keyed state."""

    def __init__(self, uid: str, store: KeyedStateStore) -> None:
        super().__init__(uid)
        self.store = store
        self.dropped: tuple[str, ...] = ()
        """What the restored snapshot held and this operator does not take, for people."""

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze the keyed state as of now."""
        return self._pending(self.store.snapshot(checkpoint))

    def savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze the keyed state as of now, to be written in the canonical form."""
        return self._pending(self.store.savepoint(checkpoint))

    def native_savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze the keyed state as of now, to be written in the backend's own form, all of it."""
        return self._pending(self.store.native_savepoint(checkpoint))

    def _pending(self, pending: FrozenState) -> PendingSnapshot:
        uid = self.uid

        def upload(writer: StateWriter) -> OperatorSnapshot:
            return OperatorSnapshot(uid, keyed=pending.upload(writer))

        return PendingSnapshot(uid, upload, pending.discard)

    def completed(self, checkpoint: CheckpointId) -> None:
        """Let the backend build on the files of `checkpoint`."""
        self.store.notify_completed(checkpoint)

    def aborted(self, checkpoint: CheckpointId) -> None:
        """Keep the backend from building on the files of `checkpoint`."""
        self.store.notify_aborted(checkpoint)

    def close(self) -> None:
        """Close the state."""
        self.store.close()


class KeyedProcessor(KeyedOperator):
    """Applies a keyed function, one record at a time."""

    def __init__(
        self, uid: str, work: ProcessKeyed, store: KeyedStateStore, schema: pa.Schema
    ) -> None:
        super().__init__(uid, store)
        self._key = work.key
        self._function = work.function
        self._schema = schema
        self._side_outputs = SideOutputs(self)
        states = FunctionContext(store, self._side_outputs)
        call_user(uid, self._function.open, states)
        self._cleaned_a_record = states.cleaned_a_record
        self._timers = states.registered
        self.dropped = store.opened()

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of each record."""
        keys = keys_of(batch.rows, self._key)
        self.store.prefetch(keys)
        results = call_user_on_records(self.uid, partial(self._apply, keys), batch.rows)
        self.emit(batch_of(results, self._schema, self.uid))
        self._side_outputs.flush()
        if self._cleaned_a_record:
            self.store.clean(self._cleaned_a_record * batch.rows.num_rows)
        if self._timers is not None:
            self._fire(self._timers.event, self._timers.current_watermark())

    @property
    def due_in_s(self) -> float | None:
        """Until the next timer in processing time."""
        if self._timers is None or self._timers.processing.queue.next_ms is None:
            return None
        waits_ms = self._timers.processing.queue.next_ms - self._timers.current_processing_time()
        return max(0, waits_ms) / 1000

    def on_time(self) -> None:
        """Fire the timers in processing time that are due."""
        if self._timers is not None:
            self._fire(self._timers.processing, self._timers.current_processing_time())

    def on_watermark(self, watermark: int) -> None:
        """Fire the timers in event time that are due."""
        if self._timers is not None:
            self._timers.advance(watermark)
            self._fire(self._timers.event, watermark)

    def _fire(self, timers: DomainTimers, until_ms: int) -> None:
        """Emit what the function makes of the timers up to `until_ms`."""
        next_ms = timers.queue.next_ms
        if next_ms is None or next_ms > until_ms:
            return
        results: list[Record] = []
        for timer in timers.due(until_ms):
            _take_results(call_user(self.uid, self._function.on_timer, timer), results)
            if len(results) >= RESULTS_A_BATCH:
                self.emit(batch_of(results, self._schema, self.uid))
                self._side_outputs.flush()
                results = []
        self.emit(batch_of(results, self._schema, self.uid))
        self._side_outputs.flush()

    def _apply(self, keys: Sequence[Any], records: Iterator[Record]) -> list[Record]:
        set_key = self.store.set_current_key
        process = self._function.process
        results: list[Record] = []
        append, extend = results.append, results.extend
        for key, record in zip(keys, records, strict=True):
            set_key(key)
            result = process(record)
            if isinstance(result, dict):
                append(cast("Record", result))
            elif result is not None:
                extend(result)
        return results

    def close(self) -> None:
        """Close the function, then the state."""
        try:
            call_user(self.uid, self._function.close)
        finally:
            super().close()


RESULTS_A_BATCH = 8192
"""Records that timers have made and that go on together."""


def _take_results(result: Record | Iterable[Record] | None, results: list[Record]) -> None:
    if isinstance(result, dict):
        results.append(cast("Record", result))
    elif result is not None:
        results.extend(result)


class AggregateRunner(KeyedOperator):
    """Adds running aggregates as columns, a batch at a time."""

    def __init__(
        self, uid: str, work: RunAggregates, store: KeyedStateStore, input_schema: pa.Schema,
        schema: pa.Schema,
    ) -> None:  # fmt: skip
        super().__init__(uid, store)
        self._key = work.key
        self._schema = schema
        self._columns = {name: aggregate.column for name, aggregate in work.aggregates.items()}
        self._table = store.accumulators(
            "running",
            [input_schema.field(name).type for name in work.key],
            [
                AccumulatorColumn(name, aggregate.op, aggregate.result_type(input_schema))
                for name, aggregate in work.aggregates.items()
            ],
        )
        self.dropped = store.opened()

    def process(self, batch: Batch) -> None:
        """Emit the batch with its aggregate columns."""
        rows = batch.rows
        values = {
            name: rows.column(column)
            for name, column in self._columns.items()
            if column is not None
        }
        keys = [rows.column(name) for name in self._key]
        try:
            running = self._table.update(keys, batch.hashes, values)
        except BadStateValue as error:
            raise user_error(self.uid, error, rows, error.row) from error
        arrays = [*rows.columns, *(pa.array(running[name]) for name in self._columns)]
        self.emit(pa.record_batch(arrays, schema=self._schema))
