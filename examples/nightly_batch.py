"""A nightly batch: all rows of all partitions at once, and once however often the job is repeated.

`python examples/nightly_batch.py DIRECTORY 20260131` writes that night's orders to a SQLite file;
the same night again writes nothing, the next one adds its own.
"""

from __future__ import annotations

import sqlite3
import sys

from pyspark.sql import SparkSession

from onceflow import connectors


def main(directory: str, night: str) -> None:
    """Write the orders of `night` to `orders.db`."""
    spark = SparkSession.builder.getOrCreate()
    connectors.register(spark)
    orders = spark.range(1_000, numPartitions=4).selectExpr("id", f"'{night}' AS night")
    (
        orders.write.format("onceflow-sqlite")
        .mode("append")
        .option("url", f"{directory}/orders.db")
        .option("dbtable", "orders")
        .option("createTable", "true")
        .option("txnAppId", "nightly-orders")
        .option("txnVersion", night)
        .option("stagingLocation", f"{directory}/staging")
        .save()
    )
    with sqlite3.connect(f"{directory}/orders.db") as database:
        found = database.execute("SELECT night, count(*) FROM orders GROUP BY night ORDER BY night")
        print(found.fetchall())


if __name__ == "__main__":
    main(*sys.argv[1:])
