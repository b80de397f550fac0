"""The end of a driver's process while its job runs: it comes soon, and aborts nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.support.program import Program, python

from onceflow import FileSystemStorage

RETENTION = "ONCEFLOW_EXECUTION_CHECKPOINTING_EXTERNALIZED_CHECKPOINT_RETENTION"
DELETES = "DELETE_ON_CANCELLATION"
SCRIPT = """
import os, sys, time
from pathlib import Path
from onceflow import LocalProcesses
from tests.support.counting_source import CountingSource
from tests.support.ledger import ledger

cluster = LocalProcesses()
if sys.argv[2] == "spark":
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    daemon = ("spark.python.daemon.module", "onceflow.connectors.python_daemon")
    cluster = builder.config("spark.log.level", "OFF").config(*daemon).getOrCreate()
source = CountingSource(1000, pause_s=0.01, endless=True)
job = ledger(cluster, Path(sys.argv[1]), source)[0].start()
while job.status().checkpoints_completed < 2:
    assert not job.state.ended, job.status().last_error
    time.sleep(0.05)
print("running", flush=True)
raise LookupError("a mistake in the main thread")
"""


@pytest.mark.parametrize(
    ("cluster", "interrupted"),
    [
        ("processes", False),
        pytest.param("spark", False, marks=[pytest.mark.spark, pytest.mark.servers]),
        pytest.param("spark", True, marks=[pytest.mark.spark, pytest.mark.slow]),
    ],
)
def test_a_main_thread_that_fails_ends_the_process_and_the_job_in_good_order(
    tmp_path: Path, cluster: str, interrupted: bool
) -> None:
    """The checkpoints stay, also those that a cancel by the user would delete."""
    command = python("-c", SCRIPT, tmp_path, cluster)
    with Program(tmp_path / "log", *command, environment={RETENTION: DELETES}) as process:
        process.wait_until(lambda: "running\n" in process.output())
        if interrupted:
            time.sleep(0.1)
            process.signal(signal.SIGINT)
        status = process.wait(60)
    err = process.output()
    assert status == 1, err
    assert "LookupError: a mistake in the main thread" in err
    assert "Fatal Python error" not in err
    assert "terminate called" not in err
    last = FileSystemStorage(str(tmp_path / "checkpoints")).open("ledger").log.read().completed[-1]
    assert last.snapshots
