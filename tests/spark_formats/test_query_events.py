"""Queries of Structured Streaming tell what jobs tell."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.support.waiting import await_true

from onceflow import CheckpointCompleted, JobEnded, JobEvent, JobState, JobStatus, Metrics
from onceflow.connectors.spark.streaming.query_events import QueryEvents
from onceflow.integration.servers.process import free_port

pytestmark = pytest.mark.spark


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
    await_true(lambda: any(isinstance(event, JobEnded) for event, _ in heard))
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
    await_true(lambda: any(isinstance(event, JobEnded) for event, _ in heard))
    status = events.statuses()[str(query.id)]
    assert status.state is JobState.FAILED
    assert "no seven" in str(status.last_error)


@pytest.mark.servers
def test_a_query_is_scraped_under_the_names_of_jobs_and_its_counters_outlive_a_run(
    spark: SparkSession, tmp_path: Path
) -> None:
    parser: Any = pytest.importorskip("prometheus_client.parser")
    bind = f"127.0.0.1:{free_port()}"
    events = QueryEvents(metrics=Metrics(prometheus_bind=bind))
    source = str(tmp_path / "in")
    spark.range(100).write.parquet(source)
    frame = spark.readStream.schema("id BIGINT").parquet(source)
    writer = frame.writeStream.format("noop").queryName('co"pied')

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{bind}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {
            sample.name: sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("query") == 'co"pied' and "job_name" not in sample.labels
        }

    def has_read(rows: int) -> bool:
        try:
            return scrape().get("onceflow_source_records_total", 0.0) == rows
        except (urllib.error.URLError, ConnectionError):
            return False

    spark.streams.addListener(events)
    try:
        for run in (1, 2):
            query = writer.option("checkpointLocation", str(tmp_path / "query")).start()
            if run == 2:
                spark.range(50).write.parquet(source, mode="append")
            await_true(lambda run=run: has_read(100 if run == 1 else 150))  # type: ignore[misc]
            shown = scrape()
            assert shown["onceflow_attempts_total"] == run
            assert shown["onceflow_checkpoint_last_completed_number"] == run
            query.stop()
            state = events.statuses
            await_true(lambda: all(status.state.ended for status in state().values()))
    finally:
        spark.streams.removeListener(events)
    with pytest.raises(urllib.error.URLError):
        scrape()
