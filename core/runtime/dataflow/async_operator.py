"""The operator that calls a service for each record, with many calls in flight.

It is the first operator of its chain, because results arrive at any time: the subtask wakes, and
calls `on_time`.

Invariants:
    calls that run <= capacity; while rows wait for a call, the subtask takes no further rows, but
    those before a barrier
    a snapshot has the rows whose results are not emitted, in their order
    a watermark is forwarded after the results of all records before it, and before all later ones
    ordered: results are emitted in the order of the records
    unordered: results of the records between two watermarks are emitted as they come
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import pyarrow as pa

from onceflow.core.errors import BadStateValue, StateIncompatible
from onceflow.core.logged_counts import gains_digit
from onceflow.core.plan.async_functions import idempotency_key
from onceflow.core.plan.work import MapAsync
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.dataflow.async_calls import CallAborted, CallLoop, PendingCall
from onceflow.core.runtime.dataflow.channels import Batch, decode_batches, encode_batches
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.result_rows import ResultRows
from onceflow.core.runtime.dataflow.user_functions import (
    BatchRecords,
    as_schema,
    call_user,
    keys_of_records,
    user_error,
)
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import find_status, may_pass
from onceflow.core.spi.dead_letters import letters_of_rows
from onceflow.core.state import ListStateDescriptor
from onceflow.core.state.states.operator_state import OperatorStateStore

_logger = logging.getLogger("onceflow.runtime")
IN_FLIGHT = "onceflow.in-flight"
"""The name of the list with the rows whose results are not emitted. It has one element for each
subtask, so that a restore with the same parallelism leaves the rows where they were."""
_WAIT_S = 1.0


@dataclass(eq=False, slots=True)
class _Segment:
    """The calls of the records between two watermarks, in the order of the records."""

    calls: dict[PendingCall, None] = field(default_factory=dict[PendingCall, None])
    done: list[PendingCall] = field(default_factory=list[PendingCall])
    """The finished calls, in the order in which they have finished."""
    watermark: int | None = None
    """The watermark that follows the records; None if the segment is the last one."""


class AsyncOperator(RunningOperator):
    """An operator that calls a coroutine function for records or for parts of batches."""

    def __init__(
        self,
        uid: str,
        work: MapAsync,
        states: OperatorStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
        job: str,
    ) -> None:
        """Create the operator; records that were in flight wait for a new call.

        Raises:
            StateIncompatible: The records in flight have other columns than `input_schema`.
        """
        super().__init__(uid)
        self._work = work
        self._job = job
        self._states = states
        self._input_schema = input_schema
        self._schema = schema
        self._results = ResultRows(uid, schema)
        self._forward: Callable[[int], None] = lambda _: None
        self._segments = deque([_Segment()])
        self._waiting: deque[PendingCall] = deque()
        """The calls that have not begun."""
        self._running = 0
        self._is_open = False
        self._in_flight = states.list_state(ListStateDescriptor[bytes](IN_FLIGHT, bytes))
        self.dropped = states.finish_open()
        for element in self._in_flight.get():
            for rows in decode_batches(element) if element else ():
                _check_restored_columns(uid, rows.schema, input_schema)
                # Rebuild the rows, because their schema's metadata may differ.
                self._accept(pa.record_batch(rows.columns, schema=input_schema))
        # Last, because the loop must be closed.
        self._loop = CallLoop(uid, work.function, work.limits)

    def attach(self, wake: Callable[[], None], forward: Callable[[int], None]) -> None:
        """Set the callbacks that wake the subtask and that forward a watermark."""
        self._loop.attach(wake)
        self._forward = forward

    @property
    def holds_watermarks(self) -> bool:
        """True: results of earlier records may be outstanding."""
        return True

    @property
    def is_full(self) -> bool:
        """True while rows wait for a call."""
        return bool(self._waiting)

    @property
    def absorbs_rows(self) -> bool:
        """True: a row waits for its call, and is part of the snapshot until its result is out."""
        return True

    def outstanding(self) -> Batch | None:
        """Return an empty batch if results or watermarks are held."""
        if len(self._segments) == 1 and not self._segments[0].calls:
            return None
        return Batch(pa.RecordBatch.from_pylist([], schema=self._input_schema))

    @property
    def cpu_beside_s(self) -> float:
        """The CPU time of the event loop."""
        return self._loop.cpu_s

    @property
    def due_in_s(self) -> float | None:
        """0 if a call has finished, or restored rows wait for their first call."""
        can_start = bool(self._waiting) and self._running < self._work.limits.capacity
        return 0.0 if self._loop.has_done or can_start else None

    def process(self, batch: Batch) -> None:
        """Begin the calls for the rows, as many as there may be."""
        self._accept(batch.rows)
        self._begin_calls()

    def on_time(self) -> None:
        """Emit the results of finished calls, and begin further calls."""
        self._take_done()
        self._emit_ready()
        self._begin_calls()

    def hold_watermark(self, watermark: int) -> None:
        """Forward the watermark when the results of all earlier records are emitted."""
        self._segments[-1].watermark = watermark
        self._segments.append(_Segment())
        self._emit_ready()

    def flush(self) -> None:
        """Wait for all results, and emit them."""
        while not self.emission_ended and self.outstanding() is not None:
            self._begin_calls()
            self._loop.wait(_WAIT_S)
            self.on_time()

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Store the rows whose results are not emitted. Emits none: the outputs may be full."""
        batches = [Batch(rows) for rows in self._rows_in_flight()]
        element = encode_batches(batches).to_pybytes() if batches else b""
        self._in_flight.update([element])
        frozen, uid = self._states.freeze(), self.uid
        return PendingSnapshot(uid, lambda writer: OperatorSnapshot(uid, raw=frozen.upload(writer)))

    def close(self) -> None:
        """Abandon all calls, and close the function."""
        call_user(self.uid, self._loop.close)

    def _accept(self, rows: pa.RecordBatch) -> None:
        segment = self._segments[-1]
        for call in self._split(rows):
            call.segment = segment
            segment.calls[call] = None
            self._waiting.append(call)

    def _split(self, rows: pa.RecordBatch) -> Iterator[PendingCall]:
        """Yield the calls for a batch: one for each record, or for each part of the batch."""
        rows_max = self._work.rows_max
        if rows_max is not None:
            for first in range(0, rows.num_rows, rows_max):
                part = rows.slice(first, rows_max)
                yield PendingCall(rows, first, part.num_rows, (part,))
            return
        records = BatchRecords(rows)
        keys = self._make_keys(records)
        row = 0
        for piece in records.pieces():
            for record in piece:
                arguments = (record,) if keys is None else (record, keys[row])
                yield PendingCall(rows, row, 1, arguments)
                row += 1

    def _make_keys(self, records: BatchRecords) -> list[str] | None:
        columns = self._work.idempotency_key
        if not columns:
            return None
        keys: list[str] = []
        for row, key in enumerate(keys_of_records(self.uid, records, columns)):
            try:
                keys.append(idempotency_key(self._job, self.uid, key))
            except BadStateValue as error:
                raise user_error(self.uid, error, records.rows, row) from error
        return keys

    def _begin_calls(self) -> None:
        if not self._is_open:
            self._is_open = True
            call_user(self.uid, self._loop.open)
        count = min(self._work.limits.capacity - self._running, len(self._waiting))
        if count > 0:
            self._running += count
            self._loop.start([self._waiting.popleft() for _ in range(count)])

    def _take_done(self) -> None:
        for call in self._loop.take_done():
            self._running -= 1
            call.is_done = True
            cast("_Segment", call.segment).done.append(call)

    def _emit_ready(self) -> None:
        """Emit results and forward watermarks, as far as the order allows."""
        while True:
            segment = self._segments[0]
            ready = segment.done
            if self._work.limits.ordered:
                ready = list[PendingCall]()
                for call in segment.calls:
                    if not call.is_done:
                        break
                    ready.append(call)
            segment.done = []
            for call in ready:
                del segment.calls[call]
            self._emit_results(ready)
            if segment.calls or segment.watermark is None:
                return
            self._segments.popleft()
            self._forward(segment.watermark)

    def _emit_results(self, calls: Sequence[PendingCall]) -> None:
        for call in calls:
            if call.error is not None:
                self._refuse(call, call.error)
            elif self._work.rows_max is None:
                self._results.take(call.result)
            else:
                self.emit(as_schema(call.result, self._schema, self.uid))
        if self._results.count:
            self.emit(self._results.batch())

    def _refuse(self, call: PendingCall, error: Exception) -> None:
        """Fail the attempt, or leave out the rows of a call that has failed in all tries.

        A row is bad only if the service refuses it. An outage says nothing about the row.
        """
        policy = self._work.on_bad_row
        if policy is OnBadRow.FAIL or not _is_refusal(error):
            raise user_error(self.uid, error, call.rows, call.first) from error
        rows = call.rows.slice(call.first, call.count)
        reason = f"{type(error).__name__}: {error}"
        before = self.rejected
        self.reject(letters_of_rows(rows, [reason] * call.count))
        if gains_digit(before, self.rejected):
            _logger.warning(
                "operator %s has left out records whose calls failed (%s), %d so far; the last: %s",
                self.uid,
                policy.value,
                self.rejected,
                reason,
            )

    def _rows_in_flight(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows without emitted results, as parts of their batches."""
        rows: pa.RecordBatch | None = None
        indices: list[int] = []
        for segment in self._segments:
            for call in segment.calls:
                if rows is not call.rows:
                    if rows is not None:
                        yield rows.take(pa.array(indices))
                    rows, indices = call.rows, []
                indices += range(call.first, call.first + call.count)
        if rows is not None:
            yield rows.take(pa.array(indices))


def _list_columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _check_restored_columns(uid: str, restored: pa.Schema, schema: pa.Schema) -> None:
    """Raise StateIncompatible unless restored rows have the columns of `schema`."""
    if (restored.names, restored.types) != (schema.names, schema.types):
        raise StateIncompatible(
            f"the checkpoint holds records in flight of operator {uid!r} with columns"
            f" {_list_columns(restored)}, but the operator now takes {_list_columns(schema)}."
            " Start the unchanged pipeline, stop it by stop(savepoint=True, drain=True), which"
            " leaves no records in flight, and then change it"
        )


def _is_refusal(error: Exception) -> bool:
    """Return True if the service has refused the rows of a call."""
    # A service that does not accept the credentials would refuse every row.
    about_caller = find_status(error) in {401, 407}
    return not (about_caller or isinstance(error, CallAborted) or may_pass(error))
