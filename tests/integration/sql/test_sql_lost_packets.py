"""A network that loses packets one way for a minute stalls a job for hardly longer than that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.lossy_cable import PREFIX, can_have_one
from tests.support.program import Program, python

from onceflow.clients.sql.session import UNACKNOWLEDGED_S

pytestmark = [pytest.mark.servers, pytest.mark.timeout(500)]
OUTAGE_S = 60
SLACK_S = 15
"""For the interval in which the job sends nothing, and for a machine under load."""


@pytest.mark.parametrize("direction", ["requests", "replies"])
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_job_notices_lost_packets_by_its_limit_and_goes_on_when_they_arrive_again(
    kind: str, direction: str, tmp_path: Path
) -> None:
    if not can_have_one():
        pytest.skip("no network namespace: it takes `unshare`, `nsenter`, `ip` with veth, and root")
    outcome = run(tmp_path, kind, direction, OUTAGE_S)
    assert outcome["noticed_s"] < UNACKNOWLEDGED_S + SLACK_S, outcome
    # Without a limit the system would send the lost packet again only after another 42 s.
    assert outcome["resumed_s"] < 2 * SLACK_S, outcome
    assert (outcome["all_rows_once"], outcome["prepared"]) == (True, 0), outcome


@pytest.mark.parametrize("direction", ["requests", "replies"])
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_transfer_of_rows_whose_packets_are_lost_ends_by_the_same_limit(
    kind: str, direction: str, tmp_path: Path
) -> None:
    if not can_have_one():
        pytest.skip("no network namespace: it takes `unshare`, `nsenter`, `ip` with veth, and root")
    outcome = run(tmp_path, kind, direction, 0)
    assert "acknowledged nothing for 30 s" in outcome["last_error"]
    assert outcome["noticed_s"] < UNACKNOWLEDGED_S + SLACK_S, outcome
    assert outcome["all_rows_once"], outcome


def run(directory: Path, kind: str, direction: str, outage_s: int) -> dict[str, Any]:
    command = python("-m", "tests.support.lost_packets", directory, kind, direction, outage_s)
    with Program(directory / "run.log", *PREFIX, *command) as program:
        assert program.wait(420) == 0, program.tail()
    outcome: dict[str, Any] = json.loads((directory / "outcome.json").read_text())
    return outcome
