"""The life of a checkpoint: acks, decisions, failures. Scenarios S50-S56, S59 of Flink's tests."""

from __future__ import annotations

import pytest
from tests.unit.protocol.checkpoints import coordination

from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator, CheckpointSettings
from onceflow.core.protocol.checkpoints.decisions import (
    AppendDecision,
    Barrier,
    CheckpointKind,
    CountFailure,
    DiscardState,
    FailAttempt,
    FinishJob,
    NotifyAbort,
    NotifyComplete,
)
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef

EVERY_SECOND = CheckpointSettings(interval_s=1.0, timeout_s=10.0)
TWO_AT_ONCE = CheckpointSettings(interval_s=1.0, timeout_s=10.0, max_concurrent=2)
TOLERANT = CheckpointSettings(interval_s=1.0, timeout_s=10.0, tolerable_failures=2)


def test_checkpoint_is_decided_only_when_every_subtask_has_acked() -> None:
    """S50: no decision one ack short, exactly one with the last."""
    job = coordination.Coordination(EVERY_SECOND)
    n = job.trigger()
    for subtask in coordination.SUBTASKS[:-1]:
        assert job.ack(n, subtask) == []
    (append,) = job.ack(n, coordination.SUBTASKS[-1])
    assert isinstance(append, AppendDecision)
    assert append.completed.checkpoint == n
    assert {s.subtask for s in append.completed.snapshots} == set(coordination.SUBTASKS)
    assert job.notified == []


def test_nobody_hears_of_completion_before_the_log_holds_it() -> None:
    """S50: complete is sent once, after `logged`, and the next checkpoint replaces it."""
    job = coordination.Coordination(EVERY_SECOND, [coordination.completed(0)])
    job.ack_all(job.trigger())
    assert job.notified == []
    assert job.logged(1) == [NotifyComplete(CheckpointId(1), CheckpointId(1))]
    job.complete(job.trigger())
    assert (job.notified, job.retained) == ([1, 2], [2])


def test_ack_that_comes_twice_counts_once() -> None:
    """S50: three subtasks and one of them twice are not four."""
    job = coordination.Coordination(EVERY_SECOND)
    n = job.trigger()
    for subtask in (
        *coordination.SUBTASKS[:-1],
        coordination.SUBTASKS[0],
        coordination.SUBTASKS[1],
    ):
        assert coordination.of_type(AppendDecision, job.ack(n, subtask)) == []
    assert coordination.of_type(AppendDecision, job.ack(n, coordination.SUBTASKS[-1]))


def test_duplicate_ack_keeps_the_files_of_the_first() -> None:
    """S50: the doubled message names the same files, which the pending checkpoint needs."""
    job = coordination.Coordination(EVERY_SECOND)
    n = job.trigger()
    job.ack(n, coordination.SINKS[0], coordination.private("a"))
    job.ack(n, coordination.SINKS[0], coordination.private("a"))
    assert job.deleted == []


def test_decline_discards_what_was_acked_and_nothing_else() -> None:
    """S51: one decline aborts that checkpoint; the other one in flight completes."""
    job = coordination.Coordination(
        CheckpointSettings(interval_s=1.0, max_concurrent=2, tolerable_failures=1),
        [coordination.completed(0)],
    )
    first, second = job.trigger(), job.trigger()
    job.ack(first, coordination.SINKS[0], coordination.private("first"))
    job.ack(second, coordination.SINKS[0], coordination.private("second"))
    decisions = job.decline(first, coordination.SINKS[1])
    assert coordination.of_type(NotifyAbort, decisions)[0].checkpoint == first
    assert job.deleted == ["first"]
    for subtask in coordination.SUBTASKS[:2] + coordination.SUBTASKS[3:]:
        job.ack(second, subtask)
    job.logged(second)
    assert job.notified == [second]
    assert job.deleted == ["first"]


def test_late_declines_change_nothing() -> None:
    """S51: of an aborted checkpoint, a completed one, one never triggered."""
    job = coordination.Coordination(TOLERANT)
    job.trigger()
    job.decline(1)
    assert job.decline(1) == []
    job.trigger()
    job.complete(2)
    assert job.decline(2) == []
    assert job.decline(77) == []


def test_interleaved_checkpoints_complete_in_order() -> None:
    """S52: two in flight, acks mixed, each complete on its own."""
    job = coordination.Coordination(TWO_AT_ONCE)
    first, second = job.trigger(), job.trigger()
    for subtask in coordination.SUBTASKS:
        job.ack(first, subtask)
        if subtask is not coordination.SUBTASKS[-1]:
            job.ack(second, subtask)
    job.logged(first)
    job.ack(second, coordination.SUBTASKS[-1])
    job.logged(second)
    assert job.notified == [first, second]


def test_newer_checkpoint_that_completes_first_subsumes_the_older() -> None:
    """S53: the older is given up with its state, and its late acks are cleaned up."""
    job = coordination.Coordination(TWO_AT_ONCE)
    first, second = job.trigger(), job.trigger()
    job.ack(first, coordination.SINKS[0], coordination.private("old"))
    job.ack_all(second, coordination.private("new"))
    assert job.pending == [first, second]
    decisions = job.logged(second)
    assert [type(d) for d in decisions[:2]] == [NotifyComplete, DiscardState]
    assert job.deleted == ["old"]
    job.ack(first, coordination.SINKS[1], coordination.private("late"))
    assert job.deleted == ["old", "late"]


def test_commit_points_never_go_backwards() -> None:
    """S53: the older one's last acks come when the newer one is decided."""
    job = coordination.Coordination(TWO_AT_ONCE)
    first, second = job.trigger(), job.trigger()
    job.ack_all(second)
    job.logged(second)
    assert job.ack_all(first) == []
    assert job.notified == [second]
    assert job.pending == []


def test_nothing_is_told_while_a_decision_is_appended() -> None:
    """The thread that tells appends, and waits for it: anything else is a bug."""
    job = coordination.Coordination(EVERY_SECOND)
    job.ack_all(job.trigger())
    with pytest.raises(InvariantViolation, match="while a decision is appended"):
        job.tick()


def test_late_checkpoint_expires_with_its_state() -> None:
    """S55: no complete is sent, partial state goes, and the reason names who is missing."""
    job = coordination.Coordination(TOLERANT)
    n = job.trigger()
    for subtask in (*coordination.SOURCES, coordination.SINKS[0]):
        job.ack(n, subtask, coordination.private(str(subtask)))
    assert job.tick(after_s=9.9) == []
    (abort,) = coordination.of_type(NotifyAbort, job.tick(after_s=0.1))
    assert "sink[1]" in abort.reason
    assert sorted(job.deleted) == ["sink[0]", "source[0]", "source[1]"]
    assert job.notified == []


def test_late_checkpoint_says_whom_its_sinks_wait_for_as_told_last() -> None:
    job = coordination.Coordination(TOLERANT)
    n = job.trigger()
    for subtask in (*coordination.SOURCES, coordination.SINKS[0]):
        job.ack(n, subtask)
    job.tick(after_s=4.9)
    assert job.coordinator.overdue(job.now_s) == frozenset()
    job.tick(after_s=0.1)
    assert job.coordinator.overdue(job.now_s) == {coordination.SINKS[1]}
    job.coordinator.note_blockers("sink", ("session 6",))
    job.coordinator.note_blockers("sink", ("session 7", "session 8"))
    job.coordinator.note_blockers("other", ())
    (abort,) = coordination.of_type(NotifyAbort, job.tick(after_s=5))
    assert abort.reason.endswith(" 10.0 s; sink sink waits for session 7; session 8")
    again = job.trigger()
    assert again > n
    (abort,) = coordination.of_type(NotifyAbort, job.tick(after_s=10))
    assert "waits for" not in abort.reason


def test_coordinator_wakes_for_the_deadline_and_for_the_interval() -> None:
    job = coordination.Coordination(EVERY_SECOND)
    assert job.coordinator.next_wake_s() == 1001.0
    job.trigger()
    assert job.coordinator.next_wake_s() == 1011.0
    job.complete(1)
    assert job.coordinator.next_wake_s() == 1002.0


def test_strays_of_this_attempt_are_cleaned_and_never_throw() -> None:
    """S56: unknown checkpoint, unknown subtask."""
    job = coordination.Coordination(EVERY_SECOND)
    job.ack(99, coordination.SINKS[0], coordination.private("unknown checkpoint"))
    n = job.trigger()
    job.ack(n, SubtaskRef("ghost", 0), coordination.private("unknown subtask"))
    assert job.deleted == ["unknown checkpoint", "unknown subtask"]
    assert job.pending == [n]


def test_acks_of_another_attempt_count_nothing_and_delete_nothing() -> None:
    """S56, I7: neither of an older nor of a newer one, even if the numbers agree."""
    job = coordination.Coordination(EVERY_SECOND)
    n = job.trigger()
    for attempt in (2, 4):
        for subtask in coordination.SUBTASKS:
            assert job.ack(n, subtask, coordination.private("theirs"), attempt=attempt) == []
        assert job.decline(n, attempt=attempt) == []
    assert job.deleted == []
    assert coordination.of_type(AppendDecision, job.ack_all(n))


@pytest.mark.parametrize("how", ["decline", "timeout", "append"])
def test_failures_in_a_row_beyond_the_tolerated_fail_the_attempt(how: str) -> None:
    """S59: decline, timeout and append failure all count, and a success starts over."""
    job = coordination.Coordination(
        CheckpointSettings(interval_s=20.0, timeout_s=10.0, tolerable_failures=2)
    )

    def fail() -> list[FailAttempt]:
        n = job.trigger()
        if how == "decline":
            decisions = job.decline(n)
        elif how == "timeout":
            decisions = job.tick(after_s=10.0)
        else:
            job.ack_all(n)
            decisions = job.append_failed(n)
        assert coordination.of_type(CountFailure, decisions)
        return coordination.of_type(FailAttempt, decisions)

    assert fail() == []
    assert fail() == []
    job.complete(job.trigger())
    assert fail() == []
    assert fail() == []
    (failure,) = fail()
    assert "3 in a row" in failure.reason


def test_first_failure_fails_the_attempt_by_default() -> None:
    """S59: tolerance 0; after it nothing is decided, whatever comes."""
    job = coordination.Coordination(EVERY_SECOND)
    job.trigger()
    assert coordination.of_type(FailAttempt, job.decline(1))
    before = len(job.decisions)
    job.ack_all(1, coordination.private("a"))
    job.coordinator.request(CheckpointKind.MANUAL, job.now_s)
    job.tick(after_s=100.0)
    assert len(job.decisions) == before
    assert job.coordinator.next_wake_s() is None


def test_append_that_certainly_failed_discards_the_state() -> None:
    job = coordination.Coordination(TOLERANT)
    job.ack_all(job.trigger(), coordination.private("a"))
    job.append_failed(1)
    assert job.deleted == ["a"]
    assert job.notified == []


def test_report_on_an_append_that_was_not_under_way_is_a_bug() -> None:
    job = coordination.Coordination(EVERY_SECOND)
    job.trigger()
    with pytest.raises(InvariantViolation, match="append of 1"):
        job.coordinator.on_logged(CheckpointId(1), job.now_s)


def test_commit_before_the_decision_is_a_bug() -> None:
    """I1 as the coordinator sees it."""
    job = coordination.Coordination(EVERY_SECOND)
    job.ack_all(job.trigger())
    with pytest.raises(InvariantViolation, match="committed checkpoint 1"):
        job.coordinator.on_committed(coordination.SINKS[0], CheckpointId(1), job.now_s)


@pytest.mark.parametrize("kind", [CheckpointKind.STOP, CheckpointKind.FINAL])
def test_job_finishes_when_the_last_checkpoint_is_committed_everywhere(
    kind: CheckpointKind,
) -> None:
    job = coordination.Coordination(EVERY_SECOND)
    if kind is CheckpointKind.STOP:
        decisions = job.coordinator.request(CheckpointKind.STOP, job.now_s)
    else:
        job.coordinator.on_source_end(coordination.SOURCES[0], job.now_s)
        decisions = job.coordinator.on_source_end(coordination.SOURCES[1], job.now_s)
    (trigger,) = coordination.of_type(Barrier, decisions)
    assert trigger.kind is kind
    (append,) = coordination.of_type(AppendDecision, job.ack_all(1))
    assert append.completed.final
    assert coordination.of_type(FinishJob, job.logged(1)) == []
    assert job.committed(1, coordination.SUBTASKS[:-1]) == []
    assert job.committed(1, coordination.SUBTASKS[-1:]) == [FinishJob(CheckpointId(1))]
    assert job.committed(1) == []
    assert job.tick(after_s=3600.0) == []


def test_subtasks_and_sources_must_fit() -> None:
    with pytest.raises(ValueError, match="sources"):
        CheckpointCoordinator(
            EVERY_SECOND,
            attempt=coordination.ATTEMPT,
            subtasks=frozenset(coordination.SINKS),
            sources=frozenset(coordination.SOURCES),
            parallelism=2,
            max_parallelism=128,
            retained=(),
            next_checkpoint=CheckpointId(1),
            now_s=0.0,
            wall_ms=lambda: 0,
        )
