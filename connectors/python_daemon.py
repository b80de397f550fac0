"""Spark's Python daemon, with what our workers import already there.

    spark.python.daemon.module=onceflow.connectors.python_daemon

An executor's daemon forks each Python worker. Under Spark's own daemon every slot, task writer and
source runner imports our modules, their libraries and pandas by itself: more than a second of
processor time, and most of what a slot's recovery takes. Forked by this one they have all of that,
in pages of memory that they share. Two libraries start a thread when they are imported, OpenBLAS
and jemalloc; both know what to do when a process forks.

Spark's own modules it imports from where pip has installed them. Spark names a zip of them first,
and from a zip they are compiled anew in each process, for nothing that is compiled is kept. It also
names a jar of its own, in which no Python is, and which each worker would list anew.

Everything else is Spark's daemon unchanged. What is not installed is left out.

Source: Spark's setting `spark.python.daemon.module`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Collection
from pathlib import Path

PRELOADED = (
    # What each worker of Spark imports after the fork.
    "pyspark.worker",
    # pyarrow imports it as soon as it is given a list.
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "onceflow.core.runtime.slot.slot",
    "onceflow.core.state.snapshots.expired_rows",
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


def leave_zips() -> None:
    """Take Spark's zips and jars off the path if what is in them also lies unpacked around them.

    That is so where pip has installed Spark. Everywhere else they stay.
    """
    # The JVM may know what is installed by another name of the same directory.
    on_path = {os.path.realpath(entry) for entry in sys.path}
    for entry in tuple(sys.path):
        if _lies_unpacked(Path(os.path.realpath(entry)), on_path):
            sys.path.remove(entry)
            # A worker drops all caches, and for a zip that means reading its directory again.
            for inside in [path for path in sys.path_importer_cache if path.startswith(entry)]:
                del sys.path_importer_cache[inside]


def _lies_unpacked(path: Path, on_path: Collection[str]) -> bool:
    """Whether `path` is of the `pyspark` that is installed around it, and so is what it holds.

    Its zip, that of its version of `py4j`, or its own jar, which holds no Python.
    """
    depth = {".zip": 2, ".jar": 1}.get(path.suffix)  # pyspark/python/lib/*.zip, pyspark/jars/*.jar
    if depth is None or len(path.parents) < depth + 2:
        return False
    spark = path.parents[depth]
    if spark.name != "pyspark" or str(spark.parent) not in on_path:
        return False
    if path.name == "pyspark.zip" or path.name.startswith("spark-core_"):
        return (spark / "__init__.py").is_file()
    return (spark.parent / f"{path.name.removesuffix('-src.zip')}.dist-info").is_dir()


def preload() -> None:
    """Import what is installed of `PRELOADED`, to be shared by all that is forked."""
    gc.disable()  # what is imported stays: looking for rubbish in it takes a tenth of the time
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A collection in a worker would look through all of it, and copy the pages that it touches.
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    leave_zips()
    preload()
    from pyspark.daemon import manager

    manager()
