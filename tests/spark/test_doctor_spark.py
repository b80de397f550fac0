"""`onceflow doctor` on a real Spark: what the executors' Python says, and what a bad one says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

import onceflow

pytestmark = pytest.mark.spark


def examine(*arguments: str, **environment: str) -> tuple[int, list[dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "onceflow.cli.main", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        env=os.environ
        | {"PYTHONPATH": str(Path(onceflow.__file__).resolve().parents[1])}
        | environment,
    )
    assert done.stdout, done.stderr
    printed: Any = json.loads(done.stdout)
    return done.returncode, printed["findings"]


def test_executors_that_agree_with_the_driver_are_well(tmp_path: Path) -> None:
    status, findings = examine("--storage", str(tmp_path / "checkpoints"), "--timeout", "120")
    by_area = {finding["area"]: finding for finding in findings}
    assert status == 0, findings
    assert "Spark 4" in by_area["spark"]["found"]
    assert f"onceflow {onceflow.__version__}" in by_area["executors"]["found"]
    assert "reads and writes it" in by_area["storage on executors"]["found"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_executors_without_our_packages_are_told_what_to_install(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare" / "bin" / "python")
    status, findings = examine(
        *("--timeout", "120", "--master", "local[2]", "--parallelism", "3"), PYSPARK_PYTHON=bare
    )
    assert status == 1
    (executor,) = [finding for finding in findings if finding["area"] == "executors"]
    assert executor["level"] == "problem"
    assert bare in executor["found"]
    assert "pyarrow missing (ModuleNotFoundError" in executor["found"]
    assert executor["remedy"].startswith(f"{bare} -m pip install 'onceflow @ file://")
    (slots,) = [finding for finding in findings if "task slots" in finding["found"]]
    assert (slots["level"], slots["found"]) == ("problem", "2 task slots")
    assert slots["remedy"] == "--master 'local[3]'"


def test_spark_that_does_not_start_is_killed_at_its_deadline(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(
        f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n"
        '[ "$1" = -version ] && { echo \'openjdk version "17.0.1"\' >&2; exit; }\n'
        "exec sleep 300\n"
    )
    java.chmod(0o755)
    status, findings = examine("--timeout", "8", JAVA_HOME=str(tmp_path))
    assert status == 1
    (spark,) = [finding for finding in findings if finding["area"] == "spark"]
    assert "no answer within 8 s" in spark["found"]
    left = [pid for pid in (tmp_path / "pids").read_text().split() if _runs(int(pid))]
    assert left == []


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
