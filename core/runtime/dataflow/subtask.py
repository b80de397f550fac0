"""One subtask: a chain's operators on one thread, from their input to their outputs.

The thread owns the operators, their state and the writers. Everything else reaches it as mail. At a
barrier it takes the synchronous part of the snapshot, forwards the barrier and goes on with the
stream; the asynchronous part and the ack happen on the slot's uploader.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.protocol.alignment import (
    AlignmentAborted,
    AlignmentAction,
    AlignmentMode,
    Barrier,
    BarrierAlignment,
    Block,
    TakeSnapshot,
    Unblock,
)
from onceflow.core.protocol.decisions import CheckpointKind, NotifyAbort, TriggerCheckpoint
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import SnapshotTimings
from onceflow.core.runtime.dataflow.channels import (
    Batch,
    Element,
    EndOfStream,
    InputGate,
    KeyGroupPartitioner,
    Received,
)
from onceflow.core.runtime.dataflow.operators import (
    PendingSnapshot,
    RunningOperator,
    SourceOperator,
)
from onceflow.core.runtime.messages import (
    Complete,
    CompletionHeard,
    Declined,
    OfferSplits,
    PartFailed,
    Shutdown,
    SourceExhausted,
    SubtaskMail,
    SubtaskMetrics,
)
from onceflow.core.spi import EndOfInput


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The synchronous part of a snapshot is done: upload `pending` and ack."""

    subtask: SubtaskRef
    checkpoint: CheckpointId
    pending: tuple[PendingSnapshot, ...]
    timings: SnapshotTimings


SubtaskReport: TypeAlias = SnapshotTaken | CompletionHeard | Declined | SourceExhausted | PartFailed
"""What a subtask tells its slot."""


class Subtask(ABC):
    """What sources and keyed chains share: the thread, snapshots and mail."""

    def __init__(
        self,
        ref: SubtaskRef,
        gate: InputGate,
        operators: Sequence[RunningOperator],
        edges: Sequence[KeyGroupPartitioner],
        report: Callable[[SubtaskReport], None],
    ) -> None:
        self.ref = ref
        self.gate = gate
        self._operators = operators
        self._outlet = next(one for one in reversed(operators) if not one.takes_dead_letters)
        self._edges = edges
        self._report = report
        self._busy_s = 0.0
        self._cpu_s = 0.0
        self._leaving = False
        self._thread = threading.Thread(target=self._main, name=str(ref), daemon=True)

    def start(self) -> None:
        """Begin to read and compute."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return whether it did within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def metrics(self) -> SubtaskMetrics:
        """Return the counters as of now. Any thread."""
        return SubtaskMetrics(
            self.ref,
            records_in=self._operators[0].records_in,
            records_out=self._outlet.records_in,
            busy_s=round(self._busy_s, 3),
            backpressured_s=round(sum(edge.waited_s for edge in self._edges), 3),
            cpu_s=round(self._cpu_s, 3),
            input_batches=self.gate.waiting(),
            rejected=sum(operator.rejected for operator in self._operators),
        )

    @abstractmethod
    def _step(self) -> None:
        """Do one piece of work, or wait for one for a bounded time."""

    @abstractmethod
    def _on_aborted(self, checkpoint: CheckpointId) -> None:
        """Give up waiting for the checkpoint's barriers."""

    def _main(self) -> None:
        try:
            while not self._leaving:
                self._step()
                beside_s = sum(operator.cpu_beside_s for operator in self._operators)
                self._cpu_s = time.thread_time() + beside_s
        except BaseException as error:  # the edge of the loop: everything goes to the driver
            self._report(PartFailed(error))
        finally:
            self._close()

    def _close(self) -> None:
        for operator in self._operators:
            try:
                operator.close()
            except Exception as error:
                self._report(PartFailed(error))

    def _handle(self, mail: SubtaskMail) -> None:
        match mail:
            case Complete(checkpoint):
                for operator in self._operators:
                    operator.completed(checkpoint)
                self._report(CompletionHeard(self.ref, checkpoint))
            case NotifyAbort(checkpoint):
                for operator in self._operators:
                    operator.aborted(checkpoint)
                self._on_aborted(checkpoint)
            case Shutdown():
                self._leaving = True
            case TriggerCheckpoint() | OfferSplits():
                raise TypeError(f"{self.ref} is no source and cannot take {mail!r}")

    def _snapshot(self, barrier: Barrier, alignment_ms: float) -> None:
        """Take the synchronous part, forward the barrier, hand the rest to the uploader."""
        # Of two machines' clocks, for metrics alone.
        start_delay_ms = max(0.0, time.time() * 1000 - alignment_ms - barrier.triggered_at_ms)
        began = time.perf_counter()
        if barrier.kind.is_savepoint:
            taken = [operator.savepoint(barrier.checkpoint) for operator in self._operators]
        else:
            taken = [operator.snapshot(barrier.checkpoint) for operator in self._operators]
        sync_ms = (time.perf_counter() - began) * 1000
        for edge in self._edges:
            edge.broadcast(barrier)
        timings = SnapshotTimings(
            alignment_ms=round(alignment_ms, 3),
            sync_ms=round(sync_ms, 3),
            start_delay_ms=round(start_delay_ms, 3),
        )
        pending = tuple(snapshot for snapshot in taken if snapshot is not None)
        self._report(SnapshotTaken(self.ref, barrier.checkpoint, pending, timings))

    def _end_of_stream(self) -> None:
        for operator in self._operators:
            operator.flush()
        for edge in self._edges:
            edge.broadcast(EndOfStream())

    def _timed(self, work: Callable[[], None]) -> None:
        began = time.monotonic()
        waited = sum(edge.waited_s for edge in self._edges)
        work()
        waited = sum(edge.waited_s for edge in self._edges) - waited
        self._busy_s += time.monotonic() - began - waited


class SourceSubtask(Subtask):
    """Polls its reader between mails; stops reading at its end and after a stop barrier."""

    def __init__(
        self,
        ref: SubtaskRef,
        source: SourceOperator,
        operators: Sequence[RunningOperator],
        edges: Sequence[KeyGroupPartitioner],
        report: Callable[[SubtaskReport], None],
        poll_timeout_s: float,
    ) -> None:
        super().__init__(ref, InputGate(0), operators, edges, report)
        self._source = source
        self._poll_timeout_s = poll_timeout_s
        self._reading = True
        self._last_checkpoint = CheckpointId(0)

    def _step(self) -> None:
        if not self._reading:
            item = self.gate.take(1.0)
            if not (item is None or isinstance(item, Received)):
                self._handle(item)
            return
        while (mail := self.gate.take_mail()) is not None:
            self._handle(mail)
            if not self._reading or self._leaving:
                return
        polled = self._source.reader.poll(self._poll_timeout_s)
        self._source.reject(self._source.reader.rejected())
        match polled:
            case None:
                pass
            case EndOfInput():
                self._end()
            case rows:
                self._timed(lambda: self._source.receive(Batch(rows)))

    def _handle(self, mail: SubtaskMail) -> None:
        match mail:
            case TriggerCheckpoint():
                self._on_triggered(mail)
            case OfferSplits(_, splits):
                self._source.offered(splits)
            case _:
                super()._handle(mail)

    def _end(self) -> None:
        """Read nothing more, and tell everybody so."""
        self._reading = False
        self._end_of_stream()
        self._report(SourceExhausted(self.ref))

    def _on_triggered(self, trigger: TriggerCheckpoint) -> None:
        if trigger.checkpoint <= self._last_checkpoint:
            return
        self._last_checkpoint = trigger.checkpoint
        if trigger.kind is CheckpointKind.SAVEPOINT_DRAIN and self._reading:
            self._end()
        elif trigger.kind.stops_sources:
            self._reading = False
        barrier = Barrier(trigger.checkpoint, trigger.kind, trigger.triggered_at_ms)
        self._snapshot(barrier, alignment_ms=0.0)

    def _on_aborted(self, checkpoint: CheckpointId) -> None:
        self._last_checkpoint = max(self._last_checkpoint, checkpoint)


class KeyedSubtask(Subtask):
    """Takes batches from any unblocked channel, in turn; barriers decide which are blocked."""

    def __init__(
        self,
        ref: SubtaskRef,
        gate: InputGate,
        operators: Sequence[RunningOperator],
        edges: Sequence[KeyGroupPartitioner],
        report: Callable[[SubtaskReport], None],
        mode: AlignmentMode,
    ) -> None:
        super().__init__(ref, gate, operators, edges, report)
        self._alignment = BarrierAlignment(gate.channels, mode)

    def _step(self) -> None:
        item = self.gate.take(1.0)
        if isinstance(item, Received):
            self._on_element(item.channel, item.element)
        elif item is not None:
            self._handle(item)

    def _on_element(self, channel: int, element: Element) -> None:
        match element:
            case Batch():
                self._timed(lambda: self._operators[0].receive(element))
            case Barrier():
                self._carry_out(self._alignment.on_barrier(channel, element, time.monotonic()))
            case EndOfStream():
                self._alignment.on_end_of_input(channel)
                if self._alignment.all_ended:
                    self._end_of_stream()

    def _on_aborted(self, checkpoint: CheckpointId) -> None:
        self._carry_out(self._alignment.on_abort(checkpoint))

    def _carry_out(self, actions: Iterable[AlignmentAction]) -> None:
        for action in actions:
            match action:
                case Block(channel):
                    self.gate.block(channel)
                case Unblock(channels):
                    self.gate.unblock(channels)
                case TakeSnapshot():
                    self._snapshot(action.barrier, action.alignment_ms)
                case AlignmentAborted(checkpoint, reason):
                    self._report(Declined(checkpoint, self.ref, reason))
