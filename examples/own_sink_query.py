"""Structured Streaming into a table of one's own sink, which one line makes a format of Spark.

`python -m examples.own_sink_query DIRECTORY` adds payments up by account in a SQLite file. Kill it
at any moment and run it again: it goes on, and adds nothing twice.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
from examples.own_sink import OwnSink
from pyspark.sql import SparkSession

from onceflow import connectors

FILES = 12
PAYMENTS = 100
"""In each file, of ten accounts, each of 1."""


class AddedUp(OwnSink):
    """Adds the rows' amounts to those in the table, where a row that came twice would be seen."""

    def apply(self, transaction: connectors.TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        """Add the rows up, with the ledger row that proves it, unless that is there or was."""
        proof = (str(transaction), transaction.sink_id, transaction.checkpoint)
        unless_below = "SELECT ?1, ?2, ?3 FROM owners WHERE sink = ?2 AND floor <= ?3"
        into = f'"{self.table}" (account, amount) VALUES (?, ?)'
        add_up = "ON CONFLICT (account) DO UPDATE SET amount = amount + excluded.amount"
        with self._locked() as db:
            if not db.execute(f"INSERT OR IGNORE INTO ledger {unless_below}", proof).rowcount:
                return False
            for batch in rows:
                values = zip(batch["account"].to_pylist(), batch["amount"].to_pylist(), strict=True)
                db.executemany(f"INSERT INTO {into} {add_up}", values)
        return True


def main(directory: str) -> None:
    """Add up what is in `payments`, one file a batch, into `totals` of `own.db`."""
    spark = SparkSession.builder.getOrCreate()
    connectors.register(spark)
    spark.dataSource.register(
        connectors.data_source(
            "my-totals", lambda options: AddedUp(options["path"], options["table"], "account")
        )
    )
    for number in range(FILES):
        made = spark.range(PAYMENTS).selectExpr("id % 10 AS account", "CAST(1 AS long) AS amount")
        made.coalesce(1).write.mode("ignore").parquet(f"{directory}/payments/file={number}")
    query = (
        spark.readStream.schema("account long, amount long")
        .option("maxFilesPerTrigger", 1)
        .parquet(f"{directory}/payments/*")
        .repartition(2)
        .writeStream.format("my-totals")
        .option("path", f"{directory}/own.db")
        .option("table", "totals")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    with closing(sqlite3.connect(f"{directory}/own.db")) as database:
        print(database.execute("SELECT count(*), sum(amount) FROM totals").fetchone())


if __name__ == "__main__":
    main(sys.argv[1])
