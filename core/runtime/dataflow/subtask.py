"""A subtask: a chain's operators on one thread, from their input to their outputs.

The thread owns the operators, their state and the writers. Other threads send it mail. At a barrier
the subtask takes the synchronous part of the snapshot, forwards the barrier and goes on with the
stream. The slot's uploader does the asynchronous part and the ack.

While rows that the subtask has produced wait for credits, it takes no other rows. So a barrier that
overtakes is handled between two batches, however slow the downstream subtasks are. The batches that
such a barrier overtakes become part of the snapshot, once the barrier has arrived on all channels.

An operator that absorbs rows takes the rows before a barrier at any time. So a checkpoint waits
neither for its results nor for the subtasks below it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints import alignment, decisions
from onceflow.core.protocol.checkpoints.in_flight import Announced, Received
from onceflow.core.protocol.checkpoints.snapshots import SnapshotTimings
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.loops.slot import SnapshotFrozen
from onceflow.core.protocol.record_times import RecordTimes
from onceflow.core.protocol.watermarks import IDLE, MAX_WATERMARK, WatermarkMerge
from onceflow.core.runtime.dataflow.channels import (
    Batch,
    Element,
    InputGate,
)
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.partitioners import Partitioner
from onceflow.core.runtime.dataflow.source_operator import SourceOperator
from onceflow.core.runtime.json_logs import bind_thread_fields
from onceflow.core.spi import EndOfInput
from onceflow.core.traces import NO_TRACE, Trace

WATERMARK_INTERVAL_S = 0.1
"""The interval at which a source emits its watermark: each costs a batch on every channel."""
WAIT_S = 1.0
"""The longest time that a subtask waits for work before it checks again."""
LAST_RESULTS_S = 1.0
"""The time for which the barrier of a FINAL checkpoint waits for outstanding results."""


@dataclass(frozen=True, slots=True)
class OvertakenBatches:
    """Batches on their way into `chain` that a barrier overtook on one side, in their order."""

    chain: str
    input: int
    """The number of the input of the chain's first operator."""
    sent: bool
    """True if the sending side had sent the batches, so that the receiving side held them."""
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class LeavingEdge:
    """An edge from this subtask's chain into an input of `chain`."""

    chain: str
    input: int
    partitioner: Partitioner


@dataclass(frozen=True, slots=True)
class SnapshotTaken(SnapshotFrozen):
    """The report of a snapshot's synchronous part.

    The slot uploads `pending` and `overtaken`, and acks.
    """

    pending: tuple[PendingSnapshot, ...]
    timings: SnapshotTimings
    overtaken: tuple[OvertakenBatches, ...] = ()
    record_times: RecordTimes | None = None
    target: decisions.SavepointTarget | None = None
    """For a savepoint: the directory to upload to, if this slot reaches it."""


SubtaskReport: TypeAlias = (
    SnapshotTaken
    | messages.CompletionHeard
    | messages.Declined
    | messages.SourceExhausted
    | messages.PartFailed
)
"""The reports of a subtask to its slot."""


class Subtask(ABC):
    """The common base of source and receiving subtasks: the thread, snapshots and mail."""

    def __init__(
        self,
        ref: SubtaskRef,
        gate: InputGate,
        operators: Sequence[RunningOperator],
        edges: Sequence[LeavingEdge],
        report: Callable[[SubtaskReport], None],
    ) -> None:
        self.ref = ref
        self.gate = gate
        self._operators = operators
        # The sink of dead letters may be the last operator. Records out are counted at the
        # operator before it.
        self._outlet = next(
            operator for operator in reversed(operators) if not operator.takes_dead_letters
        )
        self._edges = edges
        for edge in edges:
            # The thread waits only at its gate, so a new credit has to wake it there.
            edge.partitioner.attach(gate.wake)
        operators[0].attach(gate.wake, self._forward_watermark)
        self._report = report
        self._busy_s = 0.0
        self._backpressured_s = 0.0
        self._cpu_s = 0.0
        self._leaving = False
        self._barrier_may_go = False
        """True if rows wait for credits at most on edges on which a barrier pushes them through."""
        self._input_ended = False
        """True if functions have emitted their last rows."""
        self._thread = threading.Thread(target=self._main, name=str(ref), daemon=True)

    def start(self) -> None:
        """Start reading and computing."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return True if it ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, mail: messages.SubtaskMail) -> None:
        """Queue `mail` for the subtask's own thread. Any thread."""
        self.gate.post(mail)

    def metrics(self) -> messages.SubtaskMetrics:
        """Return the current counters. Any thread."""
        return messages.SubtaskMetrics(
            self.ref,
            records_in=self._operators[0].records_in,
            records_out=self._outlet.records_in,
            busy_s=round(self._busy_s, 3),
            backpressured_s=round(self._backpressured_s, 3),
            cpu_s=round(self._cpu_s, 3),
            input_batches=self.gate.waiting(),
            rejected=sum(operator.rejected for operator in self._operators),
            functions=tuple(
                metric
                for operator in self._operators
                for metric in operator.function_metrics.describe()
            ),
        )

    def list_waits(self) -> tuple[messages.Wait, ...]:
        """Return the external servers for which its operators wait. Any thread."""
        return tuple(wait for operator in self._operators for wait in operator.list_waits())

    @abstractmethod
    def _step(self) -> None:
        """Do one piece of work, or wait for work for a limited time."""

    @abstractmethod
    def _on_aborted(self, checkpoint: CheckpointId) -> None:
        """Stop waiting for the checkpoint's barriers."""

    def _main(self) -> None:
        bind_thread_fields(subtask=str(self.ref))
        try:
            while not self._leaving:
                self._step()
                # `thread_time` measures the calling thread, so read it here for other threads.
                beside_s = sum(operator.cpu_beside_s for operator in self._operators)
                self._cpu_s = time.thread_time() + beside_s
        except BaseException as error:  # the edge of the loop: everything goes to the driver
            self._report(messages.PartFailed(error))
        finally:
            self._close()

    def _close(self) -> None:
        for operator in self._operators:
            try:
                operator.close()
            except Exception as error:
                self._report(messages.PartFailed(error))

    def _handle(self, mail: messages.SubtaskMail) -> None:
        match mail:
            case messages.Complete(checkpoint):
                for operator in self._operators:
                    operator.on_completed(checkpoint)
                # After the operators, so that they have seen the decision when the driver gets this
                # report.
                self._report(messages.CompletionHeard(self.ref, checkpoint))
            case decisions.NotifyAbort(checkpoint):
                for operator in self._operators:
                    operator.on_aborted(checkpoint)
                self._on_aborted(checkpoint)
            case messages.Shutdown():
                self._leaving = True
            case decisions.Barrier() | messages.OfferSplits():
                raise TypeError(f"{self.ref} was sent {mail!r}, which only a source can carry out")

    def _flush(self) -> bool:
        """Send the elements that have credit; return True if more rows may be produced."""
        # A list, not a generator: every edge must be flushed, also after one that waits.
        waiting = [edge.partitioner for edge in self._edges if edge.partitioner.flush()]
        self._barrier_may_go = all(partitioner.pushes for partitioner in waiting)
        return not waiting

    def _take(
        self, timeout_s: float, *, clear: bool
    ) -> messages.SubtaskMail | Announced | Received[Batch] | None:
        """Wait for work. Unless `clear`, the waiting time counts as backpressure."""
        head = self._operators[0]
        if clear:
            return self.gate.take(
                timeout_s, elements=not head.is_full, up_to_barriers=head.absorbs_rows
            )
        began = time.monotonic()
        try:
            return self.gate.take(timeout_s, elements=False, up_to_barriers=head.absorbs_rows)
        finally:
            self._backpressured_s += time.monotonic() - began

    def _snapshot(self, barrier: decisions.Barrier, alignment_ms: float) -> SnapshotTaken:
        """Take the synchronous part of the snapshot, and forward the barrier. Return the report."""
        # Computed from the clocks of two machines, for metrics only.
        start_delay_ms = max(0.0, time.time() * 1000 - alignment_ms - barrier.triggered_at_ms)
        began = time.perf_counter()
        # Before the freeze, so that the last rows are part of the checkpoint. Only once, because
        # another stop barrier follows one that was aborted.
        if barrier.kind.ends_input and not self._input_ended:
            self._input_ended = True
            for operator in self._operators:
                operator.flush()
                operator.end_input()
        # Freeze the state first, then forward the barrier: rows that operators emit while they
        # freeze go before it.
        taken = [_freeze(operator, barrier) for operator in self._operators]
        sync_ms = (time.perf_counter() - began) * 1000
        if barrier.kind.ends_emission:
            for operator in self._operators:
                operator.emission_ended = True
        overtaken = [
            OvertakenBatches(edge.chain, edge.input, sent=False, batches=batches)
            for edge in self._edges
            if (batches := edge.partitioner.forward(barrier))
        ]
        timings = SnapshotTimings(
            alignment_ms=round(alignment_ms, 3),
            sync_ms=round(sync_ms, 3),
            start_delay_ms=round(start_delay_ms, 3),
            overtaken=bool(overtaken) or barrier.overtakes,
        )
        left = self._operators[0].outstanding()
        if barrier.kind is decisions.CheckpointKind.FINAL and left is not None:
            # The rows are in the operator's state. This mark of rows in flight lets another FINAL
            # checkpoint follow.
            overtaken.append(OvertakenBatches(self.ref.chain, 0, sent=True, batches=(left,)))
        pending = tuple(snapshot for snapshot in taken if snapshot is not None)
        return SnapshotTaken(
            self.ref,
            barrier.checkpoint,
            pending,
            timings,
            overtaken=tuple(overtaken),
            record_times=self._operators[0].take_record_times(),
            target=barrier.target,
        )

    def _advance(self, next_watermark: Callable[[], int | None]) -> None:
        """Pass new watermarks to the operators and to all outputs, until none is left."""
        head = self._operators[0]
        while (watermark := next_watermark()) is not None:
            if head.holds_watermarks:
                head.hold_watermark(watermark)
                continue
            if watermark != IDLE:
                head.on_watermark(watermark)
            self._forward_watermark(watermark)

    def _forward_watermark(self, watermark: int) -> None:
        """Pass a watermark of the first operator to the other operators and all outputs."""
        if watermark != IDLE:
            for operator in self._operators[1:]:
                operator.on_watermark(watermark)
        # The end of the input implies MAX_WATERMARK.
        if watermark != MAX_WATERMARK:
            for edge in self._edges:
                edge.partitioner.tell(watermark)

    def _end_of_stream(self) -> None:
        for operator in self._operators:
            operator.flush()
        for edge in self._edges:
            edge.partitioner.end()

    def _time_work(self, work: Callable[[], None]) -> None:
        began = time.monotonic()
        work()
        self._busy_s += time.monotonic() - began


class SourceSubtask(Subtask):
    """A subtask that polls its reader between mails. Stops reading at the end or a stop barrier."""

    def __init__(
        self,
        ref: SubtaskRef,
        source: SourceOperator,
        operators: Sequence[RunningOperator],
        edges: Sequence[LeavingEdge],
        report: Callable[[SubtaskReport], None],
        poll_timeout_s: float,
    ) -> None:
        super().__init__(ref, InputGate((), 0, {}), operators, edges, report)
        self._source = source
        self._poll_timeout_s = poll_timeout_s
        self._reading = True
        self._ended = False
        """True if the end of the input has been sent to all outputs."""
        self._barriers = alignment.SourceBarriers()
        self._tells_at_s = 0.0

    def post(self, mail: messages.SubtaskMail) -> None:
        """Queue `mail` for the subtask's own thread; wake the reader if it waits for records."""
        super().post(mail)
        self._source.reader.wake()

    def _step(self) -> None:
        clear = self._flush()
        # Barriers before rows: a waiting barrier is emitted as soon as no element waits for
        # credit.
        while barrier := self._barriers.next(time.monotonic(), clear=self._barrier_may_go):
            self._emit(barrier)
        if not (clear and self._reading):
            item = self._take(_until(self._barriers.overtakes_at_s), clear=clear)
            if not (item is None or isinstance(item, (Received, Announced))):
                self._handle(item)
            return
        while (mail := self.gate.take_mail()) is not None:
            self._handle(mail)
            # Return to the start of the step, which emits the barrier before anything is
            # read.
            if isinstance(mail, decisions.Barrier) or self._leaving:
                return
        if self._source.has_watermarks and time.monotonic() >= self._tells_at_s:
            self._tells_at_s = time.monotonic() + WATERMARK_INTERVAL_S
            self._advance(self._source.next_watermark)
        match self._source.poll(self._poll_timeout_s):
            case None:
                pass
            case EndOfInput():
                self._end()
            case rows:
                self._time_work(lambda: self._source.receive_rows(rows))

    def _handle(self, mail: messages.SubtaskMail) -> None:
        match mail:
            case decisions.Barrier():
                self._barriers.on_triggered(mail, time.monotonic())
            case messages.OfferSplits(_, splits):
                self._source.take_offer(splits)
            case _:
                super()._handle(mail)

    def _end(self) -> None:
        """Stop reading, and send the end of the input to all outputs and to the driver."""
        self._reading, self._ended = False, True
        self._end_of_stream()
        self._report(messages.SourceExhausted(self.ref))

    def _emit(self, barrier: decisions.Barrier) -> None:
        if barrier.kind is decisions.CheckpointKind.SAVEPOINT_DRAIN and not self._ended:
            self._end()
        elif barrier.kind.stops_sources:
            self._reading = False
        # A source has no input channels, so its barriers need no alignment.
        self._report(self._snapshot(barrier, alignment_ms=0.0))

    def _on_aborted(self, checkpoint: CheckpointId) -> None:
        self._barriers.on_abort(checkpoint)


@dataclass(frozen=True, slots=True)
class _HeldBarrier:
    """The barrier of a FINAL checkpoint that waits for the outstanding results."""

    checkpoint: CheckpointId
    actions: tuple[alignment.AlignmentAction, ...]
    until_s: float


class ReceivingSubtask(Subtask):
    """A subtask that takes batches from unblocked channels in turn. Barriers block channels."""

    def __init__(
        self,
        ref: SubtaskRef,
        gate: InputGate,
        operators: Sequence[RunningOperator],
        edges: Sequence[LeavingEdge],
        report: Callable[[SubtaskReport], None],
        mode: alignment.AlignmentMode,
        timed: Collection[int],
        trace: Trace = NO_TRACE,
    ) -> None:
        """Create the subtask. `timed` has the channels that carry watermarks, at least one."""
        super().__init__(ref, gate, operators, edges, report)
        keeping_order = [channel for channel, end in enumerate(gate.ends) if end.keeps_order]
        self._alignment = alignment.BarrierAlignment(len(gate.ends), mode, keeping_order)
        self._watermarks = WatermarkMerge(timed)
        self._timed_channels = frozenset(timed)
        self._trace = trace
        self._inputs = operators[0].inputs
        self._is_ending = False
        """True from the end of all inputs until the results of their rows are emitted."""
        self._held_barrier: _HeldBarrier | None = None
        self._held: SnapshotTaken | None = None
        """The snapshot whose barrier has overtaken rows, until the barrier arrives on all
        channels."""

    def _step(self) -> None:
        clear = self._flush()
        # Replayed rows come first. Senders get credits when the results of these rows are sent.
        if clear and not self.gate.is_open and not self._operators[0].is_full:
            self.gate.open()
        at_s = self._alignment.overtakes_at_s
        # A newer barrier may overtake rows, but not an older barrier.
        self._release_barrier(at_once=at_s is not None)
        if at_s is not None:
            # Check in every step: a barrier may overtake when its time has come, whatever
            # arrives.
            self._carry_out(self._alignment.on_time(time.monotonic()))
        # Fire timers before taking the next element, so that a steady input does not delay them.
        wait_s = min(_until(at_s), self._fire_timers(clear=clear))
        if self._held_barrier is not None:
            wait_s = min(wait_s, _until(self._held_barrier.until_s))
        match self._take(wait_s, clear=clear):
            case Received() as received:
                self._on_element(received.channel, received.element, received.input)
            case Announced(channel, barrier):
                self._release_barrier(at_once=True)
                now_s = time.monotonic()
                self._carry_out(self._alignment.on_announced(channel, barrier, now_s))
            case None:
                pass
            case mail:
                self._handle(mail)

    def _fire_timers(self, *, clear: bool) -> float:
        """Fire due timers, if rows may be produced; return the time to wait for the next timer.

        After a stop savepoint has been taken, no rows may be produced: the last checkpoint would
        commit them, and a start from the savepoint would produce them again.
        """
        head = self._operators[0]
        due_in_s = head.due_in_s
        may_emit = self._alignment.may_emit or (self._is_ending and not head.emission_ended)
        if due_in_s is None or not clear or not may_emit:
            return WAIT_S
        if due_in_s > 0:
            return due_in_s
        self._time_work(head.on_time)
        self._end_with_last_result()
        return 0.0

    def _on_element(self, channel: int, element: Element, into: int) -> None:
        self._release_barrier(at_once=True)
        match element:
            case Batch(watermark=None):
                self._time_work(lambda: self._inputs[into](element))
            case Batch(watermark=watermark):
                self._on_watermark(channel, watermark)
            case decisions.Barrier(checkpoint):
                self._trace.record(
                    "barrier", checkpoint=checkpoint, subtask=str(self.ref), channel=channel
                )
                now_s = time.monotonic()
                actions = self._alignment.on_barrier(channel, element, now_s)
                if self._waits_for_results(element, actions):
                    until_s = now_s + LAST_RESULTS_S
                    self._held_barrier = _HeldBarrier(element.checkpoint, actions, until_s)
                else:
                    self._carry_out(actions)
            case alignment.EndOfStream():
                # No barrier arrives on an ended channel any more, so pending barriers count as
                # arrived there.
                self._alignment.on_end_of_input(channel)
                self._on_watermark(channel, MAX_WATERMARK)
                if self._alignment.all_ended:
                    self._is_ending = True
                    self._end_with_last_result()

    def _waits_for_results(
        self, barrier: decisions.Barrier, actions: Iterable[alignment.AlignmentAction]
    ) -> bool:
        return (
            barrier.kind is decisions.CheckpointKind.FINAL
            and self._operators[0].outstanding() is not None
            and any(isinstance(action, alignment.TakeSnapshot) for action in actions)
        )

    def _end_with_last_result(self) -> None:
        """Send the end of the stream, if all inputs have ended and no result is outstanding."""
        if self._is_ending and self._operators[0].outstanding() is None:
            self._is_ending = False
            self._end_of_stream()

    def _release_barrier(self, *, at_once: bool) -> None:
        """Carry out the actions of a held barrier, if no result is outstanding or its time is up.

        Another FINAL checkpoint follows one in which results are outstanding.
        """
        held = self._held_barrier
        if held is not None and (
            at_once or time.monotonic() >= held.until_s or self._operators[0].outstanding() is None
        ):
            self._held_barrier = None
            self._carry_out(held.actions)

    def _on_watermark(self, channel: int, watermark: int | None) -> None:
        # Replayed batches may contain a watermark of the previous attempt. Ignore it: the channels
        # send it again.
        if watermark is not None and channel in self._timed_channels:
            self._watermarks.on_watermark(channel, watermark)
            self._time_work(lambda: self._advance(self._watermarks.next))

    def _on_aborted(self, checkpoint: CheckpointId) -> None:
        held = self._held_barrier
        if held is not None and held.checkpoint == checkpoint:
            self._held_barrier = None
            kept = (a for a in held.actions if not isinstance(a, alignment.TakeSnapshot))
            self._carry_out(kept)
        self._carry_out(self._alignment.on_abort(checkpoint))

    def _carry_out(self, actions: Iterable[alignment.AlignmentAction]) -> None:
        for action in actions:
            match action:
                case alignment.Block(channel):
                    self.gate.block(channel)
                case alignment.Unblock(channels):
                    self.gate.unblock(channels)
                case alignment.TakeSnapshot(barrier, alignment_ms, passed):
                    if barrier.kind.ends_input and self._is_ending:
                        # Wait for the last results: they are part of this checkpoint.
                        self._is_ending = False
                        self._end_of_stream()
                    if passed is None:
                        self._report(self._snapshot(barrier, alignment_ms))
                    else:
                        # Start recording before forwarding the barrier, so that no row is missed in
                        # between.
                        self.gate.record(barrier.checkpoint, passed)
                        self._held = self._snapshot(barrier, alignment_ms)
                case alignment.InFlightComplete(checkpoint, alignment_ms):
                    self._report(self._with_overtaken(checkpoint, alignment_ms))
                case alignment.ForgetInFlight(checkpoint):
                    self._forget(checkpoint)
                case alignment.AlignmentAborted(checkpoint, reason):
                    self._report(messages.Declined(checkpoint, self.ref, reason))

    def _with_overtaken(self, checkpoint: CheckpointId, alignment_ms: float) -> SnapshotTaken:
        """Return the held snapshot, with the batches that its barrier overtook in the channels."""
        held, self._held = self._held, None
        assert held is not None
        assert held.checkpoint == checkpoint
        mine = tuple(
            OvertakenBatches(self.ref.chain, into, sent=True, batches=batches)
            for into, batches in self.gate.end_recording(checkpoint).items()
        )
        timings = replace(held.timings, alignment_ms=round(alignment_ms, 3))
        return replace(held, timings=timings, overtaken=(*mine, *held.overtaken))

    def _forget(self, checkpoint: CheckpointId) -> None:
        self.gate.forget(checkpoint)
        held, self._held = self._held, None
        if held is not None:
            for snapshot in held.pending:
                snapshot.discard()


def _until(at_s: float | None) -> float:
    """Return the seconds until `at_s` on the clock `time.monotonic`, at most WAIT_S."""
    return WAIT_S if at_s is None else max(0.0, min(WAIT_S, at_s - time.monotonic()))


def _freeze(operator: RunningOperator, barrier: decisions.Barrier) -> PendingSnapshot | None:
    """Return the synchronous part of the snapshot of `operator`, in the requested form."""
    if not barrier.kind.is_savepoint:
        return operator.snapshot(barrier.checkpoint)
    match barrier.form:
        case decisions.StateForm.NATIVE:
            return operator.native_savepoint(barrier.checkpoint)
        case decisions.StateForm.CANONICAL:
            return operator.savepoint(barrier.checkpoint)
