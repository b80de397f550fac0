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
from onceflow.connectors.python_daemon import leave_zips

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


def test_zips_of_spark_leave_the_path_only_where_their_spark_lies_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, distribution = tmp_path / "site-packages", tmp_path / "spark-4.3" / "python" / "lib"
    lib = site / "pyspark" / "python" / "lib"
    zips = [str(lib / name) for name in ("pyspark.zip", "py4j-0.10.9.9-src.zip")]
    jars = [
        str(site / "pyspark" / "jars" / f"{name}.jar") for name in ("spark-core_2.13-4.3.0", "my")
    ]
    others = [
        str(distribution / "pyspark.zip"),
        str(tmp_path / "of the user.zip"),
        jars[1],
        str(site),
    ]
    monkeypatch.setattr(sys, "path", [*zips, jars[0], *others])
    lib.mkdir(parents=True)
    (site / "py4j-0.10.9.8.dist-info").mkdir()
    leave_zips()
    assert sys.path == [*zips, jars[0], *others]
    (site / "pyspark" / "__init__.py").touch()
    leave_zips()
    assert sys.path == [*zips[1:], *others]
    (site / "py4j-0.10.9.9.dist-info").mkdir()
    leave_zips()
    assert sys.path == others


def test_zips_leave_the_path_where_python_is_reached_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "release" / "site-packages"
    (site / "pyspark").mkdir(parents=True)
    (site / "pyspark" / "__init__.py").touch()
    (tmp_path / "current").symlink_to(tmp_path / "release")
    linked = str(tmp_path / "current" / "site-packages")
    for spark, other in (site, linked), (Path(linked), str(site)):
        monkeypatch.setattr(sys, "path", [f"{spark}/pyspark/python/lib/pyspark.zip", other])
        leave_zips()
        assert sys.path == [other]


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "onceflow"}
