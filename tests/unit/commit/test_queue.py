"""The commit queue of one sink subtask: S1-S4, S6, S8, S11, S18-S21 of Flink's tests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.core.commit.queue import (
    CommitQueue,
    CommitRetryPolicy,
    Done,
    RetryAt,
    StepFailed,
    WaitUntil,
)
from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId

POLICY = CommitRetryPolicy(initial_delay_s=1.0, multiplier=2.0, max_delay_s=5.0, deadline_s=20.0)


def transaction(checkpoint: int, attempt: int = 1, sequence: int = 0) -> committables.Committable:
    return committables.Committable(TransactionId("sink", attempt, checkpoint, 0, sequence), rows=7)


def queue_of(*checkpoints: int) -> CommitQueue:
    queue = CommitQueue(POLICY)
    for checkpoint in checkpoints:
        queue.pre_committed(CheckpointId(checkpoint), [transaction(checkpoint)])
    return queue


def drain(queue: CommitQueue) -> list[int]:
    """Commit whatever is due; return the checkpoints, in the order committed."""
    committed: list[int] = []
    while isinstance(head := queue.next_commit(0.0), committables.Committable):
        assert queue.outcome(head, committables.Committed(), 0.0) == Done(already=False)
        committed.append(head.transaction.checkpoint)
    assert head is None
    return committed


def test_nothing_is_committed_before_a_decision() -> None:
    assert queue_of(1, 2).next_commit(1e9) is None


def test_completion_commits_everything_up_to_it_and_nothing_after() -> None:
    """S1: three elements, snapshots 1, 2, 3; complete(2) leaves 3 pending."""
    queue = queue_of(1, 2, 3)
    queue.note_decision(CheckpointId(2))
    assert drain(queue) == [1, 2]
    assert queue.pending_through(CheckpointId(9)) == (transaction(3),)


def test_late_completion_of_an_older_checkpoint_changes_nothing() -> None:
    """S2: complete(3), then complete(2)."""
    queue = queue_of(1, 2, 3)
    queue.note_decision(CheckpointId(3))
    assert drain(queue) == [1, 2, 3]
    queue.note_decision(CheckpointId(2))
    assert drain(queue) == []
    assert queue.committed_through == 3


@pytest.mark.parametrize(
    ("completions", "commits"),
    [([1], [1]), ([2], [1, 2]), ([1, 2], [1, 2]), ([2, 1], [1, 2]), ([1, 1], [1])],
)
def test_two_prepared_checkpoints_complete_in_any_order(
    completions: list[int], commits: list[int]
) -> None:
    """S20, S21: first, second, both, both out of order, one of them twice."""
    queue = queue_of(1, 2)
    committed: list[int] = []
    for checkpoint in completions:
        queue.note_decision(CheckpointId(checkpoint))
        committed += drain(queue)
    assert committed == commits
    assert queue.committed_through == max(completions)


def test_next_checkpoint_is_not_begun_before_the_last_is_whole() -> None:
    """S11: the head stays the head until its outcome is success."""
    queue = queue_of(1, 2)
    queue.note_decision(CheckpointId(2))
    assert queue.next_commit(0.0) == transaction(1)
    queue.outcome(transaction(1), committables.RetryLater("restarting"), 0.0)
    assert queue.next_commit(0.5) == WaitUntil(1.0)
    assert queue.next_commit(1.0) == transaction(1)
    with pytest.raises(InvariantViolation, match="was not to be committed"):
        queue.outcome(transaction(2), committables.Committed(), 1.0)


def test_aborted_checkpoints_are_decided_by_the_next_completed_one() -> None:
    """I9: 1 and 2 were aborted; their transactions are listed with 3 and committed by it."""
    queue = queue_of(1, 2, 3)
    assert queue.pending_through(CheckpointId(3)) == tuple(map(transaction, (1, 2, 3)))
    queue.note_decision(CheckpointId(3))
    assert drain(queue) == [1, 2, 3]


def test_ack_lists_what_is_decided_and_not_known_to_be_committed() -> None:
    """S18: a crash between complete(1) and its commit must leave 1 in the record of 2."""
    queue = queue_of(1)
    queue.note_decision(CheckpointId(1))
    assert queue.next_commit(0.0) == transaction(1)
    queue.pre_committed(CheckpointId(2), [transaction(2)])
    assert queue.pending_through(CheckpointId(2)) == (transaction(1), transaction(2))
    queue.outcome(transaction(1), committables.Committed(), 0.0)
    assert queue.pending_through(CheckpointId(2)) == (transaction(2),)


def test_ack_lists_nothing_of_later_checkpoints() -> None:
    assert queue_of(1, 2).pending_through(CheckpointId(1)) == (transaction(1),)


def test_checkpoint_without_rows_has_nothing_to_commit() -> None:
    """S19: empty checkpoints are committed as soon as they are decided."""
    queue = CommitQueue(POLICY)
    queue.pre_committed(CheckpointId(1), [])
    queue.pre_committed(CheckpointId(2), [])
    assert queue.pending_through(CheckpointId(2)) == ()
    queue.note_decision(CheckpointId(2))
    assert queue.next_commit(0.0) is None
    assert queue.committed_through == 2


def test_committed_through_names_decided_checkpoints_only() -> None:
    """1 aborted, 2 decided, 3 aborted, 5 decided; 4's transaction is left."""
    queue = queue_of(2, 4)
    queue.note_decision(CheckpointId(2))
    queue.note_decision(CheckpointId(5))
    assert queue.committed_through == 0
    queue.outcome(transaction(2), committables.Committed(), 0.0)
    assert queue.committed_through == 2
    queue.outcome(transaction(4), committables.Committed(), 0.0)
    assert queue.committed_through == 5


def test_commit_that_landed_but_was_reported_unknown_is_not_applied_twice() -> None:
    """The same transaction is asked again, and the target proves that it is committed."""
    queue = queue_of(1)
    queue.note_decision(CheckpointId(1))
    step = queue.outcome(transaction(1), committables.Unknown("connection lost"), 0.0)
    assert step == RetryAt(1.0, "connection lost", tries=1)
    assert queue.committed_through == 0
    assert queue.next_commit(1.0) == transaction(1)
    step = queue.outcome(transaction(1), committables.AlreadyCommitted(), 1.0)
    assert step == Done(already=True)
    assert queue.committed_through == 1


def test_tries_are_spaced_further_and_further_up_to_a_bound() -> None:
    """S8, with backoff: never a tight loop."""
    policy = CommitRetryPolicy(initial_delay_s=1.0, max_delay_s=5.0, deadline_s=1e6)
    queue = CommitQueue(policy)
    queue.pre_committed(CheckpointId(1), [transaction(1)])
    queue.note_decision(CheckpointId(1))
    now_s = 100.0
    waits: list[float] = []
    for tries in range(1, 200):
        step = queue.outcome(transaction(1), committables.RetryLater("busy"), now_s)
        assert isinstance(step, RetryAt)
        assert step.tries == tries
        waits.append(step.at_s - now_s)
        now_s = step.at_s
    assert waits[:5] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert max(waits) == 5.0


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [(committables.RetryLater("busy"), "failed"), (committables.Unknown("gone"), "unknown")],
)
def test_deadline_ends_the_tries_and_keeps_the_transaction(
    outcome: committables.CommitOutcome, kind: str
) -> None:
    """S4, S8: the error names the transaction; nothing is dropped from the next ack."""
    queue = queue_of(1)
    queue.note_decision(CheckpointId(1))
    now_s = 0.0
    while isinstance(step := queue.outcome(transaction(1), outcome, now_s), RetryAt):
        now_s = step.at_s
    assert isinstance(step, StepFailed)
    assert step.kind == kind
    assert "sink/1/1/0/0" in step.message
    assert now_s <= 20.0
    assert queue.pending_through(CheckpointId(1)) == (transaction(1),)
    assert queue.committed_through == 0


@pytest.mark.parametrize("began_s", [0.0, 1e5])
def test_a_commit_is_tried_until_its_deadline_whatever_the_clock_shows(began_s: float) -> None:
    """The last try begins exactly at the deadline of 7 s. Giving up earlier would fail the job."""
    queue = CommitQueue(CommitRetryPolicy(initial_delay_s=1.0, max_delay_s=5.0, deadline_s=7.0))
    queue.pre_committed(CheckpointId(1), [transaction(1)])
    queue.note_decision(CheckpointId(1))
    for after_s, next_s in ((0.0, 1.0), (1.0, 3.0), (3.0, 7.0)):
        step = queue.outcome(transaction(1), committables.RetryLater("busy"), began_s + after_s)
        assert isinstance(step, RetryAt)
        assert step.at_s == began_s + next_s
    assert isinstance(
        queue.outcome(transaction(1), committables.RetryLater("busy"), began_s + 7.0), StepFailed
    )


def test_a_subtask_is_behind_when_more_is_decided_than_the_commit_under_way() -> None:
    queue = queue_of(1, 2, 3)
    assert not queue.is_behind
    queue.note_decision(CheckpointId(1))
    assert not queue.is_behind, "only the commit under way"
    queue.note_decision(CheckpointId(2))
    assert queue.is_behind
    queue.outcome(transaction(1), committables.Committed(), 0.0)
    assert not queue.is_behind


def test_lost_transaction_is_given_up_at_once_and_never_counted_committed() -> None:
    queue = queue_of(1)
    queue.note_decision(CheckpointId(1))
    step = queue.outcome(transaction(1), committables.Lost("rolled back by hand"), 0.0)
    assert isinstance(step, StepFailed)
    assert step.kind == "lost"
    assert "7 rows" in step.message
    assert queue.committed_through == 0
    assert queue.pending_through(CheckpointId(1)) == (transaction(1),)


def test_tries_of_one_transaction_do_not_count_for_the_next() -> None:
    queue = queue_of(1, 2)
    queue.note_decision(CheckpointId(2))
    for now_s in (0.0, 1.0, 3.0):
        queue.outcome(transaction(1), committables.RetryLater("busy"), now_s)
    queue.outcome(transaction(1), committables.Committed(), 7.0)
    assert queue.next_commit(7.0) == transaction(2)
    assert queue.outcome(transaction(2), committables.RetryLater("busy"), 7.0) == RetryAt(
        8.0, "busy", tries=1
    )


def test_a_transaction_keeps_the_name_of_a_checkpoint_that_was_given_up_before_its_barrier() -> (
    None
):
    """XA names a transaction when it begins; 3 and 4 were given up, so 5 takes what began for 3."""
    queue = queue_of(2)
    queue.pre_committed(CheckpointId(5), [transaction(3)])
    assert queue.pending_through(CheckpointId(5)) == (transaction(2), transaction(3))
    queue.note_decision(CheckpointId(2))
    assert queue.next_commit(0.0) == transaction(2)
    queue.outcome(transaction(2), committables.Committed(), 0.0)
    assert queue.next_commit(0.0) is None
    queue.note_decision(CheckpointId(5))
    assert queue.next_commit(0.0) == transaction(3)
    assert queue.committed_through == CheckpointId(2)
    queue.outcome(transaction(3), committables.Committed(), 0.0)
    assert queue.committed_through == CheckpointId(5)
    with pytest.raises(InvariantViolation, match="after 5, up to"):
        queue.pre_committed(CheckpointId(7), [transaction(5)])


def test_several_committables_of_one_pre_commit_are_committed_in_their_order() -> None:
    """Listed together, committed one by one: the checkpoint is committed when the last one is."""
    queue, several = CommitQueue(POLICY), [transaction(2, sequence=n) for n in range(3)]
    queue.pre_committed(CheckpointId(2), several)
    queue.pre_committed(CheckpointId(3), [transaction(3)])
    assert queue.pending_through(CheckpointId(2)) == tuple(several)
    queue.note_decision(CheckpointId(2))
    for one in several:
        assert queue.committed_through == 0
        assert queue.next_commit(0.0) == one
        queue.outcome(one, committables.Committed(), 0.0)
    assert queue.committed_through == 2
    assert queue.pending_through(CheckpointId(3)) == (transaction(3),)
    for wrong in (several[:1] * 2, several[::-1]):
        named = [transaction(4, sequence=one.transaction.sequence) for one in wrong]
        with pytest.raises(InvariantViolation, match="names of their own"):
            queue.pre_committed(CheckpointId(4), named)


def test_pre_commits_out_of_order_or_under_another_name_are_a_bug() -> None:
    queue = queue_of(2)
    with pytest.raises(InvariantViolation, match="pre-committed 2"):
        queue.pre_committed(CheckpointId(2), [transaction(2)])
    with pytest.raises(InvariantViolation, match="up to 3"):
        queue.pre_committed(CheckpointId(3), [transaction(4)])
    queue.note_decision(CheckpointId(9))
    with pytest.raises(InvariantViolation, match="after 9"):
        queue.pre_committed(CheckpointId(9), [])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_decided_transaction_is_committed_once_in_order_whatever_comes(
    data: st.DataObject,
) -> None:
    """Pre-commits, completions (late, doubled, out of order) and refusals in any order."""
    queue = CommitQueue(CommitRetryPolicy(deadline_s=1e9))
    prepared: list[int] = []
    committed: list[int] = []
    decided = 0
    number = 0
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["prepare", "complete", "commit", "refuse"])):
            case "prepare":
                number = max(number, decided) + 1
                rows = data.draw(st.booleans())
                queue.pre_committed(CheckpointId(number), [transaction(number)] if rows else [])
                prepared += [number] if rows else []
            case "complete" if number:
                checkpoint = data.draw(st.integers(1, number))
                queue.note_decision(CheckpointId(checkpoint))
                decided = max(decided, checkpoint)
            case kind:
                now_s += 10.0
                head = queue.next_commit(now_s)
                if isinstance(head, committables.Committable):
                    assert head.transaction.checkpoint <= decided
                    if kind == "commit":
                        queue.outcome(head, committables.Committed(), now_s)
                        committed.append(head.transaction.checkpoint)
                    elif kind == "refuse":
                        queue.outcome(head, committables.Unknown("?"), now_s)
        left = [n for n in prepared if n not in committed]
        listed = [c.transaction.checkpoint for c in queue.pending_through(CheckpointId(10**9))]
        assert listed == left
        assert queue.committed_through <= decided
        assert all(n > queue.committed_through for n in left)
    while isinstance(head := queue.next_commit(now_s := now_s + 10.0), committables.Committable):
        queue.outcome(head, committables.Committed(), now_s)
        committed.append(head.transaction.checkpoint)
    assert committed == [n for n in prepared if n <= decided]
    assert queue.committed_through == decided
