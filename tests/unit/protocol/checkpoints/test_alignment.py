"""Barrier alignment: a snapshot holds exactly the records before its barrier."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol.checkpoints import alignment
from onceflow.core.protocol.checkpoints.decisions import Barrier, CheckpointKind
from onceflow.core.protocol.ids import CheckpointId

ALIGNED, AT_LEAST_ONCE = alignment.AlignmentMode.ALIGNED, alignment.AlignmentMode.AT_LEAST_ONCE


def barrier(number: int) -> Barrier:
    return Barrier(CheckpointId(number), CheckpointKind.PERIODIC, triggered_at_ms=0)


def taken(actions: tuple[alignment.AlignmentAction, ...]) -> list[int]:
    return [a.barrier.checkpoint for a in actions if isinstance(a, alignment.TakeSnapshot)]


def aborted(actions: tuple[alignment.AlignmentAction, ...]) -> list[int]:
    return [a.checkpoint for a in actions if isinstance(a, alignment.AlignmentAborted)]


def test_channel_that_brought_its_barrier_waits_for_the_others() -> None:
    gate = alignment.BarrierAlignment(3, ALIGNED)
    assert gate.on_barrier(1, barrier(1), 0.0) == (alignment.Block(1),)
    assert gate.on_barrier(0, barrier(1), 0.0) == (alignment.Block(0),)
    assert [gate.is_blocked(c) for c in range(3)] == [True, True, False]
    snapshot, unblock = gate.on_barrier(2, barrier(1), 0.0)
    assert isinstance(snapshot, alignment.TakeSnapshot)
    assert unblock == alignment.Unblock((0, 1))
    assert not any(gate.is_blocked(c) for c in range(3))


def test_one_channel_never_waits() -> None:
    (action,) = alignment.BarrierAlignment(1, ALIGNED).on_barrier(0, barrier(1), 0.0)
    assert isinstance(action, alignment.TakeSnapshot)


def test_alignment_takes_from_the_first_barrier_to_the_last() -> None:
    gate = alignment.BarrierAlignment(2, ALIGNED)
    gate.on_barrier(0, barrier(1), 1.25)
    snapshot = gate.on_barrier(1, barrier(1), 1.75)[0]
    assert isinstance(snapshot, alignment.TakeSnapshot)
    assert snapshot.alignment_ms == 500.0


@pytest.mark.parametrize("kind", CheckpointKind)
def test_nothing_may_be_emitted_once_a_savepoint_with_which_the_job_stops_is_taken(
    kind: CheckpointKind,
) -> None:
    gate = alignment.BarrierAlignment(2, ALIGNED)
    last = Barrier(CheckpointId(1), kind, triggered_at_ms=0)
    gate.on_barrier(0, last, 0.0)
    assert gate.may_emit, "what is emitted before the snapshot is in it"
    gate.on_barrier(1, last, 0.0)
    stops = {CheckpointKind.SAVEPOINT_STOP, CheckpointKind.SAVEPOINT_DRAIN}
    assert gate.may_emit == (kind not in stops)


def test_abort_releases_the_waiting_channels_and_later_barriers_are_ignored() -> None:
    gate = alignment.BarrierAlignment(2, ALIGNED)
    gate.on_barrier(0, barrier(1), 0.0)
    assert gate.on_abort(CheckpointId(1)) == (alignment.Unblock((0,)),)
    assert gate.on_barrier(1, barrier(1), 0.0) == ()
    assert not gate.is_blocked(1)
    gate.on_barrier(0, barrier(2), 0.0)
    assert taken(gate.on_barrier(1, barrier(2), 0.0)) == [2]


def test_abort_before_the_first_barrier_keeps_it_from_blocking() -> None:
    gate = alignment.BarrierAlignment(2, ALIGNED)
    assert gate.on_abort(CheckpointId(1)) == ()
    assert gate.on_barrier(0, barrier(1), 0.0) == ()
    assert not gate.is_blocked(0)


def test_abort_of_another_checkpoint_leaves_the_alignment() -> None:
    gate = alignment.BarrierAlignment(2, ALIGNED)
    gate.on_barrier(0, barrier(2), 0.0)
    assert gate.on_abort(CheckpointId(1)) == ()
    assert gate.on_abort(CheckpointId(3)) == ()
    assert taken(gate.on_barrier(1, barrier(2), 0.0)) == [2]


def test_abort_after_the_snapshot_changes_nothing() -> None:
    gate = alignment.BarrierAlignment(1, ALIGNED)
    gate.on_barrier(0, barrier(1), 0.0)
    assert gate.on_abort(CheckpointId(1)) == ()


def test_channel_that_skipped_a_barrier_gives_the_older_checkpoint_up() -> None:
    """Its source never saw the trigger; waiting for it would block the others for ever."""
    gate = alignment.BarrierAlignment(2, ALIGNED)
    gate.on_barrier(0, barrier(1), 0.0)
    actions = gate.on_barrier(1, barrier(2), 0.0)
    assert actions[0] == alignment.Unblock((0,))
    assert aborted(actions) == [1]
    assert actions[-1] == alignment.Block(1)
    assert taken(gate.on_barrier(0, barrier(2), 0.0)) == [2]


def test_barrier_that_another_channel_has_skipped_already_is_given_up_at_once() -> None:
    """Were it to wait, both channels would be blocked, each by the other's checkpoint."""
    gate = alignment.BarrierAlignment(2, ALIGNED)
    gate.on_barrier(0, barrier(2), 0.0)
    assert aborted(gate.on_barrier(1, barrier(1), 0.0)) == [1]
    assert not gate.is_blocked(1)
    assert taken(gate.on_barrier(1, barrier(2), 0.0)) == [2]


def test_aborted_barrier_also_shows_that_an_older_one_was_skipped() -> None:
    gate = alignment.BarrierAlignment(2, ALIGNED)
    gate.on_barrier(0, barrier(1), 0.0)
    gate.on_abort(CheckpointId(2))
    assert aborted(gate.on_barrier(1, barrier(2), 0.0)) == [1]
    assert not gate.is_blocked(0)
    assert not gate.is_blocked(1)


def test_finished_input_is_still_waited_for() -> None:
    """S9, S10: a source at its end goes on emitting barriers; end of input completes nothing."""
    gate = alignment.BarrierAlignment(2, ALIGNED)
    gate.on_end_of_input(0)
    assert not gate.all_ended
    assert taken(gate.on_barrier(1, barrier(1), 0.0)) == []
    assert taken(gate.on_barrier(0, barrier(1), 0.0)) == [1]
    gate.on_end_of_input(1)
    gate.on_end_of_input(1)
    assert gate.all_ended


def test_at_least_once_blocks_nothing_and_keeps_several_checkpoints_apart() -> None:
    gate = alignment.BarrierAlignment(2, AT_LEAST_ONCE)
    assert gate.on_barrier(0, barrier(1), 0.0) == ()
    assert gate.on_barrier(0, barrier(2), 0.0) == ()
    assert not gate.is_blocked(0)
    assert gate.aligning == (1, 2)
    (first,) = gate.on_barrier(1, barrier(1), 1.0)
    assert isinstance(first, alignment.TakeSnapshot)
    assert first.alignment_ms == 1000.0
    assert taken(gate.on_barrier(1, barrier(2), 1.0)) == [2]


def test_at_least_once_abort_of_one_leaves_the_other() -> None:
    gate = alignment.BarrierAlignment(2, AT_LEAST_ONCE)
    gate.on_barrier(0, barrier(1), 0.0)
    gate.on_barrier(0, barrier(2), 0.0)
    assert gate.on_abort(CheckpointId(1)) == ()
    assert taken(gate.on_barrier(1, barrier(1), 0.0)) == []
    assert taken(gate.on_barrier(1, barrier(2), 0.0)) == [2]


def test_at_least_once_gives_up_what_a_channel_skipped() -> None:
    gate = alignment.BarrierAlignment(2, AT_LEAST_ONCE)
    gate.on_barrier(0, barrier(1), 0.0)
    gate.on_barrier(0, barrier(2), 0.0)
    actions = gate.on_barrier(1, barrier(2), 0.0)
    assert aborted(actions) == [1]
    assert taken(actions) == [2]


@pytest.mark.parametrize("again", [1, 2])
def test_channel_that_is_not_fifo_is_a_bug(again: int) -> None:
    gate = alignment.BarrierAlignment(2, AT_LEAST_ONCE)
    gate.on_barrier(0, barrier(2), 0.0)
    with pytest.raises(InvariantViolation, match="after 2"):
        gate.on_barrier(0, barrier(again), 0.0)


def test_reading_a_blocked_channel_is_a_bug() -> None:
    gate = alignment.BarrierAlignment(2, ALIGNED)
    gate.on_barrier(0, barrier(1), 0.0)
    with pytest.raises(InvariantViolation, match="blocked"):
        gate.on_barrier(0, barrier(2), 0.0)
    with pytest.raises(InvariantViolation, match="blocked"):
        gate.on_end_of_input(0)


def test_subtask_without_input_has_no_alignment() -> None:
    with pytest.raises(ValueError, match="channels=0"):
        alignment.BarrierAlignment(0, ALIGNED)


@dataclass
class _Feed:
    """Channels of records and barriers, some barriers skipped, read in a drawn order."""

    channels: list[list[int | Barrier]]
    before: dict[int, set[tuple[int, int]]] = field(default_factory=dict[int, set[tuple[int, int]]])
    complete: set[int] = field(default_factory=set[int])


@st.composite
def feeds(draw: st.DrawFn) -> _Feed:
    channels: list[list[int | Barrier]] = []
    checkpoints = draw(st.integers(1, 6))
    counts = dict.fromkeys(range(1, checkpoints + 1), 0)
    width = draw(st.integers(1, 4))
    for _ in range(width):
        items: list[int | Barrier] = []
        for number in range(1, checkpoints + 1):
            items += range(draw(st.integers(0, 2)))
            if draw(st.integers(0, 5)) > 0:
                items.append(barrier(number))
                counts[number] += 1
        channels.append([*items, *range(draw(st.integers(0, 2)))])
    feed = _Feed(channels)
    feed.complete = {number for number, count in counts.items() if count == width}
    for number in feed.complete:
        feed.before[number] = {
            (channel, at)
            for channel, items in enumerate(channels)
            for at in range(items.index(barrier(number)))
            if not isinstance(items[at], Barrier)
        }
    return feed


@settings(max_examples=50, deadline=None)
@given(feed=feeds(), data=st.data(), mode=st.sampled_from(alignment.AlignmentMode))
def test_snapshot_holds_every_record_before_its_barrier_and_aligned_no_other(
    feed: _Feed, data: st.DataObject, mode: alignment.AlignmentMode
) -> None:
    """Any interleaving, any skipped barriers, any aborts; and nothing blocks for ever."""
    gate = alignment.BarrierAlignment(len(feed.channels), mode)
    position = [0] * len(feed.channels)
    seen: set[tuple[int, int]] = set()
    snapshots: dict[int, set[tuple[int, int]]] = {}
    dead: set[int] = set()

    def note(actions: tuple[alignment.AlignmentAction, ...]) -> None:
        dead.update(aborted(actions))
        for number in taken(actions):
            assert number > max(snapshots, default=0)
            snapshots[number] = set(seen)

    while True:
        unread = [c for c, items in enumerate(feed.channels) if position[c] < len(items)]
        readable = [c for c in unread if not gate.is_blocked(c)]
        if not readable:
            if not unread:
                break
            # Somebody waits for a barrier that never comes: only the coordinator can tell.
            assert mode is alignment.AlignmentMode.ALIGNED
            stuck = gate.aligning[0]
            assert stuck not in feed.complete
            dead.add(stuck)
            note(gate.on_abort(stuck))
            continue
        if data.draw(st.integers(0, 19)) == 0:
            unwanted = CheckpointId(data.draw(st.integers(1, 6)))
            if unwanted not in snapshots:
                dead.add(unwanted)
            note(gate.on_abort(unwanted))
            continue
        channel = data.draw(st.sampled_from(readable))
        item = feed.channels[channel][position[channel]]
        if isinstance(item, Barrier):
            note(gate.on_barrier(channel, item, 0.0))
        else:
            seen.add((channel, position[channel]))
        position[channel] += 1
    assert set(snapshots) == feed.complete - dead
    for number, held in snapshots.items():
        if mode is alignment.AlignmentMode.ALIGNED:
            assert held == feed.before[number]
        else:
            assert held >= feed.before[number]


# --- the barriers of a source ---------------------------------------------------------------------


def test_a_trigger_that_arrives_after_its_abort_revives_no_checkpoint() -> None:
    barriers = alignment.SourceBarriers()
    barriers.on_abort(CheckpointId(1))
    barriers.on_triggered(barrier(1), 0.0)
    assert barriers.next(0.0, clear=True) is None
    barriers.on_triggered(barrier(3), 0.0)
    # An abort of an older checkpoint changes nothing.
    barriers.on_abort(CheckpointId(2))
    barriers.on_triggered(barrier(3), 0.0)
    assert barriers.next(0.0, clear=True) == barrier(3)
    assert barriers.next(0.0, clear=True) is None


def test_a_barrier_waits_behind_rows_for_as_long_as_it_may() -> None:
    barriers = alignment.SourceBarriers()
    barriers.on_triggered(replace(barrier(1), overtakes_after_s=2.0), 10.0)
    assert barriers.overtakes_at_s == 12.0
    assert barriers.next(11.9, clear=False) is None
    assert barriers.next(12.0, clear=False) == replace(barrier(1), overtakes_after_s=0.0)
    barriers.on_triggered(replace(barrier(2), overtakes_after_s=2.0), 20.0)
    assert barriers.next(20.5, clear=True) == replace(barrier(2), overtakes_after_s=1.5)
    barriers.on_triggered(barrier(3), 30.0)
    assert barriers.overtakes_at_s is None
    assert barriers.next(99.0, clear=False) is None
    assert barriers.next(99.0, clear=True) == barrier(3)
