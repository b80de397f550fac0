"""Spark's Python daemon with the modules of our workers imported in advance.

    spark.python.daemon.module=onceflow.connectors.python_daemon

An executor's daemon forks each Python worker. Under Spark's own daemon, every slot, task writer and
source runner imports our modules, their libraries and pandas itself. This takes more than a second
of processor time, which is most of the time of a slot's recovery. Workers that are forked by this
daemon have all modules already, in shared pages of memory. Two libraries start a thread when they
are imported, OpenBLAS and jemalloc. Both handle a fork correctly.

The daemon imports Spark's own modules from pip's installation. Spark puts a zip of them first on
the path. Modules from a zip are compiled again in each process, because the compiled code is not
stored. Spark also adds one of its jars, which contains no Python, and which each worker would list
again.

Everything else is Spark's daemon unchanged. Modules that are not installed are skipped.

Source: Spark's setting `spark.python.daemon.module`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

from onceflow.connectors.unpacked_spark import leave_zips

PRELOADED = (
    # What each worker of Spark imports after the fork.
    "pyspark.worker",
    # pyarrow imports it as soon as it is given a list.
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "onceflow.core.runtime.slot.slot",
    "onceflow.core.state.stores.store_parts",
    "onceflow.core.state.heap.store",
    "onceflow.core.state.rocksdb.store",
    "onceflow.core.storage.filesystems.bucket",
    "onceflow.sources.kafka.source",
    "onceflow.sinks.files.sink",
    "onceflow.sinks.kafka.sink",
    "onceflow.sinks.mysql.sink",
    "onceflow.sinks.postgres.sink",
    "onceflow.connectors.spark.readers.kafka_stream",
    "onceflow.connectors.spark.readers.mysql_rows",
    "onceflow.connectors.spark.readers.postgres_rows",
    "onceflow.connectors.spark.streaming.writer",
)


def preload() -> None:
    """Import the installed modules of `PRELOADED`, so that all forked workers share them."""
    gc.disable()  # what is imported stays: looking for rubbish in it takes a tenth of the time
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A collection in a worker would examine all these objects, and copy the pages that it writes
    # to.
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    leave_zips()
    preload()
    from pyspark.daemon import manager

    manager()
