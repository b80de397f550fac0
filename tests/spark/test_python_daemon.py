"""Our Python daemon for Spark, under which the session of all tests runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink

from onceflow import Checkpointing, JobState, Pipeline

pytestmark = pytest.mark.spark

_PRELOADED = """
import sys
from onceflow.connectors.python_daemon import preload
preload()
print(*sys.modules)
"""


def test_slot_begins_with_all_that_the_daemon_has_imported_and_imports_nothing_of_ours_itself(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Spark gives a worker that has served a test before to none with other variables.
    monkeypatch.setitem(spark.sparkContext.environment, "ONCEFLOW_TEST_DAEMON", "its own")
    told, origin = tmp_path / "modules", tmp_path / "origin"

    def tell(batch: pa.RecordBatch) -> pa.RecordBatch:
        told.write_text(" ".join(sys.modules), "utf-8")
        origin.write_text(str(sys.modules["pyspark.worker"].__file__), "utf-8")
        return batch

    pipeline = Pipeline(
        spark,
        name="modules",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
    )
    records = pipeline.read(CountingSource(100), uid="records")
    records.map_batches(tell, uid="tell").write(DirectorySink(str(tmp_path / "out")), uid="out")
    assert pipeline.run(90).state is JobState.FINISHED
    preloaded = set(
        subprocess.run(
            [sys.executable, "-c", _PRELOADED], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    of_slot = set(told.read_text("utf-8").split())
    assert {"pandas", "onceflow.sinks.postgres.sink", "onceflow.sources.kafka.source"} <= of_slot
    assert ours(of_slot) - ours(preloaded) == set()
    # Compiled, as pip has installed it: not from the zip that Spark names first.
    assert ".zip" not in origin.read_text("utf-8")


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "onceflow"}
