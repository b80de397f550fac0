"""A program: one query from a topic into a table, until the topic is read. It is killed."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession
from tests.spark_formats.source_formats import KafkaFormat

from onceflow.connectors.spark.formats import register


def main(servers: str, topic: str, url: str, checkpoint: str) -> None:
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
    spark.dataSource.register(KafkaFormat)
    frame = (
        spark.readStream.format("test-kafka")
        .options(servers=servers, topic=topic, schema="id BIGINT, account STRING")
        .option("offsets_most", "5000")
        .load()
    )
    query = (
        frame.writeStream.format("onceflow-postgres")
        .options(url=url, dbtable="ledger", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
