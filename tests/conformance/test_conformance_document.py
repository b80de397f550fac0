"""The tables of reference/conformance-clauses.md and scenarios.md, and the order of the clauses."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceflow.integration.conformance import clause_catalog
from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.source_catalog import SOURCE_CLAUSES

_DOCUMENTS = Path(__file__).parents[2] / "docs"
_DOCUMENT = _DOCUMENTS / "reference" / "conformance-clauses.md"


def test_document_is_in_step_with_the_clauses() -> None:
    """If it is not: python -m onceflow.integration.conformance.clause_catalog PAGES."""
    for page in (_DOCUMENT, _DOCUMENTS / "scenarios.md"):
        assert page.read_text("utf-8") == clause_catalog.with_tables(page.read_text("utf-8"))
    text = _DOCUMENT.read_text(encoding="utf-8")
    for clause in clause_catalog.CLAUSES:
        assert f"| `{clause.id}` | {clause.says} |" in text
    for clause in SOURCE_CLAUSES:
        assert f"| `{clause.id}` | {clause.says} |" in text


def test_every_scenario_is_a_clause_or_says_why_not() -> None:
    covered = {number for clause in clause_catalog.CLAUSES for number in clause.scenarios}
    assert covered | set(clause_catalog.NOT_OF_SINKS) == set(clause_catalog.SCENARIOS)
    assert not covered & set(clause_catalog.NOT_OF_SINKS)


@pytest.mark.parametrize(
    "clauses", [clause_catalog.CLAUSES, SOURCE_CLAUSES], ids=["sinks", "sources"]
)
def test_every_clause_comes_after_those_that_it_rests_on(clauses: tuple[Clause, ...]) -> None:
    seen = set[str]()
    for clause in clauses:
        assert set(clause.rests_on) <= seen, clause.id
        assert clause.id not in seen
        seen.add(clause.id)


def test_every_clause_is_one_sentence_and_needs_what_there_is() -> None:
    for clause in (*clause_catalog.CLAUSES, *SOURCE_CLAUSES):
        assert clause.says.endswith("."), clause.id
        assert ". " not in clause.says, clause.id
        for name in clause.needs:
            assert hasattr(clause.kit.interface, name), clause.id
