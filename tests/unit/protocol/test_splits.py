"""Splits that appear: decided before they are read, and whom they are given to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocol.checkpoints.coordination import completed, private

from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.checkpoints.snapshots import committables_of, retain_ledger_from
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log.rules import LogEntry, LogView, apply, next_claim, next_decision
from onceflow.core.protocol.splits import (
    AwaitedSplits,
    Split,
    SplitOffers,
    SplitState,
    describe_moved,
    merge_discovered,
    with_lists,
)


def split(name: str) -> Split:
    return Split(name, b"0")


def n(number: int) -> CheckpointId:
    return CheckpointId(number)


# The decision at a start


def _restored() -> snapshots.CompletedCheckpoint:
    """Two subtasks of a source with a sink in its chain, and state elsewhere."""
    chains = tuple(
        snapshots.SubtaskSnapshot(
            SubtaskRef("records", index),
            (
                snapshots.OperatorSnapshot(
                    "records", lists={"splits": (b"%d" % index,), "other": (b"x",)}
                ),
                snapshots.OperatorSnapshot(
                    "ledger",
                    committables=(Committable(TransactionId("job.ledger", 1, 2, index)),),
                ),
            ),
        )
        for index in range(2)
    )
    base = completed(3, private("chk-3/a1/state"), attempt=1)
    return snapshots.CompletedCheckpoint(
        checkpoint=base.checkpoint,
        attempt=base.attempt,
        parallelism=2,
        max_parallelism=128,
        snapshots=(*base.snapshots, *chains),
        triggered_at_ms=1,
        completed_at_ms=2,
        final=True,
    )


def _lists(checkpoint: snapshots.CompletedCheckpoint, uid: str) -> list[bytes]:
    return [e for _, operator in checkpoint.operator(uid) for e in operator.lists.get("splits", ())]


def test_decision_with_new_splits_changes_nothing_else_of_what_is_restored() -> None:
    restored = _restored()
    grown = with_lists(
        restored,
        "splits",
        {"records": (b"0", b"1", b"2"), "more": (b"9",)},
        attempt=AttemptId(2),
        now_ms=77,
    )
    assert _lists(grown, "records") == [b"0", b"1", b"2"]
    assert _lists(grown, "more") == [b"9"]
    assert (grown.checkpoint, grown.attempt, grown.final) == (4, 2, False)
    assert committables_of(grown) == committables_of(restored)
    assert snapshots.handles_of(grown.snapshots) == snapshots.handles_of(restored.snapshots)
    assert retain_ledger_from([grown]) == retain_ledger_from([restored]) == 2
    assert (grown.parallelism, grown.max_parallelism) == (2, 128)
    assert [operator.lists["other"] for _, operator in grown.operator("records")] == [(b"x",)] * 2
    assert len({s.subtask for s in grown.snapshots}) == len(grown.snapshots)


def test_decision_with_new_splits_is_one_that_the_log_takes_and_the_next_barrier_follows() -> None:
    claim = next_claim(LogView(), "one")
    view = apply(LogView(), LogEntry(claim, "a"))
    view = apply(view, LogEntry(next_decision(view, _restored()), "b"))
    view = apply(view, LogEntry(next_claim(view, "two"), "c"))
    grown = with_lists(
        view.completed[-1], "splits", {"more": (b"9",)}, attempt=view.attempt, now_ms=77
    )
    view = apply(view, LogEntry(next_decision(view, grown), "d"))
    assert [kept.checkpoint for kept in view.completed] == [3, 4]
    assert view.next_checkpoint == 5


# Whom a split is given to


@given(
    st.sets(st.integers(0, 30).map(str)),
    st.lists(st.sets(st.integers(0, 60).map(str)), max_size=5),
    st.integers(1, 5),
)
def test_each_split_is_offered_once_and_never_one_that_is_restored(
    restored: set[str], found: list[set[str]], parallelism: int
) -> None:
    offers = SplitOffers(restored, parallelism)
    given_out = [
        (subtask, one.id)
        for names in found
        for subtask, splits in offers.offer([split(name) for name in names]).items()
        for one in splits
    ]
    names = [name for _, name in given_out]
    assert len(set(names)) == len(names)
    assert set(names) == set().union(*found) - restored
    assert all(0 <= subtask < parallelism for subtask, _ in given_out)


def test_new_splits_go_where_the_fewest_are() -> None:
    offers = SplitOffers(["p-0", "p-1", "p-2"], 2)
    assert offers.offer([split("p-4"), split("p-3"), split("p-0")]) == {
        1: (split("p-3"),),
        0: (split("p-4"),),
    }


# What the engine keeps about a split


@given(
    known=st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers()),
    discovered=st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=2)),
)
def test_every_known_split_that_is_still_there_keeps_its_event_time_wherever_it_stands(
    known: dict[str, int | None], discovered: dict[str, bytes]
) -> None:
    states = [SplitState(Split(name, b"0"), at_ms) for name, at_ms in known.items()]
    now = merge_discovered(states, [Split(name, at) for name, at in discovered.items()])
    assert {state.split.id: state.split.position for state in now} == discovered
    assert [state.event_time_ms for state in now] == [known.get(name) for name in discovered]


def test_splits_that_a_source_makes_anew_have_not_moved() -> None:
    known = [Split("p-1", b"7"), Split("p-0", b"5")]
    assert describe_moved(known, [Split("p-0", b"5"), Split("p-2", b"0"), Split("p-1", b"7")]) == []


def test_known_split_that_is_elsewhere_or_gone_is_described_with_both_positions() -> None:
    known = [Split("p-1", b"7"), Split("p-0", b"5")]
    assert describe_moved(known, [Split("p-0", b"2")]) == [
        "split p-0 is at b'2' instead of b'5'",
        "split p-1 is missing",
    ]


# When a split is read


def test_split_is_read_when_a_decision_holds_it_and_once() -> None:
    awaited = AwaitedSplits()
    assert awaited.snapshot(n(1)) == ()
    awaited.add_offer([split("p-1")])
    assert awaited.take_decided(n(1)) == (), "its snapshot came before the offer"
    assert awaited.snapshot(n(2)) == (split("p-1"),)
    awaited.add_offer([split("p-2")])
    assert awaited.snapshot(n(3)) == (split("p-1"), split("p-2"))
    assert awaited.take_decided(n(2)) == (split("p-1"),)
    assert awaited.snapshot(n(4)) == (split("p-2"),), "the reader's snapshot holds the other"
    assert awaited.take_decided(n(3)) == (split("p-2"),)
    assert awaited.take_decided(n(4)) == ()
    assert awaited.snapshot(n(5)) == ()


def test_split_whose_checkpoint_is_aborted_waits_for_the_next_one() -> None:
    awaited = AwaitedSplits()
    awaited.add_offer([split("p-1")])
    awaited.snapshot(n(1))
    awaited.drop_snapshot(n(1))
    assert awaited.take_decided(n(1)) == ()
    assert awaited.snapshot(n(2)) == (split("p-1"),)
    assert awaited.take_decided(n(2)) == (split("p-1"),)
