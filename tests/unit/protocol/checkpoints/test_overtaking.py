"""Barriers that overtake rows: when, what they leave in flight, and what ends them early."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.unit.protocol.checkpoints import coordination

from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol.checkpoints import alignment, decisions
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.checkpoints.in_flight import (
    REPLAYED,
    Announced,
    ChannelEnd,
    InputQueues,
    OutputQueue,
    Received,
)
from onceflow.core.protocol.checkpoints.schedule import CheckpointSettings
from onceflow.core.protocol.checkpoints.snapshots import InFlight, StateHandle, SubtaskSnapshot
from onceflow.core.protocol.ids import CheckpointId


def barrier(number: int, after_s: float | None = 0.0) -> Barrier:
    return Barrier(
        CheckpointId(number), decisions.CheckpointKind.PERIODIC, 0, overtakes_after_s=after_s
    )


def aligned(channels: int) -> alignment.BarrierAlignment:
    return alignment.BarrierAlignment(channels, alignment.AlignmentMode.ALIGNED)


def kinds(actions: Iterable[alignment.AlignmentAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


# --- alignment -----------------------------------------------------------------------------------


def test_the_snapshot_is_taken_at_the_first_barrier_and_complete_with_the_last() -> None:
    gate = aligned(3)
    (taken,) = gate.on_announced(1, barrier(1), 1.0)
    assert taken == alignment.TakeSnapshot(barrier(1), 0.0, passed=())
    assert gate.on_announced(0, barrier(1), 1.5) == ()
    assert gate.on_announced(2, barrier(1), 2.0) == (
        alignment.InFlightComplete(CheckpointId(1), 1000.0),
    )
    assert not any(gate.is_blocked(channel) for channel in range(3))


def test_with_one_channel_all_is_known_at_once() -> None:
    assert kinds(aligned(1).on_announced(0, barrier(1), 0.0)) == [
        "TakeSnapshot",
        "InFlightComplete",
    ]


def test_a_barrier_with_time_left_is_aligned_and_forwarded_with_what_is_left_of_it() -> None:
    gate = aligned(2)
    assert gate.on_announced(0, barrier(1, 5.0), 10.0) == ()
    assert gate.on_announced(1, barrier(1, 4.0), 10.5) == ()
    assert gate.overtakes_at_s == 14.5
    assert gate.on_barrier(0, barrier(1, 5.0), 11.0) == (alignment.Block(0),)
    taken, unblock = gate.on_barrier(1, barrier(1, 4.0), 12.5)
    assert taken == alignment.TakeSnapshot(barrier(1, 2.0), 1500.0, passed=None)
    assert unblock == alignment.Unblock((0,))
    assert gate.overtakes_at_s is None


def test_a_barrier_whose_time_has_come_overtakes_where_it_was_not_read() -> None:
    gate = aligned(3)
    gate.on_announced(0, barrier(1, 1.0), 10.0)
    gate.on_barrier(0, barrier(1, 1.0), 10.2)
    gate.on_announced(1, barrier(1, 1.0), 10.5)
    assert gate.on_time(10.9) == ()
    assert gate.on_time(11.0) == (
        alignment.TakeSnapshot(barrier(1), 1000.0, passed=(0,)),
        alignment.Unblock((0,)),
    )
    assert gate.on_announced(2, barrier(1, 0.3), 11.5) == (
        alignment.InFlightComplete(CheckpointId(1), 1500),
    )


def test_one_that_overtakes_on_one_channel_does_so_on_all() -> None:
    gate = aligned(2)
    gate.on_announced(0, barrier(1, 60.0), 10.0)
    assert kinds(gate.on_announced(1, barrier(1), 10.1)) == ["TakeSnapshot", "InFlightComplete"]


def test_a_newer_barrier_ends_one_that_has_not_come_on_all_channels() -> None:
    gate = aligned(2)
    gate.on_announced(0, barrier(1), 0.0)
    assert gate.on_announced(0, barrier(2), 1.0)[0] == alignment.ForgetInFlight(CheckpointId(1))
    assert kinds(gate.on_announced(1, barrier(1), 2.0)) == []
    assert kinds(gate.on_announced(1, barrier(2), 2.0)) == ["InFlightComplete"]


def test_a_newer_barrier_that_waits_for_its_turn_ends_it_too() -> None:
    gate = aligned(2)
    gate.on_announced(0, barrier(1), 0.0)
    assert gate.on_barrier(0, barrier(2, None), 1.0) == (
        alignment.ForgetInFlight(CheckpointId(1)),
        alignment.Block(0),
    )


def test_an_abort_drops_what_was_recorded_and_later_barriers_are_ignored() -> None:
    gate = aligned(2)
    gate.on_announced(0, barrier(1), 0.0)
    assert gate.on_abort(CheckpointId(1)) == (alignment.ForgetInFlight(CheckpointId(1)),)
    assert gate.on_announced(1, barrier(1), 1.0) == ()
    assert gate.on_abort(CheckpointId(1)) == ()
    assert gate.on_barrier(1, barrier(1), 1.0) == ()


def test_an_abort_before_its_time_has_nothing_overtake() -> None:
    gate = aligned(2)
    gate.on_announced(0, barrier(1, 1.0), 0.0)
    gate.on_abort(CheckpointId(1))
    assert (gate.overtakes_at_s, gate.on_time(5.0)) == (None, ())
    assert gate.on_announced(1, barrier(1), 5.0) == ()


def test_an_older_alignment_is_given_up_by_what_overtakes_it() -> None:
    gate = aligned(2)
    gate.on_barrier(0, barrier(1, None), 0.0)
    unblock, given_up, *more = gate.on_announced(0, barrier(2), 1.0)
    assert unblock == alignment.Unblock((0,))
    assert isinstance(given_up, alignment.AlignmentAborted)
    assert kinds(more) == ["TakeSnapshot"]
    assert gate.on_barrier(0, barrier(3, None), 2.0)[0] == alignment.ForgetInFlight(CheckpointId(2))


def test_at_least_once_knows_no_barriers_that_overtake() -> None:
    with pytest.raises(InvariantViolation):
        alignment.BarrierAlignment(1, alignment.AlignmentMode.AT_LEAST_ONCE).on_announced(
            0, barrier(1), 0.0
        )


# --- sources -------------------------------------------------------------------------------------


def test_a_source_holds_a_barrier_behind_its_rows_for_as_long_as_that_may_wait() -> None:
    barriers = alignment.SourceBarriers()
    barriers.on_triggered(barrier(1, 2.0), 10.0)
    assert barriers.overtakes_at_s == 12.0
    assert barriers.next(11.0, clear=False) is None
    assert barriers.next(12.5, clear=False) == barrier(1)
    assert barriers.next(13.0, clear=True) is None
    barriers.on_triggered(barrier(2, 2.0), 20.0)
    assert barriers.next(20.5, clear=True) == barrier(2, 1.5)
    barriers.on_triggered(barrier(3, None), 30.0)
    assert barriers.next(99.0, clear=False) is None
    assert barriers.next(99.0, clear=True) == barrier(3, None)


def test_a_source_emits_no_barrier_twice_and_none_that_is_over() -> None:
    barriers = alignment.SourceBarriers()
    barriers.on_triggered(barrier(1), 0.0)
    barriers.on_triggered(barrier(1), 0.0)
    assert barriers.next(0.0, clear=True) == barrier(1)
    assert barriers.next(0.0, clear=True) is None
    barriers.on_triggered(barrier(2, None), 0.0)
    barriers.on_triggered(barrier(3, None), 0.0)
    barriers.on_abort(CheckpointId(2))
    barriers.on_triggered(barrier(2, None), 0.0)
    assert barriers.next(0.0, clear=True) == barrier(3, None)
    assert barriers.next(0.0, clear=True) is None


def test_a_source_emits_no_barrier_after_a_newer_one() -> None:
    """A savepoint waits its turn, and was given up; the word of that is lost."""
    barriers = alignment.SourceBarriers()
    barriers.on_triggered(barrier(1, None), 0.0)
    barriers.on_triggered(barrier(2), 5.0)
    assert barriers.next(5.0, clear=False) == barrier(2)
    assert barriers.next(6.0, clear=True) is None
    barriers.on_triggered(barrier(3, None), 7.0)
    assert barriers.next(7.0, clear=True) == barrier(3, None)


# --- channels ------------------------------------------------------------------------------------


def test_a_sender_without_credit_keeps_the_order_and_loses_nothing() -> None:
    queue = OutputQueue[str]()
    queue.release(1)
    sent = [element for element in ("a", "b", alignment.EndOfStream(), "c") if queue.offer(element)]
    assert sent == ["a"]
    assert queue.next() is None
    queue.release()
    assert [queue.next(), queue.next(), queue.next()] == ["b", alignment.EndOfStream(), None]
    queue.release(2)
    assert (queue.next(), queue.waits) == ("c", False)


def test_what_waits_for_credit_is_overtaken_and_sent_later_and_older_barriers_are_dropped() -> None:
    queue = OutputQueue[str]()
    for element in ("a", barrier(1, None), alignment.EndOfStream()):
        queue.offer(element)
    assert queue.overtaken_by(CheckpointId(2)) == ("a",)
    queue.release()
    assert [queue.next(), queue.next(), queue.next()] == ["a", alignment.EndOfStream(), None]


def test_rows_before_the_barrier_are_recorded_wherever_they_are_and_no_others() -> None:
    queues = InputQueues[str]([ChannelEnd()] * 3)
    queues.replay(["r"])
    for channel, element in ((0, "a"), (0, barrier(1)), (0, "b"), (1, "c"), (2, "d")):
        queues.put(channel, element)
    assert queues.take() == Announced(0, barrier(1))
    queues.record(CheckpointId(1), passed=(2,))
    queues.put(1, "e")
    queues.put(2, "f")
    assert queues.take() == Received(REPLAYED, "r")
    queues.put(1, barrier(1))
    queues.put(1, "g")
    assert queues.take() == Announced(1, barrier(1))
    assert queues.end_recording(CheckpointId(1)) == {0: ("r", "a", "c", "e")}
    taken: list[object] = []
    while (item := queues.take()) is not None:
        assert isinstance(item, Received)
        taken.append(item.element)
    assert sorted(map(str, taken)) == ["a", "b", "c", "d", "e", "f", "g"], "no barrier among them"


def test_what_is_recorded_without_all_barriers_is_an_error() -> None:
    queues = InputQueues[str]([ChannelEnd()] * 1)
    queues.record(CheckpointId(1), ())
    with pytest.raises(InvariantViolation, match="missing"):
        queues.end_recording(CheckpointId(1))
    with pytest.raises(ValueError, match="no rows in flight were recorded"):
        queues.end_recording(CheckpointId(1))


def test_without_credit_below_only_announcements_are_taken() -> None:
    queues = InputQueues[str]([ChannelEnd()] * 1)
    queues.put(0, "a")
    assert queues.take(elements=False) is None
    queues.put(0, barrier(1))
    assert queues.take(elements=False) == Announced(0, barrier(1))


def test_what_is_in_flight_is_told_by_the_input_that_it_is_for_and_replayed_into_it() -> None:
    queues = InputQueues[str]([ChannelEnd(0), ChannelEnd(1), ChannelEnd(0)])
    queues.replay(["r1"], 1)
    queues.replay(["r0"], 0)
    for channel, element in ((0, "a"), (1, "b"), (2, "c")):
        queues.put(channel, element)
        queues.put(channel, barrier(1))
    queues.record(CheckpointId(1), ())
    assert queues.end_recording(CheckpointId(1)) == {1: ("r1", "b"), 0: ("r0", "a", "c")}
    for _ in range(3):
        queues.take()
    taken = [queues.take() for _ in range(5)]
    assert taken[:2] == [Received(REPLAYED, "r1", 1), Received(REPLAYED, "r0", 0)]
    assert set(taken[2:]) == {Received(0, "a", 0), Received(1, "b", 1), Received(2, "c", 0)}


def test_a_sender_may_make_rows_when_it_has_its_first_credits_and_send_barriers_before() -> None:
    queue = OutputQueue[str]()
    queue.release(0)
    assert queue.waits, "the reader has answered a question, and has no room yet"
    assert queue.offer(barrier(1))
    assert not queue.offer("a")
    queue.release(2)
    assert (queue.next(), queue.waits) == ("a", False)


def test_the_first_credits_are_given_once_and_after_all_that_is_replayed() -> None:
    queues = InputQueues[str]([ChannelEnd()])
    queues.replay(["r"])
    assert not queues.open()
    assert queues.take() == Received(REPLAYED, "r")
    assert [queues.open(), queues.open()] == [True, False]


# --- channels that keep order --------------------------------------------------------------------


def test_no_barrier_is_announced_in_a_channel_that_keeps_order() -> None:
    queues = InputQueues[str]([ChannelEnd(keeps_order=True)])
    queues.open()
    queues.put(0, "a")
    queues.put(0, barrier(1))
    assert [queues.take(), queues.take()] == [Received(0, "a"), Received(0, barrier(1))]


@pytest.mark.parametrize("elements", [True, False])
def test_a_barrier_in_order_does_not_wait_for_what_is_replayed_here_or_below(
    elements: bool,
) -> None:
    queues = InputQueues[str]([ChannelEnd(), ChannelEnd(1, keeps_order=True)])
    queues.replay(["r"])
    for channel in (0, 1):
        queues.put(channel, barrier(1))
    assert queues.take(elements=elements) == Announced(0, barrier(1))
    assert queues.take(elements=elements) == Received(1, barrier(1), 1)
    queues.record(CheckpointId(1), passed=(1,))
    assert queues.end_recording(CheckpointId(1)) == {0: ("r",)}


def test_one_that_waits_for_all_rows_does_so_behind_what_is_replayed() -> None:
    queues = InputQueues[str]([ChannelEnd(), ChannelEnd(1, keeps_order=True)])
    queues.replay(["r"])
    for channel in (0, 1):
        queues.put(channel, barrier(1, None))
    assert queues.take() == Received(REPLAYED, "r")
    taken = {queues.take(), queues.take()}
    assert taken == {Received(0, barrier(1, None)), Received(1, barrier(1, None), 1)}


def test_rows_before_a_barrier_in_order_are_taken_before_those_of_channels_that_it_overtakes() -> (
    None
):
    queues = InputQueues[str]([ChannelEnd(), ChannelEnd(1, keeps_order=True)])
    queues.open()
    for channel, element in ((0, "a"), (0, "b"), (1, "c"), (1, "d"), (1, barrier(1)), (1, "e")):
        queues.put(channel, element)
    in_order = [queues.take() for _ in range(3)]
    assert in_order == [Received(1, element, 1) for element in ("c", "d", barrier(1))]
    queues.block(1)
    assert [queues.take(), queues.take()] == [Received(0, "a"), Received(0, "b")]
    assert queues.take() is None


def test_channels_that_keep_order_are_read_up_to_the_barrier_before_others_are_overtaken() -> None:
    gate = alignment.BarrierAlignment(3, alignment.AlignmentMode.ALIGNED, keeping_order=[1, 2])
    assert gate.on_announced(0, barrier(1), 1.0) == ()
    assert gate.overtakes_at_s is None, "there is nothing to do before they are"
    assert gate.on_barrier(2, barrier(1), 2.0) == (alignment.Block(2),)
    assert gate.on_barrier(1, barrier(1), 3.0) == (
        alignment.Block(1),
        alignment.TakeSnapshot(barrier(1), 2000.0, passed=(1, 2)),
        alignment.Unblock((1, 2)),
        alignment.InFlightComplete(CheckpointId(1), 2000.0),
    )


def test_where_all_channels_keep_order_the_barrier_goes_on_overtaking_below() -> None:
    gate = alignment.BarrierAlignment(2, alignment.AlignmentMode.ALIGNED, keeping_order=[0, 1])
    gate.on_barrier(0, barrier(1), 1.0)
    assert gate.on_barrier(1, barrier(1), 2.0) == (
        alignment.TakeSnapshot(barrier(1), 1000.0),
        alignment.Unblock((0,)),
    )


# --- the coordinator's part ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", decisions.CheckpointKind)
def test_nothing_overtakes_into_a_savepoint_nor_for_a_while_before_the_job_ends(
    kind: decisions.CheckpointKind,
) -> None:
    """The last one waits for all rows, and no longer than to the next checkpoint."""
    settings = CheckpointSettings(interval_s=3.0, overtakes_after_s=0.5)
    waits_for_all = kind.is_savepoint or kind.ends_input
    expected = None if waits_for_all else 3.0 if kind.ends_job else 0.5
    assert settings.overtakes_after(kind) == expected
    assert CheckpointSettings(interval_s=3.0).overtakes_after(kind) is None


@pytest.mark.parametrize(
    ("interval_s", "after_s", "expected"),
    [(None, 0.0, 5.0), (60.0, 0.0, 5.0), (4.0, 0.0, 4.0), (4.0, 7.0, 7.0)],
)
def test_the_last_barrier_overtakes_before_its_checkpoint_is_late(
    interval_s: float | None, after_s: float, expected: float
) -> None:
    settings = CheckpointSettings(interval_s, timeout_s=10.0, overtakes_after_s=after_s)
    assert settings.overtakes_after(decisions.CheckpointKind.FINAL) == expected


@pytest.mark.parametrize("kind", [decisions.CheckpointKind.STOP, decisions.CheckpointKind.FINAL])
def test_a_job_does_not_end_while_rows_are_in_flight(kind: decisions.CheckpointKind) -> None:
    job = coordination.Coordination(CheckpointSettings(interval_s=60.0, overtakes_after_s=0.0))
    if kind is decisions.CheckpointKind.STOP:
        job.coordinator.request(kind, job.now_s)
    else:
        for source in coordination.SOURCES:
            job.coordinator.on_source_end(source, job.now_s)
    row = InFlight("sink", True, StateHandle("in", "in", 1, ""))
    held_up = SubtaskSnapshot(coordination.SINKS[0], in_flight=(row,))
    job.coordinator.on_ack(coordination.ATTEMPT, CheckpointId(1), held_up, job.now_s)
    (append,) = coordination.of_type(decisions.AppendDecision, job.ack_all(1))
    assert not append.completed.final
    (trigger,) = coordination.of_type(decisions.Barrier, job.logged(1))
    assert (trigger.checkpoint, trigger.kind, trigger.overtakes_after_s) == (2, kind, 60.0)
    assert coordination.of_type(decisions.FinishJob, job.committed(1)) == []
    (append,) = coordination.of_type(decisions.AppendDecision, job.ack_all(2))
    assert append.completed.final
    job.logged(2)
    assert coordination.of_type(decisions.FinishJob, job.committed(2)) == [
        decisions.FinishJob(CheckpointId(2))
    ]


def test_checkpoints_that_may_overtake_are_taken_one_at_a_time() -> None:
    assert CheckpointSettings(1.0, max_concurrent=3, overtakes_after_s=0.0).concurrent == 1
