"""The kit catches each source of the gallery, on the one clause that it breaks and on no other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.conformance.broken_sources import GALLERY, BrokenSource
from tests.conformance.reference_source import ReferenceInput

from onceflow.integration.conformance import ClauseOutcome, run_clauses, source_harness
from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clauses import ending
from onceflow.integration.conformance.harness import Effort
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.source_catalog import SOURCE_CLAUSES


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait half a second for rows that never come."""
    monkeypatch.setattr(source_harness, "PATIENCE_S", 0.5)


@pytest.mark.parametrize("broken", GALLERY, ids=lambda source: source.__name__)
def test_broken_source_fails_on_the_clause_that_it_breaks(
    broken: type[BrokenSource],
    tmp_path: Path,
    onceflow_processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "PROMPT_S", 0.5)
    clauses = [clause for clause in SOURCE_CLAUSES if clause.id == broken.breaks]
    failed = _failed(broken, clauses, tmp_path, onceflow_processes)
    assert set(failed) == {broken.breaks}, failed


@pytest.mark.slow
@pytest.mark.parametrize("broken", GALLERY, ids=lambda source: source.__name__)
def test_broken_source_fails_on_no_other_clause(
    broken: type[BrokenSource], tmp_path: Path, onceflow_processes: Processes
) -> None:
    failed = _failed(broken, SOURCE_CLAUSES, tmp_path, onceflow_processes)
    assert set(failed) == {broken.breaks}, failed


def test_each_broken_source_breaks_another_clause() -> None:
    broken = [source.breaks for source in GALLERY]
    assert len(set(broken)) == len(broken) >= 6
    assert set(broken) <= {clause.id for clause in SOURCE_CLAUSES}


def _failed(
    broken: type[BrokenSource], clauses: Sequence[Clause], directory: Path, processes: Processes
) -> dict[str, str]:
    results = run_clauses(_inputs(directory, broken), clauses, processes, Effort(rounds=2))
    return {one.clause.id: one.reason for one in results if one.outcome is ClauseOutcome.FAILED}


def _inputs(directory: Path, broken: type[BrokenSource]) -> Callable[[], ReferenceInput]:
    numbers = itertools.count()

    def make() -> ReferenceInput:
        own = directory / str(next(numbers))
        own.mkdir()
        return ReferenceInput(own, broken)

    return make
