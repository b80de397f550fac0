"""A job under `onceflow run`, in processes of its own: stopped by a signal, and run to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import assert_exactly_once

SOURCE = CountingSource(6_000)
PROGRAM = """
from pathlib import Path
from tests.support.counting_source import CountingSource
from tests.support.ledger import ledger

HERE = Path(__file__).parent

def pipeline(cluster):
    source = CountingSource(6_000, pause_s=0.002, ends_with=str(HERE / "read all"))
    return ledger(cluster, HERE, source, interval=60)[0]
"""


def begin(directory: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "onceflow.cli.main", "run", "job.py:pipeline", "--json", *flags],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_and_stop(directory: Path, *flags: str) -> None:
    """SIGTERM takes a last checkpoint, and the next run goes on from it."""
    (directory / "job.py").write_text(PROGRAM)
    with begin(directory, *flags) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "runs, attempt 1, from the beginning" in line:
                process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        stopped: dict[str, Any] = json.loads(process.stdout.read())
        assert process.wait(60) == 0
    assert (stopped["state"], stopped["exit_status"]) == ("stopped", 0)
    (directory / "read all").touch()
    with begin(directory, *flags) as process:
        out, error = process.communicate(timeout=90)
    finished: dict[str, Any] = json.loads(out)
    assert (finished["state"], process.returncode) == ("finished", 0), error
    assert f"from checkpoint {stopped['last_checkpoint']}" in error
    assert_exactly_once(DirectorySink(str(directory / "out")), SOURCE)


@pytest.mark.only_proof
def test_a_job_is_stopped_by_a_signal_and_goes_on_in_the_next_run(tmp_path: Path) -> None:
    run_and_stop(tmp_path, "--master", "local-processes")


def test_a_job_that_takes_too_long_is_stopped_and_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PROGRAM)
    with begin(tmp_path, "--master", "local-processes", "--timeout", "0.5") as process:
        out, error = process.communicate(timeout=90)
    ended: dict[str, Any] = json.loads(out)
    assert (process.returncode, ended["exit_status"]) == (1, 1), error
    assert ended["error"] == "job 'ledger' had not finished after 0.5 s: stopped"


@pytest.mark.spark
@pytest.mark.servers
def test_a_job_runs_on_a_spark_session_that_the_command_opens(tmp_path: Path) -> None:
    run_and_stop(tmp_path, "--master", "local[2]", "--set", "runtime.stop_timeout=50 s")
