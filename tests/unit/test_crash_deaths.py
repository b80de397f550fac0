"""A test that names a crash point fails unless a process dies there, and the report counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash_deaths import POINTS

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests.crash_deaths import CountDeaths, ListDeaths

def pytest_configure(config):
    config.pluginmanager.register(CountDeaths())
    config.pluginmanager.register(ListDeaths(lambda ids: len(ids) == {whole_count}))
"""

OF_A_POINT = """
from __future__ import annotations
import os, pytest
from onceflow.core import crash_points
from onceflow.core.crash_points import CrashPoint

@pytest.mark.parametrize("point", ["write", "acked"])
def test_names_a_point(tmp_path, monkeypatch, point: CrashPoint):
    monkeypatch.setenv(crash_points.VARIABLE, str(tmp_path))
    if point == "write":
        (tmp_path / point).touch()
    pid = os.fork()
    if pid == 0:
        crash_points.reach(point)
        os._exit(0)
    os.waitpid(pid, 0)

def test_names_none():
    pass
"""


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")


def test_a_test_that_names_a_point_at_which_no_process_dies_fails_by_that_name(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(CONFTEST.format(whole_count=99))
    pytester.makepyfile(OF_A_POINT)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=2, failed=1)
    printed = result.stdout.str()
    assert "no process died at the crash point acked" in printed
    assert "write         1 deaths in   1 tests, of these" in printed


@pytest.mark.parametrize("processes", ["0", pytest.param("2", marks=pytest.mark.servers)])
def test_a_run_of_all_tests_fails_if_a_point_killed_no_process(
    pytester: pytest.Pytester, processes: str
) -> None:
    pytester.makeconftest(CONFTEST.format(whole_count=1))
    pytester.makepyfile("def test_names_none():\n    pass\n")
    result = pytester.runpytest_subprocess("-n", processes)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    assert f"FAILED: no process died at {', '.join(POINTS)}" in result.stdout.str()
