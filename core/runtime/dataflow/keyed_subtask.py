"""A subtask behind a keyed edge: reads its channels and aligns their barriers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

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
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.runtime.dataflow.channels import InputGate
from onceflow.core.runtime.dataflow.elements import Batch, Element, EndOfStream, Received
from onceflow.core.runtime.dataflow.keyed_edge import KeyGroupPartitioner
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.runtime.dataflow.subtask import SlotReports, Subtask


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
