"""One Spark session of two cores for all formats; servers are the kit's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Workers see the tests' own modules; a failed task is tried once more."""
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
    yield session
    session.stop()
