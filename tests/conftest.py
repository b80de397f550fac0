"""Where tests run jobs: one Spark session for all that ask for it, or processes without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from onceflow import LocalProcesses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.clusters import AnyCluster

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session whose workers see the tests' own modules."""
    from pyspark.sql import SparkSession

    paths = [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    session = (
        SparkSession.builder.master("local[4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AnyCluster:
    """Processes of this machine, whose output is in `tmp_path`; see `tests.support.clusters`."""
    if getattr(request, "param", "local") == "spark":
        session: SparkSession = request.getfixturevalue("spark")
        return session
    return LocalProcesses(tmp_path / "logs")
