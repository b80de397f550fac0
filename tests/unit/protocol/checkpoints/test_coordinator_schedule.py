"""Tests triggers of checkpoints: interval, pause, concurrency, requests, ends (S54, S57, S61)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.unit.protocol.checkpoints.coordination import SOURCES, START_S, Coordination, of_type

from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.protocol.checkpoints.decisions import (
    AppendDecision,
    Barrier,
    CheckpointKind,
    Decision,
    FailAttempt,
)

MANUAL, STOP, FINAL = CheckpointKind.MANUAL, CheckpointKind.STOP, CheckpointKind.FINAL


def kinds(decisions: Sequence[Decision]) -> list[CheckpointKind]:
    return [trigger.kind for trigger in of_type(Barrier, decisions)]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_never_more_checkpoints_than_allowed_are_under_way(limit: int) -> None:
    """S57 testMaxConcurrentAttempts: the next starts as soon as one ends."""
    job = Coordination(CheckpointSettings(interval_s=1.0, max_concurrent=limit))
    for _ in range(20):
        job.tick(after_s=1.0)
    assert job.pending == list(range(1, limit + 1))
    job.ack_all(1)
    assert kinds(job.logged(1)) == [CheckpointKind.PERIODIC]
    assert job.pending == list(range(2, limit + 2))


def test_interval_counts_from_trigger_to_trigger() -> None:
    job = Coordination(CheckpointSettings(interval_s=5.0))
    assert job.tick(after_s=4.9) == []
    job.trigger()
    assert job.now_s == pytest.approx(START_S + 5.0)
    job.now_s += 4.0
    job.complete(1)
    assert job.tick(after_s=0.9) == []
    assert kinds(job.tick(after_s=0.1)) == [CheckpointKind.PERIODIC]


def test_pause_counts_from_the_end_of_the_last_and_means_one_at_a_time() -> None:
    """S57 testMinDelayBetweenCheckpoints."""
    settings = CheckpointSettings(interval_s=1.0, min_pause_s=3.0, max_concurrent=4)
    job = Coordination(settings)
    job.trigger()
    assert job.tick(after_s=10.0) == []
    job.complete(1)
    assert job.coordinator.next_wake_s() == job.now_s + 3.0
    assert job.tick(after_s=2.9) == []
    assert kinds(job.tick(after_s=0.1)) == [CheckpointKind.PERIODIC]


def test_pause_follows_a_failed_checkpoint_too() -> None:
    job = Coordination(CheckpointSettings(interval_s=1.0, min_pause_s=3.0, tolerable_failures=9))
    job.trigger()
    job.now_s += 5.0
    job.decline(1)
    assert job.tick(after_s=2.9) == []
    assert kinds(job.tick(after_s=0.1)) == [CheckpointKind.PERIODIC]


def test_request_waits_neither_for_the_interval_nor_for_the_pause() -> None:
    """S57 testMinDelayBetweenSavepoints: requests are exempt from both."""
    job = Coordination(CheckpointSettings(interval_s=100.0, min_pause_s=50.0))
    assert kinds(job.coordinator.request(MANUAL, job.now_s)) == [MANUAL]
    job.complete(1)
    assert kinds(job.coordinator.request(MANUAL, job.now_s)) == [MANUAL]


def test_request_queues_behind_what_is_under_way_and_goes_before_the_periodic() -> None:
    """S61: queued behind the one in flight, then first, although a periodic one is due as well."""
    job = Coordination(CheckpointSettings(interval_s=1.0))
    job.trigger()
    assert job.coordinator.request(MANUAL, job.now_s) == ()
    assert job.tick(after_s=5.0) == []
    job.ack_all(1)
    assert kinds(job.logged(1)) == [MANUAL]


def test_requests_that_wait_together_are_fulfilled_by_one_checkpoint() -> None:
    """S57 testConcurrentSavepoints."""
    job = Coordination(CheckpointSettings(interval_s=None))
    job.coordinator.request(MANUAL, job.now_s)
    job.coordinator.request(MANUAL, job.now_s)
    job.coordinator.request(MANUAL, job.now_s)
    job.ack_all(1)
    assert kinds(job.logged(1)) == [MANUAL]
    job.ack_all(2)
    assert kinds(job.logged(2)) == []


def test_without_an_interval_nothing_is_triggered_by_time() -> None:
    job = Coordination(CheckpointSettings(interval_s=None))
    assert job.coordinator.next_wake_s() is None
    assert job.tick(after_s=1e6) == []


def test_nothing_is_triggered_after_a_stop() -> None:
    job = Coordination(CheckpointSettings(interval_s=1.0, max_concurrent=3))
    assert kinds(job.coordinator.request(STOP, job.now_s)) == [STOP]
    assert job.tick(after_s=5.0) == []
    assert job.coordinator.request(MANUAL, job.now_s) == ()
    job.ack_all(1)
    assert kinds(job.logged(1)) == []
    assert job.tick(after_s=5.0) == []


def test_stop_waits_for_its_turn_and_lets_older_ones_complete() -> None:
    job = Coordination(CheckpointSettings(interval_s=1.0))
    job.trigger()
    assert job.coordinator.request(STOP, job.now_s) == ()
    job.ack_all(1)
    assert kinds(job.logged(1)) == [STOP]


def test_final_checkpoint_follows_the_last_source_and_waits_for_what_is_under_way() -> None:
    """S9: also without an interval; a finished source stays in the checkpoint under way."""
    job = Coordination(CheckpointSettings(interval_s=1.0))
    job.trigger()
    job.coordinator.on_source_end(SOURCES[0], job.now_s)
    assert job.coordinator.on_source_end(SOURCES[1], job.now_s) == ()
    job.ack_all(1)
    assert kinds(job.logged(1)) == [FINAL]
    assert job.notified == [1]


def test_end_of_input_that_is_reported_again_triggers_nothing_more() -> None:
    """S10: repeated reports of one source are one, and do not stand for the other."""
    job = Coordination(CheckpointSettings(interval_s=None))
    for _ in range(3):
        assert job.coordinator.on_source_end(SOURCES[0], job.now_s) == ()
    assert kinds(job.coordinator.on_source_end(SOURCES[1], job.now_s)) == [FINAL]
    assert job.coordinator.on_source_end(SOURCES[1], job.now_s) == ()


def test_failed_final_checkpoint_is_tried_again_after_a_pause() -> None:
    job = Coordination(CheckpointSettings(interval_s=None, tolerable_failures=1))
    for source in SOURCES:
        job.coordinator.on_source_end(source, job.now_s)
    assert kinds(job.decline(1)) == []
    assert job.coordinator.next_wake_s() == job.now_s + 1.0
    assert kinds(job.tick(after_s=1.0)) == [FINAL]
    assert of_type(FailAttempt, job.decline(2))


@pytest.mark.parametrize("kind", [MANUAL, STOP])
@pytest.mark.parametrize("how", ["decline", "timeout", "append"])
def test_request_holds_until_a_checkpoint_is_decided_and_not_until_one_is_triggered(
    kind: CheckpointKind, how: str
) -> None:
    """S59: after a STOP that failed the sources read nothing, so another STOP follows, no other."""
    job = Coordination(CheckpointSettings(interval_s=60.0, timeout_s=10.0, tolerable_failures=1))
    assert kinds(job.coordinator.request(kind, job.now_s)) == [kind]
    match how:
        case "decline":
            failed = job.decline(1)
        case "timeout":
            failed = job.tick(after_s=10.0)
        case _:
            job.ack_all(1)
            failed = job.append_failed(1)
    assert kinds(failed) == []
    assert job.coordinator.requested == {kind}
    assert job.coordinator.next_wake_s() == job.now_s + 1.0
    assert kinds(job.tick(after_s=1.0)) == [kind]
    job.complete(2)
    assert kinds(job.tick(after_s=5.0)) == []
    assert job.coordinator.requested == ({STOP} if kind is STOP else set())


def test_attempt_that_fails_says_what_it_has_left_unfulfilled() -> None:
    job = Coordination(CheckpointSettings(interval_s=1.0))
    assert job.coordinator.requested == frozenset()
    job.coordinator.request(MANUAL, job.now_s)
    job.coordinator.request(STOP, job.now_s)
    assert of_type(FailAttempt, job.decline(1))
    assert job.coordinator.requested == {MANUAL, STOP}


def test_checkpoint_that_was_triggered_before_a_request_does_not_fulfill_it() -> None:
    job = Coordination(CheckpointSettings(interval_s=1.0, max_concurrent=3, tolerable_failures=9))
    job.trigger()
    assert kinds(job.coordinator.request(MANUAL, job.now_s)) == [MANUAL]
    job.complete(1)
    assert job.coordinator.requested == {MANUAL}
    # One triggered after the request's own covers it while it is under way, whatever its kind.
    assert job.trigger() == 3
    assert kinds(job.decline(2)) == []
    assert kinds(job.tick(after_s=0.5)) == []
    job.complete(3)
    assert job.coordinator.requested == frozenset()


def test_wall_clock_that_is_set_back_delays_no_checkpoint_and_only_stamps_it() -> None:
    job = Coordination(CheckpointSettings(interval_s=1.0, timeout_s=5.0, min_pause_s=0.5))
    job.complete(job.trigger())
    job.wall_s -= 3600.0
    assert kinds(job.tick(after_s=1.0)) == [CheckpointKind.PERIODIC]
    job.complete(2)
    first, second = (a.completed for a in of_type(AppendDecision, job.decisions))
    assert second.triggered_at_ms == first.triggered_at_ms - 3_600_000
    assert second.completed_at_ms == first.completed_at_ms - 3_600_000


def test_final_checkpoint_fulfills_a_stop() -> None:
    job = Coordination(CheckpointSettings(interval_s=1.0))
    job.trigger()
    job.coordinator.request(STOP, job.now_s)
    for source in SOURCES:
        job.coordinator.on_source_end(source, job.now_s)
    job.ack_all(1)
    assert kinds(job.logged(1)) == [FINAL]
    job.ack_all(2)
    assert kinds(job.logged(2)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_s": 0.0},
        {"timeout_s": 0.0},
        {"min_pause_s": -1.0},
        {"max_concurrent": 0},
        {"tolerable_failures": -1},
        {"retained": 0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        CheckpointSettings(**{"interval_s": 1.0, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CheckpointKind.PERIODIC, CheckpointKind.FINAL])
def test_only_manual_and_stop_can_be_requested(kind: CheckpointKind) -> None:
    with pytest.raises(ValueError, match="requested"):
        Coordination(CheckpointSettings(interval_s=1.0)).coordinator.request(kind, 0.0)
