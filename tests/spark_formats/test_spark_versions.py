"""The formats on every Spark that is supported; `script/spark-versions` runs this alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support.spark_versions import environment_of

VERSIONS = ("4.0", "4.1", "4.2", "4.3")
PROGRAM = Path(__file__).with_name("format_program.py")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_way_to_write_is_exactly_once_on(version: str, tmp_path: Path) -> None:
    python = environment_of(version)
    write_twice(python, version, tmp_path, "--master local[2] pyspark-shell")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_way_to_write_is_exactly_once_over_spark_connect(
    version: str, tmp_path: Path
) -> None:
    write_twice(environment_of(version, "[connect]"), version, tmp_path, remote="local[2]")


def write_twice(
    python: Path, version: str, directory: Path, submitted: str = "", remote: str = ""
) -> None:
    given = {"PYSPARK_SUBMIT_ARGS": submitted} if submitted else {"SPARK_REMOTE": remote}
    for _ in range(2):
        done = subprocess.run(
            [python, PROGRAM, directory],
            capture_output=True,
            text=True,
            timeout=400,
            env={
                "PATH": os.environ["PATH"],
                "PYSPARK_PYTHON": str(python),
                "SPARK_LOCAL_IP": "127.0.0.1",
                **given,
            },
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found.pop("spark").startswith(f"{version}.")
        assert found == {"streamed": [300, 300], "batch": [100, 100], "each": [300, 300]}
