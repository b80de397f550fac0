"""The restart loop of a job says how the job has ended, and begins no attempt that it must not."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.counting_source import CountingSource

from onceflow.core.errors import (
    BadRow,
    ConfigError,
    Fenced,
    SinkError,
    SparkStopped,
    StorageError,
)
from onceflow.core.plan.graph import Graph, Operator
from onceflow.core.plan.work import ReadFrom
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.loops.attempt_facts import CancelRequested, JobCancelled
from onceflow.core.protocol.restart import ExponentialDelay, FixedDelay
from onceflow.core.runtime.driver import restart_loop
from onceflow.core.runtime.driver.restart_loop import RestartLoop
from onceflow.core.runtime.driver.source_splits import genesis_of
from onceflow.core.runtime.events.job_events import JobRestarting, JobState
from onceflow.core.spi import Split


@dataclass(frozen=True)
class Source(CountingSource):
    """Notes that the job has finished; may fail then."""

    finished: list[Sequence[Split]] = field(default_factory=list[Sequence[Split]])
    error: Exception | None = None

    def on_finished(self, splits: Sequence[Split]) -> None:
        self.finished.append(splits)
        if self.error is not None:
            raise self.error


@dataclass
class Job:
    """A job whose attempts end as `ends` says: an error is raised, a bool returned."""

    ends: list[Any]
    restart: Any = field(default_factory=lambda: FixedDelay(attempts=2, delay_s=0.0))
    deletes_on_cancel: bool = False
    has_log: bool = True
    sources: dict[str, Source] = field(default_factory=dict[str, Source])
    notes: list[Any] = field(default_factory=list[Any])
    waits: list[float] = field(default_factory=list[float])
    """The times within which the job promised to do something."""
    errors: dict[str, Exception] = field(default_factory=dict[str, Exception])
    """The errors of steps, by the step's name."""
    failed_at: float | None = None
    loop: Any = None

    def step(self, name: str) -> str:
        self.notes.append(name)
        if name in self.errors:
            raise self.errors[name]
        return name

    def context(self) -> Any:
        graph = Graph(
            tuple(Operator(uid, ReadFrom(s), (), s.schema) for uid, s in self.sources.items())
        )
        completed = [genesis_of(graph, AttemptId(1), 1, 128, 0)]
        log = SimpleNamespace(view=SimpleNamespace(completed=completed)) if self.has_log else None
        return SimpleNamespace(
            plan=SimpleNamespace(
                name="job",
                restart=self.restart,
                graph=graph,
                checkpointing=SimpleNamespace(deletes_on_cancel=lambda: self.deletes_on_cancel),
            ),
            cluster=SimpleNamespace(check_alive=lambda: self.step("alive")),
            owner=SimpleNamespace(
                log=log,
                check_owned=lambda: self.step("owned"),
                claim=lambda: self.step("claim"),
                open_recovery="recovery of {}".format,
            ),
            savepoints=SimpleNamespace(add_proofs=lambda: self.step("proofs")),
            observation=SimpleNamespace(
                promise=self.waits.append,
                tracker=SimpleNamespace(publish=self.notes.append),
            ),
            storage="storage",
            events=queue.SimpleQueue(),
        )

    def run(self, monkeypatch: pytest.MonkeyPatch) -> tuple[JobState, str]:
        def delete(log: str, recovery: str, storage: str) -> None:
            self.step(f"delete {log}, {recovery}, {storage}")

        def start(*_: object) -> Any:
            return SimpleNamespace(run=self.attempt, failed_at=self.failed_at)

        monkeypatch.setattr(restart_loop, "AttemptStarter", start)
        monkeypatch.setattr(restart_loop, "delete_checkpoints", delete)
        self.loop = RestartLoop(self.context(), owned=lambda: None, end_with_process=lambda: None)
        ended = self.loop.run()
        return ended.state, ended.error

    def attempt(self) -> bool:
        self.notes.append("attempt")
        end = self.ends.pop(0)
        end = end() if callable(end) else end
        if isinstance(end, BaseException):
            raise end
        return bool(end)

    @property
    def attempts(self) -> int:
        return self.notes.count("attempt")


@pytest.mark.parametrize("finishes", [True, False])
def test_a_job_that_ends_well_has_its_proofs_and_tells_its_sources_if_it_finished(
    monkeypatch: pytest.MonkeyPatch, finishes: bool
) -> None:
    sources = {"a": Source(5, error=OSError("no")), "b": Source(5)}
    job = Job([SinkError("away"), finishes], sources=sources)
    state = JobState.FINISHED if finishes else JobState.STOPPED
    assert job.run(monkeypatch) == (state, "")
    assert job.loop.error is None
    assert job.notes[-1] == "proofs"
    told = [list(source.finished) for source in sources.values()]
    assert told == ([[tuple(s.splits())] for s in sources.values()] if finishes else [[], []])


def test_an_error_that_no_restart_helps_ends_the_job_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in (ConfigError("typing error"), BadRow("id 7"), Fenced("attempt 9"), KeyError("x")):
        job = Job([error])
        ended = job.run(monkeypatch)
        assert ended == (JobState.FAILED, f"{type(error).__name__}: {error}")
        assert job.loop.error is error
        assert job.attempts == 1
        assert "proofs" not in job.notes
    interrupt = KeyboardInterrupt()
    job = Job([interrupt])
    assert job.run(monkeypatch)[0] is JobState.FAILED
    assert job.loop.error is interrupt


def test_restarts_are_counted_and_the_last_error_says_that_there_is_no_further_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job([SinkError("one"), SinkError("two"), SinkError("three\ntrace")])
    state, text = job.run(monkeypatch)
    assert state is JobState.FAILED
    assert job.attempts == 3
    first_line, _, trace = text.partition("\n")
    assert first_line.startswith("SinkError: three (failure 3 in 0 s without a checkpoint; the")
    assert "first was SinkError: one" in first_line
    assert "no further restart: " in first_line
    assert trace == "trace"
    assert not text.startswith("SinkError: SinkError")
    restarts = [note for note in job.notes if isinstance(note, JobRestarting)]
    assert restarts[0].error == "SinkError: one"
    assert job.notes[:2] == ["attempt", "owned"]


@pytest.mark.parametrize("ends", [[SinkError("one")], [SinkError("one"), SinkError("two")]])
def test_a_cluster_that_is_gone_is_told_in_place_of_what_followed_from_it(
    monkeypatch: pytest.MonkeyPatch, ends: list[Exception]
) -> None:
    restart = FixedDelay(attempts=len(ends) - 1, delay_s=0.0)
    gone = SparkStopped("Spark has stopped")
    job = Job(ends, restart=restart, errors={"alive": gone})
    assert job.run(monkeypatch)[0] is JobState.FAILED
    assert job.loop.error is gone
    assert job.attempts == 1


def test_an_error_from_elsewhere_may_be_that_of_a_cluster_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = SparkStopped("Spark has stopped")
    job = Job([ValueError("of Spark")], errors={"alive": gone})
    job.run(monkeypatch)
    assert job.loop.error is gone


def test_a_driver_that_owns_the_job_no_more_begins_no_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fenced = Fenced("attempt 9 has claimed the log")
    job = Job([SinkError("one"), True], errors={"owned": fenced})
    assert job.run(monkeypatch)[0] is JobState.FAILED
    assert job.loop.error is fenced
    assert job.attempts == 1


def test_an_error_of_another_package_is_raised_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [StorageError("one"), OSError("two")]
    job = Job(list(errors), restart=FixedDelay(attempts=1, delay_s=0.0))
    assert job.run(monkeypatch)[0] is JobState.FAILED
    # Before its first attempt has run, an error of another package is final.
    assert job.loop.error is errors[1]


# --- waiting -------------------------------------------------------------------------------------


def test_a_restart_is_waited_for_from_the_failure_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    delayed = ExponentialDelay(initial_delay_s=500.0, max_delay_s=600.0, jitter=0.0)
    job = Job([SinkError("one"), True], restart=delayed, failed_at=time.monotonic() - 500.0)
    assert job.run(monkeypatch)[0] is JobState.FINISHED
    (restart,) = [note for note in job.notes if isinstance(note, JobRestarting)]
    assert restart.delay_s == 0.0
    assert job.waits == [0.0]
    assert "restart in 0.00 s: SinkError: one" in caplog.text


@pytest.mark.parametrize("ends", ["leave", "cancel"])
def test_a_job_that_waits_for_a_restart_can_be_left(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    job = Job([SinkError("one"), True], restart=FixedDelay(attempts=2, delay_s=500.0))

    def leave() -> Exception:
        threading.Timer(0.01, getattr(job.loop, ends)).start()
        return SinkError("one")

    job.ends[0] = leave
    assert job.run(monkeypatch)[0] is JobState.CANCELLED
    assert job.attempts == 1


def test_a_running_attempt_hears_that_the_job_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([True])
    job.run(monkeypatch)
    job.loop.leave()
    events = job.loop._context.events  # pyright: ignore[reportPrivateUsage]
    assert events.get_nowait() == CancelRequested()


# --- cancelled -----------------------------------------------------------------------------------

DELETE = "delete claim, recovery of claim, storage"


@pytest.mark.parametrize(
    ("by_request", "deletes", "has_log", "is_deleted"),
    [
        (True, True, True, True),
        (True, False, True, False),
        (False, True, True, False),
        (True, True, False, False),
    ],
)
def test_only_the_users_wish_deletes_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
    by_request: bool,
    deletes: bool,
    has_log: bool,
    is_deleted: bool,
) -> None:
    job = Job([], deletes_on_cancel=deletes, has_log=has_log)

    def end() -> Exception:
        if by_request:
            job.loop.cancel()
        return JobCancelled("cancelled")

    job.ends = [end]
    assert job.run(monkeypatch) == (JobState.CANCELLED, "")
    assert job.notes == ["attempt", *(["claim", DELETE] if is_deleted else [])]
    assert job.waits == ([math.inf] if is_deleted else []), "there may be many files"
    assert job.loop.error is None


@pytest.mark.parametrize("step", ["claim", DELETE])
def test_a_job_whose_checkpoints_cannot_be_deleted_is_cancelled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    job = Job([], deletes_on_cancel=True, errors={step: Fenced("another driver")})

    def end() -> Exception:
        job.loop.cancel()
        return JobCancelled("cancelled")

    job.ends = [end]
    ended = job.run(monkeypatch)
    text = "its checkpoints were not deleted: Fenced: another driver"
    assert ended == (JobState.CANCELLED, text)
    assert (DELETE in job.notes) is (step == DELETE)
