"""Barriers that overtake rows: checkpoints of a job that is held up, and what they restore."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, assert_exactly_once
from tests.support.throttled_sink import ThrottledSink

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    JobState,
    JobStatus,
    Pipeline,
    RocksDBBackend,
    count,
    sum_,
)
from onceflow.core.errors import StateIncompatible
from onceflow.core.pipeline import Job
from onceflow.core.state import StateBackend

SOURCE = CountingSource(12_000, splits_count=3, batch_rows=20)


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
) -> tuple[Pipeline, ThrottledSink]:
    """Build source -> running balance -> count by another key -> a slow sink."""
    sink = ThrottledSink(str(directory / "out"))
    pipeline = Pipeline(
        cluster,
        name="held-up",
        parallelism=parallelism,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"),
            interval=0.1,
            unaligned=unaligned,
            aligned_checkpoint_timeout=aligned_checkpoint_timeout,
            ignore_in_flight_of=ignore_in_flight_of,
        ),
        state_backend=backend or HeapBackend(),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=replace(SETTINGS, channel_batches=4),
    )
    records = pipeline.read(SOURCE, uid="records")
    balances = records.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    balances.key_by("id").running(seen=count(), uid=uid).write(sink, uid="ledger")
    return pipeline, sink


def assert_each_once(sink: DirectorySink) -> None:
    assert_exactly_once(sink, SOURCE)
    assert {row["seen"] for row in sink.rows()} == {1}


def await_status(job: Job, holds: Callable[[JobStatus], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds(status := job.status()):
        assert not status.state.ended, status.last_error
        assert time.monotonic() < deadline, status
        time.sleep(0.005)


def await_rows_in_flight(job: Job) -> None:
    """Wait until the attempt that runs has completed a checkpoint that has rows in flight."""
    await_status(
        job,
        lambda status: any(
            one.in_flight_bytes for one in status.history if one.attempt == status.attempt
        ),
    )


def kill_a_slot(job: Job, number: int) -> None:
    """Kill one, and wait until the next attempt runs: it begins with what was in flight."""
    restores = job.status().restores
    slots = job.status().slots
    os.kill(slots[number % len(slots)].pid, signal.SIGKILL)
    await_status(job, lambda s: s.restores > restores and s.state is JobState.RUNNING)


@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [
        pytest.param(HeapBackend(), 2, 4, id="heap-2-4"),
        pytest.param(RocksDBBackend(), 3, 5, id="rocksdb-3-5"),
        pytest.param(RocksDBBackend(), 4, 2, id="rocksdb-4-2"),
        pytest.param(HeapBackend(), 1, 2, id="heap-1-2", marks=pytest.mark.slow),
        pytest.param(HeapBackend(), 2, 1, id="heap-2-1", marks=pytest.mark.slow),
        pytest.param(RocksDBBackend(), 2, 2, id="rocksdb-2-2", marks=pytest.mark.slow),
    ],
)
def test_rows_in_flight_come_once_through_kills_while_they_are_persisted_and_replayed_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend, before: int, after: int
) -> None:
    pipeline, sink = held_up(cluster, tmp_path, parallelism=before, backend=backend)
    job = pipeline.start()
    await_rows_in_flight(job)
    kill_a_slot(job, 0)
    kill_a_slot(job, 1)
    await_rows_in_flight(job)
    status = job.status()
    in_flight = {one.checkpoint: one.in_flight_bytes for one in status.history}
    assert in_flight[status.attempts[-1].restored_checkpoint] > 0
    job.cancel(60)
    pipeline, sink = held_up(cluster, tmp_path, parallelism=after, backend=backend)
    job = pipeline.start()
    await_rows_in_flight(job)
    sink.hurry()
    assert job.wait(60).state is JobState.FINISHED
    assert_each_once(sink)


def test_a_checkpoint_takes_no_longer_than_a_batch_however_many_rows_wait(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, sink = held_up(cluster, tmp_path)
    job = pipeline.start()
    await_status(job, lambda status: status.checkpoints_completed >= 12)
    history = job.status().history[4:]
    sink.hurry()
    assert job.wait(60).state is JobState.FINISHED
    assert all(one.unaligned and one.kind == "periodic" for one in history)
    assert sorted(one.duration_ms for one in history)[len(history) // 2] < 1_000
    assert_each_once(sink)


def test_a_stop_leaves_no_rows_in_flight(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline, sink = held_up(cluster, tmp_path)
    job = pipeline.start()
    await_rows_in_flight(job)
    sink.hurry()
    status = job.stop(60)
    last = status.history[-1]
    assert (last.kind, last.unaligned, last.in_flight_bytes) == ("stop", False, 0)
    committed = len(sink.rows())
    pipeline, sink = held_up(cluster, tmp_path, uid="counted-anew", unaligned=False)
    with pytest.raises(StateIncompatible, match="state of seen"):
        pipeline.run(60)
    pipeline, sink = held_up(cluster, tmp_path, unaligned=False)
    sink.hurry()
    assert pipeline.run(60).state is JobState.FINISHED
    assert committed < SOURCE.records
    assert_each_once(sink)


def test_a_barrier_that_waits_its_turn_overtakes_when_its_time_has_come(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, sink = held_up(cluster, tmp_path, aligned_checkpoint_timeout=0.05)
    job = pipeline.start()
    await_rows_in_flight(job)
    sink.hurry()
    assert job.wait(60).state is JobState.FINISHED
    assert_each_once(sink)


def test_rows_in_flight_without_an_operator_are_refused_by_name_or_dropped_where_that_is_said(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, sink = held_up(cluster, tmp_path)
    job = pipeline.start()
    await_rows_in_flight(job)
    await_status(job, lambda status: status.history[-1].in_flight_bytes > 0)
    job.cancel(60)
    restored = job.status().history[-1].checkpoint
    pipeline, sink = held_up(cluster, tmp_path, ignore_in_flight_of=restored)
    sink.hurry()
    status = pipeline.run(60)
    assert status.state is JobState.FINISHED
    assert any("rows in flight into" in dropped for dropped in status.dropped_state)
    ids = [row["id"] for row in sink.rows()]
    assert len(ids) == len(set(ids)) < SOURCE.records
