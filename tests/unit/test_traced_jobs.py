"""A test whose jobs take a forbidden step fails, also if another process has taken the step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests import traced_jobs

def pytest_configure(config):
    config.pluginmanager.register(traced_jobs.CheckTraces())
    config.addinivalue_line("markers", "untraced: of a reason")
"""

TESTS = """
import msgspec, os, pytest
from onceflow.core.traces import Trace

@pytest.fixture(scope="module")
def writers():
    return []

def take_forbidden_step(log):
    Trace(log, 1).record("claimed", checkpoint=None, by=None, listed=[], sinks=[])
    pid = os.fork()
    if pid == 0:
        Trace(log, 1, slot=0).record("heard", checkpoint=4)
        os._exit(0)
    os.waitpid(pid, 0)

def test_forbidden():
    take_forbidden_step("a")

@pytest.mark.untraced("on purpose")
def test_on_purpose():
    take_forbidden_step("b")

def test_allowed():
    Trace("c", 1).record("claimed", checkpoint=None, by=None, listed=[], sinks=[])

def test_goes_on_with_the_job_of_another_test():
    Trace("c", 1).record("completed", checkpoint=7)

def test_begins_to_write_a_line(writers):
    Trace("d", 1).record("claimed", checkpoint=None, by=None, listed=[], sinks=[])
    [path] = os.scandir(os.environ["ONCEFLOW_TRACES"])
    writers.append(os.open(path, os.O_WRONLY | os.O_APPEND))

def test_has_written_the_line(writers):
    facts = {"checkpoint": 1, "listed": [], "subtasks": [], "sinks": []}
    line = {"step": "deciding", "log": "d", "attempt": 1, **facts}
    os.write(writers[0], msgspec.json.encode(line) + b"\\n")
    Trace("d", 1).record("decided", checkpoint=1)
"""


def test_a_test_whose_job_takes_a_forbidden_step_fails_with_the_trace(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=6, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "*this step needs completed 1 4, which is in no trace (a)*",
            "*>*slot 0 of attempt 1: heard checkpoint 4*",
            "*slots are told to commit checkpoint 7, which is not decided (c)*",
        ]
    )
    result.stdout.no_fnmatch_line("*in no trace (b)*")
    result.stdout.no_fnmatch_line("*(d)*")
