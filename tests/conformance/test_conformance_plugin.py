"""The kit as its users meet it: by an option, by a class, with a table and a report at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_TARGETS = """
import tempfile
import threading
from pathlib import Path
from tests.conformance.broken_committers import ForgetsItsCommits
from tests.conformance.reference_sink import ReferenceSink, ReferenceTarget

def make_sink():
    return ReferenceTarget(Path(tempfile.mkdtemp(dir=Path(__file__).parent)))

def make_broken():
    return ReferenceTarget(Path(tempfile.mkdtemp(dir=Path(__file__).parent)), ForgetsItsCommits)

class LacksAColumn(ReferenceTarget):
    def rows(self):
        return [{"id": row["id"], "account": row["account"]} for row in super().rows()]

def make_narrow():
    return LacksAColumn(Path(tempfile.mkdtemp(dir=Path(__file__).parent)))

class Locked(ReferenceTarget):
    def sink(self):
        sink = super().sink()
        object.__setattr__(sink, "lock", threading.Lock())
        return sink

def make_locked():
    return Locked(Path(tempfile.mkdtemp(dir=Path(__file__).parent)))

def make_description():
    return ReferenceSink("nowhere")
"""
ADDOPTS = "-p no:cacheprovider -p no:hypothesispytest -p no:xdist -p no:anyio -p no:timeout"
"""Without the plugins of others, which take longer to import than pytest itself."""
_QUICK = "hidden-after-write or commit-again or abort-again or server-killed or S14"


def _pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as a user does, in a project of its own."""
    (directory / "my_targets.py").write_text(_TARGETS)
    (directory / "pytest.ini").write_text(f"[pytest]\naddopts = {ADDOPTS}\n")
    return subprocess.run(
        [sys.executable, "-c", "import pytest; raise SystemExit(pytest.main())", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.slow  # a broken one goes the same way
def test_option_alone_tests_a_sink_without_any_test_file(tmp_path: Path) -> None:
    (tmp_path / "test_of_the_project.py").write_text("def test_other(): raise SystemExit(9)\n")
    done = _pytest(tmp_path, "--onceflow-sink", "my_targets:make_sink", "-k", _QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformance of my_targets:make_sink" in done.stdout
    assert "hidden-after-write" in done.stdout
    assert "test_of_the_project" not in done.stdout


@pytest.mark.slow
def test_option_beside_named_tests_runs_both(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_commit_again_of_ours(): pass\n")
    done = _pytest(
        tmp_path,
        "test_own.py",
        "--onceflow-sink=my_targets:make_sink",
        "-k",
        "commit-again or ours",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.slow  # another way to name what the others run
def test_package_can_be_named_instead(tmp_path: Path) -> None:
    done = _pytest(
        tmp_path,
        "--pyargs",
        "onceflow.integration.conformance",
        "--onceflow-sink=my_targets:make_sink",
        "-k",
        "commit-again",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_table_and_report_tell_every_verdict(tmp_path: Path) -> None:
    done = _pytest(
        tmp_path,
        "--onceflow-sink=my_targets:make_broken",
        "-k",
        _QUICK,
        "--onceflow-report=report.json",
        "--onceflow-seed=7",
    )
    assert done.returncode == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seed"] == 7
    sink = report["sinks"]["my_targets:make_broken"]
    assert not sink["conforms"]
    told = {one["clause"]: (one["verdict"], one["reason"]) for one in sink["clauses"]}
    assert told["hidden-after-write"] == ("passed", "")
    assert told["commit-again"][0] == "FAILED"
    assert "Lost" in told["commit-again"][1]
    assert told["server-killed-before-commit"] == ("not tested", "needs kill(), start()")
    table = done.stdout.partition("conformance of my_targets:make_broken")[2]
    lines = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert "S2 S21" in lines["commit-again"]
    assert "FAILED" in lines["commit-again"]
    assert "not tested" in lines["server-killed-before-commit"]
    assert "--onceflow-seed 7" in table


def test_class_of_ones_own_needs_make_target_alone(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import my_targets\n"
        "from onceflow.integration.conformance import SinkConformance\n"
        "class TestMine(SinkConformance):\n"
        "    def make_target(self): return my_targets.make_sink()\n"
    )
    done = _pytest(tmp_path, "test_mine.py", "-k", "commit-again or commit-elsewhere")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformance of TestMine" in done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(
    ("make", "clause", "says"),
    [
        ("make_narrow", "commit-shows-its-rows", "lacks amount: return each row with its columns"),
        pytest.param(
            "make_locked",
            "pre-committed-survives-death",
            "Keep settings alone in it",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistake_of_a_beginner_is_told_with_what_to_do(
    tmp_path: Path, make: str, clause: str, says: str
) -> None:
    done = _pytest(
        tmp_path,
        f"--onceflow-sink=my_targets:{make}",
        "-k",
        clause,
        "--onceflow-report=report.json",
    )
    assert done.returncode == 1
    clauses = json.loads((tmp_path / "report.json").read_text())["sinks"][f"my_targets:{make}"]
    (reason,) = [one["reason"] for one in clauses["clauses"] if one["clause"] == clause]
    assert says in reason
    assert "onceflow.integration" not in reason


@pytest.mark.parametrize(
    ("option", "named", "said"),
    [
        ("sink", "my_targets:make_description", "return a SinkTarget"),
        pytest.param(
            "source", "my_targets:make_sink", "return a SourceInput", marks=pytest.mark.slow
        ),
        pytest.param("sink", "my_targets:nobody", "nobody", marks=pytest.mark.slow),
        pytest.param("sink", "no_such_module:make", "no_such_module", marks=pytest.mark.slow),
        pytest.param("sink", "my_targets", "my_targets", marks=pytest.mark.slow),
    ],
)
def test_option_that_names_no_target_says_what_is_wrong(
    tmp_path: Path, option: str, named: str, said: str
) -> None:
    done = _pytest(tmp_path, f"--onceflow-{option}={named}", "-k", "again")
    assert done.returncode != 0
    assert said in done.stdout
    assert f"--onceflow-{option} {named}" in done.stdout


def test_plugin_costs_a_project_without_sinks_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\n"
        "def test_nothing_is_imported():\n"
        "    assert 'onceflow.integration.conformance' not in sys.modules\n"
    )
    done = _pytest(tmp_path, "test_own.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformance" not in done.stdout
