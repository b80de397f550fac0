"""A subtask keeps rows, barriers and watermarks in order, and tells its slot what it has done."""

# The steps of a subtask are carried out by hand, on the thread of the test.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from onceflow import WatermarkStrategy
from onceflow.core.protocol.checkpoints.alignment import AlignmentMode, Barrier, EndOfStream
from onceflow.core.protocol.checkpoints.decisions import (
    CheckpointKind,
    NotifyAbort,
    StateForm,
    TriggerCheckpoint,
)
from onceflow.core.protocol.checkpoints.in_flight import Announced, ChannelEnd, Received
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import (
    Complete,
    CompletionHeard,
    Declined,
    OfferSplits,
    PartFailed,
    Shutdown,
    SourceExhausted,
)
from onceflow.core.protocol.splits import Split, SplitState
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow import subtask as subtask_module
from onceflow.core.runtime.dataflow.channels import Batch, InputGate, LocalChannel
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.partitioners import ForwardPartitioner, KeyGroupPartitioner
from onceflow.core.runtime.dataflow.source_operator import SourceOperator
from onceflow.core.runtime.dataflow.subtask import (
    LeavingEdge,
    ReceivingSubtask,
    SnapshotTaken,
    SourceSubtask,
    SubtaskReport,
)
from onceflow.core.spi import EndOfInput, SourceReader
from onceflow.core.spi.dead_letters import DeadLetter

_SCHEMA = pa.schema([("at", pa.int64())])
_REF = SubtaskRef("chain", 0)
_FIRST, _SECOND = CheckpointId(1), CheckpointId(2)


def _rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int64())], schema=_SCHEMA)


class _Operator(RunningOperator):
    """Passes rows on, and notes what is asked of it."""

    def __init__(self, uid: str, calls: list[str]) -> None:
        super().__init__(uid)
        self.calls = calls
        self.due: float | None = None

    def _note(self, what: str) -> None:
        self.calls.append(f"{self.uid} {what}")

    def process(self, batch: Batch) -> None:
        self._note(f"rows {batch.rows.column('at').to_pylist()}")
        self.emit(batch.rows)

    @property
    def due_in_s(self) -> float | None:
        return self.due

    def on_time(self) -> None:
        self._note("timer")
        self.due = None

    def on_watermark(self, watermark: int) -> None:
        self._note(f"watermark {watermark}")

    def flush(self) -> None:
        self._note("flush")

    def end_input(self) -> None:
        self._note("end of input")

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        return self._freeze("snapshot")

    def savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        return self._freeze("savepoint")

    def native_savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        return self._freeze("native savepoint")

    def on_completed(self, checkpoint: CheckpointId) -> None:
        self._note(f"completed {checkpoint}")

    def on_aborted(self, checkpoint: CheckpointId) -> None:
        self._note(f"aborted {checkpoint}")

    def close(self) -> None:
        self._note("close")

    def _freeze(self, what: str) -> PendingSnapshot:
        self._note(what)
        done = OperatorSnapshot(self.uid)
        return PendingSnapshot(self.uid, lambda _: done, lambda: self._note("discard"))


class _Reader(SourceReader):
    def __init__(self) -> None:
        self.polls: list[pa.RecordBatch | EndOfInput] = []
        self.rejected: list[DeadLetter] = []
        self.added: list[Split] = []
        self.wakes = 0

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        return self.polls.pop(0) if self.polls else None

    def take_rejected(self) -> Sequence[DeadLetter]:
        taken, self.rejected = self.rejected, []
        return taken

    def snapshot(self) -> Sequence[Split]:
        return [Split("a", b"0")]

    def add_splits(self, splits: Sequence[Split]) -> None:
        self.added += splits

    def wake(self) -> None:
        self.wakes += 1

    def close(self) -> None:
        pass


class _Downstream:
    """The subtask that follows, with one input channel."""

    def __init__(self, *, credits_: int = 100, keyed: bool = False) -> None:
        self.gate = InputGate([ChannelEnd(keeps_order=not keyed)], credits_)
        channels = [LocalChannel(self.gate, 0)]
        self.partitioner = (
            KeyGroupPartitioner(("at",), 8, channels, _SCHEMA)
            if keyed
            else ForwardPartitioner(channels, _SCHEMA)
        )
        self.gate.open()

    @property
    def edge(self) -> LeavingEdge:
        return LeavingEdge("next", 0, self.partitioner)

    def take(self) -> list[Any]:
        """Return what has come: rows, watermarks, barriers and the end."""
        made: list[Any] = []
        while (item := self.gate.take(0)) is not None:
            if isinstance(item, Announced):
                made.append(f"announced {item.barrier.checkpoint}")
                continue
            assert isinstance(item, Received), item
            match item.element:
                case Batch(watermark=None) as batch:
                    made.append(batch.rows.column("at").to_pylist())
                case Batch(watermark=watermark):
                    made.append(watermark)
                case Barrier(checkpoint=checkpoint):
                    made.append(f"barrier {checkpoint}")
                case EndOfStream():
                    made.append("end")
        return made


def _trigger(
    checkpoint: CheckpointId = _FIRST,
    kind: CheckpointKind = CheckpointKind.PERIODIC,
    **others: Any,
) -> TriggerCheckpoint:
    return TriggerCheckpoint(checkpoint, kind, 0, **others)


class _Source:
    """A source subtask with one more operator, in front of another subtask."""

    def __init__(self, *, timed: bool = False, credits_: int = 100) -> None:
        self.reports: list[SubtaskReport] = []
        self.calls: list[str] = []
        self.reader = _Reader()
        strategy = WatermarkStrategy("at") if timed else None
        splits = [SplitState(Split("a", b"0"))]
        source = SourceOperator("source", self.reader, lambda work: work(), strategy, splits)
        self.second = _Operator("second", self.calls)
        source.outputs.append(self.second.receive)
        self.next = _Downstream(credits_=credits_)
        self.second.outputs.append(self.next.partitioner.receive)
        self.subtask = SourceSubtask(
            _REF, source, [source, self.second], [self.next.edge], self.reports.append, 0.0
        )

    def step(self, *polls: pa.RecordBatch | EndOfInput) -> list[Any]:
        self.reader.polls += polls
        for _ in polls or (None,):
            self.subtask._step()
        return self.next.take()


class _Receiver:
    """A subtask with two operators and `channels` inputs."""

    def __init__(
        self,
        channels: int = 1,
        *,
        timed: Sequence[int] = (0,),
        keyed: bool = False,
        credits_: int = 100,
        next_credits: int = 100,
    ) -> None:
        self.reports: list[SubtaskReport] = []
        self.calls: list[str] = []
        self.gate = InputGate([ChannelEnd(keeps_order=not keyed)] * channels, credits_)
        self.above = [LocalChannel(self.gate, number) for number in range(channels)]
        self.first, self.second = (_Operator(uid, self.calls) for uid in ("first", "second"))
        self.first.outputs.append(self.second.receive)
        self.next = _Downstream(credits_=next_credits, keyed=keyed)
        self.second.outputs.append(self.next.partitioner.receive)
        operators = [self.first, self.second]
        self.subtask = ReceivingSubtask(
            _REF, self.gate, operators, [self.next.edge], self.reports.append,
            AlignmentMode.ALIGNED, timed,
        )  # fmt: skip

    def send(self, *elements: Any, channel: int = 0) -> list[Any]:
        """Send `elements` on `channel`, and return what comes out below."""
        for element in elements:
            self.above[channel].send(element)
        return self.step(len(elements) + 1)

    def step(self, count: int = 1) -> list[Any]:
        for _ in range(count):
            self.subtask._step()
        return self.next.take()


def _batch(*values: int) -> Batch:
    return Batch(_rows(*values))


def _watermark(value: int) -> Batch:
    return Batch(_rows(), None, value)


def _barrier(
    checkpoint: CheckpointId = _FIRST,
    kind: CheckpointKind = CheckpointKind.PERIODIC,
    **others: Any,
) -> Barrier:
    return Barrier(checkpoint, kind, 0, **others)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtask_module, "WAIT_S", 0.001)


def _list_snapshots(reports: Sequence[SubtaskReport]) -> list[tuple[int, list[str]]]:
    return [
        (report.checkpoint, [one.uid for one in report.pending])
        for report in reports
        if isinstance(report, SnapshotTaken)
    ]


# --- sources --------------------------------------------------------------------------------------


def test_a_barrier_of_a_source_divides_the_rows_before_it_from_those_after_it() -> None:
    source = _Source()
    assert source.step(_rows(1)) == [[1]]
    source.subtask.post(_trigger())
    assert source.reader.wakes == 1
    # The step that takes the trigger reads nothing.
    assert source.step(_rows(2)) == []
    assert source.step() == ["barrier 1", [2]]
    assert _list_snapshots(source.reports) == [(1, ["source", "second"])]
    source.subtask.post(Complete(_FIRST, {}))
    source.subtask.post(NotifyAbort(_SECOND, "late"))
    source.step()
    assert source.calls[-2:] == ["second completed 1", "second aborted 2"]
    assert source.reports[-1] == CompletionHeard(_REF, _FIRST)


@pytest.mark.parametrize("kind", [CheckpointKind.STOP, CheckpointKind.SAVEPOINT_STOP])
def test_a_source_that_is_to_stop_reads_nothing_after_the_barrier(kind: CheckpointKind) -> None:
    source = _Source()
    source.subtask.post(_trigger(kind=kind))
    source.step()
    assert source.step(_rows(1)) == ["barrier 1"]
    assert source.step() == []
    assert source.reader.polls == [_rows(1)]
    assert source.second.emission_ended == (kind is CheckpointKind.SAVEPOINT_STOP)


def test_a_source_that_has_read_all_sends_its_end_once_and_takes_part_in_checkpoints() -> None:
    source = _Source()
    assert source.step(_rows(1), EndOfInput()) == [[1], "end"]
    assert source.reports == [SourceExhausted(_REF)]
    assert source.calls == ["second rows [1]", "second flush"]
    for checkpoint, kind in ((_FIRST, CheckpointKind.FINAL), (_SECOND, CheckpointKind.END)):
        source.subtask.post(_trigger(checkpoint, kind))
        source.step()
        assert source.step() == [f"barrier {checkpoint}"]
    assert source.calls[2:] == [
        "second snapshot",
        "second flush",
        "second end of input",
        "second snapshot",
    ]


def test_a_drain_ends_the_input_before_the_barrier_and_only_once() -> None:
    source = _Source()
    for checkpoint, made in ((_FIRST, ["end", "barrier 1"]), (_SECOND, ["barrier 2"])):
        source.subtask.post(_trigger(checkpoint, CheckpointKind.SAVEPOINT_DRAIN))
        source.step()
        assert source.step() == made
    assert source.calls.count("second end of input") == 1
    assert [type(report) for report in source.reports].count(SourceExhausted) == 1
    assert source.step(_rows(1)) == []


@pytest.mark.parametrize(
    ("form", "call"), [(StateForm.NATIVE, "native savepoint"), (StateForm.CANONICAL, "savepoint")]
)
def test_a_savepoint_is_taken_in_the_form_that_is_asked_for(form: StateForm, call: str) -> None:
    source = _Source()
    source.subtask.post(_trigger(kind=CheckpointKind.SAVEPOINT, form=form))
    source.step()
    source.step()
    assert source.calls == [f"second {call}"]
    assert not source.second.emission_ended


def test_watermarks_of_a_source_reach_its_operators_and_the_next_subtask() -> None:
    source = _Source(timed=True)
    assert source.step(_rows(100)) == [[100]]
    assert source.step() == []
    source.subtask._tells_at_s = 0.0
    assert source.step() == [99]
    assert source.calls == ["second rows [100]", "second watermark 99"]
    source.step(_rows(200))
    # The next watermark is due after an interval.
    assert source.step() == []
    assert source.subtask._tells_at_s > time.monotonic()


def test_a_source_whose_rows_wait_for_credit_reads_no_more_and_hears_its_mail() -> None:
    source = _Source(credits_=1)
    source.reader.polls += [_rows(1), _rows(2), _rows(3)]
    source.subtask._step()
    source.subtask._step()
    source.subtask.post(_trigger())
    source.subtask._step()
    source.subtask._step()
    assert source.reader.polls == [_rows(3)]
    assert source.subtask.metrics().backpressured_s >= 0
    taken: list[Any] = []
    for _ in range(8):
        taken += source.next.take()
        source.subtask._step()
    assert taken + source.next.take() == [[1], [2], "barrier 1", [3]]


def test_bad_records_and_new_splits_of_a_source_are_taken() -> None:
    source = _Source()
    source.reader.rejected = [DeadLetter("bad"), DeadLetter("bad")]
    source.step()
    assert source.subtask.metrics().rejected == 2
    source.subtask.post(OfferSplits("source", (Split("b", b"7"),)))
    source.subtask.post(_trigger())
    source.step()
    source.step()
    source.subtask.post(Complete(_FIRST, {}))
    source.step()
    assert source.reader.added == [Split("b", b"7")]


def test_an_aborted_barrier_is_never_sent() -> None:
    source = _Source(credits_=1)
    source.reader.polls += [_rows(1), _rows(2)]
    source.subtask._step()
    source.subtask._step()
    for mail in (_trigger(), NotifyAbort(_FIRST, "late"), _trigger(_SECOND)):
        source.subtask.post(mail)
        source.subtask._step()
    taken: list[Any] = []
    for _ in range(8):
        taken += source.next.take()
        source.subtask._step()
    assert taken == [[1], [2], "barrier 2"]


# --- the thread -----------------------------------------------------------------------------------


def _run(subtask: Any, reports: list[SubtaskReport]) -> list[SubtaskReport]:
    subtask.start()
    assert subtask.join(30)
    return reports


def test_a_subtask_that_is_shut_down_closes_every_operator() -> None:
    receiver = _Receiver()
    receiver.subtask.post(Shutdown("over"))
    assert _run(receiver.subtask, receiver.reports) == []
    assert receiver.calls == ["first close", "second close"]


def test_a_failure_is_told_and_closes_every_operator() -> None:
    receiver = _Receiver()

    def fail() -> None:
        raise ValueError("cannot close")

    receiver.first.close = fail  # type: ignore[method-assign]
    receiver.subtask.post(_trigger())
    told = _run(receiver.subtask, receiver.reports)
    texts = [str(report.error) for report in told if isinstance(report, PartFailed)]
    assert len(texts) == 2
    assert "which only a source can carry out" in texts[0]
    assert texts[1] == "cannot close"
    assert receiver.calls == ["second close"]


def test_a_subtask_that_runs_has_not_been_joined() -> None:
    receiver = _Receiver()
    receiver.subtask.start()
    assert not receiver.subtask.join(0.01)
    receiver.subtask.post(Shutdown("over"))
    assert receiver.subtask.join(30)
    assert str(_REF) not in {thread.name for thread in threading.enumerate()}


# --- receivers ------------------------------------------------------------------------------------


def test_a_receiver_passes_rows_watermarks_barriers_and_the_end_in_order() -> None:
    receiver = _Receiver()
    receiver.step()
    assert receiver.send(_batch(1), _watermark(5), _barrier(), _batch(2), EndOfStream()) == [
        [1], 5, "barrier 1", [2], "end",
    ]  # fmt: skip
    assert receiver.calls == [
        "first rows [1]",
        "second rows [1]",
        "first watermark 5",
        "second watermark 5",
        "first snapshot",
        "second snapshot",
        "first rows [2]",
        "second rows [2]",
        f"first watermark {MAX_WATERMARK}",
        f"second watermark {MAX_WATERMARK}",
        "first flush",
        "second flush",
    ]
    assert _list_snapshots(receiver.reports) == [(1, ["first", "second"])]
    metrics = receiver.subtask.metrics()
    assert (metrics.records_in, metrics.records_out, metrics.input_batches) == (2, 2, 0)


def test_a_receiver_aligns_barriers_and_takes_the_lowest_watermark() -> None:
    receiver = _Receiver(2, timed=(0, 1))
    receiver.step()
    assert receiver.send(_watermark(5), _barrier(), _batch(2)) == []
    assert receiver.send(_watermark(3), _batch(1), channel=1) == [3, [1]]
    assert receiver.send(_barrier(), channel=1) == ["barrier 1", [2]]
    assert receiver.send(EndOfStream()) == []
    assert receiver.send(EndOfStream(), channel=1) == ["end"]


def test_a_channel_without_event_time_does_not_hold_event_time_back() -> None:
    receiver = _Receiver(2, timed=(1,))
    receiver.step()
    assert receiver.send(_watermark(5)) == []
    assert receiver.send(_watermark(3), channel=1) == [3]


def test_a_timer_fires_before_the_next_element_and_not_after_a_stop_savepoint() -> None:
    receiver = _Receiver()
    receiver.step()
    receiver.first.due = 0.0
    receiver.send(_batch(1))
    assert receiver.calls == ["first timer", "first rows [1]", "second rows [1]"]
    receiver.first.due = 50.0
    receiver.step()
    assert "first timer" not in receiver.calls[1:]
    receiver.send(_barrier(kind=CheckpointKind.SAVEPOINT_STOP))
    receiver.first.due = 0.0
    receiver.step(3)
    assert "first timer" not in receiver.calls[1:]
    assert receiver.first.emission_ended


def test_no_timer_fires_while_rows_wait_for_credit() -> None:
    receiver = _Receiver(next_credits=1)
    for value in (1, 2):
        receiver.subtask._step()
        receiver.above[0].send(_batch(value))
    receiver.subtask._step()
    receiver.subtask._step()
    receiver.first.due = 0.0
    receiver.subtask._step()
    assert "first timer" not in receiver.calls
    assert receiver.next.take() == [[1]]
    receiver.subtask._step()
    assert "first timer" in receiver.calls


def test_rows_that_a_barrier_overtakes_are_part_of_its_checkpoint() -> None:
    receiver = _Receiver(2, keyed=True, timed=(0, 1))
    receiver.step()
    overtaking = _barrier(overtakes_after_s=0.0)
    receiver.above[0].send(_batch(1))
    receiver.above[0]._write(overtaking)
    receiver.above[1].send(_batch(2))
    made = receiver.step(6)
    assert made == ["announced 1", "barrier 1", [1], [2]]
    assert _list_snapshots(receiver.reports) == []
    receiver.above[1]._write(overtaking)
    receiver.step(4)
    (taken,) = (one for one in receiver.reports if isinstance(one, SnapshotTaken))
    assert taken.timings.overtaken
    rows = [batch.rows.column("at").to_pylist() for one in taken.overtaken for batch in one.batches]
    assert sorted(rows) == [[1], [2]]
    assert [(one.chain, one.input, one.sent) for one in taken.overtaken] == [("chain", 0, True)]


def test_an_aborted_checkpoint_whose_barrier_has_overtaken_discards_what_it_holds() -> None:
    receiver = _Receiver(2, keyed=True, timed=(0, 1))
    receiver.step()
    receiver.above[0].send(_batch(1))
    receiver.above[0]._write(_barrier(overtakes_after_s=0.0))
    receiver.step(3)
    receiver.subtask.post(NotifyAbort(_FIRST, "late"))
    receiver.step(2)
    assert receiver.calls[-2:] == ["first discard", "second discard"]
    assert _list_snapshots(receiver.reports) == []


def test_a_barrier_that_a_later_one_replaces_is_declined() -> None:
    receiver = _Receiver(2)
    receiver.step()
    receiver.send(_barrier())
    receiver.send(_barrier(_SECOND), channel=1)
    assert [one.checkpoint for one in receiver.reports if isinstance(one, Declined)] == [1]
