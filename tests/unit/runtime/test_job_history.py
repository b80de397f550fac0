"""Tests the history on the page, which is computed from events alone."""

from __future__ import annotations

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import SnapshotTimings
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import SinkMetrics, SubtaskMetrics
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.job_history import JobHistory
from onceflow.core.runtime.events.status import JobStatus, apply

READER, WRITER = SubtaskRef("in", 0), SubtaskRef("out", 0)


class Told:
    """A history and the status, told of the same events."""

    def __init__(self) -> None:
        self.history = JobHistory()
        self.status = JobStatus("job")
        self.tell(job_events.JobStarted(frozenset({"in"}), at=at(0)))
        self.tell(job_events.AttemptBegan(AttemptId(1), CheckpointId(0), at=at(0)))
        self.tell(job_events.SlotJoined(0, 1, 1, "here", at=at(0)))

    def tell(self, event: job_events.JobEvent) -> None:
        self.status = apply(self.status, event)
        self.history.on_event(event, self.status)

    def report(self, second: float, records: int, rows: int, busy_s: float) -> None:
        metrics = SubtaskMetrics(READER, records, records, busy_s, busy_s / 2)
        sink = SinkMetrics("out", "job.out", 0, prepared=1, rows_committed=rows)
        self.tell(job_events.SlotReported(0, (metrics,), (sink,), at=at(second)))

    def complete(self, number: int) -> None:
        checkpoint = CheckpointId(number)
        self.tell(
            job_events.CheckpointTriggered(checkpoint, CheckpointKind.PERIODIC, at=at(number))
        )
        for ref, ack_s in ((WRITER, 0.2), (READER, 0.1)):
            timings = SnapshotTimings(sync_ms=ack_s * 500)
            self.tell(job_events.CheckpointAcked(checkpoint, ref, timings, at=at(number + ack_s)))
        self.tell(job_events.CheckpointCompleted(checkpoint, 5.0, at=at(number + 0.25)))


def at(second: float) -> job_events.Moment:
    return job_events.Moment(100 + second, 1_000 + second)


def test_rates_and_shares_are_of_the_last_seconds_alone() -> None:
    told = Told()
    told.report(0, 0, 0, 0.0)
    (first,) = told.history.chains(told.status)
    assert first.records_in_per_s is None, "one heartbeat makes no rate"
    for second in range(1, 11):
        told.report(second, 100 * second, 90 * second, 0.5 * second)
    for second in range(11, 21):
        told.report(second, 1_000 + 300 * (second - 10), 900, 5.0)
    (now,) = told.history.chains(told.status)
    assert (now.records_in_per_s, now.busy, now.backpressured) == (300, 0, 0)
    last = told.history.samples()[-1]
    assert (last.records_per_s, last.rows_per_s, last.in_doubt) == (300, 0, 1)


def test_a_restart_leaves_a_gap_and_its_cause_with_the_traceback() -> None:
    told = Told()
    for second in range(4):
        told.report(second, 100 * second, 90 * second, 0.1)
    error = "UserFunctionError: no rate\nTraceback:\n  line 3"
    told.tell(job_events.SlotLeft(0, at=at(4)))
    told.tell(job_events.SlotLeft(0, error, at=at(4)))
    told.tell(job_events.JobRestarting(0.5, error, at=at(4)))
    lost, restart = told.history.incidents()
    assert (lost.kind, lost.slot, restart.kind, restart.delay_s) == ("slot_lost", 0, "restart", 0.5)
    assert restart.error == error
    assert told.history.samples()[-1].records_per_s is None
    told.tell(job_events.AttemptBegan(AttemptId(2), CheckpointId(0), at=at(5)))
    told.tell(job_events.SlotJoined(0, 2, 1, "here", at=at(5)))
    told.report(6, 10, 5, 0.0)
    assert told.history.loads() == {}, "counters of another attempt make no rate"


def test_checkpoints_keep_their_slowest_subtask_and_learn_of_their_commit_later() -> None:
    told = Told()
    for number in range(1, 151):
        told.complete(number)
    told.tell(job_events.SubtaskCommitted(WRITER, CheckpointId(150), at=at(151)))
    told.tell(job_events.SubtaskCommitted(READER, CheckpointId(150), at=at(151)))
    kept = told.history.checkpoints(None, 1_000, told.status)
    assert [one.checkpoint for one in kept] == list(range(1, 151)), "more than the status keeps"
    last = kept[-1]
    assert last.slowest is not None
    assert (last.slowest.subtask, last.slowest.sync_ms, last.subtasks) == (WRITER, 100.0, 2)
    assert last.committed_ms == 750
    assert told.history.checkpoints(10, 3, told.status)[-1].checkpoint == 9
