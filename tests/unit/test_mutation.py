"""Mutants are small mistakes in code that still parses, and never in what people read."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutation.journal import (
    Journal,
    Known,
    format_scores,
    name_for_excuse,
    read_excuses,
    read_scores,
)
from tests.mutation.mutants import Mutant, list_mutants
from tests.mutation.rooms import ROOMS
from tests.mutation.runner import ROOT, Verdict, read_mutants

_SAMPLE = '''"""Ä module 1."""
def f(x: int = 3) -> int:
    """Return 2."""
    ü = "ä"; self.kept = x - 1
    if x < 10 and ü:
        _log.info("at %s", 7)
        raise ValueError(f"below {x + 4}")
    zip(x, x, strict=True)
    return min(x, -1)
'''


def test_each_mutant_changes_one_place_and_still_parses() -> None:
    mutants = list_mutants("sample.py", _SAMPLE)
    assert [mutant.what for mutant in mutants] == [
        "without self.kept = x - 1",
        "x - 1 -> x + 1",
        "1 -> 2",
        "x < 10 -> x <= 10",
        "x < 10 and ü -> not (x < 10 and ü)",
        "x < 10 and ü -> x < 10 or ü",
        "10 -> 11",
        "without raise ValueError(f'below {x + 4}')",
        "without zip(x, x, strict=True)",
        "min(x, -1) -> max(x, -1)",
        "1 -> 2",
    ]
    for mutant in mutants:
        changed = mutant.apply(_SAMPLE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(_SAMPLE)), mutant
        assert changed.startswith(_SAMPLE[: mutant.start])
        assert changed.endswith(_SAMPLE[mutant.end :])


@pytest.mark.parametrize("name", ROOMS)
def test_each_room_has_mutants_and_tests(name: str) -> None:
    room = ROOMS[name]
    assert len(read_mutants(room)) > 300
    for stage in room.stages:
        for argument in stage:
            path, _, test = argument.partition("::")
            assert (ROOT / path).exists()
            assert not test or f"def {test}(" in (ROOT / path).read_text(), argument


@pytest.mark.servers
def test_each_argument_of_a_stage_has_tests_of_the_default_run() -> None:
    arguments = {argument for room in ROOMS.values() for stage in room.stages for argument in stage}
    marks = ("-m", "not slow and not servers")
    command = (*(sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0"), *marks, *arguments)
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tests = [line for line in listed.splitlines() if "::" in line]
    assert all(any(test.startswith(argument) for test in tests) for argument in arguments)


def test_the_journal_remembers_verdicts_until_the_file_changes(tmp_path: Path) -> None:
    """The journal tells killed mutants from those that survived, and by how many stages."""
    killed, survivor, untried = (Mutant("pyproject.toml", 1, n, n, "", "") for n in range(3))
    path = tmp_path / "verdicts.jsonl"
    journal = Journal(path)
    journal.add(Verdict("commit", killed, 0, 1.0, 2))
    journal.add(Verdict("commit", killed, 2, 1.0, 2))
    journal.add(Verdict("commit", survivor, 0, 1.0, 3))
    for known in (journal, Journal(path)):
        assert known.get(killed) == Known(stage=2, tried=2)
        assert known.get(survivor) == Known(stage=0, tried=3)
        assert known.get(untried) is None


def test_scores_are_counts_of_files_that_exist() -> None:
    for file, score in read_scores().items():
        assert set(score) == {"killed", "excused", "survived", "unsure", "of"}, file
        assert sum(score.values()) - score["of"] <= score["of"], file
        assert all(number >= 0 for number in score.values()), file
        assert (ROOT / file).exists(), f"script/mutate --record forgets {file}"
    page = (ROOT / "docs/internals/mutation.md").read_text(encoding="utf-8")
    assert format_scores(read_scores()) in page, "script/mutate --record prints the table"


def test_the_table_of_scores_says_which_files_were_sampled() -> None:
    counts = {"killed": 3, "excused": 1, "survived": 0, "unsure": 1}
    table = format_scores({"a.py": counts | {"of": 5}, "b.py": counts | {"of": 9}})
    assert "| `a.py` | all | 3 | 1 | 0 | 1 |" in table
    assert "| `b.py` | sampled 5 of 9 | 3 | 1 | 0 | 1 |" in table


def test_each_excuse_names_a_mutant_and_gives_a_reason() -> None:
    excuses = read_excuses()
    files = {name.partition(":")[0] for name in excuses}
    mutants = [mutant for file in files for mutant in list_mutants(file, (ROOT / file).read_text())]
    assert set(excuses) <= set(map(name_for_excuse, mutants)), "an excuse of a mutant that is gone"
    assert all(len(reason) > 20 for reason in excuses.values())
