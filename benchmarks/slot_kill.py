"""SIGKILL of a slot in mid-run, and the clock until rows flow again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psycopg

from benchmarks.cpu import began_at_s as process_began_at_s
from benchmarks.job_spec import JobSpec, Recovery
from onceflow import Job, JobStatus, OnceflowError

_LOOK_INTERVAL_S = 0.005
_TIMEOUT_S = 120.0
_KILL_AFTER_PART = 0.3
# A transaction's ledger row is committed with its rows and tells its attempt: far cheaper to ask
# for than the rows themselves.
_ROWS_OF_ATTEMPT = """
    SELECT coalesce(sum(row_count), 0) FROM onceflow.onceflow_ledger WHERE attempt > %s
"""


def kill_a_slot(job: Job, spec: JobSpec) -> Recovery:
    """Kill slot 0 once it has committed something and read its part; return when rows flow again.

    Raises:
        TimeoutError: They did not in time, or the records ran out before the kill.
    """
    threshold = int(spec.records * _KILL_AFTER_PART)
    before = _await(
        job, lambda status: status.records_in >= threshold and status.checkpoints_completed > 0
    )
    killed_at = time.time()
    os.kill(before.slots[0].pid, signal.SIGKILL)
    rows_flow_at = records_flow_at = 0.0
    deadline = time.monotonic() + _TIMEOUT_S
    with psycopg.connect(spec.database_url, autocommit=True) as connection:
        while not (rows_flow_at and records_flow_at):
            status = job.status()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rows {_TIMEOUT_S:g} s after the kill: {status.last_error}")
            if status.attempt > before.attempt:
                if not records_flow_at and status.records_in:
                    records_flow_at = time.time()
                row = connection.execute(_ROWS_OF_ATTEMPT, (before.attempt,)).fetchone()
                if not rows_flow_at and row is not None and row[0] > 0:
                    rows_flow_at = time.time()
                    records_flow_at = records_flow_at or rows_flow_at
            if status.state.ended and not rows_flow_at:
                raise OnceflowError(
                    f"the job {status.state.value} and the new attempt had nothing to write: all"
                    " was committed when the slot was killed; use more --records"
                )
            time.sleep(_LOOK_INTERVAL_S)
    slots = job.status().slots
    new = next(attempt for attempt in job.status().attempts if attempt.attempt > before.attempt)
    began_s = new.began_at_s - killed_at

    def since_kill(step_s: float) -> float:
        return round(began_s + step_s, 3)

    return Recovery(
        killed_at_records=before.records_in,
        noticed_s=round(began_s, 3),
        slots_ended_s=since_kill(new.slots_ended_s),
        claimed_s=since_kill(new.claimed_s),
        recovered_s=since_kill(new.recovered_s),
        forked_s=round(max(process_began_at_s(slot.pid) for slot in slots) - killed_at, 3),
        slots_up_s=since_kill(new.slots_up_s),
        deployed_s=since_kill(new.deployed_s),
        running_s=since_kill(new.running_s),
        records_flow_s=round(records_flow_at - killed_at, 3),
        rows_flow_s=round(rows_flow_at - killed_at, 3),
    )


def _await(job: Job, reached: Callable[[JobStatus], bool]) -> JobStatus:
    deadline = time.monotonic() + _TIMEOUT_S
    while not reached(status := job.status()):
        if status.state.ended or time.monotonic() > deadline:
            raise OnceflowError(
                f"the job {status.state.value} after {status.records_in} records, before a slot"
                " was to be killed; use more --records"
            )
        time.sleep(_LOOK_INTERVAL_S)
    return status
