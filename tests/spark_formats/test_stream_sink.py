"""Structured Streaming into a table: each batch whole, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.integration.postgres_sink_kit import ids_in, prepared, query

from onceflow.connectors.spark.formats import register

pytestmark = [pytest.mark.spark, pytest.mark.integration]
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


def run(frame: DataFrame, checkpoint: Path, url: str, table: str = "ledger") -> None:
    query = (
        frame.writeStream.format("onceflow-postgres")
        .option("url", url)
        .option("dbtable", table)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(150)
    assert not query.isActive


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
