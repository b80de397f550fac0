"""Records the traces in `recorded`: of each job as the product is, and of each mistake.

    python -m tests.traces.recording                 # all
    python -m tests.traces.recording "two drivers"   # one job, or one mistake

Each trace comes from a whole job, with its slots as processes. A job that a mistake keeps from its
end is killed after a while: its trace shows the mistake by then.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.support.program import Program, python
from tests.traces.mistakes import JOBS, MISTAKES, Mistake

from onceflow.core.crash_points import VARIABLE as POINTS_VARIABLE
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.core.traces import VARIABLE
from onceflow.integration.traces.events import Trace, read_trace, split_by_log, write_trace
from onceflow.integration.traces.order import order_events

RECORDED = Path(__file__).with_name("recorded")
_DEADLINE_S = 90.0


def main(arguments: Sequence[str]) -> None:
    """Record all traces, or those that `arguments` name."""
    RECORDED.mkdir(exist_ok=True)
    for job in JOBS:
        if not arguments or job in arguments:
            _save(RECORDED / f"{job.replace(' ', '-')}.jsonl", record(job))
    for mistake in MISTAKES:
        if not arguments or mistake.name in arguments:
            _save(RECORDED / mistake.file, record(mistake.job, mistake))


def record(job: str, mistake: Mistake | None = None) -> Trace:
    """Return the trace of `job`, run in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for part in ("traces", "points", "job"):
            (directory / part).mkdir()
        environment = {
            VARIABLE: str(directory / "traces"),
            POINTS_VARIABLE: str(directory / "points"),
        }
        command = python("-m", "tests.traces.recording", "--run", job, directory / "job")
        program = Program(
            directory / "log",
            *command,
            *([mistake.name] if mistake else []),
            environment=environment,
        )
        with suppress(AssertionError):
            program.wait(_DEADLINE_S)
        program.end()
        return read_trace(directory / "traces")


def _save(path: Path, trace: Trace) -> None:
    """Write `trace` without what differs from run to run: process ids, and the directory."""
    # A log with the decisions of batches leaves steps of its own, which are fewer.
    of_log = max(split_by_log(trace).values(), key=lambda part: sum(map(len, part.values())))
    # Processes in the order of their first causes: the first driver comes first.
    ordered = order_events(of_log).events
    processes = [*dict.fromkeys(event.process for event in ordered)]
    processes += sorted(of_log.keys() - set(processes))
    write_trace(
        path,
        (
            replace(event, process=f"p{number}", log="log")
            for number, process in enumerate(processes, start=1)
            for event in of_log[process]
        ),
    )
    print(path.name, sum(map(len, of_log.values())))  # noqa: T201 - a command


def _run(job: str, directory: Path, mistakes: Sequence[str]) -> None:
    for mistake in MISTAKES:
        if mistake.name in mistakes:
            mistake.apply()
    # After the mistake: slots are forks of this process.
    fork_own_host()
    JOBS[job](directory)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _run(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
        sys.stdout.flush()
        os._exit(0)
    main(sys.argv[1:])
