"""Which methods of its operators a subtask calls when, and what it releases after an abort."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.protocol.checkpoints.alignment import AlignmentMode, EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier, CheckpointKind, NotifyAbort
from onceflow.core.protocol.checkpoints.in_flight import ChannelEnd
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import Shutdown
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow.batch_iterators import ArrowFunction
from onceflow.core.runtime.dataflow.channels import Batch, Element, InputGate, LocalChannel
from onceflow.core.runtime.dataflow.operators import (
    BatchIteratorMapper,
    PendingSnapshot,
    RunningOperator,
)
from onceflow.core.runtime.dataflow.subtask import ReceivingSubtask, SubtaskReport

ONE = CheckpointId(1)
ROWS = pa.record_batch({"id": pa.array([1, 2])})


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


class Recording(RunningOperator):
    """An operator that records the calls of its methods, and emits its rows at `flush`."""

    def __init__(self) -> None:
        super().__init__("op")
        self.calls: list[str] = []
        self.held: list[pa.RecordBatch] = []

    def process(self, batch: Batch) -> None:
        self.calls.append("process")
        self.held.append(batch.rows)

    def on_watermark(self, watermark: int) -> None:
        super().on_watermark(watermark)
        self.calls.append("end of time" if watermark == MAX_WATERMARK else "watermark")

    def flush(self) -> None:
        self.calls.append("flush")
        held, self.held = self.held, []
        for rows in held:
            self.emit(rows)

    def end_input(self) -> None:
        self.calls.append("end_input")

    def snapshot(self, checkpoint: CheckpointId) -> None:
        self.calls.append(f"snapshot, emission_ended={self.emission_ended}")


def of_watermark(watermark: int) -> Batch:
    return Batch(ROWS.slice(0, 0), None, watermark)


def barrier(kind: CheckpointKind) -> Barrier:
    return Barrier(ONE, kind, 0)


def run(operator: RunningOperator, *elements: Element) -> list[int]:
    """Return the numbers of rows that `operator` emits for `elements`, which arrive in order."""
    emitted: list[int] = []
    operator.outputs.append(lambda batch: emitted.append(batch.rows.num_rows))
    gate = InputGate([ChannelEnd()], len(elements))
    channel, reports = LocalChannel(gate, 0), list[SubtaskReport]()
    subtask: Any = ReceivingSubtask(
        SubtaskRef("chain", 0), gate, [operator], [], reports.append, AlignmentMode.ALIGNED, [0]
    )
    gate.open()
    for element in elements:
        channel.send(element)
        subtask._step()
    return emitted


def test_an_operator_that_waits_for_its_end_emits_nothing_at_a_watermark() -> None:
    operator = Recording()
    assert run(operator, Batch(ROWS), of_watermark(5), Batch(ROWS)) == []
    assert operator.calls == ["process", "watermark", "process"]


@pytest.mark.parametrize(
    ("elements", "calls"),
    [
        ((EndOfStream(),), ["end of time", "flush"]),
        (
            (EndOfStream(), barrier(CheckpointKind.FINAL)),
            ["end of time", "flush", "snapshot, emission_ended=False"],
        ),
        (
            # The last rows of a function in an earlier chain arrive after the end of the stream.
            (EndOfStream(), Batch(ROWS), barrier(CheckpointKind.END)),
            [
                *("end of time", "flush", "process", "flush", "end_input"),
                "snapshot, emission_ended=False",
            ],
        ),
        (
            (
                EndOfStream(),
                barrier(CheckpointKind.SAVEPOINT_DRAIN),
                Barrier(CheckpointId(2), CheckpointKind.FINAL, 0),
            ),
            [
                *("end of time", "flush", "flush", "end_input"),
                *("snapshot, emission_ended=False", "snapshot, emission_ended=True"),
            ],
        ),
        ((barrier(CheckpointKind.STOP),), ["snapshot, emission_ended=False"]),
    ],
    ids=["end", "final", "last rows", "drain", "stop"],
)
def test_the_table_of_ends_says_what_is_called_when(
    elements: tuple[Element, ...], calls: list[str]
) -> None:
    operator = Recording()
    run(operator, *elements)
    assert operator.calls == calls


def test_functions_of_iterators_emit_what_they_hold_before_a_watermark_passes() -> None:
    def hold_one_back(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = list(batches)
        yield from held

    operator = BatchIteratorMapper("op", ArrowFunction("op", hold_one_back, ROWS.schema))
    assert run(operator, Batch(ROWS), of_watermark(5)) == [2]
    operator.close()
