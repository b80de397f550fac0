"""One commit a checkpoint: every driver finds the same ones, whatever the last record was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.protocol.checkpoints.coordination import SINKS, Coordination, completed, of_type

from onceflow.core.commit.queue import CommitRetryPolicy, RetryAt, WaitUntil
from onceflow.core.commit.whole_checkpoints import (
    GlobalCommit,
    GlobalCommitQueue,
    GlobalRecoveryPlan,
    PreCommits,
    find_undecided,
    plan_global_recovery,
)
from onceflow.core.errors import ConfigError, InvariantViolation
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.protocol.checkpoints.decisions import AppendDecision, CheckpointKind, FinishJob
from onceflow.core.protocol.committables import (
    GATHERED_MAX,
    AlreadyCommitted,
    CommitInterval,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log.memory import Decided, LogMemory

SINK = "job.lake"
ATTEMPT = AttemptId(2)


def tx(checkpoint: int, subtask: int = 0, attempt: int = 1, sink_id: str = SINK) -> Committable:
    return Committable(TransactionId(sink_id, attempt, checkpoint, subtask), rows=5)


def decision(
    number: int, *listed: Committable, undelivered: tuple[int, ...] = ()
) -> snapshots.CompletedCheckpoint:
    operator = snapshots.OperatorSnapshot("lake", committables=listed)
    return replace(
        completed(number, attempt=1),
        snapshots=(snapshots.SubtaskSnapshot(SINKS[0], (operator,)),),
        undelivered=tuple(map(CheckpointId, undelivered)),
    )


def commit(number: int, *committables: Committable) -> GlobalCommit:
    return GlobalCommit(CheckpointId(number), committables)


def test_each_decision_is_one_commit_of_all_subtasks() -> None:
    """Rows that aborted checkpoints had prepared are in the next decision, but not listed twice."""
    queue = GlobalCommitQueue(SINK, CommitRetryPolicy(), CheckpointId(3))
    queue.add_decision(decision(5, tx(4), tx(5, 1), tx(5), tx(5, sink_id="job.other")), 0.0)
    queue.add_decision(decision(6, tx(4), tx(5), tx(5, 1), tx(6)), 0.0)
    queue.add_decision(decision(7), 0.0)
    first, second = commit(5, tx(4), tx(5), tx(5, 1)), commit(6, tx(6))
    assert queue.next_commit(0.0) == first
    queue.outcome(first, Committed(), 0.0)
    assert queue.committed_through == 5
    assert queue.next_commit(0.0) == second
    queue.outcome(second, AlreadyCommitted(), 0.0)
    assert queue.committed_through == 7
    assert queue.next_commit(0.0) is None


def gathering(checkpoints: int | None = None, seconds: float | None = None) -> GlobalCommitQueue:
    interval = CommitInterval(checkpoints, seconds)
    return GlobalCommitQueue(SINK, CommitRetryPolicy(), CheckpointId(3), interval)


def test_decisions_wait_for_others_and_are_committed_together() -> None:
    """Also one without rows counts; nothing of them is confirmed before all of them is."""
    queue = gathering(checkpoints=3)
    queue.add_decision(decision(4), 0.0)
    assert queue.committed_through == 4, "it waits for nothing"
    queue.add_decision(decision(5, tx(5)), 1.0)
    queue.add_decision(decision(6), 2.0)
    assert queue.next_commit(1e9) is None, "there is no bound of time"
    assert queue.committed_through == 4
    queue.add_decision(decision(8, tx(5), tx(7), tx(8)), 3.0)
    whole = commit(8, tx(5), tx(7), tx(8))
    assert queue.next_commit(3.0) == whole
    queue.add_decision(decision(9, tx(5), tx(7), tx(8), tx(9)), 4.0)
    assert queue.next_commit(4.0) == whole, "what is under way takes in no more"
    assert queue.committed_through == 4
    queue.outcome(whole, Committed(), 4.0)
    assert queue.committed_through == 8
    assert queue.next_commit(4.0) is None
    queue.add_decision(decision(10), 5.0)
    queue.add_decision(decision(11, tx(11)), 6.0)
    last = commit(11, tx(9), tx(11))
    assert queue.next_commit(6.0) == last
    queue.outcome(last, AlreadyCommitted(), 6.0)
    assert queue.committed_through == 11


def test_decisions_wait_until_the_first_has_waited_long_enough() -> None:
    queue = gathering(checkpoints=3, seconds=10.0)
    queue.add_decision(decision(4), 0.0)
    queue.add_decision(decision(5, tx(5)), 2.0)
    queue.add_decision(decision(6, tx(6)), 5.0)
    assert queue.next_commit(5.0) == WaitUntil(12.0)
    whole = commit(6, tx(5), tx(6))
    assert queue.next_commit(12.0) == whole
    queue.add_decision(decision(7, tx(7)), 13.0)
    retry = queue.outcome(whole, RetryLater("away"), 14.0)
    assert isinstance(retry, RetryAt)
    assert queue.next_commit(14.0) == WaitUntil(retry.at_s)
    assert queue.next_commit(retry.at_s) == whole
    queue.outcome(whole, Committed(), 15.0)
    assert queue.next_commit(15.0) == WaitUntil(23.0), "its own time, from its own decision"


def test_last_decision_of_a_job_waits_for_none() -> None:
    queue = gathering(seconds=3600.0)
    queue.add_decision(decision(4, tx(4)), 0.0)
    queue.add_decision(replace(decision(5), final=True), 1.0)
    assert queue.next_commit(1.0) == commit(4, tx(4))
    queue.outcome(commit(4, tx(4)), Committed(), 1.0)
    assert queue.committed_through == 5


def test_what_no_bound_of_checkpoints_ends_is_committed_before_decisions_get_too_long() -> None:
    queue = gathering(seconds=3600.0)
    for number in range(4, 4 + GATHERED_MAX):
        assert queue.next_commit(0.0) in (None, WaitUntil(3600.0))
        queue.add_decision(decision(number, tx(number)), 0.0)
    whole = queue.next_commit(0.0)
    assert isinstance(whole, GlobalCommit)
    assert len(whole.committables) == GATHERED_MAX


@pytest.mark.parametrize(
    ("checkpoints", "seconds", "why"),
    [
        (None, None, "needs a number of checkpoints, or seconds"),
        (0, None, "0 checkpoints per commit: give a number from 1 to 1000"),
        (1001, None, "1001 checkpoints per commit"),
        (None, 0.0, "0.0 seconds between commits"),
    ],
)
def test_interval_that_is_none_is_refused(
    checkpoints: int | None, seconds: float | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        CommitInterval(checkpoints, seconds)


def test_recovery_commits_all_that_was_gathering_at_once() -> None:
    last = decision(8, tx(4), tx(5), tx(6), tx(8), undelivered=(5, 6))
    plan = plan_global_recovery(
        last,
        [],
        sink_id=SINK,
        attempt=ATTEMPT,
        committed_through=CheckpointId(5),
        gathers=True,
    )
    assert plan.commit == (commit(8, tx(6), tx(8)),)
    nothing = plan_global_recovery(
        last,
        [],
        sink_id=SINK,
        attempt=ATTEMPT,
        committed_through=CheckpointId(8),
        gathers=True,
    )
    assert nothing == GlobalRecoveryPlan(), "a target that has all of it is not ahead"


def test_lost_files_name_the_checkpoint() -> None:
    queue = GlobalCommitQueue(SINK, CommitRetryPolicy(), CheckpointId(0))
    queue.add_decision(decision(1, tx(1), tx(1, 1)), 0.0)
    whole = commit(1, tx(1), tx(1, 1))
    assert queue.next_commit(0.0) == whole
    step = queue.outcome(whole, Lost("no such file"), 0.0)
    assert "checkpoint 1 of sink job.lake (10 rows) was decided, but is gone" in str(step)
    with pytest.raises(InvariantViolation, match="decision 1 of job.lake after 1"):
        queue.add_decision(decision(1), 0.0)


def test_subtask_lists_what_it_does_not_know_to_be_committed() -> None:
    waiting = PreCommits()
    waiting.pre_committed(CheckpointId(1), [tx(1)])
    waiting.pre_committed(CheckpointId(2), [])
    waiting.pre_committed(CheckpointId(3), [tx(3)])
    assert waiting.pending_through(CheckpointId(2)) == (tx(1),)
    assert waiting.pending_through(CheckpointId(3)) == (tx(1), tx(3))
    assert waiting.take_committed(CheckpointId(2)) == (tx(1),)
    assert waiting.take_committed(CheckpointId(1)) == ()
    assert waiting.pending_through(CheckpointId(3)) == (tx(3),)
    assert waiting.take_committed(CheckpointId(3)) == (tx(3),)
    with pytest.raises(InvariantViolation, match="pre-committed 3 after 3"):
        waiting.pre_committed(CheckpointId(3), [tx(3)])


def test_recovery_finds_the_commits_of_every_decision_that_may_be_undelivered() -> None:
    """Not one for all: an older driver may be committing the first of them at this moment."""
    last = decision(8, tx(4), tx(5), tx(6), tx(8), tx(8, 1), undelivered=(5, 6))
    plan = plan_global_recovery(
        last, [], sink_id=SINK, attempt=ATTEMPT, committed_through=CheckpointId(0)
    )
    assert plan.commit == (
        commit(5, tx(4), tx(5)),
        commit(6, tx(6)),
        commit(8, tx(8), tx(8, 1)),
    )
    later = plan_global_recovery(
        last, [], sink_id=SINK, attempt=ATTEMPT, committed_through=CheckpointId(6)
    )
    assert later.commit == (commit(8, tx(8), tx(8, 1)),)


def test_recovery_aborts_what_older_attempts_did_not_decide() -> None:
    memory = LogMemory(decided=(Decided(1, 5),), sinks=(SINK,))
    in_doubt = [tx(6), tx(5), tx(4), tx(7, attempt=2), tx(6, sink_id="job.other")]
    plan = plan_global_recovery(
        decision(5, tx(5)),
        in_doubt,
        sink_id=SINK,
        attempt=ATTEMPT,
        committed_through=CheckpointId(4),
        memory=memory,
    )
    assert plan.commit == (commit(5, tx(5)),)
    assert plan.abort == (tx(6),)
    forgetful = replace(memory, since=2)
    found = find_undecided(decision(5), in_doubt, sink_id=SINK, attempt=ATTEMPT, memory=forgetful)
    assert found == (), "nobody knows whether a forgotten attempt decided it"


def test_target_ahead_of_the_log_or_behind_it_is_noticed() -> None:
    """Numbers that rise cannot say which of two logs they are of: a person must."""
    memory = LogMemory(sinks=(SINK,), committed=(tx(4),))
    ahead = plan_global_recovery(
        decision(5, tx(5)),
        [tx(6)],
        sink_id=SINK,
        attempt=ATTEMPT,
        committed_through=CheckpointId(6),
    )
    behind = plan_global_recovery(
        decision(5, tx(5)),
        [],
        sink_id=SINK,
        attempt=ATTEMPT,
        committed_through=CheckpointId(3),
        memory=memory,
    )
    assert "has committed checkpoint 6 of sink job.lake, but the last decision" in ahead.ahead
    assert (
        "checkpoint 4 of sink job.lake was committed, but the highest checkpoint in the target is 3"
        in behind.behind
    )
    delivered = replace(decision(5, tx(4), tx(5)), delivered_through=CheckpointId(4))
    gone = plan_global_recovery(
        delivered, [], sink_id=SINK, attempt=ATTEMPT, committed_through=CheckpointId(3)
    )
    assert (
        "checkpoint 4 of sink job.lake was committed, but the highest checkpoint in the target is 3"
        in gone.behind
    )
    assert not any((ahead.commit, ahead.abort, behind.commit, behind.abort))


@pytest.mark.parametrize("delivered", [4, 5])
def test_a_target_without_the_highest_known_commit_is_behind(delivered: int) -> None:
    """The log knows of commits from its last record and from its memory; the higher one counts."""
    memory = LogMemory(sinks=(SINK,), committed=(tx(9 - delivered),))
    plan = plan_global_recovery(
        replace(decision(6, tx(delivered), tx(6)), delivered_through=CheckpointId(delivered)),
        [],
        sink_id=SINK,
        attempt=ATTEMPT,
        committed_through=CheckpointId(4),
        memory=memory,
    )
    assert (
        "checkpoint 5 of sink job.lake was committed, but the highest checkpoint in the target is 4"
        in plan.behind
    )
    assert not plan.commit


def test_decisions_name_those_that_are_not_known_to_be_committed() -> None:
    """And the job finishes only when the last one is."""
    whole = SubtaskRef("lake", -1)
    job = Coordination(CheckpointSettings(interval_s=10.0), committers=frozenset({whole}))
    for number in range(1, 5):
        assert job.trigger() == number
        job.complete(number)
        if number == 3:
            job.committed(2, [whole])
    found = [d.completed for d in of_type(AppendDecision, job.decisions)]
    assert [one.undelivered for one in found] == [(), (1,), (1, 2), (3,)]
    assert [one.delivered_through for one in found] == [0, 0, 0, 2]
    job.decisions += job.coordinator.request(CheckpointKind.STOP, job.now_s)
    job.complete(5)
    assert not of_type(FinishJob, job.decisions)
    job.committed(5, [whole])
    assert of_type(FinishJob, job.decisions)


def test_a_checkpoint_is_delivered_when_the_slowest_sink_has_committed_it() -> None:
    """A restart would not commit what only the faster sink has committed."""
    fast, slow = SubtaskRef("lake", -1), SubtaskRef("archive", -1)
    job = Coordination(CheckpointSettings(interval_s=10.0), committers=frozenset({fast, slow}))
    for number in range(1, 4):
        assert job.trigger() == number
        job.complete(number)
        job.committed(number, [fast])
        if number == 2:
            job.committed(1, [slow])
    decisions = [d.completed for d in of_type(AppendDecision, job.decisions)]
    assert [decision.delivered_through for decision in decisions] == [0, 0, 1]
    assert [decision.undelivered for decision in decisions] == [(), (1,), (2,)]
