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
from typing import Protocol

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
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import SnapshotTimings
from onceflow.core.protocol.splits import Split
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
from onceflow.core.runtime.messages import SubtaskMetrics
from onceflow.core.spi import EndOfInput


@dataclass(frozen=True, slots=True)
class CheckpointTriggered:
    """Mail to a source: emit this barrier now."""

    barrier: Barrier


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """Mail: the checkpoint is decided."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class CheckpointAborted:
    """Mail: the checkpoint will never be."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Mail: close the operators and end the thread."""


class SlotReports(Protocol):
    """Where a subtask reports to: its slot."""

    def snapshot_taken(
        self,
        subtask: SubtaskRef,
        checkpoint: CheckpointId,
        pending: Sequence[PendingSnapshot],
        timings: SnapshotTimings,
    ) -> None:
        """Upload `pending` and ack."""
        ...

    def snapshot_declined(self, subtask: SubtaskRef, checkpoint: CheckpointId, reason: str) -> None:
        """Decline the checkpoint."""
        ...

    def completion_heard(self, subtask: SubtaskRef, checkpoint: CheckpointId) -> None:
        """Take note that every operator of the subtask knows the checkpoint to be decided."""
        ...

    def source_exhausted(self, subtask: SubtaskRef) -> None:
        """Tell the driver that a source has emitted its last record."""
        ...

    def subtask_failed(self, subtask: SubtaskRef, error: BaseException) -> None:
        """End the attempt."""
        ...


class Subtask(ABC):
    """What sources and keyed chains share: the thread, snapshots and mail."""

    def __init__(
        self,
        ref: SubtaskRef,
        gate: InputGate,
        operators: Sequence[RunningOperator],
        edges: Sequence[KeyGroupPartitioner],
        reports: SlotReports,
    ) -> None:
        self.ref = ref
        self.gate = gate
        self._operators = operators
        self._outlet = next(one for one in reversed(operators) if not one.takes_dead_letters)
        self._edges = edges
        self._reports = reports
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
    def _on_triggered(self, barrier: Barrier) -> None:
        """Take part in a checkpoint as its source."""

    @abstractmethod
    def _on_aborted(self, checkpoint: CheckpointId) -> None:
        """Give up waiting for the checkpoint's barriers."""

    def _main(self) -> None:
        try:
            while not self._leaving:
                self._step()
                self._cpu_s = time.thread_time()
        except BaseException as error:  # the edge of the loop: everything goes to the driver
            self._reports.subtask_failed(self.ref, error)
        finally:
            self._close()

    def _close(self) -> None:
        for operator in self._operators:
            try:
                operator.close()
            except Exception as error:
                self._reports.subtask_failed(self.ref, error)

    def _handle(self, mail: object) -> None:
        match mail:
            case CheckpointTriggered(barrier):
                self._on_triggered(barrier)
            case CheckpointCompleted(checkpoint):
                for operator in self._operators:
                    operator.completed(checkpoint)
                self._reports.completion_heard(self.ref, checkpoint)
            case CheckpointAborted(checkpoint):
                for operator in self._operators:
                    operator.aborted(checkpoint)
                self._on_aborted(checkpoint)
            case Shutdown():
                self._leaving = True
            case _:
                raise TypeError(f"subtask {self.ref} cannot read mail {mail!r}")

    def _snapshot(self, barrier: Barrier, alignment_ms: float) -> None:
        """Take the synchronous part, forward the barrier, hand the rest to the uploader."""
        # Of two machines' clocks, for metrics alone.
        start_delay_ms = max(0.0, time.time() * 1000 - alignment_ms - barrier.triggered_at_ms)
        began = time.perf_counter()
        taken = [operator.snapshot(barrier.checkpoint) for operator in self._operators]
        sync_ms = (time.perf_counter() - began) * 1000
        for edge in self._edges:
            edge.broadcast(barrier)
        timings = SnapshotTimings(
            alignment_ms=round(alignment_ms, 3),
            sync_ms=round(sync_ms, 3),
            start_delay_ms=round(start_delay_ms, 3),
        )
        pending = [snapshot for snapshot in taken if snapshot is not None]
        self._reports.snapshot_taken(self.ref, barrier.checkpoint, pending, timings)

    def _end_of_stream(self) -> None:
        for edge in self._edges:
            edge.broadcast(EndOfStream())

    def _timed(self, work: Callable[[], None]) -> None:
        began = time.monotonic()
        waited = sum(edge.waited_s for edge in self._edges)
        work()
        waited = sum(edge.waited_s for edge in self._edges) - waited
        self._busy_s += time.monotonic() - began - waited


@dataclass(frozen=True, slots=True)
class SplitsOffered:
    """Mail to a source: these splits have appeared, and are its own."""

    splits: tuple[Split, ...]


class SourceSubtask(Subtask):
    """Polls its reader between mails; stops reading at its end and after a stop barrier."""

    def __init__(
        self,
        ref: SubtaskRef,
        source: SourceOperator,
        operators: Sequence[RunningOperator],
        edges: Sequence[KeyGroupPartitioner],
        reports: SlotReports,
        poll_timeout_s: float,
    ) -> None:
        super().__init__(ref, InputGate(0), operators, edges, reports)
        self._source = source
        self._poll_timeout_s = poll_timeout_s
        self._reading = True
        self._last_checkpoint = CheckpointId(0)

    def _step(self) -> None:
        if not self._reading:
            mail = self.gate.take(1.0)
            if mail is not None:
                self._handle(mail)
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
                self._reading = False
                self._end_of_stream()
                self._reports.source_exhausted(self.ref)
            case rows:
                self._timed(lambda: self._source.receive(Batch(rows)))

    def _handle(self, mail: object) -> None:
        if isinstance(mail, SplitsOffered):
            self._source.offered(mail.splits)
        else:
            super()._handle(mail)

    def _on_triggered(self, barrier: Barrier) -> None:
        if barrier.checkpoint <= self._last_checkpoint:
            return
        self._last_checkpoint = barrier.checkpoint
        if barrier.kind is CheckpointKind.STOP:
            self._reading = False
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
        reports: SlotReports,
        mode: AlignmentMode,
    ) -> None:
        super().__init__(ref, gate, operators, edges, reports)
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

    def _on_triggered(self, barrier: Barrier) -> None:
        raise TypeError(f"{self.ref} is no source; checkpoint {barrier.checkpoint} triggered at it")

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
                    self._reports.snapshot_declined(self.ref, checkpoint, reason)
