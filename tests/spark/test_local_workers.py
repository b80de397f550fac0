"""The path and the daemon of Python workers that run beside the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from onceflow.connectors import register
from onceflow.connectors.spark.local_workers import DAEMON_SETTING, add_worker_path, is_installed
from onceflow.connectors.unpacked_spark import leave_zips

pytestmark = pytest.mark.spark


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


def test_a_process_with_the_worker_path_leaves_the_zips_and_runs_the_next_sitecustomize(
    tmp_path: Path,
) -> None:
    import pyspark

    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.next_one_ran = True")
    zipped = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
    assert zipped.is_file()
    path = os.pathsep.join([add_worker_path(str(zipped)), str(tmp_path)])
    program = "import sys, pyspark; print(*sys.path, pyspark.__file__); next_one_ran"
    for changed, expected in (path, False), (os.pathsep.join([str(zipped), str(tmp_path)]), True):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": changed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("pyspark.zip" in run.stdout) is expected


def test_the_worker_path_costs_a_process_next_to_no_imports(tmp_path: Path) -> None:
    """Spark starts a dozen such processes before the first rows of a query."""
    program = "import sys; print(*sys.modules)"
    without, with_path = (
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for path in (str(tmp_path), add_worker_path(str(tmp_path)))
    )
    added = {name.partition(".")[0] for name in set(with_path) - set(without)}
    assert added <= {"sitecustomize", "__future__", "importlib", "warnings"}
    assert "importlib.util" not in set(with_path) - set(without)


class PathFormat(DataSource):
    """A format whose schema says whether its planner has Spark's zip on its path."""

    @classmethod
    def name(cls) -> str:
        return "path-of-the-planner"

    def schema(self) -> str:
        return f"zip_{any(entry.endswith('pyspark.zip') for entry in sys.path)} INT"


def test_register_gives_local_workers_a_path_without_zips(
    spark: SparkSession,
) -> None:
    register(spark)
    register(spark)
    path = spark.sparkContext.environment["PYTHONPATH"].split(os.pathsep)
    assert len(path) == len(set(path))
    spark.dataSource.register(PathFormat)
    assert spark.read.format("path-of-the-planner").load().columns == ["zip_False"]


@pytest.mark.servers
def test_register_chooses_the_daemon_of_a_session_that_has_none(tmp_path: Path) -> None:
    program = f"""
from pyspark.sql import SparkSession
from onceflow.connectors import register
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
register(spark)
print(spark.sparkContext._jsc.sc().conf().get("{DAEMON_SETTING}"))
imported = lambda _: "onceflow.sinks.postgres.sink" in __import__("sys").modules
print(spark.sparkContext.parallelize([1], 1).map(imported).collect())
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ["onceflow.connectors.python_daemon", "[True]"]


def test_onceflow_is_installed_for_the_tests() -> None:
    """Otherwise the tests above would pass without looking at anything."""
    assert is_installed()
