"""A job tells what happens to it, in order, and nobody who listens can stop it."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger

from onceflow import (
    AttemptBegan,
    AttemptEnded,
    AttemptRunning,
    CheckpointAcked,
    CheckpointCompleted,
    CheckpointTriggered,
    FixedDelay,
    JobEnded,
    JobEvent,
    JobRestarting,
    JobStarted,
    JobState,
    JobStatus,
    LocalProcesses,
    SinksRecovered,
    SlotJoined,
    SlotLeft,
    SlotsDeployed,
    SlotsJoined,
)
from onceflow.core.runtime.events.status import apply
from onceflow.integration.conformance.processes import eventually

DOCUMENTS = Path(__file__).parents[2] / "docs"


def names(events: list[JobEvent], *kinds: type[Any]) -> list[str]:
    return [type(event).__name__ for event in events if isinstance(event, kinds)]


def test_a_job_with_a_killed_slot_tells_its_whole_life(
    cluster: LocalProcesses, tmp_path: Path
) -> None:
    source = CountingSource(4_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    delay_s = 0.5
    restart = FixedDelay(attempts=20, delay_s=delay_s)
    pipeline, sink = ledger(cluster, tmp_path, source, restart=restart)
    events: list[JobEvent] = []
    statuses: list[JobStatus] = []
    job = pipeline.start()
    first = job.status()

    def listener(event: JobEvent, status: JobStatus) -> None:
        events.append(event)
        statuses.append(status)

    job.add_listener(listener)
    assert eventually(lambda: job.status().checkpoints_completed > 1, 90)
    os.kill(job.status().slots[1].pid, signal.SIGKILL)
    (tmp_path / "read all").touch()
    last = job.wait(60)
    assert_exactly_once(sink, source)

    assert (last.state, last.restores, statuses[-1]) == (JobState.FINISHED, 1, last)
    assert first.job == last.job
    lives = names(events, AttemptBegan, AttemptRunning, AttemptEnded, JobRestarting, JobEnded)
    life = ["AttemptBegan", "AttemptRunning", "AttemptEnded"]
    assert lives[-len(life) - 1 :] == [*life, "JobEnded"]
    (restarting,) = [event for event in events if isinstance(event, JobRestarting)]
    # The delay begins with the failure, and the slots that were left took a part of it to end.
    assert restarting.delay_s < delay_s
    (lost,) = [event for event in events if isinstance(event, SlotLeft) and event.error]
    (ended,) = [event for event in events if isinstance(event, AttemptEnded) and event.error]
    assert re.search("SlotLost", ended.error)
    assert lost.at.monotonic_s <= ended.at.monotonic_s
    second = events[max(i for i, one in enumerate(events) if isinstance(one, AttemptBegan)) :]
    start = names(second, SlotsJoined, SlotsDeployed, AttemptRunning)
    assert start == ["SlotsJoined", "SlotsDeployed", "AttemptRunning"]
    assert sorted(one.slot for one in second if isinstance(one, SlotJoined)) == [0, 1]
    assert len(names(second, SinksRecovered)) == 1
    assert sorted(one.slot for one in second if isinstance(one, SlotLeft)) == [0, 1]
    # Every subtask's part of every completed checkpoint is told before it, and remembered.
    for stats in last.history:
        if stats.attempt != last.attempt:
            continue
        number = stats.checkpoint
        told = [one for one in second if getattr(one, "checkpoint", None) == number]
        assert isinstance(told[0], CheckpointTriggered)
        acks = [one.subtask for one in told if isinstance(one, CheckpointAcked)]
        assert acks == [subtask.subtask for subtask in stats.subtasks]
        assert len(set(acks)) == len(acks) == 4
        assert len(names(told, CheckpointCompleted)) == 1
        assert stats.committed_ms is not None
        assert all(0 < subtask.ack_ms <= stats.duration_ms for subtask in stats.subtasks)


def test_events_alone_tell_the_status(cluster: LocalProcesses, tmp_path: Path) -> None:
    pipeline, _ = ledger(
        cluster, tmp_path, CountingSource(2_000), listeners=[lambda event, _: events.append(event)]
    )
    events: list[JobEvent] = []
    last = pipeline.run(60)
    assert isinstance(events[0], JobStarted)
    status = JobStatus(last.job)
    for event in events:
        status = apply(status, event)
    assert status == last
    assert last.records_in == 2_000


def test_listeners_that_raise_or_hang_stop_nothing(cluster: LocalProcesses, tmp_path: Path) -> None:
    source = CountingSource(2_000)
    go_on = threading.Event()
    calls: list[JobEvent] = []

    def raising(event: JobEvent, status: JobStatus) -> None:
        calls.append(event)
        raise RuntimeError("no")

    def hanging(event: JobEvent, status: JobStatus) -> None:
        go_on.wait(120)

    pipeline, sink = ledger(cluster, tmp_path, source, listeners=[raising, hanging])
    try:
        assert pipeline.run(60).state is JobState.FINISHED
    finally:
        go_on.set()
    assert_exactly_once(sink, source)
    assert isinstance(calls[-1], JobEnded)


def test_programs_of_the_pages_on_monitoring_and_metrics_run_as_shown(
    cluster: LocalProcesses, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "__name__": "__main__",
        "cluster": cluster,
        "checkpoints": str(tmp_path / "checkpoints"),
        "target": str(tmp_path / "target"),
    }
    for page in ("metrics.md", "monitoring.md"):
        text = (DOCUMENTS / page).read_text(encoding="utf-8")
        for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            exec(compile(block, page, "exec"), given)
    status = given["job"].status()
    assert given["lines"][-1] == f"finished after {status.checkpoints_completed} checkpoints"
    assert re.fullmatch(r"checkpoint \d+: [\d.]+ ms, \d+ bytes", given["lines"][0])
    assert len(given["lines"]) == status.checkpoints_completed + 1
    assert given["slowest"](status).startswith("payments[0]: ")
