"""A copy of a table, kept by the changes that Debezium sends of it, equal through any crash.

`python examples/cdc_upsert.py localhost:9092 shop.public.orders postgresql://localhost/db /storage`
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from onceflow import Checkpointing, LocalProcesses, Pipeline, session
from onceflow.sinks import PostgresSink
from onceflow.sources import KafkaSource

ORDER = "id BIGINT NOT NULL, state STRING NOT NULL, cents BIGINT"


def copy_of_orders(
    cluster: SparkSession | LocalProcesses, servers: str, topic: str, url: str, storage: str
) -> Pipeline:
    """Describe the job: what the table does, its copy does."""
    pipeline = Pipeline(
        cluster,
        name="orders-copy",
        parallelism=2,
        checkpointing=Checkpointing(storage=storage, interval="500 ms"),
    )
    changes = pipeline.read(
        KafkaSource(servers, topic=topic, format="debezium-json", schema=ORDER), uid="changes"
    )
    copy = PostgresSink(
        url,
        table="orders_copy",
        create=True,
        write_mode="upsert",
        primary_key=("id",),
        operation_column="_op",
    )
    changes.write(copy, uid="copy")
    return pipeline


def main(servers: str, topic: str, url: str, storage: str) -> None:
    """Run it until it is interrupted."""
    spark = session("local[2]")
    try:
        print(copy_of_orders(spark, servers, topic, url, storage).run())
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
