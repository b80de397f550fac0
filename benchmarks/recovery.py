"""SIGKILL of a slot under full load: how long until rows flow again, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.job_spec import JobSpec, Recovery
from benchmarks.spread import Spread
from benchmarks.stage import BenchmarkError, Stage

RECORDS_MIN = 2_000_000
"""Fewer would all be committed before the kill."""

STEPS = {
    "noticed_s": "driver knows",
    "slots_ended_s": "old slots gone",
    "claimed_s": "attempt claimed",
    "recovered_s": "sinks recovered",
    "forked_s": "new process forked",
    "slots_up_s": "new slots up",
    "deployed_s": "state sent",
    "running_s": "all slots run",
    "records_flow_s": "records read",
    "rows_flow_s": "rows visible",
}


def recover(stage: Stage, spec: JobSpec) -> Recovery:
    """Kill a slot in one run of `spec`; return its clock, once the table is proven right.

    Raises:
        BenchmarkError: The job did not recover, or the table is wrong.
    """
    recovery = stage.run(msgspec.structs.replace(spec, task="kill_slot")).recovery
    if recovery is None:
        raise BenchmarkError("the run came back without a recovery")
    return recovery


def steps_of(recoveries: Sequence[Recovery]) -> dict[str, Spread]:
    """Return seconds from the kill to each step."""
    return {
        label: Spread.of(getattr(recovery, step) for recovery in recoveries)
        for step, label in STEPS.items()
        if recoveries
    }
