"""The kit fails a sink whose job takes a step that the protocol forbids."""

from __future__ import annotations

from typing import Any

import pytest
from typing_extensions import override

from onceflow.core.runtime.cluster.process_host import Link
from onceflow.core.traces import Trace
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.target import Violation
from onceflow.integration.conformance.whole_job import KilledJob, KillPlan


class _Job(KilledJob):
    @override
    def look(self) -> None:
        pass


def _take_forbidden_step(link: Link, work: Any, plan: KillPlan) -> bool:
    del link, work, plan
    Trace("log", 1).record("claimed", checkpoint=None, by=None, listed=[], sinks=[])
    Trace("log", 1, slot=0).record("heard", checkpoint=4)
    return True


def test_job_that_takes_a_forbidden_step_fails() -> None:
    with Processes() as processes:
        job = _Job(processes, _take_forbidden_step, None)
        with pytest.raises(Violation, match="needs completed 1 4, which is in no trace"):
            job.attempt(KillPlan(1))
