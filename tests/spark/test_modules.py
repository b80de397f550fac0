"""Modules of the user's program on executors: found where they are sent, and missed by name."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink

from onceflow import Checkpointing, Pipeline
from onceflow.core.errors import ConfigError

pytestmark = pytest.mark.spark

REPOSITORY = Path(__file__).parents[2]
CLUSTER = "local-cluster[1,2,1024]"

DRIVER = """
    import sys
    from pathlib import Path
    from pyspark.sql import SparkSession
    from onceflow import Checkpointing, Pipeline
    from tests.support.counting_source import CountingSource
    from tests.support.directory_sink import DirectorySink

    directory = Path(sys.argv[1])
    sys.path.insert(0, str(directory / "only_here"))
    import of_the_driver

    spark = (
        SparkSession.builder.master(sys.argv[4])
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executorEnv.PYTHONPATH", sys.argv[2])
        .getOrCreate()
    )
    pipeline = Pipeline(
        spark, name="modules", parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
    )
    if sys.argv[3] == "sent":
        spark.sparkContext.addPyFile(str(directory / "only_here" / "of_the_driver.py"))
    records = pipeline.read(CountingSource(100), uid="records")
    records.map(of_the_driver.double, uid="step").write(
        DirectorySink(str(directory / "out")), uid="out"
    )
    try:
        print("RESULT", pipeline.run(90).state.value)
    except Exception as error:
        print("RESULT", type(error).__name__, error)
    print("ENDED", file=sys.stderr, flush=True)
    spark.stop()
"""


def test_a_module_that_executors_lack_ends_the_job_at_once_and_says_how_to_send_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python workers have their own path also where the executor is the driver's JVM."""
    driver_only_module(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "only_here"), *sys.path])
    pipeline = Pipeline(
        spark,
        name="modules",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
    )
    try:
        double = importlib.import_module("of_the_driver").double
        records = pipeline.read(CountingSource(100), uid="records").map(double, uid="step")
        records.write(DirectorySink(str(tmp_path / "out")), uid="out")
        with pytest.raises(ConfigError, match="the module 'of_the_driver'") as refused:
            pipeline.run(90)
    finally:
        sys.modules.pop("of_the_driver", None)
    assert "--py-files" in str(refused.value)
    assert "addPyFile" in str(refused.value)


@pytest.mark.servers
@pytest.mark.parametrize("master", ["local[2]", pytest.param(CLUSTER, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_a_driver_whose_executors_lack_a_module_prints_little_else(
    tmp_path: Path, master: str
) -> None:
    driver_only_module(tmp_path)
    lacking = run_driver(tmp_path, "lacking", master)
    result = next(line for line in lacking.stdout.splitlines() if line.startswith("RESULT"))
    assert result.startswith("RESULT ConfigError")
    assert "the module 'of_the_driver'" in result
    said = lacking.stderr.partition("ENDED")[0]
    assert len(said.splitlines()) < 20, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_module_that_is_sent_to_executors_is_found_there(tmp_path: Path) -> None:
    driver_only_module(tmp_path)
    sent = run_driver(tmp_path, "sent", CLUSTER)
    assert "RESULT finished" in sent.stdout, sent.stderr[-2000:]
    assert len(DirectorySink(str(tmp_path / "out")).rows()) == 100


def driver_only_module(directory: Path) -> None:
    (directory / "only_here").mkdir()
    (directory / "only_here" / "of_the_driver.py").write_text(
        "def double(record):\n    return record | {'amount': 2 * record['amount']}\n"
    )


def run_driver(directory: Path, how: str, master: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(directory), paths, how, master],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
