"""Savepoints in the coordinator: S54, S57 testConcurrentSavepoints, S59, S61."""

from __future__ import annotations

import pytest
from tests.unit.protocol.checkpoints import coordination

from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.protocol.checkpoints.decisions import (
    AbortSavepoint,
    AppendDecision,
    Barrier,
    CheckpointKind,
    CountFailure,
    Decision,
    FailAttempt,
    FinishJob,
    NotifyAbort,
    NotifyComplete,
    SavepointRequest,
    SavepointTarget,
    WriteSavepoint,
)
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef

GOES_ON, STOPS, DRAINS = (
    CheckpointKind.SAVEPOINT,
    CheckpointKind.SAVEPOINT_STOP,
    CheckpointKind.SAVEPOINT_DRAIN,
)


class Job(coordination.Coordination):
    def ask(self, name: str, kind: CheckpointKind = GOES_ON) -> list[Decision]:
        request = SavepointRequest(name, kind)
        return self._noted(self.coordinator.request_savepoint(request, self.now_s))

    def asks_for_a_checkpoint(self) -> list[Decision]:
        return self._noted(self.coordinator.request(CheckpointKind.MANUAL, self.now_s))

    def exhausted(self, source: SubtaskRef) -> list[Decision]:
        return self._noted(self.coordinator.on_source_end(source, self.now_s))

    def ended(self, number: int, error: str = "") -> list[Decision]:
        return self._noted(
            self.coordinator.on_savepoint_end(CheckpointId(number), self.now_s, error=error)
        )


def triggered(decisions: list[Decision]) -> list[tuple[int, CheckpointKind]]:
    return [(one.checkpoint, one.kind) for one in coordination.of_type(Barrier, decisions)]


def job(**settings: object) -> Job:
    return Job(CheckpointSettings(**({"interval_s": None} | settings)))  # type: ignore[arg-type]


def test_a_savepoint_is_written_and_never_decided_and_its_files_go() -> None:
    one = job()
    assert triggered(one.ask("a")) == [(1, GOES_ON)]
    (write,) = coordination.of_type(WriteSavepoint, one.ack_all(1, coordination.private("f")))
    assert (write.request.id, write.completed.checkpoint) == ("a", 1)
    assert one.deleted == []
    assert coordination.of_type(NotifyAbort, one.ended(1)), "what it has prepared stays pending"
    assert one.deleted == ["f"]
    assert not coordination.of_type(AppendDecision, one.decisions)
    assert not coordination.of_type(NotifyComplete, one.decisions)
    assert one.pending == []


def test_savepoints_queue_and_a_checkpoint_waits_only_while_barriers_travel() -> None:
    """S57, S61: one barrier at a time; the writing of one holds up nothing."""
    one = job(interval_s=1.0)
    one.ask("a")
    assert one.ask("b") == []
    assert one.tick(after_s=5.0) == [], "checkpoints wait for savepoints that were asked for"
    decisions = one.ack_all(1)
    assert triggered(decisions) == [(2, GOES_ON)], "while the first is written"
    assert triggered(one.ack_all(2)) == [(3, CheckpointKind.PERIODIC)]
    one.complete(3)
    assert one.pending == [1, 2]
    one.ended(2)
    one.ended(1)
    assert [w.request.id for w in coordination.of_type(WriteSavepoint, one.decisions)] == ["a", "b"]


def test_a_savepoint_is_not_subsumed() -> None:
    """S54 testSavepointsAreNotSubsumed: the checkpoint after it is decided first."""
    one = job(interval_s=1.0, max_concurrent=2)
    one.ask("a")
    assert one.trigger() == 2
    one.ack_all(2, coordination.private("g"))
    one.logged(2)
    assert one.pending == [1]
    assert coordination.of_type(WriteSavepoint, one.ack_all(1, coordination.private("f")))
    one.ended(1)
    assert one.deleted == ["f"]
    assert one.retained == [2]


def test_a_savepoint_fulfills_no_request_for_a_checkpoint() -> None:
    one = job()
    one.ask("a")
    one.asks_for_a_checkpoint()
    assert triggered(one.ack_all(1)) == [(2, CheckpointKind.MANUAL)]


def test_a_failed_savepoint_is_told_and_counts_as_no_failure() -> None:
    one = job()
    one.ask("a")
    (aborted,) = coordination.of_type(AbortSavepoint, one.decline(1))
    assert aborted.request.id == "a"
    one.ask("b")
    one.ack_all(2, coordination.private("f"))
    (aborted,) = coordination.of_type(AbortSavepoint, one.ended(2, error="no space"))
    assert "no space" in aborted.reason
    assert one.deleted == ["f"]
    one.ask("c")
    (aborted,) = coordination.of_type(AbortSavepoint, one.tick(after_s=601.0))
    assert "no ack of" in aborted.reason
    one.ask("d")
    one.ack_all(4)
    (aborted,) = coordination.of_type(AbortSavepoint, one.tick(after_s=601.0))
    assert "not written within" in aborted.reason
    assert one.ended(4) == [], "too late"
    assert not coordination.of_type(CountFailure, one.decisions)
    assert not coordination.of_type(FailAttempt, one.decisions)


def test_stop_with_savepoint_decides_and_ends_only_once_it_is_written() -> None:
    one = job(interval_s=1.0)
    one.ask("a", STOPS)
    one.ack_all(1)
    assert one.tick(after_s=5.0) == [], "nothing may be decided that the savepoint does not hold"
    assert triggered(one.ended(1)) == [(2, CheckpointKind.STOP)]
    one.ack_all(2)
    one.logged(2)
    assert coordination.of_type(FinishJob, one.committed(2)) == [FinishJob(CheckpointId(2))]


def test_a_job_that_comes_to_its_end_waits_for_the_savepoint_that_is_written() -> None:
    one = job()
    one.ask("a")
    one.ack_all(1)
    for source in coordination.SOURCES:
        one.exhausted(source)
    assert coordination.of_type(FinishJob, one.complete(2)) == []
    assert coordination.of_type(FinishJob, one.ended(1)) == [FinishJob(CheckpointId(2))]


def test_a_drain_ends_with_the_final_checkpoint_after_the_savepoint() -> None:
    one = job()
    one.ask("a", DRAINS)
    for source in coordination.SOURCES:
        assert one.exhausted(source) == []
    one.ack_all(1)
    assert triggered(one.ended(1)) == [(2, CheckpointKind.FINAL)]
    assert coordination.of_type(FinishJob, one.complete(2)) == []
    assert one.coordinator.next_wake_s() is None


@pytest.mark.parametrize("how", ["declined", "not written", "late"])
def test_a_job_that_was_to_stop_with_a_savepoint_that_fails_fails_over(how: str) -> None:
    """S59, S72: its sources have stopped, so that only another attempt reads on."""
    one = job(tolerable_failures=5)
    one.ask("a", STOPS)
    if how == "declined":
        decisions = one.decline(1, coordination.SINKS[0])
    else:
        one.ack_all(1)
        decisions = one.ended(1, "no space") if how == "not written" else one.tick(601.0)
    assert [type(d) for d in decisions if not isinstance(d, NotifyAbort)] == [
        AbortSavepoint,
        FailAttempt,
    ]
    assert one.coordinator.requested == frozenset(), "the next attempt does not stop"


def test_what_follows_a_savepoint_is_not_asked_of_the_next_attempt() -> None:
    one = job()
    one.ask("a", STOPS)
    one.ack_all(1)
    one.ended(1)
    one.decline(2, coordination.SUBTASKS[0])
    assert one.coordinator.requested == frozenset()


def _ask_with_target(one: Job, target: SavepointTarget) -> None:
    request = SavepointRequest("a", GOES_ON, target=target)
    (trigger,) = coordination.of_type(
        Barrier, one.coordinator.request_savepoint(request, one.now_s)
    )
    assert trigger.target == target, "slots learn where they may write"


def test_files_that_slots_wrote_into_the_savepoint_are_never_discarded() -> None:
    """Some slots reach the directory; what the others have uploaded goes when it is copied."""
    one = job()
    _ask_with_target(one, SavepointTarget("/kept/a", "a"))
    for subtask in coordination.SOURCES:
        one.ack(1, subtask, coordination.private(f"job/{subtask}"))
    decisions: list[Decision] = []
    for subtask in coordination.SINKS:
        decisions += one.ack(1, subtask, coordination.private(f"state/{subtask}"), in_target=True)
    (write,) = coordination.of_type(WriteSavepoint, decisions)
    assert write.in_target == frozenset(coordination.SINKS)
    one.ended(1)
    assert sorted(one.deleted) == sorted(f"job/{subtask}" for subtask in coordination.SOURCES)


@pytest.mark.parametrize("how", ["declined", "late"])
def test_a_failed_savepoint_discards_what_was_uploaded_and_not_what_is_in_its_directory(
    how: str,
) -> None:
    one = job()
    _ask_with_target(one, SavepointTarget("/kept/a", "a"))
    one.ack(1, coordination.SOURCES[0], coordination.private("job/f"))
    one.ack(1, coordination.SINKS[0], coordination.private("state/f"), in_target=True)
    decisions = one.decline(1, coordination.SINKS[1]) if how == "declined" else one.tick(601.0)
    assert coordination.of_type(AbortSavepoint, decisions)
    assert one.deleted == ["job/f"]
    assert one.ack(1, coordination.SINKS[1], coordination.private("state/g"), in_target=True) == []
    one.ack(1, coordination.SOURCES[1], coordination.private("job/g"))
    assert one.deleted == ["job/f", "job/g"]


def test_state_of_a_checkpoint_cannot_be_in_the_directory_of_a_savepoint() -> None:
    one = job()
    one.asks_for_a_checkpoint()
    with pytest.raises(InvariantViolation, match="into the directory of a savepoint"):
        one.ack(1, coordination.SINKS[0], coordination.private("state/f"), in_target=True)
