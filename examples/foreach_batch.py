"""Your foreachBatch, exactly once: five changed lines, and a table by key in update mode.

    def save(batch, batch_id):
        batch.selectExpr(…).write.format("jdbc").options(url=…, dbtable="balances").save()

    payments.writeStream.foreachBatch(save)…

becomes a sink, a function that returns what it wrote, and `connectors.foreach_batch` around both.
`python examples/foreach_batch.py DIRECTORY` shows it, with a SQLite file as the database; run again
it goes on, and counts nothing twice.
"""

from __future__ import annotations

import sqlite3
import sys

from pyspark.sql import DataFrame, SparkSession

from onceflow import connectors
from onceflow.sinks import SQLiteSink


def totals(batch: DataFrame, batch_id: int) -> DataFrame:
    """Return what is written of a batch."""
    del batch_id
    return batch.selectExpr("account", "`count` AS payments")


def main(directory: str) -> None:
    """Count payments by account into `balances.db`."""
    spark = SparkSession.builder.getOrCreate()
    payments = spark.range(1_000).selectExpr("id", "id % 10 AS account")
    payments.coalesce(2).write.mode("append").parquet(f"{directory}/payments")
    checkpoint = f"{directory}/checkpoint"
    sink = SQLiteSink(
        f"{directory}/balances.db",
        table="balances",
        write_mode="upsert",
        primary_key=("account",),
        create=True,
    )
    query = (
        spark.readStream.schema("id long, account long")
        .parquet(f"{directory}/payments")
        .groupBy("account")
        .count()
        .writeStream.outputMode("update")
        .foreachBatch(connectors.foreach_batch(sink, totals, checkpoint_location=checkpoint))
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    with sqlite3.connect(f"{directory}/balances.db") as database:
        print(database.execute("SELECT count(*), sum(payments) FROM balances").fetchone())


if __name__ == "__main__":
    main(sys.argv[1])
