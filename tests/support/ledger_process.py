"""Runs the ledger in a driver process of its own, to be killed: DIRECTORY RECORDS PAUSE_S."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.ledger import ledger


def main(directory: str, records: str, pause_s: str) -> None:
    """Run until the input is at its end."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )
    source = CountingSource(int(records), pause_s=float(pause_s))
    ledger(spark, Path(directory), source)[0].run()


if __name__ == "__main__":
    main(*sys.argv[1:])
