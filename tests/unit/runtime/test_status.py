"""The status of a job is a fold of its events: what it must say after them, in any order at all."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import SnapshotTimings
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import SinkMetrics, SubtaskMetrics
from onceflow.core.runtime.events.job_events import (
    AttemptBegan,
    AttemptEnded,
    AttemptRunning,
    CheckpointAcked,
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    CommitRefused,
    EventsDropped,
    JobEnded,
    JobEvent,
    JobRestarting,
    JobStarted,
    JobState,
    LagMeasured,
    LeftoversAborted,
    Moment,
    RecoveredSink,
    SinkBlocked,
    SinksRecovered,
    SlotJoined,
    SlotLeft,
    SlotReported,
    SlotsDeployed,
    SlotsJoined,
    SplitsDiscovered,
    StateDropped,
    SubtaskCommitted,
)
from onceflow.core.runtime.events.status import (
    FAILURES_LENGTH,
    HISTORY_LENGTH,
    SUBTASK_HISTORY_LENGTH,
    JobStatus,
    apply,
)
from onceflow.core.runtime.events.status_parts import describe_copy
from onceflow.core.spi import CopyProgress, SourceProgress, SourceWarning, SplitOffsets

FIRST, SECOND = SubtaskRef("in", 0), SubtaskRef("in", 1)
ONE, TWO = AttemptId(1), AttemptId(2)
_OFFSETS = ((), (SplitOffsets("0", 3, 10), SplitOffsets("1", 10, 10)))


def at(seconds: float) -> Moment:
    return Moment(seconds, 1_000_000 + seconds)


def chk(number: int) -> CheckpointId:
    return CheckpointId(number)


def after(*events: JobEvent, status: JobStatus | None = None) -> JobStatus:
    return reduce(apply, events, status or JobStatus("job"))


def triggered(number: int, seconds: float) -> CheckpointTriggered:
    return CheckpointTriggered(chk(number), CheckpointKind.PERIODIC, at=at(seconds))


def acked(number: int, subtask: SubtaskRef, seconds: float, **ms: Any) -> CheckpointAcked:
    timings = SnapshotTimings(size_bytes=10, **ms)
    return CheckpointAcked(chk(number), subtask, timings, at=at(seconds))


def completed(number: int, seconds: float) -> CheckpointCompleted:
    return CheckpointCompleted(chk(number), 1.5, at=at(seconds))


def committed(subtask: SubtaskRef, number: int, seconds: float) -> SubtaskCommitted:
    return SubtaskCommitted(subtask, chk(number), at=at(seconds))


BEGUN = (
    JobStarted(frozenset({"in"}), at=at(0)),
    AttemptBegan(ONE, chk(0), at=at(1)),
    SlotJoined(0, 10, 9, "here", at=at(2)),
    SlotsJoined(at=at(2)),
    SinksRecovered((RecoveredSink("out", "job.out", committed=2, aborted=1),), at=at(3)),
    SlotsDeployed(at=at(4)),
    AttemptRunning(at=at(5)),
)


def test_how_an_attempt_began_is_told_in_seconds_since_the_start() -> None:
    status = after(*BEGUN)
    assert (status.state, status.attempt, status.restores) == (JobState.RUNNING, 1, 0)
    (stats,) = status.attempts
    assert (stats.claimed_s, stats.slots_up_s, stats.recovered_s) == (1, 2, 3)
    assert (stats.deployed_s, stats.running_s) == (4, 5)
    assert (stats.committed, stats.aborted, stats.began_at_s) == (2, 1, 1_000_000)


def test_a_refused_commit_is_told_until_it_is_committed_or_its_attempt_ends() -> None:
    refused = CommitRefused("out", "checkpoint 3 of sink job.out (5 rows): read-only", at=at(6))
    status = after(*BEGUN, refused)
    assert [sink.commit_refusal for sink in status.sinks] == [refused.refusal]
    assert f"; sink out refuses {refused.refusal}" in str(status)
    for over in (CommitRefused("out", "", at=at(7)), AttemptBegan(TWO, chk(0), at=at(7))):
        ended = after(over, status=status)
        assert "refuses" not in str(ended)


def test_the_next_attempt_is_timed_from_the_end_of_the_one_before() -> None:
    status = after(
        *BEGUN,
        triggered(1, 6),
        AttemptEnded(ONE, "SlotLost: gone", at=at(10)),
        JobRestarting(0.5, "SlotLost: gone", at=at(12)),
        status=JobStatus("job"),
    )
    assert (status.state, status.last_error) == (JobState.RESTARTING, "SlotLost: gone")
    status = after(AttemptBegan(TWO, chk(0), at=at(13)), status=status)
    assert (status.attempt, status.restores, status.checkpoints_pending) == (2, 1, ())
    assert (status.attempts[-1].slots_ended_s, status.attempts[-1].claimed_s) == (2, 3)


def test_a_checkpoint_is_remembered_with_each_subtasks_part_of_it() -> None:
    status = after(*BEGUN, triggered(1, 10), acked(1, FIRST, 10.1, sync_ms=3, alignment_ms=1))
    assert status.checkpoints_pending == (1,)
    assert [subtask.ack_ms for subtask in status.pending[0].subtasks] == [100]
    status = after(acked(1, SECOND, 10.3, sync_ms=2, async_ms=7), completed(1, 10.5), status=status)
    last = status.last_checkpoint
    assert last is not None
    assert status.checkpoints_pending == ()
    assert (last.checkpoint, last.attempt, last.duration_ms, last.append_ms) == (1, 1, 500, 1.5)
    assert (last.alignment_ms, last.sync_ms, last.async_ms, last.size_bytes) == (1, 3, 7, 20)
    assert [(subtask.subtask, subtask.ack_ms, subtask.async_ms) for subtask in last.subtasks] == [
        (FIRST, 100, 0),
        (SECOND, 300, 7),
    ]


def test_a_checkpoint_is_committed_when_its_last_subtask_has_committed() -> None:
    done = (triggered(1, 10), acked(1, FIRST, 10), acked(1, SECOND, 10), completed(1, 11))
    more = (triggered(2, 12), acked(2, FIRST, 12), acked(2, SECOND, 12), completed(2, 13))
    status = after(*BEGUN, *done, *more, committed(FIRST, 2, 13.5))
    assert [one.committed_ms for one in status.history] == [None, None]
    status = after(committed(SECOND, 1, 14), status=status)
    assert [one.committed_ms for one in status.history] == [3000, None]
    status = after(committed(SECOND, 2, 15), status=status)
    assert [one.committed_ms for one in status.history] == [3000, 2000]


def test_a_checkpoint_is_committed_when_the_driver_has_committed_it_whole() -> None:
    """Slots confirm such a sink's decision as soon as they hear of it: nothing is visible yet."""
    running = AttemptRunning(frozenset({"lake"}), at=at(5))
    done = (triggered(1, 10), acked(1, FIRST, 10), acked(1, SECOND, 10), completed(1, 11))
    status = after(*BEGUN, running, *done, committed(FIRST, 1, 11.1), committed(SECOND, 1, 11.2))
    assert [one.committed_ms for one in status.history] == [None]
    status = after(CheckpointCommitted("lake", chk(1), at=at(16)), status=status)
    assert [one.committed_ms for one in status.history] == [5000]


def test_a_checkpoint_that_was_given_up_is_remembered_with_who_had_acked() -> None:
    failed = CheckpointFailed(chk(1), "no ack of in[1]", at=at(20))
    status = after(*BEGUN, triggered(1, 10), acked(1, FIRST, 10.1), failed)
    assert (status.checkpoints_pending, status.checkpoints_failed) == ((), 1)
    assert status.last_error == "checkpoint 1: no ack of in[1]"
    (failure,) = status.failures
    assert (failure.checkpoint, failure.attempt, failure.failed_at_s) == (1, 1, 1_000_020)
    assert [subtask.subtask for subtask in failure.subtasks] == [FIRST]


def test_a_completed_checkpoint_ends_older_ones_that_were_still_pending() -> None:
    status = after(*BEGUN, triggered(1, 10), triggered(2, 11), triggered(3, 12), completed(2, 13))
    assert status.checkpoints_pending == (3,)


def test_sinks_add_up_recovery_and_every_slot() -> None:
    def reported(slot: int) -> SlotReported:
        sink = SinkMetrics("out", "job.out", slot, prepared=1, committed=4, oldest_prepared_s=slot)
        metrics = SubtaskMetrics(SubtaskRef("in", slot), records_in=5, rejected=1)
        other = SubtaskMetrics(SubtaskRef("balance", slot), records_in=5)
        return SlotReported(slot, (metrics, other), (sink,), 100, at=at(9))

    late = LeftoversAborted(ONE, (RecoveredSink("out", "job.out", aborted=3),))
    older = LeftoversAborted(AttemptId(0), (RecoveredSink("out", "job.out", aborted=30),))
    second = SlotJoined(1, 11, 9, "there", at=at(2))
    status = after(*BEGUN, second, reported(0), reported(1), late, older)
    (sink,) = status.sinks
    assert (sink.prepared, sink.committed, sink.aborted, sink.oldest_prepared_s) == (2, 10, 4, 1)
    assert (status.records_in, status.rejected, len(status.subtasks)) == (10, 2, 4)
    assert [slot.heard_at_s for slot in status.slots] == [1_000_009, 1_000_009]
    ended = after(SlotLeft(0), JobEnded(JobState.FINISHED), status=status)
    assert (ended.state, ended.records_in, ended.sinks) == (JobState.FINISHED, 10, status.sinks)


def test_counts_of_sinks_and_rejected_records_go_on_over_attempts() -> None:
    report = SlotReported(
        0,
        (SubtaskMetrics(FIRST, records_in=900, rejected=180),),
        (
            SinkMetrics(
                "out",
                "job.out",
                0,
                open=1,
                prepared=2,
                committed=7,
                retried=3,
                rows_committed=180,
                rows_rejected=5,
                commit_refusal="why",
            ),
        ),
        at=at(6),
    )
    status = after(*BEGUN, SlotJoined(0, 1, 1, "here", at=at(5)), report)
    before = status.sinks
    restarted = after(
        AttemptEnded(ONE, "SlotLost: gone", at=at(7)),
        JobRestarting(0.5, "SlotLost: gone", at=at(8)),
        AttemptBegan(TWO, chk(4), at=at(9)),
        status=status,
    )
    assert (restarted.rejected, restarted.records_in) == (180, 0)
    (sink,) = restarted.sinks
    assert (sink.rows_committed, sink.rows_rejected, sink.retried) == (
        before[0].rows_committed,
        5,
        3,
    )
    assert (sink.open, sink.prepared, sink.commit_refusal) == (0, 0, "")
    again = after(
        SlotJoined(0, 2, 1, "here", at=at(10)), replace(report, at=at(11)), status=restarted
    )
    assert again.rejected == 360
    assert again.sinks[0].rows_committed == before[0].rows_committed + 180


def test_the_last_error_has_a_time_which_stays_when_the_job_runs_again() -> None:
    status = after(
        *BEGUN,
        AttemptEnded(ONE, "SlotLost: gone", at=at(10)),
        JobRestarting(0.5, "SlotLost: gone", at=at(12)),
        AttemptBegan(TWO, chk(0), at=at(13)),
        AttemptRunning(at=at(14)),
    )
    assert status.last_error_at_s == at(12).wall_s
    assert "; last error at 1970-01-12 13:46:52 UTC: SlotLost: gone" in str(status)
    seen = status.describe(at(12 + 3 * 60 + 4).wall_s)
    assert "; last error at 1970-01-12 13:46:52 UTC, 3 min 4 s ago: SlotLost: gone" in seen


def test_state_that_was_dropped_is_listed_once() -> None:
    status = after(*BEGUN, StateDropped(("b", "a")), StateDropped(("a", "c")))
    assert status.dropped_state == ("a", "b", "c")


def test_why_a_job_failed_outlives_why_it_restarted() -> None:
    status = after(*BEGUN, JobRestarting(1, "one"), JobEnded(JobState.FAILED, "two"))
    assert (status.state, status.last_error) == (JobState.FAILED, "two")
    assert after(*BEGUN, JobRestarting(1, "one"), JobEnded(JobState.CANCELLED)).last_error == "one"


def test_the_history_of_a_long_run_is_bounded() -> None:
    subtasks = [SubtaskRef("in", index) for index in range(300)]
    status = after(*BEGUN)
    for number in range(1, HISTORY_LENGTH + 20):
        acks = [acked(number, subtask, number) for subtask in subtasks]
        status = after(triggered(number, number), *acks, completed(number, number), status=status)
    assert status.checkpoints_completed == HISTORY_LENGTH + 19
    assert [one.checkpoint for one in status.history] == list(range(20, HISTORY_LENGTH + 20))
    kept = sum(len(one.subtasks) for one in status.history)
    assert SUBTASK_HISTORY_LENGTH - len(subtasks) < kept <= SUBTASK_HISTORY_LENGTH
    assert len(status.history[-1].subtasks) == len(subtasks)
    assert status.history[0].subtasks == ()
    assert status.history[0].size_bytes == 10 * len(subtasks)


_NUMBERS = st.integers(1, 6).map(CheckpointId)
_ATTEMPTS = st.integers(1, 3).map(AttemptId)
_SUBTASKS = st.sampled_from([FIRST, SECOND])
_MOMENTS = st.floats(0, 100).map(at)
_TEXTS = st.sampled_from(["", "why"])
_SINKS = st.just((RecoveredSink("out", "job.out", aborted=1),))


def _events() -> st.SearchStrategy[JobEvent]:
    kinds: Sequence[st.SearchStrategy[JobEvent]] = (
        st.builds(JobStarted, st.just(frozenset({"in"})), at=_MOMENTS),
        st.builds(AttemptBegan, _ATTEMPTS, _NUMBERS, at=_MOMENTS),
        st.builds(StateDropped, st.just(("a",)), at=_MOMENTS),
        st.builds(
            SlotJoined, st.integers(0, 2), st.just(1), st.just(1), st.just("here"), at=_MOMENTS
        ),
        st.builds(SlotsJoined, at=_MOMENTS),
        st.builds(SinksRecovered, _SINKS, at=_MOMENTS),
        st.builds(SlotsDeployed, at=_MOMENTS),
        st.builds(AttemptRunning, st.just(frozenset({"out"})), at=_MOMENTS),
        st.builds(SlotReported, st.integers(0, 2), at=_MOMENTS),
        st.builds(SlotLeft, st.integers(0, 2), _TEXTS, at=_MOMENTS),
        st.builds(SplitsDiscovered, st.just("in"), st.just(("0",)), at=_MOMENTS),
        st.builds(LagMeasured, st.just("in"), st.sampled_from(_OFFSETS), at=_MOMENTS),
        st.builds(SinkBlocked, st.just("out"), st.sampled_from([(), ("session 7",)]), at=_MOMENTS),
        st.builds(CommitRefused, st.just("out"), _TEXTS, at=_MOMENTS),
        st.builds(CheckpointTriggered, _NUMBERS, st.sampled_from(CheckpointKind), at=_MOMENTS),
        st.builds(CheckpointAcked, _NUMBERS, _SUBTASKS, st.just(SnapshotTimings()), at=_MOMENTS),
        st.builds(CheckpointCompleted, _NUMBERS, st.just(1.0), at=_MOMENTS),
        st.builds(CheckpointFailed, _NUMBERS, _TEXTS, at=_MOMENTS),
        st.builds(SubtaskCommitted, _SUBTASKS, _NUMBERS, at=_MOMENTS),
        st.builds(CheckpointCommitted, st.just("out"), _NUMBERS, at=_MOMENTS),
        st.builds(LeftoversAborted, _ATTEMPTS, _SINKS, at=_MOMENTS),
        st.builds(AttemptEnded, _ATTEMPTS, _TEXTS, at=_MOMENTS),
        st.builds(JobRestarting, st.just(1.0), _TEXTS, at=_MOMENTS),
        st.builds(JobEnded, st.sampled_from(JobState), _TEXTS, at=_MOMENTS),
        st.builds(EventsDropped, st.just(1), at=_MOMENTS),
    )
    return st.one_of(kinds)


@example([triggered(1, 0.0), completed(1, 0.0), triggered(1, 0.0)])
@given(st.lists(_events(), max_size=60))
def test_any_events_in_any_order_leave_a_status_that_can_be_read(events: list[JobEvent]) -> None:
    status = JobStatus("job")
    for event in events:
        before = pickle.dumps(status)
        status, older = apply(status, event), status
        assert pickle.dumps(older) == before, "what was told stays as it was told"
        assert apply(older, event) == status, "the same events always tell the same"
        assert len(status.history) <= HISTORY_LENGTH
        assert len(status.failures) <= FAILURES_LENGTH
        assert len(status.history) <= status.checkpoints_completed
        # A job that goes back to a savepoint triggers numbers again that it has completed.
        triggered = {event.checkpoint} if isinstance(event, CheckpointTriggered) else set[int]()
        assert {*status.checkpoints_pending} - {*older.checkpoints_pending} <= triggered
        if isinstance(event, CheckpointCompleted):
            assert event.checkpoint not in status.checkpoints_pending
        assert repr(status)
        assert [sink.uid for sink in status.sinks] in ([], ["out"])
        assert (status.records_in, status.rejected) == (0, 0)
    assert pickle.loads(pickle.dumps(events)) == events
    assert reduce(apply, events, JobStatus("job")) == status


def test_lag_is_a_sources_own_and_absent_while_it_cannot_tell() -> None:
    status = apply(JobStatus("job"), LagMeasured("in", _OFFSETS[1], at=at(1)))
    status = apply(status, LagMeasured("other", (SplitOffsets("a", 0, 2),), at=at(2)))
    assert status.lag == {"in": 7, "other": 2}
    silent = apply(status, LagMeasured("in", (), at=at(3)))
    assert silent.lag == {"other": 2}
    restarted = apply(status, AttemptBegan(TWO, chk(4), at=at(4)))
    assert restarted.lag == {}, "the restored checkpoint is another one"


def test_what_a_source_measures_is_in_the_line_until_it_does_not_answer() -> None:
    copy = CopyProgress("public.orders", 500, 5, 2_000, 20)
    warning = SourceWarning("extended", "slot s keeps much WAL")
    progress = SourceProgress(12_345_678, 3.04, 999_600, "0/16B", 100.0, (copy,), (warning,))
    status = apply(JobStatus("job"), LagMeasured("in", (), progress, at=at(1)))
    assert status.describe(190.0).split("; ")[1:] == [
        "in has copied 500 of about 2,000 rows of public.orders in 5 of about 20 chunks (25%)",
        "in is 12.3 MB and 3.0 s behind",
        "in makes the server keep 1 MB, the same position for 1 min 30 s",
        "in: slot s keeps much WAL",
    ]
    assert status.lag == {}
    silent = apply(status, LagMeasured("in", (), at=at(2)))
    assert silent == replace(status, progress={})
    restarted = apply(status, AttemptBegan(TWO, chk(4), at=at(4)))
    assert restarted.progress == {}


def test_a_copy_without_an_estimate_has_numbers_and_no_share() -> None:
    assert describe_copy(CopyProgress("t", 7, 1)) == "7 rows of t in 1 chunks"
    more = CopyProgress("t", 30, 3, rows_expected=20, chunks_expected=2)
    assert (more.share, CopyProgress("t", 0, 0, rows_expected=0).share) == (1.0, 0.0)
    assert describe_copy(more) == "30 of about 30 rows of t in 3 chunks (100%)"


def test_a_status_prints_one_line_however_much_has_happened() -> None:
    status = JobStatus("ledger", last_error="the server is away", attempt=3)
    assert str(status) == (
        "ledger: starting, attempt 3, 0 records read, 0 rows committed, 0 transactions in doubt,"
        " checkpoint none yet; last error: the server is away"
    )
