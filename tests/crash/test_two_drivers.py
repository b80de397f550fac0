"""Two drivers of one job: the one that was started last goes on, the other one stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.crash.ledger_audit import Audit
from tests.crash.ledger_driver import LOCAL_PROCESSES, LedgerSpec
from tests.crash.ledger_runs import LedgerDriver, LedgerRun

from onceflow.integration.judge import Verdict


@pytest.fixture
def second_driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LedgerDriver]:
    driver = LedgerDriver(tmp_path / "second", request.param)
    yield driver
    driver.end()


@pytest.mark.parametrize(
    ("ledger_driver", "second_driver"),
    [
        # tests/runtime/test_faults.py has two drivers in the default run.
        pytest.param("local", LOCAL_PROCESSES, id="local", marks=pytest.mark.slow),
        pytest.param("spark", "local[2]", id="spark", marks=[pytest.mark.spark, pytest.mark.slow]),
    ],
    indirect=True,
)
def test_the_newer_of_two_drivers_goes_on_and_the_older_stops_as_fenced(
    ledger_driver: LedgerDriver,
    second_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Callable[[LedgerRun], Verdict],
) -> None:
    """The newer one ends the older one's sessions, which the older one takes for a failure."""
    # Rows come for longer than the newer one takes to, and oftener than barriers: what meets the
    # ended sessions is a row nearly always, and not a pre-commit, which would find the new owner.
    spec = replace(ledger_spec, trickle_s=0.6, interval_s=2.0)
    second_driver.await_ready()
    older = ledger_driver.run(spec)
    older.await_checkpoint()
    newer = second_driver.run(spec)
    stopped = older.until("the older one stops", lambda status: status.ended)
    assert stopped.state == "failed", stopped
    assert "Fenced" in stopped.error, stopped
    assert f"attempt {stopped.attempt} " in stopped.error, stopped
    ended = newer.finish()
    assert (ended.state, ended.attempt) == ("finished", stopped.attempt + 1), ended
    audit = Audit(spec)
    assert audit.visible().transactions == audit.decided().keys()
    assert judge(newer).ok
