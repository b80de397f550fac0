"""Reads a DataFrame whose rows are other ones each time that it is evaluated, in a driver to kill.

    python -m tests.support.dataframe_job DIRECTORY ROWS

Its slots are processes of this machine. It reads slowly until DIRECTORY/released is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from tests.support.clusters import AnyCluster
from tests.support.directory_sink import DirectorySink

from onceflow import Checkpointing, FixedDelay, LocalProcesses, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UID = "frame"
JOB = "frames"


def frame_of(spark: SparkSession, rows: int) -> DataFrame:
    """Rows `id` 0 to `rows`, each with a number that is drawn anew at each evaluation."""
    return spark.range(rows, numPartitions=3).selectExpr(
        "id", "CAST(rand() * 1000000000 AS BIGINT) AS drawn", "CAST(id % 7 AS STRING) AS account"
    )


def pipeline_of(
    cluster: AnyCluster, dataframe: DataFrame, directory: Path
) -> tuple[Pipeline, DirectorySink]:
    """Return a pipeline that writes the DataFrame's rows to a directory."""
    released = directory / "released"

    def slowly(batch: pa.RecordBatch) -> pa.RecordBatch:
        if not released.exists():
            time.sleep(0.25)
        return batch

    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        cluster,
        name=JOB,
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=10, delay_s=0.01),
    )
    pipeline.read(dataframe, uid=UID).map_batches(slowly).write(sink, uid="out")
    return pipeline, sink


def inputs_in(directory: Path) -> Path:
    """Return where the evaluated DataFrame is."""
    return directory / "checkpoints" / JOB / "inputs" / UID


def main() -> None:
    """Run to the end, unless killed before."""
    from pyspark.sql import SparkSession

    directory, rows = Path(sys.argv[1]), int(sys.argv[2])
    spark = (
        SparkSession.Builder()
        .master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )
    pipeline_of(LocalProcesses(), frame_of(spark, rows), directory)[0].run()


if __name__ == "__main__":
    main()
