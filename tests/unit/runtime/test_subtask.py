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
from onceflow.core.runtime.dataflow import subtask as subtask_module
from onceflow.core.runtime.dataflow.batch_iterators import ArrowFunction
from onceflow.core.runtime.dataflow.channels import Batch, Element, InputGate, LocalChannel
from onceflow.core.runtime.dataflow.operators import (
    BatchIteratorMapper,
    PendingSnapshot,
    RunningOperator,
)
from onceflow.core.runtime.dataflow.subtask import ReceivingSubtask, SnapshotTaken, SubtaskReport

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
    gate = InputGate([ChannelEnd()] * 2, 1, {})
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


class Absorbing(Recording):
    """An operator that holds its rows until `is_answered`, and has room for one batch."""

    is_answered = False

    @property
    def is_full(self) -> bool:
        return bool(self.held)

    @property
    def absorbs_rows(self) -> bool:
        return True

    def outstanding(self) -> Batch | None:
        return Batch(ROWS.slice(0, 0)) if self.held else None

    @property
    def due_in_s(self) -> float | None:
        return 0.0 if self.held and self.is_answered else None

    def on_time(self) -> None:
        self.held.clear()


def of_watermark(watermark: int) -> Batch:
    return Batch(ROWS.slice(0, 0), None, watermark)


def barrier(kind: CheckpointKind) -> Barrier:
    return Barrier(ONE, kind, 0)


def run(operator: RunningOperator, *elements: Element) -> list[int]:
    """Return the numbers of rows that `operator` emits for `elements`, which arrive in order."""
    emitted: list[int] = []
    operator.outputs.append(lambda batch: emitted.append(batch.rows.num_rows))
    start(operator, [], *elements)
    return emitted


def start(
    operator: RunningOperator,
    reports: list[SubtaskReport],
    *elements: Element,
    keeps_order: bool = True,
) -> Any:
    """Return a subtask that has made a step for each of `elements`."""
    gate = InputGate([ChannelEnd(keeps_order=keeps_order)], len(elements), {0: ROWS.schema})
    channel = LocalChannel(gate, 0)
    subtask: Any = ReceivingSubtask(
        SubtaskRef("chain", 0), gate, [operator], [], reports.append, AlignmentMode.ALIGNED, [0]
    )
    gate.open()
    # A step without work would wait.
    gate.wake()
    for element in elements:
        channel.send(element)
        subtask._step()
        gate.wake()
    return subtask


def test_a_full_operator_takes_the_rows_before_a_barrier() -> None:
    operator = Absorbing()
    rows = Batch(ROWS)
    subtask = start(operator, [], rows, rows)
    assert operator.calls == ["process"]
    for element in (barrier(CheckpointKind.PERIODIC), rows):
        subtask.gate.put(0, element)
    for _ in range(4):
        subtask.gate.wake()
        subtask._step()
    assert operator.calls == ["process", "process", "snapshot, emission_ended=False"]


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_final_barrier_waits_for_results_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    monkeypatch.setattr(subtask_module, "LAST_RESULTS_S", 60.0 if is_answered else 0.0)
    operator, reports = Absorbing(), list[SubtaskReport]()
    final = barrier(CheckpointKind.FINAL)
    subtask = start(operator, reports, Batch(ROWS), EndOfStream(), final)
    for _ in range(3):
        subtask.gate.wake()
        subtask._step()
    if is_answered:
        assert not reports
        operator.is_answered = True
        for _ in range(2):
            subtask.gate.wake()
            subtask._step()
    (taken,) = reports
    assert isinstance(taken, SnapshotTaken)
    # Rows in flight let another FINAL checkpoint follow.
    assert bool(taken.overtaken) == (not is_answered)
    ends = ["end of time", *["flush"] * is_answered]
    assert operator.calls == ["process", *ends, "snapshot, emission_ended=False"]


def test_the_barrier_of_an_aborted_checkpoint_waits_for_no_result() -> None:
    operator, reports = Absorbing(), list[SubtaskReport]()
    final = barrier(CheckpointKind.FINAL)
    subtask = start(operator, reports, Batch(ROWS), EndOfStream(), final)
    subtask.gate.wake()
    subtask._step()
    subtask.post(NotifyAbort(ONE, "it took too long"))
    operator.is_answered = True
    for _ in range(4):
        subtask.gate.wake()
        subtask._step()
    assert not reports
    assert operator.calls == ["process", "end of time", "flush"]


def test_an_aborted_checkpoint_that_waits_for_results_leaves_no_channel_blocked() -> None:
    operator, reports = Absorbing(), list[SubtaskReport]()
    ends = [ChannelEnd(keeps_order=True)] * 2
    gate = InputGate(ends, 5, {0: ROWS.schema, 1: ROWS.schema})
    subtask: Any = ReceivingSubtask(
        SubtaskRef("chain", 0), gate, [operator], [], reports.append, AlignmentMode.ALIGNED, [0, 1]
    )
    gate.open()

    def step(count: int) -> None:
        for _ in range(count):
            gate.wake()
            subtask._step()

    gate.put(0, Batch(ROWS))
    step(1)
    for number, checkpoint in enumerate((ONE, CheckpointId(2))):
        for channel in range(2):
            if not number:
                gate.put(channel, EndOfStream())
            gate.put(channel, Barrier(checkpoint, CheckpointKind.FINAL, 0))
    step(4)
    assert not reports, "the barrier waits"
    subtask.post(NotifyAbort(ONE, "it took too long"))
    step(1)
    operator.is_answered = True
    step(6)
    assert [getattr(report, "checkpoint", report) for report in reports] == [2]


def test_no_barrier_overtakes_one_that_waits_for_results() -> None:
    operator, reports = Absorbing(), list[SubtaskReport]()
    final = barrier(CheckpointKind.FINAL)
    subtask = start(operator, reports, Batch(ROWS), EndOfStream(), final, keeps_order=False)
    subtask._step()
    assert not reports, "the barrier waits"
    newer = Barrier(CheckpointId(2), CheckpointKind.FINAL, 0, overtakes_after_s=0.0)
    subtask.gate.put(0, newer)
    for _ in range(3):
        subtask.gate.wake()
        subtask._step()
    assert [getattr(report, "checkpoint", report) for report in reports] == [1, 2]


def test_a_final_barrier_that_overtakes_the_end_is_not_the_last_one() -> None:
    """The operator emits its last rows, such as the last windows, behind this barrier."""
    operator, reports = Recording(), list[SubtaskReport]()
    subtask = start(operator, reports, keeps_order=False)
    subtask.gate.put(0, EndOfStream())
    subtask.gate.put(0, Barrier(ONE, CheckpointKind.FINAL, 0, overtakes_after_s=0.0))
    for _ in range(2):
        subtask.gate.wake()
        subtask._step()
    assert operator.calls == ["snapshot, emission_ended=False", "end of time", "flush"]
    (taken,) = reports
    assert isinstance(taken, SnapshotTaken)
    ((batch,),) = [part.batches for part in taken.overtaken]
    assert batch.rows.schema == ROWS.schema
    assert batch.rows.num_rows == 0


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
