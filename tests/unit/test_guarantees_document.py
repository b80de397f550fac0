"""docs/internals/proofs.md names tests and clauses that exist, and a proof for each of its lines.

In a run of all tests, one that this run has, if only the default one.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from tests.tiers import has_all_folders

from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clause_catalog import CLAUSES, NOT_OF_SINKS

ROOT = Path(__file__).parents[2]
_DOCUMENT = ROOT / "docs" / "internals" / "proofs.md"
_PROOF = re.compile(r"`(\w+)::([\w-]+)`")


@cache
def _tests() -> frozenset[tuple[str, str]]:
    """Every test function of the repository, as file and name, both without `test_`'s share."""
    return frozenset(
        (path.stem, name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *def test_(\w+)", path.read_text("utf-8"), re.MULTILINE)
    )


def _rows(section: str) -> list[list[str]]:
    """The cells of every line of every table, without their heads."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    following = [*lines[1:], ""]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line, after in zip(lines, following, strict=False)
        if not line.startswith("|---") and not after.startswith("|---")
    ]


def test_every_proof_that_is_named_exists() -> None:
    named = _PROOF.findall(_DOCUMENT.read_text(encoding="utf-8"))
    assert len(named) > 100
    clauses = {("clause", clause.id) for clause in CLAUSES}
    assert [one for one in named if one not in clauses and one not in _tests()] == []


def test_every_line_has_a_proof_and_every_fault_one_that_runs_on_each_database() -> None:
    _, faults, bugs, *others = _DOCUMENT.read_text(encoding="utf-8").split("\n## ")
    assert len(_rows(faults)) > 15
    assert len(_rows(bugs)) > 15
    rows = [row for section in (faults, bugs, *others) for row in _rows(section)]
    assert [row[0] for row in rows if not _PROOF.search(row[-1])] == []
    for_all = re.compile(r"`(test_sql_\w+|clause)::")
    assert [row[0] for row in _rows(faults) if not for_all.search(row[-1])] == []


def test_every_line_has_a_proof_among_the_tests_of_this_run(request: pytest.FixtureRequest) -> None:
    run: set[tuple[str, str]] = set()
    for item in request.session.items:
        run.add((item.path.stem, item.name.partition("[")[0].removeprefix("test_")))
        clause = getattr(getattr(item, "callspec", None), "params", {}).get("clause")
        if isinstance(clause, Clause):
            run.add(("clause", clause.id))
    if not has_all_folders(item.nodeid for item in request.session.items):
        pytest.skip("not all tests were asked for")
    # .ci/run has these clauses in containers alone: what remains there is held to this, too.
    in_containers = re.search(
        r"^deaths=\((.+)\)\nnetworks=\((.+)\)$",
        (ROOT / ".ci" / "run").read_text("utf-8"),
        re.MULTILINE,
    )
    assert in_containers is not None
    run -= {("clause", name) for names in in_containers.groups() for name in names.split()}
    rows = _rows(_DOCUMENT.read_text(encoding="utf-8"))
    proofs = [(row[0], set(_PROOF.findall(row[-1]))) for row in rows]
    assert [line for line, named in proofs if named and not named & run] == []


def test_every_scenario_that_is_no_clause_has_a_word() -> None:
    text = _DOCUMENT.read_text(encoding="utf-8")
    assert [number for number in NOT_OF_SINKS if not re.search(rf"\bS{number}\b", text)] == []


def test_the_page_of_scenarios_has_each_that_a_test_or_a_document_names() -> None:
    page = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| (S\d+) \|", page, re.MULTILINE))
    assert {f"S{number}" for number in range(1, 44)} <= listed
    texts = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    named = {
        (name, path.name)
        for path in texts
        for name in re.findall(r"\bS\d{1,2}\b", path.read_text(encoding="utf-8"))
    }
    assert {one for one in named if one[0] not in listed} == set()
