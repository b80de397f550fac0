"""SIGKILL at every named point between a row's arrival and the last word about its commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.crash.ledger_audit import Audit
from tests.crash.ledger_driver import Backend, CommitMode, LedgerSpec
from tests.crash.ledger_runs import LedgerDriver, LedgerRun, killed_by_itself

from onceflow.core.crash_points import CRASH_POINTS, CrashPoint
from onceflow.integration.judge import Verdict

Judge = Callable[[LedgerRun], Verdict]

SLOT_POINTS = [point for point in CRASH_POINTS if point != "logged"]
STATE_AND_SINK = [("heap", "two_phase"), ("rocksdb", "two_phase"), ("heap", "ledger")]
# Around the decision, and what differs there; the conformance kit kills jobs at all points.
TELLING = (
    *(("prepared", "heap", "two_phase"), ("commit", "heap", "two_phase")),
    ("committed", "heap", "ledger"),
)
AS_TELLING = (("committed", "heap", "two_phase"), ("prepared", "rocksdb", "two_phase"))


def _tier(step: tuple[str, str, str]) -> Sequence[pytest.MarkDecorator]:
    if step in TELLING:
        return ()
    return (pytest.mark.servers if step in AS_TELLING else pytest.mark.slow,)


STEPS = [
    pytest.param(
        "local",
        point,
        backend,
        commit_mode,
        marks=_tier((point, backend, commit_mode)),
    )
    for point in SLOT_POINTS
    for backend, commit_mode in STATE_AND_SINK
]
# What runs in a slot is the same there: tests/crash/test_kills.py kills those of Spark.
ON_SPARK = [
    pytest.param("spark", point, *STATE_AND_SINK[0], marks=[pytest.mark.spark, pytest.mark.slow])
    for point in SLOT_POINTS
]


@pytest.mark.parametrize(
    ("ledger_driver", "point", "backend", "commit_mode"),
    STEPS + ON_SPARK,
    indirect=["ledger_driver"],
)
@pytest.mark.only_proof
def test_a_slot_that_dies_at_a_crash_point_neither_loses_nor_doubles_a_row(
    ledger_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Judge,
    point: CrashPoint,
    backend: Backend,
    commit_mode: CommitMode,
) -> None:
    spec = replace(ledger_spec, backend=backend, commit_mode=commit_mode)
    run, audit = ledger_driver.run(spec), Audit(spec)
    run.watch = audit.look
    run.await_checkpoint()
    ledger_driver.arm(point)
    run.wait(f"a slot dies at {point}", lambda: ledger_driver.reached(point))
    status = run.finish()
    assert status.state == "finished", status
    assert status.restores >= 1
    assert not ledger_driver.died
    assert audit.visible().transactions == audit.decided().keys()
    assert audit.looks > 5
    verdict = judge(run)
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    ("ledger_driver", "backend", "commit_mode"),
    [
        ("local", *STATE_AND_SINK[0]),
        *(pytest.param("local", *one, marks=pytest.mark.slow) for one in STATE_AND_SINK[1:]),
        pytest.param("spark", *STATE_AND_SINK[0], marks=[pytest.mark.spark, pytest.mark.slow]),
    ],
    indirect=["ledger_driver"],
)
def test_a_driver_that_dies_right_after_deciding_has_decided(
    ledger_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Judge,
    backend: Backend,
    commit_mode: CommitMode,
) -> None:
    spec = replace(ledger_spec, backend=backend, commit_mode=commit_mode)
    run, audit = ledger_driver.run(spec), Audit(spec)
    run.watch = audit.look
    run.await_checkpoint()
    ledger_driver.arm("logged")
    run.wait("the driver dies", lambda: ledger_driver.died)
    assert ledger_driver.reached("logged")
    assert killed_by_itself(ledger_driver)
    decided = audit.decided()
    undelivered = decided.keys() - audit.visible().transactions
    assert undelivered, "the last decision must not have been told to anybody"
    run.restart_driver()
    status = run.finish()
    assert status.state == "finished", status
    assert status.restored_checkpoint > 0
    assert undelivered <= audit.visible().transactions
    assert audit.visible().transactions == audit.decided().keys()
    verdict = judge(run)
    assert verdict.ok, verdict


@pytest.mark.parametrize("ledger_driver", ["local"], indirect=True)
@pytest.mark.servers
def test_between_pre_commit_and_decision_nothing_of_the_checkpoint_is_visible(
    ledger_driver: LedgerDriver, ledger_spec: LedgerSpec, judge: Judge
) -> None:
    """S13, S14: what a dead slot prepared stays invisible, and the next attempt rolls it back."""
    spec = replace(ledger_spec, restart_delay_s=10.0)
    run, audit = ledger_driver.run(spec), Audit(spec)
    run.await_checkpoint()
    ledger_driver.arm("prepared")
    run.wait("a slot dies", lambda: ledger_driver.reached("prepared"))
    run.until("the attempt has failed", lambda status: status.state == "restarting")
    undecided = audit.in_doubt() - audit.decided().keys()
    assert undecided, "the slot died after its PREPARE TRANSACTION"
    visible = audit.visible()
    assert visible.rows > 0
    assert not undecided & visible.transactions
    status = run.finish()
    assert status.state == "finished", status
    assert not undecided & audit.visible().transactions
    assert not undecided & audit.decided().keys()
    verdict = judge(run)
    assert verdict.ok, verdict


@pytest.mark.parametrize("ledger_driver", ["local"], indirect=True)
def test_at_least_once_the_same_death_shows_duplicates_and_loses_nothing(
    ledger_driver: LedgerDriver, ledger_spec: LedgerSpec, judge: Judge
) -> None:
    run = ledger_driver.run(replace(ledger_spec, mode="at_least_once"))
    run.await_checkpoint()
    ledger_driver.arm("prepared")
    run.wait("a slot dies", lambda: ledger_driver.reached("prepared"))
    status = run.finish()
    assert status.state == "finished", status
    assert status.restores >= 1
    verdict = judge(run)
    assert verdict.duplicates > 0
    assert verdict.missing == 0
    assert not verdict.ok
