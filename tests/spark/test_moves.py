"""A stopped job goes on after it was moved, renamed or given another state backend."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger

from onceflow import HeapBackend, JobState, RocksDBBackend
from onceflow.core.state import StateBackend

pytestmark = pytest.mark.spark

_SOURCE = CountingSource(6_000)
_SLOW = replace(_SOURCE, pause_s=0.1)
"""The same records, at a pace at which the job is stopped long before their end."""


def _stopped_halfway(spark: SparkSession, directory: Path, backend: StateBackend) -> None:
    pipeline, sink = ledger(spark, directory, _SLOW, backend=backend)
    job = pipeline.start()
    while job.status().checkpoints_completed < 3:
        assert not job.state.ended, job.status()
        time.sleep(0.01)
    assert job.stop().state is JobState.STOPPED
    assert 0 < len(sink.rows()) < _SOURCE.records


def test_a_stopped_job_goes_on_in_another_directory_with_every_record_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    _stopped_halfway(spark, tmp_path / "here", RocksDBBackend())
    # The target's directory too: rows move with the proofs of their commits.
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    pipeline, sink = ledger(spark, tmp_path / "there", _SOURCE, backend=RocksDBBackend())
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, _SOURCE)


def test_a_job_whose_state_was_on_the_heap_goes_on_in_rocksdb(
    spark: SparkSession, tmp_path: Path
) -> None:
    _stopped_halfway(spark, tmp_path, HeapBackend())
    pipeline, sink = ledger(spark, tmp_path, _SOURCE, backend=RocksDBBackend())
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, _SOURCE)


def test_a_renamed_job_goes_on_with_every_record_once(spark: SparkSession, tmp_path: Path) -> None:
    _stopped_halfway(spark, tmp_path, RocksDBBackend())
    (tmp_path / "checkpoints/ledger").rename(tmp_path / "checkpoints/books")
    pipeline, sink = ledger(
        spark, tmp_path, _SOURCE, name="books", sink_id="ledger.ledger", backend=RocksDBBackend()
    )
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, _SOURCE)
