"""Mutants are small mistakes in code that still parses, and never in what people read."""

from __future__ import annotations

import ast

import pytest
from tests.mutation.mutants import list_mutants
from tests.mutation.rooms import ROOMS
from tests.mutation.runner import ROOT, read_mutants

_SAMPLE = '''"""Ä module 1."""
def f(x: int = 3) -> int:
    """Return 2."""
    ü = "ä"; self.kept = x - 1
    if x < 10 and ü:
        _log.info("at %s", 7)
        raise ValueError(f"below {x + 4}")
    return min(x, -1)
'''


def test_each_mutant_changes_one_place_and_still_parses() -> None:
    mutants = list_mutants("sample.py", _SAMPLE)
    assert [one.what for one in mutants] == [
        "without self.kept = x - 1",
        "x - 1 -> x + 1",
        "1 -> 2",
        "x < 10 -> x <= 10",
        "x < 10 and ü -> not (x < 10 and ü)",
        "x < 10 and ü -> x < 10 or ü",
        "10 -> 11",
        "without raise ValueError(f'below {x + 4}')",
        "min(x, -1) -> max(x, -1)",
        "1 -> 2",
    ]
    for one in mutants:
        changed = one.apply(_SAMPLE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(_SAMPLE)), one
        assert changed.startswith(_SAMPLE[: one.start])
        assert changed.endswith(_SAMPLE[one.end :])


@pytest.mark.parametrize("name", ROOMS)
def test_each_room_has_mutants_and_tests(name: str) -> None:
    room = ROOMS[name]
    assert len(read_mutants(room)) > 300
    for stage in room.stages:
        assert all((ROOT / argument.partition("::")[0]).exists() for argument in stage)
