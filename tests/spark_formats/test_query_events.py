"""Queries of Structured Streaming tell what jobs tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from onceflow import CheckpointCompleted, JobEnded, JobEvent, JobState, JobStatus
from onceflow.connectors.spark.streaming.query_events import QueryEvents

pytestmark = pytest.mark.spark


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def told(spark: SparkSession) -> Iterator[tuple[QueryEvents, list[tuple[JobEvent, JobStatus]]]]:
    heard: list[tuple[JobEvent, JobStatus]] = []
    events = QueryEvents([lambda event, status: heard.append((event, status))])
    spark.streams.addListener(events)
    yield events, heard
    spark.streams.removeListener(events)


@pytest.mark.servers
def test_batches_are_checkpoints_and_rows_are_counted(
    spark: SparkSession, told: tuple[QueryEvents, list[tuple[JobEvent, JobStatus]]], tmp_path: Path
) -> None:
    events, heard = told
    for number in range(3):
        spark.range(100 * number, 100 * number + 100, 1, 1).write.parquet(
            str(tmp_path / "in"), mode="append"
        )
    frame = spark.readStream.schema("id BIGINT").option("maxFilesPerTrigger", 1)
    writer = frame.parquet(str(tmp_path / "in")).writeStream.format("noop").queryName("copied")
    query = (
        writer.option("checkpointLocation", str(tmp_path / "query"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(150)
    _await(lambda: any(isinstance(event, JobEnded) for event, _ in heard))
    status = events.statuses()[str(query.id)]
    assert (status.job, status.state) == ("copied", JobState.STOPPED)
    assert status.records_in == 300
    completed = [event.checkpoint for event, _ in heard if isinstance(event, CheckpointCompleted)]
    assert completed == [one.checkpoint for one in status.history] == [1, 2, 3]
    assert all(one.duration_ms >= one.sync_ms > 0 for one in status.history)
    assert heard[-1][1] == status


def test_a_query_that_fails_ends_with_its_reason(
    spark: SparkSession, told: tuple[QueryEvents, list[tuple[JobEvent, JobStatus]]], tmp_path: Path
) -> None:
    events, heard = told
    spark.range(10).write.parquet(str(tmp_path / "in"))
    frame = spark.readStream.schema("id BIGINT").parquet(str(tmp_path / "in"))
    bad = frame.selectExpr("IF(id = 7, raise_error('no seven'), id) AS id")
    query = (
        bad.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "query")).start()
    )
    with pytest.raises(Exception, match="no seven"):
        query.awaitTermination(150)
    _await(lambda: any(isinstance(event, JobEnded) for event, _ in heard))
    status = events.statuses()[str(query.id)]
    assert status.state is JobState.FAILED
    assert "no seven" in str(status.last_error)
