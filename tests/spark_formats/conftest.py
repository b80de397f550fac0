"""One Spark session of two cores for all formats; servers are the kit's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from onceflow.core.crash_points import VARIABLE

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def crash_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file named for a crash point kills the next process of Spark that reaches it."""
    return tmp_path_factory.mktemp("crash_points")


@pytest.fixture(scope="session")
def spark(crash_points: Path) -> Iterator[SparkSession]:
    """Workers see the tests' own modules; a failed task is tried once more."""
    os.environ[VARIABLE] = str(crash_points)
    paths = [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2,2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    # The JVM and its workers have it; this process is not to die.
    del os.environ[VARIABLE]
    yield session
    session.stop()
