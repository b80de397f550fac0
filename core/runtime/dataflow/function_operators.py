"""Functions of the user's as they run, of records or of batches, one stream or two, keyed or not.

A function's states are its operator's: those of keys in a keyed store, those without a key in an
operator state store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import pyarrow as pa

from onceflow.core.functions import Record
from onceflow.core.graph import (
    ProcessBatches,
    ProcessBroadcast,
    ProcessConnected,
    ProcessKeyed,
    ProcessRecords,
)
from onceflow.core.process_functions import BroadcastProcessFunction, ProcessFunction
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import OperatorSnapshot
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_context import (
    NO_KEY_OF_BROADCAST,
    NO_KEY_OF_SNAPSHOT,
    BatchContext,
    BroadcastStates,
    KeyedContext,
    SideOutputs,
    UnkeyedContext,
)
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator
from onceflow.core.runtime.dataflow.operators import Emit, PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.user_functions import (
    BatchRecords,
    as_schema,
    batch_of,
    batch_of_pieces,
    call_user,
    call_user_on_records,
)
from onceflow.core.state import KeyedBatchStates, KeyedStateStore, StateWriter, Timer
from onceflow.core.state.api import PendingSnapshot as FrozenState
from onceflow.core.state.operator_state import OperatorStateStore
from onceflow.core.state.timers import DomainTimers

Results: TypeAlias = Record | Iterable[Record] | None
RecordFunction: TypeAlias = Callable[[Record], Results]

RESULTS_A_BATCH = 8192
"""Records that timers have made and that go on together."""


class Snapshotted(Protocol):
    """What every function has."""

    def snapshot_state(self, checkpoint: int) -> None:
        """Bring states up to date."""
        ...

    def close(self) -> None:
        """Release what was opened."""
        ...


class TimedFunction(Snapshotted, Protocol):
    """What every function of records of keyed streams has."""

    def on_timer(self, timer: Timer) -> Results:
        """Return what follows now that `timer` has fired."""
        ...


class SnapshottedOperator(KeyedOperator):
    """Applies a function that has keyed state, and state of its subtask besides."""

    def __init__(
        self,
        uid: str,
        function: Snapshotted,
        store: KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, store)
        self._function = function
        self._states = states
        self._schema = schema
        self._side_outputs = SideOutputs(self)
        self._operator = UnkeyedContext(uid, states, self._side_outputs)

    def _before_snapshot(self, checkpoint: CheckpointId) -> None:
        """Have the function bring its state up to date."""
        self.store.set_current_key(NO_KEY_OF_SNAPSHOT)
        call_user(self.uid, self._function.snapshot_state, int(checkpoint))
        self._side_outputs.flush()

    def _pending(self, pending: FrozenState) -> PendingSnapshot:
        return _with_operator_state(super()._pending(pending), self._states)

    def close(self) -> None:
        """Close the function, then the state."""
        try:
            call_user(self.uid, self._function.close)
        finally:
            super().close()


class KeyedBatchProcessor(SnapshottedOperator):
    """Applies a function to whole batches, with the states of their keys."""

    def __init__(
        self,
        uid: str,
        work: ProcessBatches,
        store: KeyedStateStore,
        states: OperatorStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema)
        self._process = work.function.process
        self._of_keys = KeyedBatchStates(store, work.key, input_schema)
        context = BatchContext(self._of_keys, states, self._operator)
        call_user(uid, work.function.open, context)
        self._of_keys.opened()
        self.dropped = store.opened() + states.opened()

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of the batch."""
        rows = batch.rows
        if not rows.num_rows:
            return
        made = call_user(self.uid, self._process, self._of_keys.begin(rows, batch.hashes))
        self._of_keys.end()
        if made is not None:
            self.emit(as_schema(made, self._schema, self.uid))
        self._side_outputs.flush()
        if self._of_keys.cleaned_a_record:
            self.store.clean(self._of_keys.cleaned_a_record * rows.num_rows)


class KeyedFunctionOperator(SnapshottedOperator):
    """Applies a function with the state and timers of each record's key."""

    def __init__(
        self,
        uid: str,
        function: TimedFunction,
        store: KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, function, store, states, schema)
        self._on_timer = function.on_timer

    def _open(
        self, open_function: Callable[[Any], None], broadcast: BroadcastStates | None = None
    ) -> None:
        states = self._states
        context = KeyedContext(self.store, states, self._operator, self._side_outputs, broadcast)
        call_user(self.uid, open_function, context)
        self._cleaned_a_record = context.cleaned_a_record
        self._timers = context.registered
        self.dropped = self.store.opened() + states.opened()

    def _run(self, rows: pa.RecordBatch, key: Sequence[str], process: RecordFunction) -> None:
        """Emit what `process` makes of each record."""
        records = BatchRecords(rows)
        keys = records.keys(key)
        self.store.prefetch(keys)
        step = partial(_apply_keyed, self.store.set_current_key, process, iter(keys))
        made = call_user_on_records(self.uid, step, records)
        self.emit(batch_of_pieces(made, self._schema, self.uid))
        self._side_outputs.flush()
        if self._cleaned_a_record:
            self.store.clean(self._cleaned_a_record * rows.num_rows)
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
            _take_results(call_user(self.uid, self._on_timer, timer), results)
            if len(results) >= RESULTS_A_BATCH:
                self.emit(batch_of(results, self._schema, self.uid))
                self._side_outputs.flush()
                results = []
        self.emit(batch_of(results, self._schema, self.uid))
        self._side_outputs.flush()


class KeyedProcessor(KeyedFunctionOperator):
    """Applies a keyed function."""

    def __init__(
        self,
        uid: str,
        work: ProcessKeyed,
        store: KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema)
        self._key = work.key
        self._process = work.function.process
        self._open(work.function.open)

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of each record."""
        self._run(batch.rows, self._key, self._process)


class CoProcessor(KeyedFunctionOperator):
    """Applies a function of two streams with one key."""

    def __init__(
        self,
        uid: str,
        work: ProcessConnected,
        store: KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema)
        self._keys = work.keys
        self._co_function = work.function
        self._open(work.function.open)

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """What takes each stream's batches."""
        return (self.receive, self._receive_second)

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of the first stream's records."""
        self._run(batch.rows, self._keys[0], self._co_function.process_1)

    def flush(self) -> None:
        """Fire what waits for the clock, where the function wants that."""
        if self._timers is not None and self._co_function.fires_at_end:
            self._fire(self._timers.processing, MAX_WATERMARK)

    def _receive_second(self, batch: Batch) -> None:
        self.records_in += batch.rows.num_rows
        self._run(batch.rows, self._keys[1], self._co_function.process_2)


class KeyedBroadcastProcessor(KeyedFunctionOperator):
    """Applies a function of a keyed stream and a broadcast one."""

    def __init__(
        self,
        uid: str,
        work: ProcessBroadcast,
        store: KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema)
        self._work = work
        self._broadcast = BroadcastStates(uid, states, work.states)
        self._open(work.function.open, self._broadcast)

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """What takes each stream's batches."""
        return (self.receive, self._receive_broadcast)

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of each record."""
        self._run(batch.rows, self._work.key, self._work.function.process)

    def _receive_broadcast(self, batch: Batch) -> None:
        self.records_in += batch.rows.num_rows
        self.store.set_current_key(NO_KEY_OF_BROADCAST)
        results = _broadcast_results(self.uid, self._work, self._broadcast, batch)
        self.emit(batch_of_pieces(results, self._schema, self.uid))
        self._side_outputs.flush()


class FunctionOperator(RunningOperator):
    """Applies a function of a stream without keys, with state of its subtask."""

    def __init__(
        self,
        uid: str,
        function: BroadcastProcessFunction | ProcessFunction,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid)
        self.dropped: tuple[str, ...] = ()
        """What the restored snapshot held and this operator does not take, for people."""
        self._function = function
        self._states = states
        self._schema = schema
        self._side_outputs = SideOutputs(self)

    def _open(self, broadcast: BroadcastStates | None = None) -> None:
        context = UnkeyedContext(self.uid, self._states, self._side_outputs, broadcast)
        call_user(self.uid, cast("Callable[[Any], None]", self._function.open), context)
        self.dropped = self._states.opened()

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of each record."""
        step = partial(_apply, self._function.process)
        self._emit_results(call_user_on_records(self.uid, step, BatchRecords(batch.rows)))

    def _emit_results(self, results: Iterable[list[Record]]) -> None:
        self.emit(batch_of_pieces(results, self._schema, self.uid))
        self._side_outputs.flush()

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Have the function bring its state up to date, and freeze that."""
        call_user(self.uid, self._function.snapshot_state, int(checkpoint))
        self._side_outputs.flush()
        nothing = PendingSnapshot(self.uid, lambda _: OperatorSnapshot(self.uid))
        return _with_operator_state(nothing, self._states)

    def close(self) -> None:
        """Close the function."""
        call_user(self.uid, self._function.close)


class BroadcastProcessor(FunctionOperator):
    """Applies a function of a stream without keys and a broadcast one."""

    def __init__(
        self,
        uid: str,
        work: ProcessBroadcast,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, work.function, states, schema)
        self._work = work
        self._broadcast = BroadcastStates(uid, states, work.states)
        self._open(self._broadcast)

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """What takes each stream's batches."""
        return (self.receive, self._receive_broadcast)

    def _receive_broadcast(self, batch: Batch) -> None:
        self.records_in += batch.rows.num_rows
        self._emit_results(_broadcast_results(self.uid, self._work, self._broadcast, batch))


class RecordProcessor(FunctionOperator):
    """Applies a function of one stream without keys."""

    def __init__(
        self,
        uid: str,
        work: ProcessRecords,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, work.function, states, schema)
        self._open()


def _with_operator_state(pending: PendingSnapshot, states: OperatorStateStore) -> PendingSnapshot:
    """Return `pending` with the state without a key as of now."""
    frozen = states.frozen()

    def upload(writer: StateWriter) -> OperatorSnapshot:
        done = pending.upload(writer)
        return OperatorSnapshot(done.uid, keyed=done.keyed, raw=frozen.upload(writer))

    return PendingSnapshot(pending.uid, upload, pending.discard)


def _broadcast_results(
    uid: str, work: ProcessBroadcast, states: BroadcastStates, batch: Batch
) -> Iterator[list[Record]]:
    states.may_change(True)
    try:
        step = partial(_apply, work.function.process_broadcast)
        yield from call_user_on_records(uid, step, BatchRecords(batch.rows))
    finally:
        states.may_change(False)


def _apply_keyed(
    set_key: Callable[[Any], None],
    process: Callable[[Record], Any],
    keys: Iterator[Any],
    records: Iterator[Record],
) -> list[Record]:
    results: list[Record] = []
    append, extend = results.append, results.extend
    # Records first, for they are a part of the batch: at their end no key must be taken.
    for record, key in zip(records, keys, strict=False):
        set_key(key)
        result = process(record)
        if result.__class__ is dict:
            append(result)
        elif isinstance(result, dict):
            append(cast("Record", result))
        elif result is not None:
            extend(result)
    return results


def _apply(process: RecordFunction, records: Iterator[Record]) -> list[Record]:
    results: list[Record] = []
    for record in records:
        _take_results(process(record), results)
    return results


def _take_results(result: Results, results: list[Record]) -> None:
    if isinstance(result, dict):
        results.append(cast("Record", result))
    elif result is not None:
        results.extend(result)
