"""A job whose sink takes its time, so that rows wait in all of its channels."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, assert_exactly_once
from tests.support.scripted_sink import ScriptedSink, throttled_sink
from tests.support.waiting import await_status

from onceflow import (
    Checkpointing,
    FileSystemStorage,
    FixedDelay,
    HeapBackend,
    JobState,
    Pipeline,
    count,
    sum_,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.runtime.dataflow.channels import decode_batches
from onceflow.core.state import StateBackend

SOURCE = CountingSource(6_000, splits_count=3, batch_rows=20)
CHANNEL_BATCHES = 4


def held_up(
    cluster: AnyCluster,
    directory: Path,
    *,
    parallelism: int = 2,
    backend: StateBackend | None = None,
    unaligned: bool = True,
    aligned_checkpoint_timeout: float = 0.0,
    ignore_in_flight_of: int | None = None,
    uid: str = "seen",
    source: CountingSource = SOURCE,
    pause_s: float = 0.04,
    retained: int = 1,
) -> tuple[Pipeline, ScriptedSink]:
    """Build source -> running balance -> count by another key -> a slow sink."""
    sink = throttled_sink(directory / "out", pause_s=pause_s)
    pipeline = Pipeline(
        cluster,
        name="held-up",
        parallelism=parallelism,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"),
            interval=0.1,
            retained=retained,
            unaligned=unaligned,
            aligned_checkpoint_timeout=aligned_checkpoint_timeout,
            ignore_in_flight_of=ignore_in_flight_of,
        ),
        state_backend=backend or HeapBackend(),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=replace(SETTINGS, channel_batches=CHANNEL_BATCHES),
    )
    records = pipeline.read(source, uid="records")
    balances = records.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    balances.key_by("id").running(seen=count(), uid=uid).write(sink, uid="ledger")
    return pipeline, sink


def assert_each_once(sink: DirectorySink, source: CountingSource = SOURCE) -> None:
    assert_exactly_once(sink, source)
    assert {row["seen"] for row in sink.rows()} == {1}


def await_rows_in_flight(job: Job) -> None:
    """Wait until the attempt that runs has completed a checkpoint that has rows in flight."""
    await_status(
        job,
        lambda status: any(
            one.in_flight_bytes for one in status.history if one.attempt == status.attempt
        ),
    )


def rows_in_flight(directory: Path, checkpoint: int) -> int:
    """Return how many rows the barrier of `checkpoint` overtook."""
    storage = FileSystemStorage(str(directory / "checkpoints")).open("held-up")
    (completed,) = (one for one in storage.log.read().completed if one.checkpoint == checkpoint)
    files = [one.handle for snapshot in completed.snapshots for one in snapshot.in_flight]
    reader = storage.reader()
    return sum(rows.num_rows for file in files for rows in decode_batches(reader.read(file)))


def await_checkpoint(job: Job) -> None:
    """Wait until the attempt that runs has completed a checkpoint."""
    await_status(job, lambda s: any(one.attempt == s.attempt for one in s.history))


def killed_and_rescaled(
    make: Callable[[int], tuple[Pipeline, ScriptedSink]], *, unaligned: bool
) -> Sequence[Mapping[str, Any]]:
    """Run the job that `make` builds for a parallelism: two slots, then three, one killed of each.

    Returns what its sink holds at the end.
    """
    for parallelism in (2, 3):
        pipeline, sink = make(parallelism)
        job = pipeline.start()
        if unaligned:
            await_rows_in_flight(job)
        else:
            await_checkpoint(job)
        kill_a_slot(job, parallelism)
        if parallelism == 2:
            await_checkpoint(job)
            job.cancel(60)
    sink.release()
    assert job.wait(120).state is JobState.FINISHED
    return sink.rows()


def kill_a_slot(job: Job, number: int) -> None:
    """Kill one, and wait until the next attempt runs: it begins with what was in flight."""
    await_status(job, lambda s: s.state is JobState.RUNNING and len(s.slots) > 0)
    restores = job.status().restores
    slots = job.status().slots
    os.kill(slots[number % len(slots)].pid, signal.SIGKILL)
    await_status(job, lambda s: s.restores > restores and s.state is JobState.RUNNING)
