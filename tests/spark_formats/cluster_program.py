"""A user's program for `spark-submit`: files into a table of Postgres that has a unique key.

`cluster_program.py DIRECTORY URL`; the crash points in DIRECTORY/points are its executors'.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from onceflow import connectors


def main(directory: str, url: str) -> None:
    """Write what is in DIRECTORY/in, one file a batch, in two tasks."""
    spark = SparkSession.builder.appName("formats").getOrCreate()
    connectors.register(spark)
    query = (
        spark.readStream.schema("id long")
        .option("maxFilesPerTrigger", 1)
        .parquet(f"{directory}/in")
        .repartition(2)
        .writeStream.format("onceflow-postgres")
        .option("url", url)
        .option("dbtable", "ledger")
        .option("commitMode", "two_phase")
        .option("lockTimeout", "15 s")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
