"""A program: one query from a table and its changes into another table. It is killed."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from onceflow.connectors import register


def main(url: str, directory: str, trigger: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.memory", "1g")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .getOrCreate()
    )
    register(spark)
    changes = (
        spark.readStream.format("onceflow-postgres-changes")
        .options(url=url, table="original", slot="s", changesLocation=f"{directory}/changes")
        .options(maxRowsPerTrigger="500", chunkRows="200")
        .load()
    )
    writer = (
        changes.writeStream.format("onceflow-postgres")
        .options(url=url, dbtable="copy", checkpointLocation=f"{directory}/checkpoint")
        .options(writeMode="upsert", primaryKey="id", operationColumn="_op")
    )
    if trigger == "availableNow":
        writer = writer.trigger(availableNow=True)
    writer.start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
