"""Which commit is begun before its decision, and when it is withdrawn."""

from __future__ import annotations

from onceflow.core.commit.queue import (
    HELD_MAX_S,
    Begin,
    CommitQueue,
    CommitRetryPolicy,
    EarlyCommits,
    WaitUntil,
    Withdraw,
)
from onceflow.core.protocol.committables import Committable, Committed
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId

FIRST, SECOND, THIRD = CheckpointId(1), CheckpointId(2), CheckpointId(3)


def committable_of(checkpoint: CheckpointId) -> Committable:
    return Committable(TransactionId("out", AttemptId(1), checkpoint, 0), rows=7)


ONE, TWO, THREE = map(committable_of, (FIRST, SECOND, THIRD))


def begun_at_zero() -> EarlyCommits:
    """Return one that has begun the commit of the first checkpoint, pre-committed at 0 s."""
    early = EarlyCommits(held_max_s=1.0)
    early.record_pre_commit(FIRST, 0.0)
    assert early.next_step(ONE, 0.0) == Begin(ONE)
    early.record_begin(ONE, is_begun=True)
    return early


def test_only_what_the_next_decision_commits_first_is_expected() -> None:
    queue = CommitQueue(CommitRetryPolicy())
    assert queue.first_undecided is None
    for committable in (ONE, TWO):
        queue.pre_committed(committable.checkpoint, [committable])
    assert queue.first_undecided == ONE
    queue.note_decision(FIRST)
    assert queue.first_undecided is None, "a decided one waits"
    queue.outcome(ONE, Committed(), 0.0)
    assert queue.first_undecided == TWO


def test_a_commit_is_begun_once_and_nothing_more_until_it_is_decided() -> None:
    early = begun_at_zero()
    assert early.next_step(ONE, 0.1) == WaitUntil(1.0)
    early.record_decision(FIRST, 0.2)
    assert early.next_step(None, 0.2) is None
    early.record_end()
    early.record_pre_commit(SECOND, 0.3)
    assert early.next_step(TWO, 0.3) == Begin(TWO)


def test_what_could_not_be_begun_is_not_tried_again() -> None:
    early = EarlyCommits(HELD_MAX_S)
    early.record_pre_commit(FIRST, 0.0)
    early.record_begin(ONE, is_begun=False)
    assert early.next_step(ONE, 0.1) is None


def test_what_is_begun_is_withdrawn_when_its_checkpoint_is_given_up_and_not_begun_again() -> None:
    early = begun_at_zero()
    early.record_abort(FIRST)
    assert early.next_step(ONE, 0.1) == Withdraw(ONE)
    early.record_end()
    assert early.next_step(ONE, 0.1) is None
    early.record_pre_commit(SECOND, 0.2)
    assert early.next_step(ONE, 0.2) is None, "it is still the first to be committed"
    early.record_decision(SECOND, 0.3)
    early.record_pre_commit(THIRD, 0.4)
    assert early.next_step(THREE, 0.4) == Begin(THREE)


def test_a_checkpoint_that_was_given_up_is_not_begun() -> None:
    early = EarlyCommits(HELD_MAX_S)
    early.record_pre_commit(FIRST, 0.0)
    early.record_abort(FIRST)
    assert early.next_step(ONE, 0.1) is None


def test_what_is_begun_is_withdrawn_when_the_decision_is_late() -> None:
    early = begun_at_zero()
    assert early.next_step(ONE, 0.999) == WaitUntil(1.0)
    assert early.next_step(ONE, 1.0) == Withdraw(ONE)


def test_a_later_pre_commit_does_not_lengthen_the_time_that_it_is_held() -> None:
    early = begun_at_zero()
    early.record_pre_commit(SECOND, 0.9)
    assert early.next_step(ONE, 1.0) == Withdraw(ONE)


def test_after_a_late_decision_nothing_is_begun_until_one_comes_in_time() -> None:
    early = begun_at_zero()
    early.record_end()
    early.record_decision(FIRST, 1.0)
    assert early.next_step(TWO, 1.0) == Begin(TWO), "at the last moment is in time"
    early.record_decision(FIRST, 1.5)
    early.record_pre_commit(SECOND, 2.0)
    assert early.next_step(TWO, 2.0) is None
    early.record_decision(SECOND, 2.1)
    early.record_pre_commit(THIRD, 3.0)
    assert early.next_step(THREE, 3.0) == Begin(THREE)


def test_a_decision_before_the_first_pre_commit_changes_nothing() -> None:
    early = EarlyCommits(HELD_MAX_S)
    early.record_decision(FIRST, 9.0)
    early.record_pre_commit(SECOND, 9.5)
    assert early.next_step(TWO, 9.5) == Begin(TWO)
