"""Tests that a user's requests to a running job are carried out, whatever fails first."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.support.clusters import ON_BOTH, AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.scripted_sink import Once, ScriptedSink, Step, Wait, released_in
from tests.support.waiting import await_status

from onceflow import JobEvent, JobState, NoRestart
from onceflow.core.errors import PreCommitFailed
from onceflow.core.runtime.events.job_events import AttemptEnded
from onceflow.core.runtime.events.status import JobStatus


def _source(tmp_path: Path) -> CountingSource:
    """More records than a test reads before `_goes_on`."""
    return CountingSource(4_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))


def _goes_on(cluster: AnyCluster, tmp_path: Path, sink: DirectorySink) -> None:
    """The job that was stopped is started again and ends with every record there once."""
    (tmp_path / "read all").touch()
    source = _source(tmp_path)
    pipeline, _ = ledger(cluster, tmp_path, source, sink=sink, interval=None, restart=NoRestart())
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


@ON_BOTH
def test_stop_whose_checkpoint_fails_the_attempt_is_asked_again_of_the_next(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    sink = _failing_sink(tmp_path / "out")
    pipeline, _ = ledger(cluster, tmp_path, _source(tmp_path), sink=sink, interval=None)
    job = pipeline.start()
    await_status(job, lambda status: status.records_in > 0)
    status = job.stop(60)
    # The next attempt may be asked before it has read anything: it takes a checkpoint all the same.
    assert (status.state, status.restores) == (JobState.STOPPED, 1)
    assert status.checkpoints_completed >= 1
    assert sink.prepared() == []
    _goes_on(cluster, tmp_path, sink)


def _failing_sink(directory: Path, **steps: Step) -> ScriptedSink:
    """Return a sink whose first pre-commit of the job raises."""
    first = Once(directory / "failed", PreCommitFailed("the first pre-commit fails"))
    return ScriptedSink(str(directory), {"pre_commit": first, **steps})


def test_stop_that_is_asked_for_while_an_attempt_ends_is_carried_out_by_the_next(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    asked = tmp_path / "out" / "asked"
    # Every writer of an attempt waits before it closes.
    sink = _failing_sink(tmp_path / "out", close=Wait(asked))
    pipeline, _ = ledger(cluster, tmp_path, _source(tmp_path), sink=sink, interval=None)
    job = pipeline.start()
    attempt_ended = threading.Event()

    def listen(event: JobEvent, _: JobStatus) -> None:
        if isinstance(event, AttemptEnded):
            attempt_ended.set()

    job.add_listener(listen)
    await_status(job, lambda status: status.records_in > 0)
    job.checkpoint()
    assert attempt_ended.wait(60)
    with pytest.raises(TimeoutError):
        job.stop(0.0)
    asked.touch()
    status = job.wait(60)
    assert (status.state, status.restores) == (JobState.STOPPED, 1)
    _goes_on(cluster, tmp_path, sink)


def test_stop_whose_checkpoint_times_out_is_repeated_in_the_same_attempt(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    sink = ScriptedSink(str(out), {"pre_commit": Wait(released_in(out))})
    pipeline, _ = ledger(
        cluster,
        tmp_path,
        _source(tmp_path),
        sink=sink,
        interval=None,
        timeout=1.5,
        tolerable_failures=99,
        restart=NoRestart(),
    )
    job = pipeline.start()
    await_status(job, lambda status: status.records_in > 0)
    with pytest.raises(TimeoutError):
        job.stop(0.0)
    await_status(job, lambda status: status.checkpoints_failed > 0)
    sink.release()
    status = job.wait(60)
    assert (status.state, status.restores) == (JobState.STOPPED, 0)
    assert sink.prepared() == []
    _goes_on(cluster, tmp_path, sink)


def test_checkpoint_that_was_asked_for_and_failed_is_taken_by_the_next_attempt(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    sink = _failing_sink(tmp_path / "out")
    pipeline, _ = ledger(cluster, tmp_path, _source(tmp_path), sink=sink, interval=None)
    job = pipeline.start()
    await_status(job, lambda status: status.records_in > 0)
    job.checkpoint()
    assert await_status(job, lambda status: status.checkpoints_completed > 0).restores == 1
    job.cancel()
    _goes_on(cluster, tmp_path, sink)


@pytest.mark.only_proof
def test_clock_of_the_driver_that_is_set_back_an_hour_delays_no_checkpoint(
    cluster: AnyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's own clock cannot be set here; the driver, in this process, sees another one."""
    source = CountingSource(4_000, pause_s=0.01, ends_with=str(tmp_path / "read all"))
    pipeline, sink = ledger(cluster, tmp_path, source, restart=NoRestart())
    job = pipeline.start()
    await_status(job, lambda status: status.checkpoints_completed >= 2)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() - 3600.0)
    before = job.status().checkpoints_completed
    await_status(job, lambda status: status.checkpoints_completed >= before + 3)
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)
