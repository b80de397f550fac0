"""Tests the answers of probes for a job that makes no progress, or does not run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from tests.unit.runtime.test_status import at

from onceflow import JobState, RuntimeSettings
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.runtime.driver import health
from onceflow.core.runtime.driver.health import Health, JobHealth, answer_probe
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.status import JobStatus, apply
from onceflow.core.settings.pipeline_settings import Metrics

SETTINGS = CheckpointSettings(interval_s=10.0, timeout_s=60.0)
RUNTIME = RuntimeSettings(heartbeat_timeout_s=30.0, cancel_timeout_s=10.0)


class Watched:
    """A job, a clock, and its health."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, intervals: int | None = 5) -> None:
        self.now_s = 0.0
        clock = type("Clock", (), {"monotonic": staticmethod(lambda: self.now_s)})
        monkeypatch.setattr(health, "time", clock)
        self._health = JobHealth(SETTINGS, RUNTIME, intervals)
        self._status = JobStatus("ledger")
        self.take(lambda moment: job_events.JobStarted(at=moment))

    def take(self, *events: Callable[[job_events.Moment], job_events.JobEvent]) -> None:
        for make in events:
            event = make(at(self.now_s))
            self._status = apply(self._status, event)
            self._health.on_event(event)

    def run(self, attempt: int = 1) -> None:
        self.take(
            lambda moment: job_events.AttemptBegan(AttemptId(attempt), CheckpointId(0), at=moment),
            lambda moment: job_events.AttemptRunning(at=moment),
        )

    def complete(self, number: int) -> None:
        checkpoint, kind = CheckpointId(number), CheckpointKind.PERIODIC
        self.take(
            lambda moment: job_events.CheckpointTriggered(checkpoint, kind, at=moment),
            lambda moment: job_events.CheckpointCompleted(checkpoint, 1.0, at=moment),
        )

    def promise(self, within_s: float) -> None:
        self._health.promise(within_s)

    def judge(self) -> Health:
        return self._health.judge(self._status)


def test_a_job_is_ready_once_it_runs_and_a_checkpoint_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Watched(monkeypatch)
    assert job.judge().unreadiness == "the job is starting"
    job.run()
    assert job.judge().unreadiness == "no checkpoint is decided yet"
    job.complete(1)
    assert job.judge() == Health("ledger", "", "")
    job.take(lambda moment: job_events.JobRestarting(1.0, "SlotLost: gone", at=moment))
    assert job.judge() == Health("ledger", "", "the job is restarting")
    job.run(2)
    assert job.judge().unreadiness == ""
    job.take(lambda moment: job_events.JobEnded(JobState.STOPPED, at=moment))
    assert job.judge() == Health("ledger", "", "the job has ended: stopped")


def test_a_job_whose_checkpoints_stop_is_unhealthy_after_so_many_intervals_and_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Watched(monkeypatch)
    job.now_s = 500.0
    assert job.judge().sickness == "", "a job that has not run yet owes no checkpoint"
    job.run()
    job.now_s += 20.0
    job.complete(1)
    job.now_s += 5 * 10.0 + 60.0
    assert job.judge().sickness == ""
    job.now_s += 1.0
    assert job.judge().sickness == "no checkpoint has completed for 111 s; the limit is 110 s"
    job.run(2)
    assert job.judge().sickness, "another attempt is no progress"
    job.complete(2)
    assert job.judge().sickness == ""


def test_no_limit_of_intervals_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Watched(monkeypatch, intervals=None)
    job.run()
    job.now_s += 1e6
    assert job.judge().sickness == ""


def test_a_loop_that_owes_a_turn_is_unhealthy_and_one_that_waits_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Watched(monkeypatch)
    job.promise(0.5)
    job.now_s += 50.4
    assert job.judge().sickness == ""
    job.now_s += 10.0
    assert job.judge().sickness == "the driver's loop hangs: its next turn is 10 s overdue"
    job.promise(600.0)
    job.now_s += 640.0
    assert job.judge().sickness == "", "a restart's delay is no standstill"


def test_a_probe_asks_for_every_job_and_is_told_which_is_unwell() -> None:
    well, ill = Health("one", "", ""), Health("two", "no checkpoint", "the job is restarting")
    both = answer_probe("/healthz", [well, ill])
    assert both.status == 503
    assert json.loads(both.body) == {"ok": False, "jobs": {"one": "ok", "two": "no checkpoint"}}
    assert answer_probe("/healthz", [well]).status == 200
    unready = answer_probe("/readyz", [well, ill])
    assert json.loads(unready.body)["jobs"]["two"] == "the job is restarting"


@pytest.mark.parametrize("intervals", [0, -1])
def test_a_limit_below_one_interval_is_refused(intervals: int) -> None:
    with pytest.raises(ConfigError, match="unhealthy_after_intervals"):
        Metrics(unhealthy_after_intervals=intervals)


def test_the_clock_of_promises_is_that_of_events() -> None:
    assert abs(job_events.Moment.now().monotonic_s - time.monotonic()) < 5.0
