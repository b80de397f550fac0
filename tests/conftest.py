"""Where tests run jobs: one Spark session for all that ask for it, or processes without it."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.budget import DearFirst, Recorder
from tests.tiers import mark_left_out

from onceflow import LocalProcesses
from onceflow.core.crash_points import VARIABLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.clusters import AnyCluster

REPOSITORY = Path(__file__).parents[1]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests are no garbage: looking for it among them is half of collecting them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write how long each test took to tests/durations.json, if all pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(DearFirst())
    elif config.getoption("record_durations"):
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_left_out(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests failed at their first try, and why tests were skipped.

    A test that passes at its second try only is a defect. A skipped proof proves nothing.
    """
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.write_sep("_", f"failed at first: {report.nodeid}", yellow=True)
        terminalreporter.write_line(f"{report.longreprtext}\n{report.capstdout}{report.capstderr}")
    skipped: defaultdict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.getreports("skipped"):
        # Of a skip this is the file, the line and the reason.
        skipped[str(report.longrepr).rpartition("Skipped: ")[2].rstrip("')\"")].append(
            report.nodeid
        )
    for reason, tests in sorted(skipped.items()):
        also = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        terminalreporter.write_line(f"skipped, {reason}: {min(tests)}{also}", yellow=True)


@pytest.fixture(scope="session")
def crash_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file named for a crash point kills the next process of Spark that reaches it."""
    return tmp_path_factory.mktemp("crash_points")


@pytest.fixture(scope="session")
def spark(crash_points: Path) -> Iterator[SparkSession]:
    """A session whose workers see the tests' own modules; a failed task is tried once more.

    One for all tests of a process: there is one JVM, and what it has in its environment stays.
    """
    from pyspark.sql import SparkSession

    paths = [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ[VARIABLE] = str(crash_points)
    session = (
        SparkSession.builder.master("local[4,2]")
        .config("spark.ui.enabled", "false")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config("spark.log.level", "OFF")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        # Queries of a few rows: compiling code for each is a third of their processor time.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .getOrCreate()
    )
    # The JVM and its workers have it; this process is not to die.
    del os.environ[VARIABLE]
    yield session
    session.stop()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AnyCluster:
    """Processes of this machine, whose output is in `tmp_path`; see `tests.support.clusters`."""
    if getattr(request, "param", "local") == "spark":
        session: SparkSession = request.getfixturevalue("spark")
        return session
    return LocalProcesses(tmp_path / "logs")
