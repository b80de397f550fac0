"""`onceflow doctor --source … --sink … --schema …`: as a user asks whether a start would pass."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onceflow.cli.main import app

FITTING = "id bigint NOT NULL, name string"
MY_JOB = """
import os

from onceflow.connectors import SourceUnavailable
from onceflow.sinks import SQLiteSink
from onceflow.sources import DatagenSource

events = DatagenSource()


class Unreachable(DatagenSource):
    def validate(self):
        raise SourceUnavailable("nobody answers at broker:9092")


def unreachable():
    return Unreachable()


def payments():
    return SQLiteSink(os.path.abspath("payments.db"), table="payments")


number = 17
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a program, `my_job`, and the database of its sink."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_job", raising=False)
    (tmp_path / "my_job.py").write_text(MY_JOB)
    with contextlib.closing(sqlite3.connect(tmp_path / "payments.db")) as database:
        database.execute("CREATE TABLE payments (id INTEGER PRIMARY KEY, name TEXT)")
    return tmp_path


def tables_in(directory: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(directory / "payments.db")) as database:
        return [name for (name,) in database.execute("SELECT name FROM sqlite_master")]


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--no-spark", *arguments])


def found_in(said: str, area: str) -> list[dict[str, Any]]:
    """The findings about `area` of what `--json` printed."""
    return [one for one in json.loads(said)["findings"] if one["area"] == area]


def test_source_and_sink_that_fit_are_well_and_nothing_is_changed(directory: Path) -> None:
    """In a process of its own, as from a shell."""
    names = ["--source", "my_job:events", "--sink", "my_job:payments", "--schema", FITTING]
    done = subprocess.run(
        [sys.executable, "-m", "onceflow.cli.main", "doctor", "--no-spark", *names, "--json"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    for area, words in (
        ("source", "DatagenSource can be read"),
        ("sink", "SQLiteSink accepts rows"),
    ):
        (finding,) = found_in(done.stdout, area)
        assert finding["level"] == "ok"
        assert words in finding["found"]
    assert tables_in(directory) == ["payments"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("id bigint, town string", ["payments", "'town'", "(it has id, name)"]),
        ("id bigint, name double", ["'name'", "double", "TEXT"]),
        ("id bigint, name map<string, int>", ["'name'", "map<string, int32>"]),
    ],
)
def test_schema_that_the_table_does_not_take_is_a_problem_by_column_and_type(
    directory: Path, schema: str, words: list[str]
) -> None:
    asked = ("--sink", "my_job:payments", "--schema", schema)
    as_json, as_text = doctor(*asked, "--json"), doctor(*asked)
    assert (as_json.exit_code, as_text.exit_code) == (1, 1)
    assert json.loads(as_json.stdout)["ok"] is False
    (finding,) = found_in(as_json.stdout, "sink")
    assert finding["level"] == "problem"
    for word in words:
        assert word in finding["found"]
        assert word in as_text.stdout
    assert "1 problem(s)" in as_text.stdout
    assert tables_in(directory) == ["payments"]


def test_source_that_cannot_be_read_is_a_problem_and_the_sink_is_looked_at_all_the_same(
    directory: Path,
) -> None:
    done = doctor(
        *("--source", "my_job:unreachable", "--sink", "my_job:payments"),
        *("--schema", FITTING, "--json"),
    )
    assert done.exit_code == 1
    (source,), (sink,) = found_in(done.stdout, "source"), found_in(done.stdout, "sink")
    assert (source["level"], sink["level"]) == ("problem", "ok")
    assert "nobody answers at broker:9092" in source["found"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sink", "my_job:payments"], "--sink needs --schema"),
        (["--schema", FITTING], "--schema needs --sink"),
        (["--sink", "my_job:payments", "--schema", "id bigness"], "--schema"),
        (["--sink", "my_job:payments", "--schema", "id"], "--schema"),
        (["--sink", "my_job:number", "--schema", FITTING], "is a int, not a Sink"),
        (["--sink", "my_job:absent", "--schema", FITTING], "my_job:absent"),
        (["--source", "no_such_module:events"], "no_such_module"),
        (["--source", "my_job"], "'my_job' is not module:name"),
    ],
)
@pytest.mark.usefixtures("directory")
def test_what_cannot_be_understood_is_usage_and_nothing_is_looked_at(
    arguments: list[str], said: str
) -> None:
    done = doctor(*arguments, "--json")
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""
