"""Spark DataFrames as input of a job: evaluated once, each row once through any crash."""

from __future__ import annotations

import datetime as dt
import os
import signal
from decimal import Decimal
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.dataframe_job import UID, frame_of, inputs_in, pipeline_of
from tests.support.directory_sink import DirectorySink
from tests.support.program import Program, python
from tests.support.waiting import await_true

from onceflow import Checkpointing, JobState, LocalProcesses, NoRestart, Pipeline
from onceflow.core.errors import ConfigError, DataFrameFailed, OffsetOutOfRange, StateIncompatible
from onceflow.core.plan.dataframe_source import DataFrameSource
from onceflow.core.storage import FileSystemStorage

pytestmark = pytest.mark.spark
_ROWS = 200_000


def _evaluated(directory: Path) -> dict[int, int]:
    """Return the evaluated rows of the DataFrame: id -> drawn value."""
    table = ds.dataset(str(inputs_in(directory)), format="parquet").to_table()
    return dict(zip(table["id"].to_pylist(), table["drawn"].to_pylist(), strict=True))


def _written(sink: DirectorySink) -> list[tuple[int, int]]:
    return sorted((row["id"], row["drawn"]) for row in sink.rows())


def _committed(sink: DirectorySink) -> bool:
    directory = Path(sink.directory, "committed")
    return directory.exists() and len(list(directory.iterdir())) > 1


def test_rows_of_a_dataframe_are_written_once_while_slots_are_killed(
    spark: SparkSession, tmp_path: Path
) -> None:
    pipeline, sink = pipeline_of(LocalProcesses(), frame_of(spark, _ROWS), tmp_path)
    job = pipeline.start()
    await_true(lambda: _committed(sink))
    evaluated = _evaluated(tmp_path)
    for slot in range(2):
        await_true(lambda: job.status().state is JobState.RUNNING)
        os.kill(job.status().slots[slot].pid, signal.SIGKILL)
        await_true(lambda restores=slot: job.status().restores > restores)  # type: ignore[misc]
    (tmp_path / "released").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert _written(sink) == sorted(evaluated.items())
    assert len(evaluated) == _ROWS
    assert not inputs_in(tmp_path).exists()
    # Started again it has nothing to read, and evaluates nothing.
    again, _ = pipeline_of(LocalProcesses(), frame_of(spark, _ROWS), tmp_path)
    assert again.run(60).records_in == 0
    assert not inputs_in(tmp_path).exists()


@pytest.mark.slow  # a Spark of its own
def test_a_driver_that_is_killed_is_followed_by_one_that_reads_the_same_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The DataFrame of the second driver would give other rows, and has other partitions."""
    command = python("-m", "tests.support.dataframe_job", tmp_path, _ROWS)
    sink = DirectorySink(str(tmp_path / "out"))
    with Program(tmp_path / "driver.log", *command) as process:
        process.wait_until(lambda: _committed(sink), 90)
    evaluated = _evaluated(tmp_path)
    assert len(_written(sink)) < _ROWS
    (tmp_path / "released").touch()
    other = frame_of(spark, 10).repartition(1)
    assert pipeline_of(LocalProcesses(), other, tmp_path)[0].run(60).state is JobState.FINISHED
    assert _written(sink) == sorted(evaluated.items())
    assert len(evaluated) == _ROWS


@pytest.mark.servers
def test_a_job_that_is_drained_keeps_the_rows_that_its_next_start_reads(
    spark: SparkSession, tmp_path: Path
) -> None:
    pipeline, sink = pipeline_of(LocalProcesses(), frame_of(spark, _ROWS), tmp_path)
    job = pipeline.start()
    await_true(lambda: _committed(sink))
    evaluated = _evaluated(tmp_path)
    (tmp_path / "savepoints").mkdir()
    job.stop(savepoint=str(tmp_path / "savepoints"), drain=True)
    assert 0 < len(_written(sink)) < _ROWS
    (tmp_path / "released").touch()
    again, _ = pipeline_of(LocalProcesses(), frame_of(spark, _ROWS), tmp_path)
    assert again.run(60).state is JobState.FINISHED
    assert _written(sink) == sorted(evaluated.items())
    assert not inputs_in(tmp_path).exists()


def _source(spark: SparkSession, directory: Path, rows: int = 10) -> DataFrameSource:
    storage = FileSystemStorage(str(directory / "checkpoints"))
    return DataFrameSource.of(frame_of(spark, rows), storage, "frames", UID)


def test_what_a_driver_evaluated_that_died_before_its_decision_is_deleted_by_the_next(
    spark: SparkSession, tmp_path: Path
) -> None:
    first, second = _source(spark, tmp_path), _source(spark, tmp_path)
    first.splits()
    decided = second.splits()
    files = inputs_in(tmp_path)
    assert len(list(files.iterdir())) == 2
    assert second.discover(decided) == decided
    assert [path.name for path in files.iterdir()] == [decided[0].id.partition("/")[0]]
    for path in files.rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OffsetOutOfRange, match=r"bytes long, and it was written with \d+ bytes"):
        second.discover(decided)
    second.on_finished(decided)
    assert files.exists()
    second.on_finished(())
    assert not files.exists()
    with pytest.raises(OffsetOutOfRange, match="is gone"):
        second.discover(decided)


def test_a_dataframe_of_other_columns_under_the_same_uid_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    decided = _source(spark, tmp_path).splits()
    storage = FileSystemStorage(str(tmp_path / "checkpoints"))
    other = DataFrameSource.of(frame_of(spark, 10).drop("account"), storage, "frames", UID)
    with pytest.raises(StateIncompatible, match=r"id int64, drawn int64, and .*account string"):
        other.discover(decided)


def _pipeline(cluster: AnyCluster, directory: Path) -> Pipeline:
    return Pipeline(
        cluster,
        name="typed",
        checkpointing=Checkpointing(storage=str(directory / "checkpoints")),
        restart=NoRestart(),
    )


def test_a_stream_and_a_type_that_batches_do_not_take_are_refused_by_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = _pipeline(LocalProcesses(), tmp_path)
    with pytest.raises(ConfigError, match="the DataFrame is a stream"):
        pipeline.read(spark.readStream.format("rate").load(), uid="stream")
    odd = spark.sql("SELECT 1 AS id, INTERVAL 1 DAY AS wait")
    with pytest.raises(ConfigError, match="column 'wait'.*interval day"):
        pipeline.read(odd, uid="odd")


def test_what_spark_cannot_evaluate_ends_the_job_with_its_reason(
    spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = _pipeline(LocalProcesses(), tmp_path)
    bad = spark.range(10).selectExpr("IF(id = 7, raise_error('no seven'), id) AS id")
    pipeline.read(bad, uid="bad").write(DirectorySink(str(tmp_path / "out")), uid="out")
    with pytest.raises(DataFrameFailed, match=r"could not evaluate the DataFrame.*no seven"):
        pipeline.run(60)


def test_a_stream_is_joined_with_a_dataframe_that_is_evaluated_once_a_start(
    spark: SparkSession, tmp_path: Path
) -> None:
    drawn = spark.range(50).selectExpr(
        "CAST(id AS STRING) AS account", "rand() AS drawn", "TIMESTAMP'2026-01-01' AS since"
    )
    source = CountingSource(2_000, accounts=100)
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        LocalProcesses(),
        name="joined",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints")),
    )
    records = pipeline.read(source, uid="records")
    records.join(drawn, on="account").write(sink, uid="out")
    with pytest.raises(ConfigError, match="the DataFrame is a stream"):
        records.join(spark.readStream.format("rate").load(), on="account")
    assert pipeline.run(60).state is JobState.FINISHED
    rows = sink.rows()
    assert sorted(row["id"] for row in rows) == [
        one for one in range(source.records) if one % 100 < 50
    ]
    # Of each account one number, though both slots have joined its rows.
    assert len({(row["account"], row["drawn"]) for row in rows}) == 50


def test_values_of_all_types_arrive_as_they_are_on_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    utc = dt.timezone.utc
    rows = [
        (1, "ü", 1.5, True, Decimal("12.34"), dt.date(1, 1, 1), b"\x00", [1, None], {"a": 1}, (5,)),
        (2, *[None] * 9),
    ]
    frame = spark.createDataFrame(
        rows,
        "id BIGINT NOT NULL, s STRING, d DOUBLE, b BOOLEAN, n DECIMAL(5, 2), day DATE, raw BINARY,"
        " l ARRAY<INT>, m MAP<STRING, INT>, t STRUCT<x: SMALLINT>",
    ).selectExpr(
        "*",
        "TIMESTAMP'1600-01-01 00:00:00.000001+00:00' AS at",
        "TIMESTAMP_NTZ'9999-12-31 23:59:59' AS ntz",
    )
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = _pipeline(spark, tmp_path)
    pipeline.read(frame, uid="typed").write(sink, uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    first, second = sorted(sink.rows(), key=lambda row: row["id"])
    assert list(first.values())[:10] == [*rows[0][:8], [("a", 1)], {"x": 5}]
    assert list(second.values())[:10] == [2, *[None] * 9]
    assert first["at"] == dt.datetime(1600, 1, 1, 0, 0, 0, 1, utc)
    assert first["ntz"] == dt.datetime(9999, 12, 31, 23, 59, 59)
