"""A subtask whose checkpoint is aborted releases what it has frozen for it."""

from __future__ import annotations

import threading

from onceflow.core.protocol.checkpoints.alignment import AlignmentMode, Barrier
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, NotifyAbort
from onceflow.core.protocol.checkpoints.in_flight import ChannelEnd
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import Shutdown
from onceflow.core.runtime.dataflow.channels import Batch, InputGate, LocalChannel
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.subtask import ReceivingSubtask, SubtaskReport

ONE = CheckpointId(1)


class Freezing(RunningOperator):
    """Tells that it has frozen its state, and that the state was released."""

    def __init__(self) -> None:
        super().__init__("op")
        self.frozen, self.released = threading.Event(), threading.Event()

    def process(self, batch: Batch) -> None:
        pass

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        self.frozen.set()
        return PendingSnapshot("op", lambda _: OperatorSnapshot("op"), self.released.set)


def test_snapshot_of_a_barrier_that_has_overtaken_rows_is_released_by_an_abort() -> None:
    gate = InputGate([ChannelEnd()] * 2, 1)
    left, _ = (LocalChannel(gate, number) for number in range(2))
    operator, reports = Freezing(), list[SubtaskReport]()
    subtask = ReceivingSubtask(
        SubtaskRef("chain", 0), gate, [operator], [], reports.append, AlignmentMode.ALIGNED, [0, 1]
    )
    subtask.start()
    left.send(Barrier(ONE, CheckpointKind.PERIODIC, 0, overtakes_after_s=0))
    assert operator.frozen.wait(60)
    assert not operator.released.is_set()
    subtask.post(NotifyAbort(ONE, "it took too long"))
    assert operator.released.wait(60)
    subtask.post(Shutdown("over"))
    assert subtask.join(60)
    assert reports == []
