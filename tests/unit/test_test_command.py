"""`script/test`: an option leaves the selection as it is, and `--repeat` names what was ever red.

The script runs as it is, in an environment whose Python writes down how pytest was called.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.red_tests import RedTests, RunReport, list_red_tests
from tests.selection import selects_tests

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
DEFAULT_MARKS = ("-m", "not slow and not servers", "--onceflow-rounds=2")
_PYTHON = """#!/usr/bin/env bash
case "$*" in
"-m pytest "*)
    printf '%s\\n' "$@" "" >>"{calls}"
    while [ $# -gt 1 ]; do
        [ "$1" = --red-report ] && mv "$(ls -d "{reports}"/* | head -n 1)" "$2"
        shift
    done
    echo "1 passed"
    ;;
"-m tests."*) exec "{python}" "$@" ;;
*) ;; # setup asks whether this is a Python, with pip: it is
esac
"""


@dataclass(frozen=True)
class Command:
    """`script/test` with an environment of its own below `directory`."""

    directory: Path

    def __post_init__(self) -> None:
        programs = self.directory / "venv" / "bin"
        programs.mkdir(parents=True)
        self._reports.mkdir()
        python = _PYTHON.format(calls=self._calls, reports=self._reports, python=sys.executable)
        (programs / "python").write_text(python, encoding="utf-8")
        for name in ("ruff", "lint-imports", "promtool"):
            (programs / name).write_text("#!/bin/sh\n", encoding="utf-8")
        for program in programs.iterdir():
            program.chmod(0o755)
        # The environment counts as complete, so that the script installs nothing.
        for stamp, sources in (
            ("dev", "pyproject.toml"),
            ("native", "native/setup.py native/src/*"),
        ):
            checksum = f"cat {sources} | cksum >'{programs.parent}/.onceflow-{stamp}'"
            subprocess.run(["bash", "-c", checksum], cwd=ROOT, check=True)

    @property
    def _calls(self) -> Path:
        return self.directory / "calls"

    @property
    def _reports(self) -> Path:
        return self.directory / "reports"

    def expect_report(self, report: RunReport) -> None:
        """Have the next run of pytest write this report."""
        report.write(self._reports / f"{len([*self._reports.iterdir()]):03}")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script, which must not take a minute: no test runs in it."""
        environment = {
            "ONCEFLOW_VENV": str(self.directory / "venv"),
            "ONCEFLOW_TEST_LOGS": str(self.directory / "logs"),
            "ONCEFLOW_CHROMIUM": "not needed",
            "TMPDIR": str(self.directory),
            "ONCEFLOW_TEST_PROCESSES": "2",
            "PYTEST_ADDOPTS": "",
        }
        return subprocess.run(
            [ROOT / "script/test", *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def calls(self) -> list[list[str]]:
        """Return the arguments of each run of pytest."""
        text = self._calls.read_text(encoding="utf-8")
        return [call.split("\n")[2:] for call in text.removesuffix("\n\n").split("\n\n")]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def test_options_alone_select_nothing_and_paths_and_marks_do() -> None:
    for options in (["-v"], ["-x"], ["--lf"], ["-k", "gate"], ["-p", "no:cacheprovider"]):
        assert not selects_tests(options), options
    for selection in (
        ["tests/unit"],
        ["tests/unit/test_tiers.py::test_it", "-v"],
        ["-m", "slow"],
        ["--onceflow-sink", "examples.own_sink_target:make_target"],
    ):
        assert selects_tests(selection), selection


def test_an_option_runs_the_default_selection_in_parallel_with_that_option(
    command: Command,
) -> None:
    ended = command.run("-k", "gate")
    assert ended.returncode == 0, ended.stderr
    (call,) = command.calls()
    assert tuple(call[:3]) == DEFAULT_MARKS
    assert "--numprocesses" in call
    assert "--reruns" not in call, "a second try hides a defect"
    assert call[-2:] == ["-k", "gate"]
    assert "checks passed, tests passed" in ended.stdout


def test_a_path_runs_those_tests_alone(command: Command) -> None:
    assert command.run("tests/unit", "-k", "gate").returncode == 0
    assert command.calls() == [["tests/unit", "-k", "gate"]]


def test_repeated_runs_name_each_test_that_was_ever_red_with_its_seeds(
    command: Command,
) -> None:
    command.expect_report(RunReport(7, 1, ["tests/a.py::test_a[x y]"], []))
    command.expect_report(RunReport(8, 0, [], []))
    ended = command.run("--repeat", "2")
    assert ended.returncode == 1
    assert "red in 1 of 2: tests/a.py::test_a[x y]: failed with seed 7\n" in ended.stdout
    assert ended.stdout.endswith("s\n")
    assert ended.stdout.count("lint: ruff check passed") == 1
    first, second = command.calls()
    seeds = {word for call in (first, second) for word in call if "--randomly-seed=" in word}
    assert len(seeds) == 2
    assert tuple(first[:3]) == DEFAULT_MARKS
    assert len([*(command.directory / "logs").rglob("*.log")]) == 2


def test_red_tests_are_listed_by_how_often_they_were_red() -> None:
    runs = [
        RunReport(1, 1, ["a", "b"], []),
        RunReport(2, 1, ["b"], ["c"]),
        RunReport(3, 3, [], []),
        None,
    ]
    assert list_red_tests(runs) == [
        "2 of 4: b: failed with seed 1, failed with seed 2",
        "1 of 4: a: failed with seed 1",
        "1 of 4: c: passed at its second try with seed 2",
        "1 of 4: run 3 ended with status 3: seed 3",
        "1 of 4: run 4 wrote no report: see its log",
    ]
    assert list_red_tests([RunReport(1, 0, [], [])]) == []


def test_a_run_reports_its_failures_and_its_second_tries(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="""
        tries = []
        def test_red(): assert False
        def test_green_at_last():
            tries.append(1)
            assert len(tries) == 2
        """
    )
    path = pytester.path / "report"
    arguments = ("--reruns", "1", "--randomly-seed", "5")
    pytester.runpytest_inprocess(*arguments, plugins=[RedTests(path)])
    report = RunReport.read(path)
    assert (report.seed, report.status, report.failed) == (5, 1, ["test_it.py::test_red"])
    assert {*report.second_tries} == {"test_it.py::test_red", "test_it.py::test_green_at_last"}
