"""The end of a driver's process while its job runs: it comes soon, and aborts nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.support.program import Program, python

pytestmark = pytest.mark.spark

SCRIPT = """
import os, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.ledger import ledger

os.environ["PYSPARK_PYTHON"] = sys.executable
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
daemon = ("spark.python.daemon.module", "onceflow.connectors.python_daemon")
spark = builder.config("spark.log.level", "OFF").config(*daemon).getOrCreate()
source = CountingSource(1000, pause_s=0.01, endless=True)
job = ledger(spark, Path(sys.argv[1]), source)[0].start()
while job.status().checkpoints_completed < 2:
    assert not job.state.ended, job.status().last_error
    time.sleep(0.05)
print("running", flush=True)
raise LookupError("a mistake in the main thread")
"""


@pytest.mark.only_proof
@pytest.mark.parametrize("interrupted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_main_thread_that_fails_ends_the_process_and_the_job_in_good_order(
    tmp_path: Path, interrupted: bool
) -> None:
    with Program(tmp_path / "log", *python("-c", SCRIPT, tmp_path)) as process:
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
