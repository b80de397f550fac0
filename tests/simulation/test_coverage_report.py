"""Tests that each excuse of the coverage command names an existing file, function and line."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.coverage_report import EXCUSES, NOT_MODELLED, PURE, Excuse, judge

LINES = [
    "def grow(plants):",
    "for plant in plants:",
    "if plant.thirsty:",
    "plant.water()",
    "return",
]


def _paths(file: str) -> list[Path]:
    return [path for directory in PURE for path in directory.rglob(file)]


@pytest.mark.parametrize("file", NOT_MODELLED)
def test_a_file_that_is_not_modelled_is_there(file: str) -> None:
    assert len(_paths(file)) == 1


@pytest.mark.parametrize("name", EXCUSES)
def test_an_excuse_names_lines_of_a_function_that_is_there(name: str) -> None:
    file, _, function = name.partition(":")
    assert file not in NOT_MODELLED
    (path,) = _paths(file)
    source = path.read_text(encoding="utf-8")
    node = _functions(ast.parse(source))[function]
    lines = [line.strip() for line in source.splitlines()[node.lineno - 1 : node.end_lineno]]
    for text in EXCUSES[name].lines:
        assert any(line.startswith(text) for line in lines), f"{name} has no line {text!r}"


def test_what_no_schedule_reaches_is_told_by_function_and_line() -> None:
    counts: dict[str, list[Any]] = {"missing_lines": [4], "missing_branches": [[2, 5], [3, 4]]}
    report = judge("garden.py", LINES, {"grow": counts}, {})
    assert report.unreached == [
        "garden.py:grow:4 never runs: plant.water()",
        "garden.py:grow:2 never goes to return: for plant in plants:",
    ]


def test_an_excuse_covers_its_lines_alone_and_one_that_excuses_nothing_is_told() -> None:
    excuses = {"garden.py:grow": Excuse("it rains", ("plant.water", "return"))}
    counts: dict[str, list[Any]] = {"missing_lines": [4], "missing_branches": [[2, 1]]}
    report = judge("garden.py", LINES, {"grow": counts}, excuses)
    assert report.unreached == [
        "garden.py:grow:2 never goes to def grow(plants):: for plant in plants:"
    ]
    assert report.needless(excuses) == [
        "garden.py:grow: the excuse 'return' excuses nothing: schedules reach it"
    ]


def _functions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    found[f"{node.name}.{member.name}"] = member
    return found
