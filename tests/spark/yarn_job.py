"""A user's program for `spark-submit --master yarn`: payments in a topic, balances in a table.

`yarn_job.py SERVERS TOPIC URL STORAGE`; runs until `onceflow stop`.
"""

from __future__ import annotations

import getpass
import sys

from pyspark.sql import SparkSession

from onceflow import Checkpointing, HdfsStorage, Pipeline, count, sum_
from onceflow.sinks import PostgresSink
from onceflow.sources import KafkaSource


def main(servers: str, topic: str, url: str, storage: str) -> None:
    """Run the job until it is told to stop."""
    spark = SparkSession.builder.appName("ledger").getOrCreate()
    pipeline = Pipeline(
        spark,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=HdfsStorage(storage, user=getpass.getuser()), interval="2 s"
        ),
    )
    source = KafkaSource(
        servers,
        topic=topic,
        schema="id BIGINT NOT NULL, account STRING NOT NULL, amount BIGINT NOT NULL",
    )
    payments = pipeline.read(source, uid="payments")
    balances = payments.key_by("account").running(uid="balance", balance=sum_("amount"), n=count())
    balances.write(PostgresSink(url, table="ledger"), uid="ledger")
    pipeline.run()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
