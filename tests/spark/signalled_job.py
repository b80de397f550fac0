"""A driver program as users write one: starts a job, waits for it, says how it ended.

    signalled_job.py DIRECTORY [WAY [CLUSTER]]

DIRECTORY/slots holds the slots' pids once some checkpoints are completed; the input ends when
DIRECTORY/end is there. WAY is how it waits: `wait` (the default), `impatient` (a stop has 5 s, and
not 60), `poll` (looks at the job's state, in a block that stops on signals), or `spark_stop` (stops
Spark under the job). CLUSTER is `spark` (the default) or `processes`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS, ledger

from onceflow import LocalProcesses
from onceflow.core.api.pipeline import Job
from onceflow.core.runtime.cluster.local_processes import fork_own_host

_LOOK_S = 0.05


def source_in(directory: Path) -> CountingSource:
    """Return the source of the job."""
    return CountingSource(6_000, pause_s=0.01, ends_with=str(directory / "end"))


def session() -> SparkSession:
    """Start Spark."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.Builder()
        .master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )


def main(directory: Path, way: str = "wait", cluster: str = "spark") -> None:
    """Run until the job ends."""
    spark = session() if cluster == "spark" else None
    stop_timeout_s = 5.0 if way == "impatient" else 60.0
    settings = replace(SETTINGS, stop_timeout_s=stop_timeout_s, cancel_timeout_s=1.0)
    if spark is None:
        fork_own_host()
    runs_on = spark or LocalProcesses(directory / "logs")
    job = ledger(runs_on, directory, source_in(directory), settings=settings)[0].start()
    telling = threading.Thread(target=_tell_slots, args=(job, directory / "slots"), daemon=True)
    telling.start()
    try:
        if way == "poll":
            with job.stopping_on_signals():
                while not job.state.ended:
                    time.sleep(_LOOK_S)
        elif way == "spark_stop":
            telling.join()
            _stop(spark)
        print("ended:", job.wait().state.value, flush=True)  # noqa: T201 - the test reads it
    finally:
        _stop(spark)
    print("closed", flush=True)  # noqa: T201


def _stop(spark: SparkSession | None) -> None:
    if spark is not None:
        spark.stop()


def _tell_slots(job: Job, path: Path) -> None:
    while (status := job.status()).checkpoints_completed < 3 or len(status.slots) < 2:
        time.sleep(_LOOK_S)
    fresh = path.with_suffix(".fresh")
    fresh.write_text(" ".join(str(slot.pid) for slot in status.slots))
    fresh.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
