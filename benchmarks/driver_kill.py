"""SIGKILL of the driver and its JVM under full load, and the clock of the driver after it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg

from benchmarks.job_spec import DriverRecovery, JobSpec
from benchmarks.spread import Spread
from benchmarks.stage import BenchmarkError, DriverProcess, Stage

STEPS = {
    "imported_s": "imports done",
    "session_s": "Spark's session started",
    "claimed_s": "attempt claimed",
    "recovered_s": "sinks recovered",
    "daemon_s": "Python's daemon started",
    "forked_s": "slots forked",
    "slots_up_s": "slots up",
    "deployed_s": "state sent",
    "running_s": "all slots run",
    "records_flow_s": "records read",
    "rows_flow_s": "rows visible",
    "records_without_session_s": "records read, without Spark's session",
    "rows_without_session_s": "rows visible, without Spark's session",
}

_LOOK_INTERVAL_S = 0.005
_TIMEOUT_S = 180.0
_KILL_AFTER_PART = 0.3
_LEDGER = "SELECT to_regclass('onceflow.onceflow_ledger') IS NOT NULL"
# A transaction's ledger row is committed with its rows and tells its attempt.
_ROWS = """
    SELECT coalesce(max(attempt), 0), coalesce(sum(row_count), 0) FROM onceflow.onceflow_ledger
"""


def recover_driver(stage: Stage, spec: JobSpec) -> DriverRecovery:
    """Kill the driver of one run of `spec`, start another, and return its clock.

    The table is proven right before this returns.

    Raises:
        BenchmarkError: The job did not recover, or the table is wrong.
    """
    with stage.prepared(spec) as ready:
        url, threshold = ready.spec.database_url, int((spec.records or 0) * _KILL_AFTER_PART)
        with DriverProcess(ready) as first:
            attempt, _ = _await(url, first, 0, threshold)
            first.kill()
        with DriverProcess(ready) as second:
            _, flow_at_s = _await(url, second, attempt + 1, 0)
            result = second.result()

    def since_start(at_s: float) -> float:
        return round(at_s - second.began_at_s, 3)

    return DriverRecovery(
        imported_s=since_start(result.imported_at_s),
        session_s=since_start(result.session_at_s),
        claimed_s=since_start(result.start.claimed_at_s),
        recovered_s=since_start(result.start.recovered_at_s),
        daemon_s=since_start(result.start.daemon_at_s),
        forked_s=since_start(result.start.forked_at_s),
        slots_up_s=since_start(result.start.slots_up_at_s),
        deployed_s=since_start(result.start.deployed_at_s),
        running_s=since_start(result.start.running_at_s),
        records_flow_s=since_start(result.reading_at_s),
        rows_flow_s=since_start(flow_at_s),
    )


def driver_steps_of(recoveries: Sequence[DriverRecovery]) -> dict[str, Spread]:
    """Return seconds from the start of the process to each step."""
    return {
        label: Spread.of(getattr(recovery, step) for recovery in recoveries)
        for step, label in STEPS.items()
        if recoveries
    }


def _await(url: str, driver: DriverProcess, attempt: int, rows_least: int) -> tuple[int, float]:
    """Wait for rows of `attempt` or a later one, and for `rows_least` in all.

    Returns the last attempt that has written, and when that was seen.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    exists = False
    with psycopg.connect(url, autocommit=True) as connection:
        while time.monotonic() < deadline:
            exists = exists or connection.execute(_LEDGER).fetchone() == (True,)
            if exists:
                found, rows = connection.execute(_ROWS).fetchone() or (0, 0)
                if found >= attempt and rows >= rows_least:
                    return found, time.time()
            driver.check_alive()
            time.sleep(_LOOK_INTERVAL_S)
    raise BenchmarkError(f"attempt {attempt} wrote no {rows_least} rows in {_TIMEOUT_S:g} s")
