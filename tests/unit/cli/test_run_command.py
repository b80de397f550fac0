"""`onceflow run`: what it takes for a pipeline, what it refuses, and what its flags show."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onceflow.cli.main import app
from onceflow.cli.run.target import load_target

PROGRAM = """
from onceflow import Checkpointing, FixedDelay, HeapBackend, LocalProcesses, Pipeline, count
from onceflow.sinks import SQLiteSink
from onceflow.sources import DatagenSource
from pathlib import Path

FILE = str(Path(__file__).with_name("out.db"))

def build(cluster, table="ledger", **more):
    pipeline = Pipeline(
        cluster, name="payments", parallelism=2,
        checkpointing=Checkpointing(storage="checkpoints", interval="1 s"), **more,
    )
    payments = pipeline.read(DatagenSource(rows=10, splits_count=2), uid="payments")
    counts = payments.key_by("account").running(n=count(), uid="counts")
    counts.write(SQLiteSink(FILE, table=table, create=table == "ledger"), uid="ledger")
    return pipeline

def pipeline(spark):
    return build(spark)

def restarting(spark):
    return build(spark, restart=FixedDelay(attempts=1, delay_s=1.0))

def on_the_heap(spark):
    return build(spark, state_backend=HeapBackend())

def without_table(spark):
    return build(spark, table="absent")

def of_nothing():
    return build(LocalProcesses())

def of_too_much(spark, servers, url):
    return build(spark)

def a_number(spark):
    return 7

def broken(spark):
    return {}["payments"]

class Builder:
    pass

text = "payments"
finished = build(LocalProcesses())
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """job.py in the working directory; what `onceflow run` imports is forgotten afterwards."""
    known, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    (tmp_path / "job.py").write_text(PROGRAM)
    yield tmp_path / "job.py"
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def answer(*arguments: str) -> dict[str, Any]:
    status, out, error = run("--json", "--master", "local-processes", *arguments)
    assert status == 0, (out, error)
    parsed: dict[str, Any] = json.loads(out)
    return parsed


@pytest.mark.parametrize(
    ("target", "takes_cluster"),
    [
        ("job.py:pipeline", True),
        ("job.py:of_nothing", False),
        ("job.py:finished", False),
        ("job:pipeline", True),
    ],
)
def test_a_pipeline_is_found_in_a_file_or_module(target: str, takes_cluster: bool) -> None:
    found = load_target(target)
    assert found.takes_cluster == takes_cluster
    if not takes_cluster:
        assert found.build(lambda: None).name == "payments"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["job.py"], "did you mean job.py:pipeline?"),
        (["jobs.py:pipeline"], "file jobs.py does not exist in"),
        (["jobs:pipeline"], "module 'jobs' cannot be found"),
        (["job.py:pipelin"], "did you mean 'pipeline'?"),
        (["job.py:text"], "is a str and neither a Pipeline nor a function"),
        (["job.py:Builder"], "is a class and neither"),
        (["job.py:of_too_much"], "takes spark, servers, url"),
        (["job.py:a_number", "--master", "local-processes"], "returns a int"),
        (["job.py:of_nothing", "--master", "local[2]"], "already has a cluster"),
        (["job.py:finished", "--plan", "--check"], "give one of the two"),
        (["job.py:finished", "--set", "checkpointing.intervall=5s"], "'checkpointing.interval'?"),
        (["job.py:finished", "--set", "checkpointing.interval"], "is not name=value"),
        (["job.py:finished", "--set", "checkpointing.interval=soon"], "is not a duration"),
        (["job.py:finished", "--claim"], "from_savepoint, which is missing"),
    ],
)
def test_a_mistake_ends_with_usage_and_says_what_would_do(arguments: list[str], words: str) -> None:
    status, _, error = run(*arguments)
    assert (status, words in error) == (2, True), error
    assert not Path("checkpoints").exists()


def test_what_the_program_raises_is_shown_with_its_own_lines() -> None:
    status, _, error = run("job.py:broken", "--master", "local-processes")
    assert status == 1
    assert "job.py:broken raised: KeyError: 'payments'" in error
    assert "target.py" not in error


def test_an_import_that_the_program_lacks_is_not_taken_for_the_program(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("import absent_library\n")
    status, _, error = run("other:pipeline")
    assert (status, "absent_library" in error) == (1, True)


def test_the_plan_shows_operators_and_every_setting_with_its_origin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONCEFLOW_CHECKPOINTING_RETAINED", "3")
    plan = answer("job.py:pipeline", "--plan", "--set", "checkpointing.interval=5 s")
    assert [one["uid"] for one in plan["graph"]["operators"]] == ["payments", "counts", "ledger"]
    assert plan["graph"]["edges"][0]["key"] == ["account"]
    settings = {one["name"]: (one["value"], one["origin"]) for one in plan["settings"]}
    assert settings["checkpointing.interval"] == ("5 s", "--set")
    assert settings["checkpointing.storage"] == ("checkpoints", "program")
    assert settings["checkpointing.retained"][0] == "3"
    assert "CHECKPOINTING_RETAINED" in settings["checkpointing.retained"][1]
    assert settings["pipeline.parallelism"] == ("2", "program")
    assert settings["runtime.stop_timeout"] == ("30 s", "default")
    status, text, _ = run("job.py:pipeline", "--plan", "--master", "local-processes")
    assert status == 0
    assert "by key account" in text
    assert not Path("checkpoints").exists()


def test_set_is_stronger_than_the_program(tmp_path: Path) -> None:
    def settings_of(target: str, *assignments: str) -> dict[str, str]:
        flags = [flag for assignment in assignments for flag in ("--set", assignment)]
        return {one["name"]: one["value"] for one in answer(target, "--plan", *flags)["settings"]}

    shown = settings_of("job.py:pipeline", "pipeline.parallelism=3", "endpoint.port=0")
    assert shown["pipeline.parallelism"] == "3"
    replaced = settings_of(
        "job.py:restarting", "restart.strategy=fixed_delay", "restart.fixed_delay.attempts=9"
    )
    assert replaced["restart.fixed_delay.attempts"] == "9"
    assert "restart" not in replaced
    assert settings_of("job.py:restarting")["restart"].startswith("FixedDelay")
    assert settings_of("job.py:on_the_heap", "state_backend.type=rocksdb")[
        "state_backend.type"
    ] == ("rocksdb")


@pytest.mark.parametrize(
    ("target", "assignment"),
    [
        ("job.py:restarting", "restart.fixed_delay.attempts=9"),
        ("job.py:on_the_heap", "state_backend.block_cache=1mb"),
    ],
)
def test_a_part_of_an_object_that_the_program_passes_is_refused(
    target: str, assignment: str
) -> None:
    """Otherwise the rest of the object would be lost in silence."""
    status, _, error = run(target, "--master", "local-processes", "--plan", "--set", assignment)
    assert status == 2
    assert "taken whole" in error
    assert assignment.partition("=")[0] in error


def test_settings_of_one_run_do_not_outlive_it() -> None:
    forced = answer("job.py:pipeline", "--plan", "--set", "checkpointing.interval=5 s")
    plain = answer("job.py:pipeline", "--plan")
    intervals = [
        next(one["value"] for one in plan["settings"] if one["name"] == "checkpointing.interval")
        for plan in (forced, plain)
    ]
    assert intervals == ["5 s", "1 s"]


def test_a_check_finds_what_a_start_would_refuse_and_changes_nothing() -> None:
    found = answer("job.py:pipeline", "--check")
    areas = {one["area"] for one in found["findings"]}
    assert areas >= {
        "python",
        "cluster",
        "source payments",
        "checkpoints",
        "sink ledger",
        "storage",
    }
    assert found["ok"]
    status, out, _ = run("--json", "--master", "local-processes", "job.py:without_table", "--check")
    assert status == 1
    (problem,) = [one for one in json.loads(out)["findings"] if one["level"] == "problem"]
    assert problem["area"] == "sink ledger"
    assert "out.db does not exist" in problem["found"]
    assert not Path("checkpoints").exists()
    assert not Path("out.db").exists()
