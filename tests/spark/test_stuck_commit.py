"""A commit that is stuck while its job fails over is over with its attempt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS
from tests.support.stuck_sink import StuckSink
from tests.support.waiting import await_true

from onceflow import Checkpointing, FixedDelay, JobState, Pipeline, Record

pytestmark = pytest.mark.spark


def test_commit_that_is_stuck_while_its_job_fails_over_is_never_applied_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark uses the Python worker again: a thread that lived on in it would go on committing."""
    sink = StuckSink(str(tmp_path))
    failed, ends_with = tmp_path / "failed", tmp_path / "ends"

    def fail_once_a_commit_is_stuck(record: Record) -> Record:
        if sink.stuck.exists() and not failed.exists():
            failed.touch()
            raise ValueError("fails once")
        return record

    pipeline = Pipeline(
        spark,
        name="stuck",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=5, delay_s=0.01),
        settings=SETTINGS,
    )
    source = CountingSource(20_000, pause_s=0.01, ends_with=str(ends_with))
    records = pipeline.read(source, uid="records").map(fail_once_a_commit_is_stuck, uid="map")
    records.write(sink, uid="sink")
    job = pipeline.start()
    try:
        await_true(lambda: job.status().restores >= 1)
        first = min(sink.proofs(), default=0)
        await_true(lambda: min(sink.proofs(), default=0) > first + 3)
        pid = int(sink.stuck.read_text())
        is_alive = Path(f"/proc/{pid}").exists()
        sink.release()
        if is_alive and pid != os.getpid():
            # What was stuck needs no longer than the commits that follow.
            last = max(sink.proofs())
            await_true(lambda: min(sink.proofs()) > last + 3)
    finally:
        ends_with.touch()
        status = job.wait(60)
    assert status.state is JobState.FINISHED
    ids = sink.ids()
    assert len(ids) - len(set(ids)) == 0, "rows are there twice"
    assert ids == list(range(source.records))
    assert not is_alive, "the process with the stuck commit lives on"
