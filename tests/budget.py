"""The recorded durations of tests, and the time that the whole default run may take.

`durations.json` has each test of the default run that took over a second, by module, and the sum of
all else: of shorter tests, and of fixtures, which the first of several tests starts.
`script/test --record-durations` writes it, on a quiet machine. A test that it lacks counts as
nothing until then, so that one may be added, renamed or moved without it.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("durations.json")

RUN_S = 600
"""What `script/test` may take on two quiet cores."""
PROCESSES = 3
OUTSIDE_TESTS_S = 30
"""The part of it outside of tests and fixtures: collecting in each process, and the time for which
some processes have ended. 576 s were measured from a fresh clone, of which three processes were in
tests and fixtures for 543."""
SLOWER_MACHINES = 1.0
"""The factor by which the slowest machine is slower than the one that recorded the durations. The
recording machine is the slowest one so far: 200 schedules of the simulation took 14 s there, and
8.7 s on another machine."""
BUDGET_S = (RUN_S - OUTSIDE_TESTS_S) * PROCESSES / SLOWER_MACHINES

LONG_S = 8.0
"""A test of the default run that takes longer says why: it has the mark `only_proof`."""
_RECORDED_S = 1.0
_DEAR_SCOPE_S = 10.0
"""Modules and classes above it begin first: one that begins last keeps one process busy alone."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds that tests took, without their fixtures."""

    by_test: dict[str, float]
    others_s: float = 0.0
    """Fixtures, and tests that took no more than a second each: all together."""

    @classmethod
    def read(cls, path: Path = RECORD) -> Durations:
        """Read what was last recorded."""
        document = json.loads(path.read_text(encoding="utf-8"))
        modules: dict[str, dict[str, float]] = document["tests"]
        by_test = {
            f"{module}::{name}": seconds
            for module, tests in modules.items()
            for name, seconds in tests.items()
        }
        return cls(by_test, document["others_s"])

    def write(self, how: str, path: Path = RECORD) -> None:
        """Replace what was recorded; `how` says on which machine."""
        modules: defaultdict[str, dict[str, float]] = defaultdict(dict)
        others_s = self.others_s
        for node_id, seconds in sorted(self.by_test.items()):
            module, _, name = node_id.partition("::")
            if seconds > _RECORDED_S:
                modules[module][name] = round(seconds, 1)
            else:
                others_s += seconds
        document = {"how": how, "others_s": round(others_s, 1), "tests": modules}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def sum_s(self, node_ids: Iterable[str]) -> float:
        """Return what a run of these tests takes, with all the short ones."""
        return self.others_s + sum(self.by_test.get(node_id, 0.0) for node_id in node_ids)


class Recorder:
    """A plugin that writes the durations of a run at its end, if all of its tests passed."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._fixtures_s = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how long each phase took; a second try takes the place of the first."""
        if report.when == "call":
            self._seconds[report.nodeid] = report.duration
        else:
            self._fixtures_s += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write what was recorded."""
        if exitstatus == pytest.ExitCode.OK:
            load = os.getloadavg()[2]
            how = f"script/test on {os.cpu_count()} cores, load {load:.1f}"
            Durations(self._seconds, self._fixtures_s).write(how)


class DearFirst:
    """A plugin for the processes that share a run: they begin with what takes longest."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort modules and classes that take long to the front; all else keeps its random order."""
        durations = Durations.read().by_test
        scopes: defaultdict[str, float] = defaultdict(float)
        for item in items:
            scopes[_scope(item)] += durations.get(item.nodeid, 0.0)
        dear = {scope: seconds for scope, seconds in scopes.items() if seconds > _DEAR_SCOPE_S}
        items.sort(key=lambda item: -dear.get(_scope(item), 0.0))


def _scope(item: pytest.Item) -> str:
    """Return what xdist keeps in one process: the test's class or module."""
    return item.nodeid.rsplit("::", 1)[0]


def default_run(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return those of the tests that `script/test` runs."""
    return [
        item
        for item in items
        if not any(item.get_closest_marker(mark) for mark in ("slow", "servers"))
    ]
