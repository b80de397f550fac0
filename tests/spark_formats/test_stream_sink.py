"""Structured Streaming into a table: each batch whole, once."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.integration.postgres_sink_kit import await_lock_wait, ids_in, prepared, query

from onceflow.connectors.spark.formats import register

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(600)]
TABLE = "CREATE TABLE ledger (id bigint, part int)"


@pytest.fixture(scope="module", autouse=True)
def formats(spark: SparkSession) -> None:
    register(spark)


def feed(spark: SparkSession, directory: Path, first: int, last: int, partitions: int = 2) -> None:
    """Add one file that holds ids from `first` to before `last`."""
    frame = spark.range(first, last, numPartitions=1).selectExpr("id", f"id % {partitions} AS part")
    frame.coalesce(1).write.mode("append").parquet(str(directory))


def input_of(spark: SparkSession, directory: Path) -> DataFrame:
    return (
        spark.readStream.schema("id long, part long")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(directory))
        .repartition(2)
        .selectExpr("id", "CAST(part AS int) AS part")
    )


def start(frame: DataFrame, checkpoint: Path, url: str) -> StreamingQuery:
    return (
        frame.writeStream.format("onceflow-postgres")
        .option("url", url)
        .option("dbtable", "ledger")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def run(frame: DataFrame, checkpoint: Path, url: str) -> None:
    started = start(frame, checkpoint, url)
    assert started.awaitTermination(150)


@pytest.mark.servers
def test_every_batch_is_written_once(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    query(postgres_database, TABLE)
    for first in (0, 100, 200):
        feed(spark, tmp_path / "in", first, first + 100)
    run(input_of(spark, tmp_path / "in"), tmp_path / "checkpoint", postgres_database)
    assert ids_in(postgres_database) == list(range(300))
    assert prepared(postgres_database) == []
    feed(spark, tmp_path / "in", 300, 400)
    run(input_of(spark, tmp_path / "in"), tmp_path / "checkpoint", postgres_database)
    assert ids_in(postgres_database) == list(range(400))
    assert prepared(postgres_database) == []


def test_a_batch_write_is_all_or_nothing_and_a_repeated_one_is_not_written(
    spark: SparkSession, postgres_database: str
) -> None:
    query(postgres_database, TABLE, "ALTER TABLE ledger ADD CHECK (id <> 150)")
    good = spark.range(0, 100, numPartitions=2).selectExpr("id", "CAST(id % 2 AS int) AS part")
    bad = spark.range(100, 200, numPartitions=2).selectExpr("id", "CAST(id % 2 AS int) AS part")

    def write(frame: DataFrame, **options: str) -> None:
        writer = frame.write.format("onceflow-postgres").option("url", postgres_database)
        writer.option("dbtable", "ledger").options(**options).mode("append").save()

    write(good, txnAppId="nightly", txnVersion="1")
    write(good, txnAppId="nightly", txnVersion="1")
    assert ids_in(postgres_database) == list(range(100))
    with pytest.raises(PySparkException, match="violates check constraint"):
        write(bad)
    assert ids_in(postgres_database) == list(range(100))
    assert prepared(postgres_database) == []
    with pytest.raises(PySparkException, match="txnVersion"):
        write(good, txnAppId="nightly")


@pytest.mark.parametrize(
    "point", [pytest.param("claimed", marks=pytest.mark.slow), "prepared", "logged"]
)
@pytest.mark.only_proof
def test_a_query_whose_process_is_killed_writes_every_row_once(
    spark: SparkSession, postgres_database: str, tmp_path: Path, crash_points: Path, point: str
) -> None:
    """Planning, a task (which is tried again), the commit: each a process of its own."""
    # With a key the task that is tried again would wait for what the killed one has prepared.
    query(postgres_database, TABLE, "ALTER TABLE ledger ADD PRIMARY KEY (id)")
    feed(spark, tmp_path / "in", 0, 100)
    (crash_points / point).touch()
    with contextlib.suppress(StreamingQueryException):
        run(input_of(spark, tmp_path / "in"), tmp_path / "checkpoint", postgres_database)
    assert not (crash_points / point).exists()
    frame = input_of(spark, tmp_path / "in").repartition(3)
    feed(spark, tmp_path / "in", 100, 110)
    run(frame, tmp_path / "checkpoint", postgres_database)
    assert ids_in(postgres_database) == list(range(110))
    assert prepared(postgres_database) == []


def test_a_query_that_is_stopped_in_mid_batch_goes_on_with_every_row_once(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    query(postgres_database, TABLE)
    feed(spark, tmp_path / "in", 0, 100)
    frame = input_of(spark, tmp_path / "in")
    with psycopg.connect(postgres_database) as locked:
        locked.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
        stopped = start(frame, tmp_path / "checkpoint", postgres_database)
        await_lock_wait(postgres_database, timeout_s=100)
        stopped.stop()
    run(frame, tmp_path / "checkpoint", postgres_database)
    assert ids_in(postgres_database) == list(range(100))
    assert prepared(postgres_database) == []


def test_a_query_with_a_continuous_trigger_is_refused_with_the_triggers_to_use(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    """Its error said that the checkpoint might be on another file system."""
    query(postgres_database, TABLE)
    frame = spark.readStream.format("rate").load().selectExpr("value AS id", "0 AS part")
    started = (
        frame.writeStream.format("onceflow-postgres")
        .option("url", postgres_database)
        .option("dbtable", "ledger")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(continuous="1 second")
        .start()
    )
    with pytest.raises(StreamingQueryException, match=r"trigger\(processingTime=…\)") as refused:
        started.awaitTermination(120)
    assert "file system" not in str(refused.value)
    assert ids_in(postgres_database) == []


@pytest.mark.only_proof
def test_a_query_without_new_rows_asks_the_database_nothing(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    query(postgres_database, TABLE)
    feed(spark, tmp_path / "in", 0, 10)
    place = urlsplit(postgres_database)
    sessions = (
        "SELECT pid, query_start, state_change FROM pg_stat_activity"
        f" WHERE datname = '{place.path[1:]}' AND backend_type = 'client backend' ORDER BY pid"
    )
    commits = f"SELECT xact_commit FROM pg_stat_database WHERE datname = '{place.path[1:]}'"
    # To ask there would be transactions, too.
    elsewhere = urlunsplit(place._replace(path="/postgres"))

    def asked() -> tuple[list[Any], list[Any]]:
        return query(elsewhere, sessions), query(elsewhere, commits)

    stream = input_of(spark, tmp_path / "in").writeStream.format("onceflow-postgres")
    stream.option("url", postgres_database).option("dbtable", "ledger")
    stream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    idle = stream.trigger(processingTime="50 milliseconds").start()
    try:
        until = time.monotonic() + 100
        while len(ids_in(postgres_database)) < 10:
            assert time.monotonic() < until
            time.sleep(0.2)
        before, after = asked(), None
        while before != after:
            assert time.monotonic() < until, (before, after)
            before = after or before
            # Some twenty triggers. A server counts what was done up to a second later.
            time.sleep(1.2)
            after = asked()
        assert before[0], "the query keeps its sessions"
    finally:
        idle.stop()
    assert ids_in(postgres_database) == list(range(10))


def test_an_older_copy_of_a_checkpoint_is_refused_and_nothing_is_written(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    query(postgres_database, TABLE)
    feed(spark, tmp_path / "in", 0, 10)
    frame = input_of(spark, tmp_path / "in")
    run(frame, tmp_path / "checkpoint", postgres_database)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    feed(spark, tmp_path / "in", 10, 20)
    run(frame, tmp_path / "checkpoint", postgres_database)
    shutil.rmtree(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "copy", tmp_path / "checkpoint")
    feed(spark, tmp_path / "in", 20, 30)
    with pytest.raises(StreamingQueryException, match="older copy"):
        run(frame, tmp_path / "checkpoint", postgres_database)
    assert ids_in(postgres_database) == list(range(20))
