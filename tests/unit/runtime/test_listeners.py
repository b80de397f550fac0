"""Listeners see every event in order, on threads of their own, and hold up nobody."""

from __future__ import annotations

import logging
import threading

import pytest
from tests.support.waiting import await_true

from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.runtime.events import job_events, listeners
from onceflow.core.runtime.events.listeners import QUEUE_LENGTH, StatusTracker
from onceflow.core.runtime.events.status import JobStatus


def began(attempt: int) -> job_events.AttemptBegan:
    return job_events.AttemptBegan(AttemptId(attempt), CheckpointId(0))


def attempts_in(seen: list[tuple[job_events.JobEvent, JobStatus]]) -> list[int]:
    return [event.attempt for event, _ in seen if isinstance(event, job_events.AttemptBegan)]


def test_a_listener_hears_every_event_in_order_with_the_status_as_of_it() -> None:
    seen: list[tuple[job_events.JobEvent, JobStatus]] = []
    threads: set[str] = set()

    def listener(event: job_events.JobEvent, status: JobStatus) -> None:
        threads.add(threading.current_thread().name)
        seen.append((event, status))

    tracker = StatusTracker("job", [listener])
    for attempt in range(1, 50):
        tracker.publish(began(attempt))
    tracker.publish(job_events.JobEnded(job_events.JobState.FINISHED))
    tracker.close()
    assert attempts_in(seen) == list(range(1, 50))
    assert [status.attempt for _, status in seen] == [*range(1, 50), 49]
    assert seen[-1] == (seen[-1][0], tracker.status)
    assert isinstance(seen[-1][0], job_events.JobEnded)
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


def test_one_that_is_added_later_hears_what_comes_and_one_that_is_too_late_hears_nothing() -> None:
    seen: list[tuple[job_events.JobEvent, JobStatus]] = []
    tracker = StatusTracker("job")
    tracker.publish(began(1))
    tracker.add_listener(lambda event, status: seen.append((event, status)))
    tracker.publish(began(2))
    tracker.publish(job_events.JobEnded(job_events.JobState.FINISHED))
    tracker.add_listener(lambda event, status: seen.append((event, status)))
    tracker.close()
    assert attempts_in(seen) == [2]
    assert len(seen) == 2


def test_a_listener_that_raises_is_named_once_and_goes_on_hearing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[job_events.JobEvent, JobStatus]] = []

    def broken(event: job_events.JobEvent, status: JobStatus) -> None:
        seen.append((event, status))
        raise ValueError(f"cannot bear {type(event).__name__}")

    tracker = StatusTracker("job", [broken])
    with caplog.at_level(logging.ERROR):
        for attempt in range(1, 4):
            tracker.publish(began(attempt))
        tracker.publish(job_events.JobEnded(job_events.JobState.FINISHED))
        tracker.close()
    assert attempts_in(seen) == [1, 2, 3]
    first, last = caplog.messages
    assert "broken of job job raised at AttemptBegan" in first
    assert "raised 4 times" in last
    assert caplog.text.count("cannot bear AttemptBegan") == 1


def test_a_slow_listener_holds_up_neither_the_job_nor_others_and_is_told_what_it_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = threading.Event()
    slow: list[tuple[job_events.JobEvent, JobStatus]] = []
    quick: list[tuple[job_events.JobEvent, JobStatus]] = []

    def slow_listener(event: job_events.JobEvent, status: JobStatus) -> None:
        go_on.wait(60)
        slow.append((event, status))

    tracker = StatusTracker("job", [slow_listener])
    tracker.add_listener(lambda event, status: quick.append((event, status)))
    count = 2 * QUEUE_LENGTH
    for attempt in range(1, count + 1):
        tracker.publish(began(attempt))
        await_true(lambda: len(quick) >= attempt - QUEUE_LENGTH // 2)
    assert slow == []
    go_on.set()
    await_true(lambda: len(slow) >= QUEUE_LENGTH)
    tracker.publish(began(count + 1))
    tracker.publish(job_events.JobEnded(job_events.JobState.FINISHED))
    tracker.close()
    assert attempts_in(quick) == list(range(1, count + 2))
    missed = [event.count for event, _ in slow if isinstance(event, job_events.EventsDropped)]
    assert len(attempts_in(slow)) + sum(missed) == count + 1
    assert len(missed) == 1
    assert isinstance(slow[-1][0], job_events.JobEnded)
    assert f"slow_listener of job job is too slow: it has missed {missed[0]} events" in caplog.text


def test_the_end_does_not_wait_for_a_listener_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "END_TIMEOUT_S", 0.05)
    go_on = threading.Event()

    def hanging(event: job_events.JobEvent, status: JobStatus) -> None:
        go_on.wait(60)

    tracker = StatusTracker("job", [hanging])
    tracker.publish(began(1))
    tracker.publish(job_events.JobEnded(job_events.JobState.FINISHED))
    tracker.close()
    go_on.set()
    assert "hanging of job job had not received 1 events when the job ended" in caplog.text


def test_state_that_is_dropped_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = StatusTracker("job")
    tracker.publish(job_events.StateDropped(("the state of operator 'a'",)))
    tracker.publish(job_events.StateDropped(("the state of operator 'a'",)))
    assert caplog.messages == [
        "job job drops the state of operator 'a', which no operator of the pipeline uses"
    ]
