"""A user's program: `endless_query.py DIRECTORY NAME` writes an endless stream into files.

It adds the number of each batch that is done to DIRECTORY/NAME.batches, and writes the error with
which the query ends into DIRECTORY/NAME.error.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from onceflow import connectors


def main(directory: Path, name: str) -> None:
    """Run the query to its end, which is an error."""
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .getOrCreate()
    )
    connectors.register(spark)
    query = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 5)
        .option("numPartitions", 1)
        .load()
        .selectExpr("value AS id")
        .writeStream.format("onceflow-files")
        .option("path", str(directory / "rows"))
        .option("fileFormat", "parquet")
        .option("checkpointLocation", str(directory / "query"))
        .start()
    )
    seen = -1
    with (directory / f"{name}.batches").open("a") as batches:
        while query.isActive:
            progress = query.lastProgress
            if progress is not None and progress.batchId > seen:
                seen = progress.batchId
                batches.write(f"{seen}\n")
                batches.flush()
            time.sleep(0.05)
    error = query.exception()
    (directory / f"{name}.error").write_text(str(error))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
