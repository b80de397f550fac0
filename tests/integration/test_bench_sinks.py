"""The benchmark of the sinks in its short form: every way is run, and proven, on real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.sinks.measuring import measure_sinks
from benchmarks.sinks.places import places
from benchmarks.sinks.rows import Rows
from benchmarks.stage import Stage

from onceflow.integration.workload import Payments

PAYMENTS = Payments(records=20_000, accounts=500, seed=11)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(PAYMENTS) as running:
        yield running


def test_every_way_through_every_sink_gives_a_figure(stage: Stage) -> None:
    said: list[str] = []
    chosen = places(stage)
    found = measure_sinks(chosen, Rows.of(PAYMENTS), 1, said.append, barrier_rows=10_000)
    expected = [(place.name, way) for place in chosen for way in place.ways]
    assert [(one.place, one.name) for one in found] == expected
    for one in found:
        (run,) = one.runs
        assert run.rows == 20_000
        assert len(run.commit_ms) == 2
        assert one.ratio.median > 0
        assert len(one.small[0].commit_ms) == 20
    assert len(said) == len(expected) + len(chosen), "a bare load for each target"
