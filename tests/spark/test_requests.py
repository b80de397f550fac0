"""What the user asks of a running job comes about, whatever fails first; no clock delays it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.hindered_sink import FailingSink, SlowSink
from tests.support.ledger import SETTINGS, assert_exactly_once, ledger

from onceflow import Checkpointing, FixedDelay, JobState, NoRestart, Pipeline, count, sum_
from onceflow.core.pipeline import Job
from onceflow.core.protocol.restart import RestartStrategy
from onceflow.core.runtime.driver.status import JobStatus

pytestmark = pytest.mark.spark


def _await(job: Job, what: Callable[[JobStatus], bool], timeout_s: float = 30.0) -> JobStatus:
    deadline = time.monotonic() + timeout_s
    while not what(status := job.status()):
        assert not status.state.ended, status.last_error
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


def _pipeline(
    spark: SparkSession,
    tmp_path: Path,
    sink: DirectorySink,
    *,
    timeout: float = 60.0,
    tolerable_failures: int = 0,
    restart: RestartStrategy,
) -> tuple[Pipeline, CountingSource]:
    """Without an interval: every checkpoint is one that was asked for, or the last."""
    pipeline = Pipeline(
        spark,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(tmp_path / "checkpoints"),
            interval=None,
            timeout=timeout,
            tolerable_failures=tolerable_failures,
        ),
        restart=restart,
        settings=SETTINGS,
    )
    source = CountingSource(4_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    records = pipeline.read(source, uid="records")
    balances = records.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    balances.write(sink, uid="ledger")
    return pipeline, source


def _goes_on(spark: SparkSession, tmp_path: Path, sink: DirectorySink) -> None:
    """The job that was stopped is started again and ends with every record there once."""
    (tmp_path / "read all").touch()
    pipeline, source = _pipeline(spark, tmp_path, sink, restart=NoRestart())
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_stop_whose_checkpoint_fails_the_attempt_is_asked_again_of_the_next(
    spark: SparkSession, tmp_path: Path
) -> None:
    sink = FailingSink(str(tmp_path / "out"))
    pipeline, _ = _pipeline(spark, tmp_path, sink, restart=FixedDelay(attempts=3, delay_s=0.0))
    job = pipeline.start()
    _await(job, lambda status: status.records_in > 0)
    status = job.stop(60)
    assert (status.state, status.restores) == (JobState.STOPPED, 1)
    assert sink.rows()
    assert sink.prepared() == []
    _goes_on(spark, tmp_path, sink)


def test_stop_whose_checkpoint_times_out_is_repeated_in_the_same_attempt(
    spark: SparkSession, tmp_path: Path
) -> None:
    sink = SlowSink(str(tmp_path / "out"))
    pipeline, _ = _pipeline(
        spark, tmp_path, sink, timeout=0.5, tolerable_failures=9, restart=NoRestart()
    )
    job = pipeline.start()
    _await(job, lambda status: status.records_in > 0)
    with pytest.raises(TimeoutError):
        job.stop(0.0)
    _await(job, lambda status: status.checkpoints_failed > 0)
    sink.go_on()
    status = job.wait(60)
    assert (status.state, status.restores) == (JobState.STOPPED, 0)
    assert sink.prepared() == []
    _goes_on(spark, tmp_path, sink)


def test_checkpoint_that_was_asked_for_and_failed_is_taken_by_the_next_attempt(
    spark: SparkSession, tmp_path: Path
) -> None:
    sink = FailingSink(str(tmp_path / "out"))
    pipeline, _ = _pipeline(spark, tmp_path, sink, restart=FixedDelay(attempts=3, delay_s=0.0))
    job = pipeline.start()
    _await(job, lambda status: status.records_in > 0)
    job.checkpoint()
    assert _await(job, lambda status: status.checkpoints_completed > 0).restores == 1
    job.cancel()
    _goes_on(spark, tmp_path, sink)


def test_clock_of_the_driver_that_is_set_back_an_hour_delays_no_checkpoint(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's own clock cannot be set here; the driver, in this process, sees another one."""
    source = CountingSource(40_000, pause_s=0.01, ends_with=str(tmp_path / "read all"))
    pipeline, sink = ledger(spark, tmp_path, source, restart=NoRestart())
    job = pipeline.start()
    _await(job, lambda status: status.checkpoints_completed >= 2)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() - 3600.0)
    before = job.status().checkpoints_completed
    _await(job, lambda status: status.checkpoints_completed >= before + 3)
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)
