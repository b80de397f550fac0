"""The end of the input where functions make last rows: once all rows before it are decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.protocol.checkpoints import coordination

from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.protocol.checkpoints.decisions import (
    AppendDecision,
    Barrier,
    CheckpointKind,
    Decision,
    FinishJob,
    SavepointRequest,
    WriteSavepoint,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef

FINAL, END, STOP = CheckpointKind.FINAL, CheckpointKind.END, CheckpointKind.STOP
ROWS = snapshots.InFlight("sink", True, snapshots.StateHandle("rows", "rows", 1, "x"))


class Ending(coordination.Coordination):
    """A job whose sources stand at `at`, each in one split."""

    def __init__(self, *retained: snapshots.CompletedCheckpoint, overtakes: bool = False) -> None:
        settings = CheckpointSettings(
            interval_s=None,
            tolerable_failures=5,
            overtakes_after_s=0.0 if overtakes else None,
        )
        super().__init__(settings, retained, makes_last_rows=True)
        self.at = 10

    def exhaust(self) -> list[Decision]:
        decisions: list[Decision] = []
        for source in coordination.SOURCES:
            decisions += self._noted(self.coordinator.on_source_end(source, self.now_s))
        return decisions

    def ask(self, kind: CheckpointKind) -> list[Decision]:
        if not kind.is_savepoint:
            return self._noted(self.coordinator.request(kind, self.now_s))
        request = SavepointRequest("a", kind)
        return self._noted(self.coordinator.request_savepoint(request, self.now_s))

    def written(self, number: int) -> list[Decision]:
        return self._noted(self.coordinator.on_savepoint_end(CheckpointId(number), self.now_s))

    def ack_each(self, number: int, *in_flight: snapshots.InFlight) -> list[Decision]:
        """Every subtask acks, the sources with where they stand."""
        decisions: list[Decision] = []
        for subtask in coordination.SUBTASKS:
            rows = in_flight if subtask == coordination.SINKS[0] else ()
            operators = (snapshots.OperatorSnapshot("op", lists={"splits": self._splits(subtask)}),)
            snapshot = snapshots.SubtaskSnapshot(subtask, operators, in_flight=rows)
            checkpoint = CheckpointId(number)
            decisions += self._noted(
                self.coordinator.on_ack(
                    AttemptId(coordination.ATTEMPT), checkpoint, snapshot, self.now_s
                )
            )
        return decisions

    def decide(
        self, number: int, *in_flight: snapshots.InFlight
    ) -> tuple[snapshots.CompletedCheckpoint, list[Decision]]:
        """Every subtask acks, and the log takes it."""
        (append,) = coordination.of_type(AppendDecision, self.ack_each(number, *in_flight))
        return append.completed, self.logged(number)

    def _splits(self, subtask: SubtaskRef) -> tuple[bytes, ...]:
        return (f"p{subtask.index}:{self.at}".encode(),) if subtask in coordination.SOURCES else ()


def triggered(decisions: list[Decision]) -> list[CheckpointKind]:
    return [one.kind for one in coordination.of_type(Barrier, decisions)]


def run_to_its_end() -> snapshots.CompletedCheckpoint:
    """Return the last decision of a job that has made its last rows."""
    job = Ending()
    job.exhaust()
    job.decide(1)
    decided, _ = job.decide(2)
    return decided


def test_last_rows_are_made_once_every_row_before_them_is_decided() -> None:
    job = Ending()
    assert triggered(job.exhaust()) == [FINAL]
    final, decisions = job.decide(1)
    assert (final.final, final.input_ended) == (False, False)
    assert triggered(decisions) == [END]
    assert not coordination.of_type(FinishJob, job.committed(1))
    end, _ = job.decide(2)
    assert (end.final, end.input_ended) == (True, True)
    assert coordination.of_type(FinishJob, job.committed(2)) == [FinishJob(CheckpointId(2))]


def test_rows_in_flight_are_decided_before_last_rows_are_made() -> None:
    job = Ending(overtakes=True)
    job.exhaust()
    _, decisions = job.decide(1, ROWS)
    assert triggered(decisions) == [FINAL]
    _, decisions = job.decide(2)
    (end,) = coordination.of_type(Barrier, decisions)
    assert (end.kind, end.overtakes_after_s) == (END, None), "last rows are in flight nowhere"


def test_an_end_that_fails_is_tried_again() -> None:
    job = Ending()
    job.exhaust()
    job.decide(1)
    job.decline(2)
    assert triggered(job.tick(after_s=60.0)) == [END]
    job.decide(3)
    assert coordination.of_type(FinishJob, job.committed(3))


@pytest.mark.parametrize("is_decided", [False, True])
@pytest.mark.parametrize("asked", [CheckpointKind.SAVEPOINT, STOP, CheckpointKind.MANUAL])
def test_nothing_that_is_asked_for_comes_between_the_last_rows_read_and_the_last_rows_made(
    asked: CheckpointKind, is_decided: bool
) -> None:
    """A savepoint would hold the state from which a start makes the last rows again."""
    job = Ending()
    job.exhaust()
    decisions = list(job.decide(1)[1]) if is_decided else []
    decisions += job.ask(asked)
    if not is_decided:
        decisions += job.decide(1)[1]
    assert triggered(decisions) == [END]
    # An END that fails is followed by another one, and by nothing else.
    job.decline(2)
    assert triggered(job.tick(after_s=60.0)) == [END]
    end, decisions = job.decide(3)
    assert (end.final, end.input_ended, triggered(decisions)) == (True, True, [])
    assert coordination.of_type(FinishJob, job.committed(3))


def test_an_input_that_grows_again_and_again_has_last_rows_made_once_each_time() -> None:
    kept: tuple[snapshots.CompletedCheckpoint, ...] = ()
    for number, at in ((1, 10), (3, 11), (5, 12)):
        job = Ending(*kept)
        job.at = at
        job.exhaust()
        final, decisions = job.decide(number)
        assert (final.final, final.input_ended, triggered(decisions)) == (False, False, [END])
        end, _ = job.decide(number + 1)
        kept = (*kept, replace(end, attempt=AttemptId(2)))
        job = Ending(*kept)
        job.at = at
        job.exhaust()
        final, decisions = job.decide(number + 2)
        assert (final.final, final.input_ended, triggered(decisions)) == (True, True, [])


def test_a_job_that_begins_at_its_end_makes_last_rows_only_if_it_reads_more() -> None:
    job = Ending(replace(run_to_its_end(), attempt=AttemptId(2)))
    job.exhaust()
    final, _ = job.decide(3)
    assert (final.final, final.input_ended) == (True, True)
    job = Ending(replace(run_to_its_end(), attempt=AttemptId(2)))
    job.at = 11
    job.exhaust()
    assert triggered(job.decide(3)[1]) == [END]


def test_what_follows_a_savepoint_that_drains_holds_its_last_rows_and_no_more() -> None:
    job = Ending()
    assert triggered(job.ask(CheckpointKind.SAVEPOINT_DRAIN)) == [CheckpointKind.SAVEPOINT_DRAIN]
    job.exhaust()
    (write,) = coordination.of_type(WriteSavepoint, job.ack_each(1))
    assert write.completed.input_ended
    assert triggered(job.written(1)) == [FINAL]
    final, _ = job.decide(2)
    assert (final.final, final.input_ended) == (True, True)


@pytest.mark.parametrize("exhausted", [True, False])
def test_no_last_rows_are_made_behind_a_savepoint_with_which_the_job_stops(exhausted: bool) -> None:
    """A start from the savepoint makes them: nothing after it may be committed."""
    job = Ending()
    job.ask(CheckpointKind.SAVEPOINT_STOP)
    if exhausted:
        job.exhaust()
    job.ack_each(1)
    assert triggered(job.written(1)) == [STOP]
    stop, decisions = job.decide(2)
    assert (stop.final, stop.input_ended, triggered(decisions)) == (True, False, [])
    assert coordination.of_type(FinishJob, job.committed(2))
