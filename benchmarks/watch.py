"""Waiting for what a measured job's status says."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from onceflow import Job, JobStatus

_LOOK_INTERVAL_S = 0.01
TIMEOUT_S = 900.0

Predicate: TypeAlias = Callable[[JobStatus], bool]


@dataclass
class Watch:
    """Looks at the job's status until it says what is waited for, and remembers the counters."""

    job: Job
    slot_rss_bytes_max: int = 0
    latest: JobStatus | None = None

    def until(self, reached: Predicate) -> None:
        """Return once `reached`; the job may not fail before.

        Raises:
            OnceflowError: The job failed.
            TimeoutError: It was not reached in time.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not reached(status := self.job.status()):
            self._note(status)
            if status.state.ended:
                self.job.wait(TIMEOUT_S)
                raise TimeoutError(f"the job {status.state.value} before it was expected to")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not reached in {TIMEOUT_S} s; {status.last_error or status}")
            time.sleep(_LOOK_INTERVAL_S)
        self._note(status)

    def _note(self, status: JobStatus) -> None:
        rss = max((slot.rss_bytes for slot in status.slots), default=0)
        self.slot_rss_bytes_max = max(self.slot_rss_bytes_max, rss)
        if status.subtasks:
            self.latest = status

    def stage_cpu_us(self) -> dict[str, float]:
        """Return CPU microseconds a record of each chain, as of the last reports."""
        cpu_s: dict[str, float] = {}
        records: dict[str, int] = {}
        for one in self.latest.subtasks if self.latest else ():
            chain = one.subtask.chain
            cpu_s[chain] = cpu_s.get(chain, 0.0) + one.cpu_s
            records[chain] = records.get(chain, 0) + one.records_in
        return {
            chain: round(cpu_s[chain] / records[chain] * 1e6, 3)
            for chain in cpu_s
            if records[chain]
        }
