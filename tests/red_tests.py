"""Which tests were red in a run, and in which of several runs.

`--red-report FILE` has a run of pytest write its red tests into FILE: those that failed, and those
that passed at a second try. `python -m tests.red_tests DIRECTORY` reads the reports of several runs
and lists each red test with its seeds. `script/test --repeat` and `.ci/run` use both.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

_GREEN = (int(pytest.ExitCode.OK), int(pytest.ExitCode.NO_TESTS_COLLECTED))


@dataclass(frozen=True, slots=True)
class RunReport:
    """The outcome of one run of pytest."""

    seed: int
    """The seed of the random order of its tests."""
    status: int
    """The exit status of pytest."""
    failed: Sequence[str]
    """The ids of tests that failed, and the modules that could not be collected."""
    second_tries: Sequence[str]
    """The ids of tests that failed and were tried again, whatever the second try gave."""

    @classmethod
    def read(cls, path: Path) -> RunReport:
        """Read the report of one run."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Replace the file with this report."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


class RedTests:
    """A plugin of the controlling process that writes the report of its run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # As keys of dictionaries: in order, and each id once.
        self._failed: dict[str, None] = {}
        self._second_tries: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed, or is tried again."""
        if report.outcome == "failed":
            self._failed[report.nodeid] = None
        elif str(report.outcome) == "rerun":
            self._second_tries[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that cannot be collected."""
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report."""
        seed = int(session.config.option.randomly_seed)
        report = RunReport(seed, int(exitstatus), [*self._failed], [*self._second_tries])
        report.write(self._path)


def list_red_tests(reports: Iterable[RunReport | None]) -> list[str]:
    """Return one line for each red test and each run that broke, the most frequent first.

    None is a run that ended without a report.
    """
    runs = [*reports]
    times: defaultdict[str, list[str]] = defaultdict(list)
    for number, run in enumerate(runs, start=1):
        if run is None:
            times[f"run {number} wrote no report"].append("see its log")
            continue
        for test in run.failed:
            times[test].append(f"failed with seed {run.seed}")
        for test in set(run.second_tries).difference(run.failed):
            times[test].append(f"passed at its second try with seed {run.seed}")
        if run.status not in _GREEN and not run.failed:
            times[f"run {number} ended with status {run.status}"].append(f"seed {run.seed}")
    ordered = sorted(times.items(), key=lambda red: (-len(red[1]), red[0]))
    return [f"{len(seen)} of {len(runs)}: {what}: {', '.join(seen)}" for what, seen in ordered]


def _read_reports(directory: Path) -> list[RunReport | None]:
    """Return the report of each run that has a log or a report in `directory`."""
    paths = sorted({path.with_suffix(".json") for path in directory.iterdir()})
    return [RunReport.read(path) if path.exists() else None for path in paths]


def main(directory: str) -> int:
    """Print the red tests of all runs that `directory` knows; return 1 if there are any."""
    reports = _read_reports(Path(directory))
    red = list_red_tests(reports)
    for line in red:
        sys.stdout.write(f"red in {line}\n")
    sys.stdout.write(f"{len(reports)} runs, {len(red)} red; see {directory}\n")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
