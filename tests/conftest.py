"""The place where tests run jobs, one Spark session for all that ask for it, and an S3 server."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import uuid
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from tests.budget import DearFirst, Recorder
from tests.crash_deaths import CountDeaths, ListDeaths
from tests.red_tests import RedTests
from tests.support.servers.database_packages import offer_packages
from tests.tiers import has_all_folders, mark_left_out
from tests.traced_jobs import CheckTraces

from onceflow import LocalProcesses
from onceflow.core.crash_points import VARIABLE
from onceflow.core.runtime.cluster import local_processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.sharing import KeepServersTogether
    from tests.support.clusters import AnyCluster
    from tests.support.servers.s3 import EmbeddedS3, S3Factory

REPOSITORY = Path(__file__).parents[1]

# On a machine under load the time of one example says nothing. Set before modules of tests begin
# their own settings with these.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Slots are forks of a host. A program of a test module imports pytest, which takes a slot longer
# than all its other work. The host imports pytest once, and the modules of most programs.
local_processes.IMPORTED_BY_HOST += (
    "_pytest.",
    "tests.support.clusters",
    "tests.support.counting_source",
    "tests.support.directory_sink",
    "tests.support.held_up",
    "tests.support.ledger",
    "tests.support.program",
    "tests.support.scripted_sink",
    "tests.support.scripted_source",
    "tests.support.waiting",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the tests themselves: thousands of objects that stay.

    To look at them is half of collecting the tests. Later it would be most of each full collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Let each process of a run of all tests compile its share of the modules."""
    config = collector.config
    worker = getattr(config, "workerinput", None)
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if worker is not None and whole and isinstance(collector, pytest.Session):
        from tests.sharing import import_share

        import_share(int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write how long each test took to tests/durations.json, if all pass",
    )
    parser.addoption(
        "--red-report",
        metavar="FILE",
        type=Path,
        help="write which tests failed or were tried again into a JSON file",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Run in the background of a script. Programs that tests start would ignore it, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    offer_packages()
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(DearFirst())
        config.pluginmanager.register(CountDeaths())
        config.pluginmanager.register(CheckTraces())
        return
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(CountDeaths())
        config.pluginmanager.register(CheckTraces())
    config.pluginmanager.register(ListDeaths(has_all_folders))
    if config.getoption("record_durations"):
        config.pluginmanager.register(Recorder())
    if path := config.getoption("red_report"):
        config.pluginmanager.register(RedTests(path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> KeepServersTogether | None:
    """Keep tests that need a server where it runs, in a run of several processes."""
    if config.getoption("dist") != "loadscope":
        return None
    from tests.sharing import KeepServersTogether

    return KeepServersTogether(config, log)


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
    """Return the directory where a file named for a crash point kills the next process of Spark."""
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


@pytest.fixture(scope="session")
def onceflow_s3() -> Iterator[EmbeddedS3]:
    """The run's S3 server. Not to be killed: `s3_server` gives one for that."""
    from tests.support.servers.s3 import start_s3

    with start_s3() as server:
        yield server


@pytest.fixture
def s3_server() -> Iterator[S3Factory]:
    """A factory of S3 servers that the test may kill, pause and cut off."""
    from tests.support.servers.s3 import start_s3

    with contextlib.ExitStack() as running:

        def make(options: Mapping[str, str] | None = None, *, proxied: bool = False) -> EmbeddedS3:
            return running.enter_context(start_s3(options or {}, proxied=proxied))

        yield make


@pytest.fixture
def s3_bucket(onceflow_s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a bucket that is this test's alone; the environment leads to it, with all rights."""
    for name, value in onceflow_s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{onceflow_s3.create_bucket(f'onceflow-{uuid.uuid4().hex[:16]}')}"
