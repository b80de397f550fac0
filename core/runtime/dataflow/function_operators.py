"""Operators of user functions: of records or of batches, of one stream or two, keyed or not.

A function's states belong to its operator: keyed states are in a keyed store, and states without a
key in an operator state store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import pyarrow as pa

from onceflow.core import state
from onceflow.core.errors import BadStateValue
from onceflow.core.plan.functions import Record
from onceflow.core.plan.process_functions import BroadcastProcessFunction, ProcessFunction
from onceflow.core.plan.window_functions import WindowsOfRecords
from onceflow.core.plan.work import (
    ProcessBatches,
    ProcessBroadcast,
    ProcessConnected,
    ProcessKeyed,
    ProcessRecords,
)
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.runtime.dataflow import function_context
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator, with_event_time
from onceflow.core.runtime.dataflow.operators import Emit, PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.restored_event_time import (
    NOTHING_RESTORED,
    RestoredEventTime,
)
from onceflow.core.runtime.dataflow.result_rows import ResultRows, Results
from onceflow.core.runtime.dataflow.user_functions import (
    BatchRecords,
    as_schema,
    call_user,
    call_user_on_records,
    keys_of_records,
    user_error,
)
from onceflow.core.state.states.batch_timers import TimerTable
from onceflow.core.state.states.operator_state import OperatorStateStore
from onceflow.core.state.states.timers import DomainTimers, OperatorTimers
from onceflow.core.state.stores.keyed_store import PendingKeyedSnapshot as FrozenState

RecordFunction: TypeAlias = Callable[[Record], Results]

RESULTS_A_BATCH = 8192
"""The number of records that timers produce before these are emitted as a batch."""


class Snapshotted(Protocol):
    """The methods that every function has."""

    def snapshot_state(self, checkpoint: int) -> None:
        """Bring the states up to date."""
        ...

    def close(self) -> None:
        """Release the function's resources."""
        ...


class TimedFunction(Snapshotted, Protocol):
    """The methods that every function of records of keyed streams has."""

    fires_at_end: bool

    def on_timer(self, timer: state.Timer) -> Results:
        """Return the results after `timer` has fired."""
        ...

    def on_end(self) -> Results:
        """Return the results after all input has ended."""
        ...


class SnapshottedOperator(KeyedOperator):
    """An operator whose function has keyed state and state of the subtask."""

    def __init__(
        self,
        uid: str,
        function: Snapshotted,
        store: state.KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, store)
        self._function = function
        self._states = states
        self._results = ResultRows(uid, schema)
        self._side_outputs = function_context.SideOutputs(self)
        self._operator = function_context.UnkeyedContext(uid, states, self._side_outputs)

    def _before_snapshot(self, checkpoint: CheckpointId) -> None:
        """Let the function update its state. Does nothing after a stop savepoint has been taken."""
        if self.emission_ended:
            return
        # Keyed state cannot be used here, outside of any record: its use raises a clear error.
        self.store.set_current_key(function_context.NO_KEY_OF_SNAPSHOT)
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


class TimedOperator(SnapshottedOperator):
    """An operator whose function has keyed state and, if it asks for them, timers."""

    def __init__(
        self,
        uid: str,
        function: Snapshotted,
        store: state.KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
        event_time: RestoredEventTime,
    ) -> None:
        super().__init__(uid, function, store, states, schema)
        self._event_time = event_time
        self._timed: OperatorTimers | None = None
        """The function's timers; None if it has not asked for any."""
        self._ended_at_ms: int | None = None
        """The event time at which the input ended; None while it has not ended."""

    @abstractmethod
    def _fire_processing(self, until_ms: int) -> None:
        """Emit the function's results for processing-time timers up to `until_ms`."""

    @abstractmethod
    def _fire_event(self, until_ms: int) -> None:
        """Emit the function's results for event-time timers up to `until_ms`."""

    @property
    def due_in_s(self) -> float | None:
        """The seconds until the next timer in processing time; None if there is none."""
        if self._timed is None:
            return None
        next_ms = self._timed.processing.next_ms
        if next_ms is None:
            return None
        return max(0, next_ms - self._timed.current_processing_time()) / 1000

    def on_time(self) -> None:
        """Fire the processing-time timers that are due."""
        if self._timed is not None:
            self._fire_processing(self._timed.current_processing_time())

    def on_watermark(self, watermark: int) -> None:
        """Fire the event-time timers that are due."""
        if self._timed is None:
            return
        if watermark == MAX_WATERMARK:
            self._end_event_time(self._timed)
            return
        self._timed.advance(watermark)
        self._fire_event(self._timed.watermark)

    def _end_event_time(self, timers: OperatorTimers) -> None:
        """Fire all event-time timers. The event time to restore is the time of the last timer."""
        before = timers.watermark
        timers.advance(MAX_WATERMARK)
        self._fire_event(MAX_WATERMARK)
        # A savepoint must not contain MAX_WATERMARK: a job restored from it would treat all rows as
        # late.
        self._ended_at_ms = max(before, timers.event.fired_ms)

    def _pending(self, pending: FrozenState) -> PendingSnapshot:
        taken = super()._pending(pending)
        if self._timed is None:
            return taken
        now = self._timed.watermark if self._ended_at_ms is None else self._ended_at_ms
        return with_event_time(taken, self._event_time.elements(now))


class KeyedBatchProcessor(TimedOperator):
    """An operator that applies a function to whole batches, with the state of their keys."""

    def __init__(
        self,
        uid: str,
        work: ProcessBatches,
        store: state.KeyedStateStore,
        states: OperatorStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
        event_time: RestoredEventTime = NOTHING_RESTORED,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema, event_time)
        self._process = work.function.process
        self._on_timers = work.function.on_timers
        self._on_end = work.function.on_end
        self._of_keys = state.KeyedBatchStates(store, work.key, input_schema)
        context = function_context.BatchContext(self._of_keys, states, self._operator)
        call_user(uid, work.function.open, context)
        self._of_keys.finish_open()
        self._timers = self._timed = self._of_keys.registered
        if self._timers is not None:
            self._timers.advance(event_time.least)
        self.dropped = store.finish_open() + states.finish_open()

    def process(self, batch: Batch) -> None:
        """Emit the function's results for the batch."""
        rows = batch.rows
        if not rows.num_rows:
            return
        try:
            keyed = self._of_keys.begin(rows, batch.hashes)
        except BadStateValue as error:
            raise user_error(self.uid, error) from error
        self._take(call_user(self.uid, self._process, keyed))
        if self._of_keys.cleaned_a_record:
            self.store.clean(self._of_keys.cleaned_a_record * rows.num_rows)
        if self._timers is not None:
            self._fire_event(self._timers.watermark)

    def end_input(self) -> None:
        """Emit the function's last batch."""
        self.store.set_current_key(function_context.NO_KEY_OF_END)
        made = call_user(self.uid, self._on_end)
        if made is not None:
            self.emit(as_schema(made, self._results.schema, self.uid))
        self._side_outputs.flush()

    def _take(self, made: pa.RecordBatch | None) -> None:
        """Emit the results for the current batch, and end the use of its keys."""
        self._of_keys.end()
        if made is not None:
            self.emit(as_schema(made, self._results.schema, self.uid))
        self._side_outputs.flush()

    def _fire_processing(self, until_ms: int) -> None:
        if self._timers is not None:
            self._fire(self._timers, self._timers.processing, "processing", until_ms)

    def _fire_event(self, until_ms: int) -> None:
        if self._timers is not None:
            self._fire(self._timers, self._timers.event, "event", until_ms)

    def _fire(
        self, timers: state.BatchTimers, table: TimerTable, domain: state.TimeDomain, until_ms: int
    ) -> None:
        """Emit the function's results for the timers up to `until_ms`, many keys per call.

        A timer that is registered meanwhile and is due fires, too. At MAX_WATERMARK only timers
        registered before fire: a timer that registers its successor would never end.
        """
        due = iter(partial(timers.take_due, table, until_ms), None)
        for rows in list(due) if until_ms == MAX_WATERMARK else due:
            keyed = self._of_keys.begin(rows, None)
            self._take(call_user(self.uid, self._on_timers, keyed, domain))


class KeyedFunctionOperator(TimedOperator):
    """An operator that calls a function with the state and timers of each record's key."""

    def __init__(
        self,
        uid: str,
        function: TimedFunction,
        store: state.KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
        event_time: RestoredEventTime = NOTHING_RESTORED,
    ) -> None:
        super().__init__(uid, function, store, states, schema, event_time)
        self._on_timer = function.on_timer
        self._on_end = function.on_end
        self._fires_at_end = function.fires_at_end

    def flush(self) -> None:
        """Fire all processing-time timers at the end of the input, if the function wants that."""
        if self._timers is not None and self._fires_at_end:
            self._fire(self._timers.processing, MAX_WATERMARK)

    def _open(
        self,
        open_function: Callable[[Any], None],
        broadcast: function_context.BroadcastStates | None = None,
    ) -> None:
        states = self._states
        context = function_context.KeyedContext(
            self.store, states, self._operator, self._side_outputs, broadcast
        )
        call_user(self.uid, open_function, context)
        self._cleaned_a_record = context.cleaned_a_record
        self._timers = self._timed = context.registered
        if self._timers is not None:
            least, most = self._event_time.least, self._event_time.most
            self._timers.restore(least, most, self._find_event_time)
        self.dropped = self.store.finish_open() + states.finish_open()

    def _run(self, rows: pa.RecordBatch, key: Sequence[str], process: RecordFunction) -> None:
        """Emit the results of `process` for each record."""
        records = BatchRecords(rows)
        keys = keys_of_records(self.uid, records, key)
        # Load the state of all keys of the batch at once, which is faster for RocksDB.
        self.store.prefetch(keys)
        step = partial(apply_keyed, self.store.set_current_key, process, self._results, iter(keys))
        self.emit(self._results.batch_of_pieces(call_user_on_records(self.uid, step, records)))
        self._side_outputs.flush()
        if self._cleaned_a_record:
            self.store.clean(self._cleaned_a_record * rows.num_rows)
        if self._timers is not None:
            self._fire_event(self._timers.watermark)

    def _end_event_time(self, timers: OperatorTimers) -> None:
        """End event time. A function of windows fires only its due windows.

        Timers at which windows expire stay for the allowed lateness.
        """
        if self._timers is None or not isinstance(self._function, WindowsOfRecords):
            super()._end_event_time(timers)
            return
        last_ms = self._timers.event.queue.last_ms
        if last_ms is not None:
            # The last timer is the one at which the last window expires. That window is due earlier
            # by the allowed lateness.
            timers.advance(last_ms - self._function.lateness_ms)
        self._fire_event(timers.watermark)

    def _fire_processing(self, until_ms: int) -> None:
        if self._timers is not None:
            self._fire(self._timers.processing, until_ms)

    def _fire_event(self, until_ms: int) -> None:
        if self._timers is not None:
            self._fire(self._timers.event, until_ms)

    def _find_event_time(self, key: Any) -> int:
        """Return the event time that `key` had reached in the snapshot."""
        is_key = key is not None and not isinstance(key, function_context.NoKey)
        return self._event_time.watermark_of_key(key) if is_key else NO_WATERMARK

    def end_input(self) -> None:
        """Emit the function's last records."""
        self.store.set_current_key(function_context.NO_KEY_OF_END)
        call_user(self.uid, _take_last, self._on_end, self._results)
        self.emit(self._results.batch())
        self._side_outputs.flush()

    def _fire(self, timers: DomainTimers, until_ms: int) -> None:
        """Emit the function's results for the timers up to `until_ms`."""
        next_ms = timers.queue.next_ms
        # Return fast: this is the usual case, and runs after every batch.
        if next_ms is None or next_ms > until_ms:
            return
        results = self._results
        for timer in timers.fire_due(until_ms):
            call_user(self.uid, _take_results_of, self._on_timer, timer, results)
            if results.count >= RESULTS_A_BATCH:
                self.emit(results.batch())
                self._side_outputs.flush()
        self.emit(results.batch())
        self._side_outputs.flush()


class KeyedProcessor(KeyedFunctionOperator):
    """An operator that applies a keyed function."""

    def __init__(
        self,
        uid: str,
        work: ProcessKeyed,
        store: state.KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
        event_time: RestoredEventTime = NOTHING_RESTORED,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema, event_time)
        self._key = work.key
        self._process = work.function.process
        self._open(work.function.open)

    def process(self, batch: Batch) -> None:
        """Emit the function's results for each record."""
        self._run(batch.rows, self._key, self._process)


class CoProcessor(KeyedFunctionOperator):
    """An operator that applies a function of two streams with one key."""

    def __init__(
        self,
        uid: str,
        work: ProcessConnected,
        store: state.KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
        event_time: RestoredEventTime = NOTHING_RESTORED,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema, event_time)
        self._keys = work.keys
        self._co_function = work.function
        self._open(work.function.open)

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """The receivers of each stream's batches."""
        return (self.receive, self._receive_second)

    def process(self, batch: Batch) -> None:
        """Emit the function's results for the first stream's records."""
        self._run(batch.rows, self._keys[0], self._co_function.process_1)

    def _receive_second(self, batch: Batch) -> None:
        self.records_in += batch.rows.num_rows
        self._run(batch.rows, self._keys[1], self._co_function.process_2)


class KeyedBroadcastProcessor(KeyedFunctionOperator):
    """An operator that applies a function of a keyed stream and a broadcast stream."""

    def __init__(
        self,
        uid: str,
        work: ProcessBroadcast,
        store: state.KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
        event_time: RestoredEventTime = NOTHING_RESTORED,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema, event_time)
        self._work = work
        self._broadcast = function_context.BroadcastStates(uid, states, work.states)
        self._open(work.function.open, self._broadcast)

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """The receivers of each stream's batches."""
        return (self.receive, self._receive_broadcast)

    def process(self, batch: Batch) -> None:
        """Emit the function's results for each record."""
        self._run(batch.rows, self._work.key, self._work.function.process)

    def _receive_broadcast(self, batch: Batch) -> None:
        self.records_in += batch.rows.num_rows
        self.store.set_current_key(function_context.NO_KEY_OF_BROADCAST)
        pieces = _broadcast_rows(self.uid, self._work, self._broadcast, self._results, batch)
        self.emit(self._results.batch_of_pieces(pieces))
        self._side_outputs.flush()


class FunctionOperator(RunningOperator):
    """An operator that applies a function of a stream without keys, with state of its subtask."""

    def __init__(
        self,
        uid: str,
        function: BroadcastProcessFunction | ProcessFunction,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid)
        self.dropped: tuple[str, ...] = ()
        """Descriptions of restored state that this operator does not use, for messages."""
        self._function = function
        self._states = states
        self._results = ResultRows(uid, schema)
        self._side_outputs = function_context.SideOutputs(self)

    def _open(self, broadcast: function_context.BroadcastStates | None = None) -> None:
        context = function_context.UnkeyedContext(
            self.uid, self._states, self._side_outputs, broadcast
        )
        call_user(self.uid, cast("Callable[[Any], None]", self._function.open), context)
        self.dropped = self._states.finish_open()

    def process(self, batch: Batch) -> None:
        """Emit the function's results for each record."""
        step = partial(_apply, self._function.process, self._results)
        self._emit_results(call_user_on_records(self.uid, step, BatchRecords(batch.rows)))

    def end_input(self) -> None:
        """Emit the function's last records."""
        call_user(self.uid, _take_last, self._function.on_end, self._results)
        self.emit(self._results.batch())
        self._side_outputs.flush()

    def _emit_results(self, pieces: Iterable[object]) -> None:
        self.emit(self._results.batch_of_pieces(pieces))
        self._side_outputs.flush()

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Let the function update its state, then freeze the state.

        After a stop savepoint has been taken, the state is up to date already.
        """
        if not self.emission_ended:
            call_user(self.uid, self._function.snapshot_state, int(checkpoint))
            self._side_outputs.flush()
        nothing = PendingSnapshot(self.uid, lambda _: OperatorSnapshot(self.uid))
        return _with_operator_state(nothing, self._states)

    def close(self) -> None:
        """Close the function."""
        call_user(self.uid, self._function.close)


class BroadcastProcessor(FunctionOperator):
    """An operator that applies a function of a stream without keys and a broadcast stream."""

    def __init__(
        self,
        uid: str,
        work: ProcessBroadcast,
        states: OperatorStateStore,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, work.function, states, schema)
        self._work = work
        self._broadcast = function_context.BroadcastStates(uid, states, work.states)
        self._open(self._broadcast)

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """The receivers of each stream's batches."""
        return (self.receive, self._receive_broadcast)

    def _receive_broadcast(self, batch: Batch) -> None:
        self.records_in += batch.rows.num_rows
        self._emit_results(
            _broadcast_rows(self.uid, self._work, self._broadcast, self._results, batch)
        )


class RecordProcessor(FunctionOperator):
    """An operator that applies a function of one stream without keys."""

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
    """Return `pending` with the current state without keys."""
    frozen = states.freeze()

    def upload(writer: state.StateWriter) -> OperatorSnapshot:
        done = pending.upload(writer)
        return replace(done, raw=frozen.upload(writer))

    return PendingSnapshot(pending.uid, upload, pending.discard)


def _broadcast_rows(
    uid: str,
    work: ProcessBroadcast,
    states: function_context.BroadcastStates,
    results: ResultRows,
    batch: Batch,
) -> Iterator[None]:
    states.may_change(True)
    try:
        step = partial(_apply, work.function.process_broadcast, results)
        yield from call_user_on_records(uid, step, BatchRecords(batch.rows))
    finally:
        # Also after an error: a record that belongs to one subtask must never change the state.
        states.may_change(False)


def apply_keyed(
    set_key: Callable[[Any], None],
    process: Callable[[Record], Any],
    results: ResultRows,
    keys: Iterator[Any],
    records: Iterator[Record],
) -> None:
    """Collect the results of `process` for each record, after setting the record's key."""
    take, take_record = results.take, results.take_record
    # Records first in `zip`: they are a part of the batch, and at their end no further key must
    # be taken.
    for record, key in zip(records, keys, strict=False):
        set_key(key)
        result = process(record)
        if result.__class__ is dict:
            take_record(result)
        else:
            take(result)


def _apply(process: RecordFunction, results: ResultRows, records: Iterator[Record]) -> None:
    for record in records:
        results.take(process(record))


def _take_results_of(
    on_timer: Callable[[state.Timer], Results], timer: state.Timer, results: ResultRows
) -> None:
    results.take(on_timer(timer))


def _take_last(on_end: Callable[[], Results], results: ResultRows) -> None:
    results.take(on_end())
