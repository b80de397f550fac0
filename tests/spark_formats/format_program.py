"""A user's program: a stream, a batch and a foreachBatch, into SQLite; prints what it found there.

`format_program.py DIRECTORY`: run again it goes on, and writes nothing twice. Where it runs, in
which Spark and with which of its packages, is its caller's business.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path

import pyspark
from pyspark.sql import DataFrame, SparkSession

from onceflow import connectors
from onceflow.sinks import SQLiteSink


def main(directory: Path) -> None:
    """Write 300 rows by the stream's format, 100 by the batch's, and 300 by foreachBatch."""
    spark = SparkSession.builder.appName("formats").getOrCreate()
    connectors.register(spark)
    url = str(directory / "out.db")
    for first in (0, 100, 200):
        ids = spark.range(first, first + 100, numPartitions=1)
        # Written again the files had other names: to the stream they were new.
        ids.write.mode("ignore").parquet(str(directory / f"in/first={first}"))

    def stream(name: str) -> DataFrame:
        files = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
        return (
            files.parquet(str(directory / "in/*"))
            .repartition(2)
            .selectExpr("id", f"'{name}' AS name")
        )

    query = (
        stream("stream")
        .writeStream.format("onceflow-sqlite")
        .option("url", url)
        .option("dbtable", "streamed")
        .option("createTable", "true")
        .option("checkpointLocation", str(directory / "stream"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(240)

    (
        spark.range(100)
        .write.format("onceflow-sqlite")
        .mode("append")
        .option("url", url)
        .option("dbtable", "batch")
        .option("createTable", "true")
        .option("txnAppId", "formats")
        .option("txnVersion", "1")
        .option("stagingLocation", str(directory / "staging"))
        .save()
    )

    checkpoint = str(directory / "foreach")
    sink = SQLiteSink(url, table="each", create=True)
    query = (
        stream("foreach")
        .writeStream.foreachBatch(connectors.foreach_batch(sink, checkpoint_location=checkpoint))
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(240)
    spark.stop()

    with sqlite3.connect(url) as database:
        found = {
            table: database.execute(f"SELECT count(*), count(DISTINCT id) FROM {table}").fetchone()
            for table in ("streamed", "batch", "each")
        }
    sys.stdout.write(json.dumps({"spark": pyspark.__version__, **found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
