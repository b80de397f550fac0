"""One subtask: a chain's operators on one thread, from their input to their outputs.

The thread owns the operators, their state and the writers. Everything else reaches it as mail. At a
barrier it takes the synchronous part of the snapshot, forwards the barrier and goes on with the
stream; the asynchronous part and the ack happen on the slot's uploader.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from onceflow.core.protocol.alignment import Barrier
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import SnapshotTimings
from onceflow.core.runtime.dataflow.channels import InputGate
from onceflow.core.runtime.dataflow.elements import EndOfStream
from onceflow.core.runtime.dataflow.keyed_edge import KeyGroupPartitioner
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.messages import SubtaskMetrics


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
