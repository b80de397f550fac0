"""The Spark session whose JVM writes its loaded classes to an archive; see `class_archive`.

`python -m onceflow.connectors.spark.class_archive_session FILE` ends with status 0 if another JVM
has verified FILE.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import SparkSession

_JVM_TIMEOUT_S = 120.0
"""The maximum time in seconds for a JVM to end. It writes the archive at its exit."""


def main(file: str) -> int:
    """Run a session and one job of each kind, end its JVM, and verify `file` with another JVM."""
    spark = (
        SparkSession.Builder()
        .master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config(
            "spark.driver.extraJavaOptions",
            # This JVM compiles for a short life. The archive's content is the same.
            f"-XX:ArchiveClassesAtExit={file} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        )
        .getOrCreate()
    )
    _run_jobs(spark)
    gateway = cast("Any", SparkContext)._gateway
    system = gateway.jvm.java.lang.System
    java = f"{system.getProperty('java.home')}/bin/java"
    class_path = str(system.getProperty("java.class.path"))
    spark.stop()
    gateway.proc.stdin.close()  # the JVM ends with its input, and writes what it has loaded
    if status := gateway.proc.wait(_JVM_TIMEOUT_S):
        return int(status)
    uses = ("-Xshare:on", f"-XX:SharedArchiveFile={file}", "-XX:+VerifySharedSpaces")
    command = [java, *uses, "-cp", class_path, "-version"]
    return subprocess.run(command, check=False, timeout=_JVM_TIMEOUT_S).returncode


def _run_jobs(spark: SparkSession) -> None:
    """Run what our jobs ask of Spark: slots that end, slots that fail, and rows of DataFrames."""
    numbers = spark.sparkContext.parallelize(range(2), 2)
    numbers.barrier().mapPartitions(_as_it_is).collect()
    try:
        numbers.barrier().mapPartitions(_failing).collect()
    except Exception as error:
        str(error)  # fetched from the JVM, as for any stage that fails
    rows = spark.createDataFrame([(1, "a"), (2, "b")], "n int, s string")
    rows.groupBy("s").count().collect()
    rows.mapInArrow(_as_batches, "n int, s string").collect()


def _as_it_is(numbers: Iterable[int]) -> Iterator[int]:
    yield from numbers


def _failing(numbers: Iterable[int]) -> Iterator[int]:
    yield from numbers
    raise RuntimeError("on purpose")


def _as_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
