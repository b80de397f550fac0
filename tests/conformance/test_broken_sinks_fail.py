"""The kit catches each sink of the gallery, on the one clause that it breaks and on no other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.broken_sink import BrokenSink
from tests.conformance.broken_sinks import GALLERY
from tests.conformance.reference_sink import ReferenceTarget

from onceflow.integration.conformance import Verdict, run_clauses
from onceflow.integration.conformance.catalogue import CLAUSES
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.rig import Effort


@pytest.mark.parametrize("broken", GALLERY, ids=lambda sink: sink.__name__)
def test_broken_sink_fails_on_the_clause_that_it_breaks(
    broken: type[BrokenSink], tmp_path: Path, onceflow_processes: Processes
) -> None:
    effort = Effort(rounds=broken.rounds)
    results = run_clauses(_targets(tmp_path, broken), CLAUSES, onceflow_processes, effort)
    failed = {one.clause.id: one.reason for one in results if one.verdict is Verdict.FAILED}
    assert set(failed) == {broken.breaks}, failed


def test_gallery_is_large_and_breaks_many_clauses() -> None:
    assert len(GALLERY) >= 12
    assert {sink.breaks for sink in GALLERY} <= {clause.id for clause in CLAUSES}
    assert len({sink.breaks for sink in GALLERY}) >= 12


def _targets(directory: Path, broken: type[BrokenSink]) -> Callable[[], ReferenceTarget]:
    numbers = itertools.count()

    def make() -> ReferenceTarget:
        own = directory / str(next(numbers))
        own.mkdir()
        return ReferenceTarget(own, broken)

    return make
