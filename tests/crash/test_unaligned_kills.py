"""SIGKILL while barriers overtake rows into Postgres, and another parallelism after it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.crash.ledger_audit import Audit
from tests.crash.ledger_driver import Backend, CommitMode, LedgerSpec, LedgerStatus
from tests.crash.ledger_runs import LedgerDriver, LedgerRun

from onceflow.core.crash_points import CRASH_POINTS, CrashPoint
from onceflow.integration.faults import kill_process
from onceflow.integration.judge import Verdict

Judge = Callable[[LedgerRun], Verdict]

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "11"))
OVERTAKING: tuple[CrashPoint, ...] = ("overtaken", "persisted", "replayed")
SLOT_POINTS = (*(point for point in CRASH_POINTS if point != "logged"), *OVERTAKING)


@pytest.mark.parametrize("ledger_driver", ["local"], indirect=True)
@pytest.mark.parametrize(
    ("backend", "commit_mode", "points", "parallelisms", "kills", "trickle_s"),
    [
        pytest.param(
            *("heap", "two_phase", ("overtaken", "prepared", "replayed"), (2, 3), 0, 0.1),
            marks=pytest.mark.servers,
        ),
        *(
            pytest.param(backend, mode, SLOT_POINTS, (2, 3, 1), 3, 0.8, marks=pytest.mark.slow)
            for backend, mode in (("heap", "two_phase"), ("rocksdb", "ledger"))
        ),
    ],
)
def test_slots_killed_while_barriers_overtake_leave_every_row_once_through_rescaling(
    ledger_driver: LedgerDriver,
    ledger_spec: LedgerSpec,
    judge: Judge,
    backend: Backend,
    commit_mode: CommitMode,
    points: Sequence[CrashPoint],
    parallelisms: Sequence[int],
    kills: int,
    trickle_s: float,
) -> None:
    """Slots die at `points` and at `kills` random moments, then the driver; and so on anew."""
    print(f"seed {SEED}; ONCEFLOW_TEST_SEED sets it")  # noqa: T201
    rng = random.Random(SEED)
    spec = replace(
        ledger_spec,
        overtaking=True,
        trickle_s=trickle_s,
        backend=backend,
        commit_mode=commit_mode,
    )
    audit = Audit(spec)
    killed_driver = 0
    run = ledger_driver.run(replace(spec, parallelism=parallelisms[0]))
    for parallelism in parallelisms:
        if killed_driver:
            run = ledger_driver.run(replace(spec, parallelism=parallelism))
        run.watch = audit.look
        await_driver(run, killed_driver)
        status = await_rows_in_flight(run)
        if killed_driver:
            assert audit.in_flight_bytes(status.restored_checkpoint) > 0
        for point in rng.sample(points, len(points)):
            die_at(run, point, audit)
        for _ in range(kills):
            time.sleep(rng.uniform(0, spec.interval_s))
            die(run, audit, rng.randrange(parallelism))
        if parallelism != parallelisms[-1]:
            killed_driver = status.driver
            ledger_driver.kill()
    assert run.finish().state == "finished"
    assert audit.visible().transactions == audit.decided().keys()
    verdict = judge(run)
    assert verdict.ok, verdict


def await_driver(run: LedgerRun, killed: int) -> None:
    """Return once another driver than `killed` says how the job stands."""
    run.until("a driver takes over", lambda s: s.driver != killed)


def await_rows_in_flight(run: LedgerRun) -> LedgerStatus:
    """Return once the attempt that runs has decided a checkpoint whose barrier overtook rows."""
    return run.until(
        "a checkpoint with rows in flight",
        lambda s: (
            s.state == "running" and len(s.slots) == run.spec.parallelism and s.in_flight_bytes > 0
        ),
    )


def die_at(run: LedgerRun, point: CrashPoint, audit: Audit) -> None:
    """Have a slot die at `point`, and wait for the attempt after it, which replays rows."""
    before = await_rows_in_flight(run)
    run.driver.arm(point)
    if point == "replayed":
        kill_process(before.slots[0][0])
    run.wait(f"a slot dies at {point}", lambda: run.driver.reached(point))
    await_replay(run, before, audit)


def die(run: LedgerRun, audit: Audit, slot: int) -> None:
    """Kill `slot` now, and wait for the attempt after it, which replays rows."""
    before = await_rows_in_flight(run)
    kill_process(before.slots[slot][0])
    await_replay(run, before, audit)


def await_replay(run: LedgerRun, before: LedgerStatus, audit: Audit) -> None:
    status = run.until(
        "a new attempt runs", lambda s: s.attempt > before.attempt and s.state == "running"
    )
    assert audit.in_flight_bytes(status.restored_checkpoint) > 0
