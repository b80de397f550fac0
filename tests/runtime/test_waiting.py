"""`Job.wait_for` returns when a job has come as far as is asked, or cannot any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import ledger

from onceflow import JobState, NoRestart
from onceflow.core.errors import OnceflowError, UserFunctionError


def test_a_job_is_waited_for_until_it_has_come_as_far_as_is_asked(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(10_000, pause_s=0.02, endless=True)
    pipeline, _ = ledger(cluster, tmp_path, source)
    job = pipeline.start()
    status = job.wait_for(checkpoints=2, records=500)
    assert status.state is JobState.RUNNING
    assert status.checkpoints_completed >= 2
    assert status.records_in >= 500
    with pytest.raises(TimeoutError, match="1000000 checkpoints"):
        job.wait_for(checkpoints=1_000_000, timeout_s=0.1)
    assert job.state is JobState.RUNNING
    job.cancel()
    assert job.wait_for(state=JobState.CANCELLED).state is JobState.CANCELLED


def test_a_job_that_ends_before_is_not_waited_for(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline, _ = ledger(cluster, tmp_path, CountingSource(100))
    job = pipeline.start()
    with pytest.raises(OnceflowError, match="ended before it had 0 checkpoints and 101 records"):
        job.wait_for(records=101)


def test_the_error_of_a_job_that_fails_is_raised_to_whoever_waits_for_it(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, _ = ledger(cluster, tmp_path, CountingSource(100), restart=NoRestart())
    more = pipeline.read(CountingSource(100), uid="more")
    failing = more.map(lambda record: record | {"id": record["id"] // 0})
    failing.write(DirectorySink(str(tmp_path / "fails")), uid="fails")
    with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
        pipeline.start().wait_for(checkpoints=1_000)
