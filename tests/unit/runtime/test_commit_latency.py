"""Tests the time until records are visible, over failed checkpoints and failed attempts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from onceflow.core.protocol.checkpoints.snapshots import SnapshotTimings
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.record_times import RecordTimes
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.metrics.commit_latency import UNCOMMITTED_MAX, CommitLatency, SinkInputs
from onceflow.core.runtime.metrics.metric_catalog import HistogramValue

MADE_S = 1_800_000_000
SOURCE, OTHER = SubtaskRef("in", 0), SubtaskRef("beside", 0)
WRITERS = SubtaskRef("write", 0), SubtaskRef("write", 1)
SINKS = (
    SinkInputs("out", "write", frozenset({"in"})),
    SinkInputs("lake", "write", frozenset({"in", "beside"}), committed_by_driver=True),
)


def at(seconds: float) -> job_events.Moment:
    """Return a time that long after the records were made."""
    return job_events.Moment(seconds, MADE_S + seconds)


def ack(number: int, records: int, source: SubtaskRef = SOURCE) -> Iterable[job_events.JobEvent]:
    """Yield the acks of one checkpoint, with `records` of one time."""
    checkpoint, made_ms = CheckpointId(number), MADE_S * 1000
    times = RecordTimes(1, {made_ms: records}, made_ms * records) if records else None
    yield job_events.CheckpointAcked(checkpoint, source, SnapshotTimings(), times)
    for writer in WRITERS:
        yield job_events.CheckpointAcked(checkpoint, writer, SnapshotTimings())


def decide(number: int) -> job_events.JobEvent:
    return job_events.CheckpointCompleted(CheckpointId(number), append_ms=1.0)


def commit(number: int, seconds: float, *writers: int) -> Iterable[job_events.JobEvent]:
    for index in writers or (0, 1):
        yield job_events.SubtaskCommitted(WRITERS[index], CheckpointId(number), at=at(seconds))


class Measuring:
    def __init__(self) -> None:
        self.latency = CommitLatency(SINKS)

    def take(self, *events: job_events.JobEvent) -> None:
        for event in events:
            self.latency.on_event(event)

    def read(self, uid: str) -> tuple[int, int]:
        """Return how many records are counted for sink `uid`, and the sum of their seconds."""
        (family,) = self.latency.collect()
        value = dict(family.samples)[uid,]
        assert isinstance(value, HistogramValue)
        return value.count, round(value.total)


def test_a_record_counts_when_all_subtasks_of_its_sink_have_committed() -> None:
    job = Measuring()
    job.take(*ack(1, 10), decide(1), *commit(1, 3, 0))
    assert job.read("out") == (0, 0)
    job.take(*commit(1, 4, 1))
    assert job.read("out") == (10, 40)
    job.take(*commit(1, 9))
    assert job.read("out") == (10, 40), "once"
    assert job.read("lake") == (0, 0), "the driver has not committed"
    job.take(job_events.CheckpointCommitted("lake", CheckpointId(1), at=at(7)))
    assert job.read("lake") == (10, 70)


def test_a_sink_counts_the_records_of_its_own_sources() -> None:
    job = Measuring()
    job.take(*ack(1, 5, OTHER), decide(1), *commit(1, 3))
    job.take(job_events.CheckpointCommitted("lake", CheckpointId(1), at=at(3)))
    assert job.read("out") == (0, 0)
    assert job.read("lake") == (5, 15)
    job.take(*ack(2, 2), *ack(2, 4, OTHER), decide(2), *commit(2, 1))
    assert job.read("out") == (2, 2)


def test_one_commit_may_be_of_several_checkpoints_and_an_earlier_one_waits() -> None:
    job = Measuring()
    job.take(*ack(1, 1), decide(1), *ack(2, 2), decide(2), *ack(3, 4))
    job.take(*commit(2, 5))
    assert job.read("out") == (3, 15)
    job.take(decide(3), *commit(3, 6))
    assert job.read("out") == (7, 39)


def test_records_of_a_checkpoint_that_was_given_up_count_with_the_next() -> None:
    job = Measuring()
    job.take(*ack(1, 10), job_events.CheckpointFailed(CheckpointId(1), "a subtask said no"))
    job.take(*ack(2, 1), decide(2), *commit(2, 8))
    assert job.read("out") == (11, 88)


def test_recovery_counts_what_was_decided_and_what_is_read_again_counts_once() -> None:
    job = Measuring()
    job.take(*ack(1, 10), decide(1), *commit(1, 2, 0), *ack(2, 5))
    job.take(
        job_events.AttemptBegan(AttemptId(2), CheckpointId(1)),
        job_events.SinksRecovered((), at=at(6)),
    )
    assert job.read("out") == job.read("lake") == (10, 60)
    job.take(*ack(3, 5), decide(3), *commit(3, 9))
    assert job.read("out") == (15, 105)


def test_a_decision_of_which_the_attempt_did_not_hear_counts_at_recovery() -> None:
    job = Measuring()
    job.take(*ack(1, 1), *ack(2, 10), *ack(3, 100))
    job.take(
        job_events.AttemptBegan(AttemptId(2), CheckpointId(2)),
        job_events.SinksRecovered((), at=at(6)),
    )
    assert job.read("out") == (11, 66)


def test_a_sink_that_never_commits_keeps_a_bounded_number_of_checkpoints_and_every_record() -> None:
    """The other one commits all the time, and counts each record once."""
    job = Measuring()
    count = 3 * UNCOMMITTED_MAX
    for number in range(1, count + 1):
        job.take(*ack(number, 2), decide(number), *commit(number, 1))
        assert len(job.latency._decided) <= UNCOMMITTED_MAX  # pyright: ignore[reportPrivateUsage]
    assert job.read("out") == (2 * count, 2 * count)
    assert job.read("lake") == (0, 0)
    job.take(job_events.CheckpointCommitted("lake", CheckpointId(count), at=at(10)))
    assert job.read("lake") == (2 * count, 20 * count)
    assert not job.latency._decided  # pyright: ignore[reportPrivateUsage]


def test_recent_percentiles_are_of_the_last_minutes_alone() -> None:
    job = Measuring()
    assert job.latency.read_recent(MADE_S) == {}
    for number in range(1, 101):
        slow = 10 if number == 100 else 1
        job.take(*ack(number, 3), decide(number), *commit(number, slow))
    recent = job.latency.read_recent(MADE_S + 20)["out"]
    assert recent.records == 300
    assert recent.p50_s == pytest.approx(1, rel=0.05)
    assert recent.p99_s == pytest.approx(1, rel=0.05)
    job.take(*ack(101, 3), decide(101), *commit(101, 10))
    assert job.latency.read_recent(MADE_S + 20)["out"].p99_s == pytest.approx(10, rel=0.05)
    assert job.latency.read_recent(MADE_S + 200) == {}
