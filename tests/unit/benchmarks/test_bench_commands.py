"""The commands that the results name can be run."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

from benchmarks.__main__ import Scenario

DOCS = Path(__file__).parents[3] / "docs"


def test_each_command_of_the_results_names_a_program_and_a_scenario_that_exist() -> None:
    results = json.loads((DOCS / "pictures" / "results.json").read_text())
    commands = set(re.findall(r'"command": "(.*?)"', json.dumps(results)))
    assert len(commands) > 5
    text = "\n".join([*commands, (DOCS / "benchmarks.md").read_text()])
    scenarios = set(re.findall(r"--scenario ([\w-]+)", text))
    assert scenarios - {one.value for one in Scenario} == set()
    programs = set(re.findall(r"-m (benchmarks[\w.]*)", text))
    assert {program for program in programs if find_spec(program) is None} == set()
