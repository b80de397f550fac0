"""Spark's Python daemon, with what our workers import already there.

    spark.python.daemon.module=onceflow.connectors.python_daemon

An executor's daemon forks each Python worker. Under Spark's own daemon every slot, task writer and
source runner imports our modules, their libraries and pandas by itself: more than a second of
processor time, and most of what a slot's recovery takes. Forked by this one they have all of that,
in pages of memory that they share. Two libraries start a thread when they are imported, OpenBLAS
and jemalloc; both know what to do when a process forks.

Everything else is Spark's daemon unchanged. What is not installed is left out.

Source: Spark's setting `spark.python.daemon.module`.
"""

from __future__ import annotations

import contextlib
import importlib

from pyspark.daemon import manager

PRELOADED = (
    # pyarrow imports it as soon as it is given a list.
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "onceflow.core.runtime.slot.slot",
    "onceflow.core.state.expired_rows",
    "onceflow.core.state.heap",
    "onceflow.core.state.rocksdb",
    "onceflow.core.storage.bucket",
    "onceflow.sources.kafka.source",
    "onceflow.sinks.files.sink",
    "onceflow.sinks.kafka.sink",
    "onceflow.sinks.mysql.sink",
    "onceflow.sinks.postgres.sink",
    "onceflow.connectors.spark.kafka_stream",
    "onceflow.connectors.spark.mysql_rows",
    "onceflow.connectors.spark.postgres_rows",
    "onceflow.connectors.spark.stream_writer",
)


def preload() -> None:
    """Import what is installed of `PRELOADED`."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


if __name__ == "__main__":
    preload()
    manager()
