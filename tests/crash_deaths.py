"""The crash points at which processes died, test by test.

Each process that dies at a crash point leaves a file (`core/crash_points.py`). `CountDeaths` runs
in each process of pytest. It adds the deaths of a test to the report of the test. It fails a test
that has a parameter annotated with `CrashPoint` if no process died at that point. `ListDeaths` runs
in the process that prints the report. It prints a table, and it fails a run of all tests if a crash
point killed no process.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

import pytest

from onceflow.core.crash_points import DEATHS_VARIABLE, CrashPoint

POINTS: tuple[str, ...] = get_args(CrashPoint)
_PROPERTY = "crash points"


class CountDeaths:
    """A plugin that tells of each test at which crash points processes died."""

    def __init__(self) -> None:
        """Have all processes that tests start record their deaths in a new directory."""
        self._directory = tempfile.TemporaryDirectory(prefix="onceflow-deaths-")
        os.environ[DEATHS_VARIABLE] = self._directory.name
        self._died: list[str] = []

    def pytest_unconfigure(self) -> None:
        """Delete the directory."""
        self._directory.cleanup()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the deaths of the test to its last report, and fail it if one is missing."""
        report = yield
        self._died += self._take()
        if call.when == "call" and report.passed:
            missing = sorted(_named_points(item) - set(self._died))
            if missing:
                report.outcome = "failed"
                report.longrepr = f"no process died at the crash point {', '.join(missing)}"
        if call.when == "teardown":
            report.user_properties.append((_PROPERTY, self._died))
            self._died = []
        return report

    def _take(self) -> Sequence[str]:
        files = list(Path(self._directory.name).iterdir())
        for file in files:
            file.unlink()
        return [file.name.partition(".")[0] for file in files]


class ListDeaths:
    """A plugin that prints how often processes died at each crash point, and in which tests."""

    def __init__(self, is_whole: Callable[[Sequence[str]], bool]) -> None:
        """`is_whole` says of the ids of all tests of a run whether each point needs a death."""
        self._is_whole = is_whole
        self._whole = False
        self._deaths: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Look at the tests of a run of one process."""
        if session.items:
            self._whole = self._is_whole([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Look at the tests of a run of several processes, each of which has collected all."""
        self._whole = self._is_whole(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the deaths of a test from its last report."""
        for name, value in report.user_properties:
            if name == _PROPERTY:
                for point in cast("list[str]", value):
                    self._deaths[point][report.nodeid] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run of all tests in which a crash point killed no process."""
        if self._whole and exitstatus == pytest.ExitCode.OK and self._missing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for each crash point."""
        if not self._deaths and not self._whole:
            return
        terminalreporter.write_sep("-", "processes that died at crash points")
        for line in table(self._deaths):
            terminalreporter.write_line(line)
        if self._whole and self._missing():
            missing = ", ".join(self._missing())
            terminalreporter.write_line(f"FAILED: no process died at {missing}", red=True)

    def _missing(self) -> Sequence[str]:
        return [point for point in POINTS if point not in self._deaths]


def table(deaths: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield a line for each crash point: its name, its deaths, its tests and one test by name."""
    for point in POINTS:
        tests = deaths.get(point, {})
        example = f", of these {min(tests)}" if tests else ""
        yield f"{point:10} {sum(tests.values()):4} deaths in {len(tests):3} tests{example}"


def _named_points(item: pytest.Item) -> set[str]:
    """Return the values of the parameters that the test function annotates with `CrashPoint`."""
    function, call = getattr(item, "function", None), getattr(item, "callspec", None)
    if function is None or call is None:
        return set()
    named: set[str] = set()
    for name, annotation in function.__annotations__.items():
        if "CrashPoint" in str(annotation) and name in call.params:
            value = call.params[name]
            named |= {value} if isinstance(value, str) else set(value)
    return named
