"""A small job on Spark, from the start of its process to the first row that a reader sees.

    python -m benchmarks.first_row builder|session BEGAN

Prints one JSON object of seconds since BEGAN, a time in seconds; see `benchmarks.start`.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
import time
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from onceflow import Pipeline

_IMPORTS = {
    "onceflow": "Pipeline",
    "onceflow.sinks": "SQLiteSink",
    "onceflow.sources": "DatagenSource",
    "pyspark.sql": "SparkSession",
}
"""What a user's program begins with."""
_DEADLINE_S = 120.0
_LOOK_S = 0.01


def main(kind: str, began: float) -> None:
    """Start the session that `kind` names, run the job until a row is visible, tell the times."""
    seconds: dict[str, float] = {}

    def tell(step: str) -> None:
        seconds[step] = round(time.time() - began, 2)

    for module, name in _IMPORTS.items():
        getattr(import_module(module), name)  # imported when it is named
    tell("imports done")
    spark = _start(kind)
    tell("Spark's session started")
    with tempfile.TemporaryDirectory() as directory:
        job = _pipeline(spark, directory).start()
        _wait_for_a_row(Path(directory, "target.db"))
        tell("first row visible")
        job.cancel(60)
    spark.stop()
    print(json.dumps(seconds))


def _start(kind: str) -> SparkSession:
    from pyspark.sql import SparkSession

    import onceflow

    if kind == "session":
        return onceflow.session("local[2]")
    return SparkSession.Builder().master("local[2]").getOrCreate()


def _pipeline(spark: SparkSession, directory: str) -> Pipeline:
    from onceflow import Checkpointing, Pipeline, count, sum_
    from onceflow.sinks import SQLiteSink
    from onceflow.sources import DatagenSource

    checkpointing = Checkpointing(storage=f"{directory}/checkpoints", interval="100 ms")
    pipeline = Pipeline(spark, name="start", parallelism=2, checkpointing=checkpointing)
    source = DatagenSource(10_000_000, splits_count=2, accounts=50, rows_per_second=10_000)
    payments = pipeline.read(source, uid="payments")
    balances = payments.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    balances.write(SQLiteSink(f"{directory}/target.db", table="t", create=True), uid="target")
    return pipeline


def _wait_for_a_row(target: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        # No file at first, then no table.
        with (
            suppress(sqlite3.OperationalError),
            closing(sqlite3.connect(f"file:{target}?mode=ro", uri=True)) as database,
        ):
            if database.execute("SELECT 1 FROM t LIMIT 1").fetchone():
                return
        time.sleep(_LOOK_S)
    raise TimeoutError(f"no row after {_DEADLINE_S:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
