"""A round of benchmarks/scoreboard on real servers: onceflow, and one other engine."""

from __future__ import annotations

import pytest
from benchmarks.scoreboard.contestants.all import OURS, list_contestants
from benchmarks.scoreboard.run import Outcome, run
from benchmarks.scoreboard.schedule import StrikeKind, draw_schedule

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
_KINDS = (StrikeKind.WORKER, StrikeKind.COORDINATOR, StrikeKind.CONNECTIONS)


def play(name: str) -> Outcome:
    contestant = next(c for c in list_contestants() if c.name == name)
    lines: list[str] = []
    outcome = run(contestant, draw_schedule(11, 15.0, _KINDS), 15_000, lines.append)
    assert not outcome.failure, outcome.failure
    assert not outcome.not_run, outcome.not_run
    assert [blow.struck for blow in outcome.blows] == [True] * len(_KINDS), lines
    return outcome


def test_onceflow_is_exact() -> None:
    verdict = play(OURS).verdict
    assert verdict is not None
    assert verdict.is_exact, verdict


def test_upserts_of_structured_streaming_are_exact_and_its_totals_too() -> None:
    verdict = play("spark-upsert").verdict
    assert verdict is not None
    assert verdict.is_exact, verdict
