"""A program: one query from a table and its changes into another table. It is killed."""

from __future__ import annotations

import os
import sys
from typing import Literal

from pyspark.sql import SparkSession
from tests.support.random_load import SCHEMA

from onceflow.connectors import register

Target = Literal["copy", "log"]
"""`copy` is to equal the original; `log` gets every change as a row of its own."""


def main(url: str, directory: str, trigger: str, target: Target) -> None:
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
    # The last run reads all that has gathered. The others have many small batches to be killed in.
    batch_rows = "10000" if trigger == "availableNow" else "500"
    changes = (
        spark.readStream.format("onceflow-postgres-changes")
        .options(url=url, table="original", slot="s", changesLocation=f"{directory}/changes")
        .options(schema=SCHEMA, maxRowsPerTrigger=batch_rows, chunkRows="200")
        .load()
    )
    writer = changes.writeStream.format("onceflow-postgres").options(
        url=url, dbtable=target, checkpointLocation=f"{directory}/checkpoint"
    )
    if target == "copy":
        writer = writer.options(writeMode="upsert", primaryKey="id", operationColumn="_op")
    if trigger == "availableNow":
        writer = writer.trigger(availableNow=True)
    writer.start().awaitTermination()


if __name__ == "__main__":
    url, directory, trigger, target = sys.argv[1:]
    main(url, directory, trigger, "log" if target == "log" else "copy")
