"""Barriers that overtake rows: checkpoints of a job that is held up, and what they restore."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import (
    CHANNEL_BATCHES,
    SOURCE,
    assert_each_once,
    await_rows_in_flight,
    held_up,
    kill_a_slot,
    rows_in_flight,
)
from tests.support.ledger import SETTINGS, assert_exactly_once
from tests.support.leftovers import find_copies
from tests.support.slot_ways import slot_ways
from tests.support.waiting import await_status

from onceflow import (
    AggregateFunction,
    Checkpointing,
    FixedDelay,
    HeapBackend,
    JobState,
    LocalProcesses,
    NoRestart,
    Pipeline,
    Record,
    RocksDBBackend,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
    sum_,
)
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.errors import StateIncompatible
from onceflow.core.protocol.checkpoints import schedule
from onceflow.core.state import StateBackend


@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [
        # Others join, unite and window rows in flight, and go on at more subtasks than before.
        pytest.param(HeapBackend(), 2, 4, id="heap-2-4", marks=pytest.mark.slow),
        pytest.param(RocksDBBackend(), 3, 5, id="rocksdb-3-5", marks=pytest.mark.slow),
        pytest.param(RocksDBBackend(), 4, 2, id="rocksdb-4-2"),
        pytest.param(HeapBackend(), 1, 2, id="heap-1-2", marks=pytest.mark.slow),
        pytest.param(HeapBackend(), 2, 1, id="heap-2-1", marks=pytest.mark.slow),
        pytest.param(RocksDBBackend(), 2, 2, id="rocksdb-2-2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.only_proof
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
    sink.release()
    assert job.wait(60).state is JobState.FINISHED
    assert_each_once(sink)


@pytest.mark.parametrize("point", ["overtaken", "persisted", "replayed"])
def test_rows_in_flight_come_once_though_a_slot_dies_at_a_step_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: CrashPoint
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(VARIABLE, str(points))
    pipeline, sink = held_up(LocalProcesses(tmp_path / "logs"), tmp_path)
    job = pipeline.start()
    await_rows_in_flight(job)
    restores = job.status().restores
    (points / point).touch()
    if point == "replayed":
        kill_a_slot(job, 0)
        restores += 1
    await_status(job, lambda s: s.restores > restores and s.state is JobState.RUNNING)
    sink.release()
    assert job.wait(60).state is JobState.FINISHED
    assert_each_once(sink)


@pytest.mark.servers
def test_a_checkpoint_takes_no_longer_than_a_batch_however_many_rows_wait(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, sink = held_up(cluster, tmp_path)
    job = pipeline.start()
    await_status(job, lambda status: status.checkpoints_completed >= 12)
    history = job.status().history[4:]
    sink.release()
    assert job.wait(60).state is JobState.FINISHED
    assert all(one.unaligned and one.kind == "periodic" for one in history)
    assert sorted(one.duration_ms for one in history)[len(history) // 2] < 1_000
    assert_each_once(sink)


def test_restarts_add_nothing_to_the_rows_in_flight_however_many_come(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = replace(SOURCE, records=3_000)
    pipeline, sink = held_up(
        cluster, tmp_path, parallelism=1, source=source, pause_s=0.3, retained=1_000
    )
    job = pipeline.start()
    for _ in range(2):
        await_rows_in_flight(job)
        kill_a_slot(job, 0)
    restored = job.status().attempts[-1].restored_checkpoint
    assert restored is not None
    sink.release()
    assert job.wait(60).state is JobState.FINISHED
    # Into each of two operators: what may wait in the channel, and what its sender has besides.
    assert 0 < rows_in_flight(tmp_path, restored) <= 2 * (CHANNEL_BATCHES + 1) * source.batch_rows
    assert_each_once(sink, source)


def test_the_last_rows_of_the_input_are_checkpointed_while_they_wait(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """All are read, and take long: whatever ends the job then, they do not all begin anew."""
    source = replace(SOURCE, records=240)
    pipeline, sink = held_up(cluster, tmp_path, source=source, pause_s=1.0)
    job = pipeline.start()
    await_status(job, lambda s: any(c.kind == "final" and c.in_flight_bytes for c in s.history))
    last = job.status().history[-1].checkpoint
    kill_a_slot(job, 0)
    restored = job.status().attempts[-1].restored_checkpoint
    assert restored is not None
    assert restored >= last
    sink.release()
    assert job.wait(60).state is JobState.FINISHED
    assert_each_once(sink, source)


class _SlowCount(AggregateFunction[Record, int, Record]):
    """Counts records, and takes twice as long for each as a FINAL barrier waits for rows."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Record, accumulator: int) -> int:
        time.sleep(0.4)
        return accumulator + 1

    def get_result(self, accumulator: int) -> Record:
        return {"n": accumulator}


def test_the_last_window_is_there_though_a_barrier_overtakes_the_end_of_the_input(
    tmp_path: Path,
) -> None:
    """The last barrier arrives during the first record, and overtakes after the second one."""
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        LocalProcesses(),
        name="last-window",
        parallelism=1,
        checkpointing=Checkpointing(
            storage=str(tmp_path / "checkpoints"), interval=0.2, unaligned=True
        ),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    source = CountingSource(2, splits_count=1, accounts=1, batch_rows=1)
    records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("id"))
    windows = records.key_by("account").window(TumblingEventTimeWindows("1 s"))
    schema = pa.schema([("n", pa.int64())])
    counts = windows.aggregate_by(_SlowCount(), schema=schema, uid="n", accumulator_type=int)
    counts.write(sink, uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    assert [row["n"] for row in sink.rows()] == [2]


def test_a_stop_leaves_no_rows_in_flight(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline, sink = held_up(cluster, tmp_path)
    job = pipeline.start()
    await_rows_in_flight(job)
    sink.release()
    status = job.stop(60)
    last = status.history[-1]
    assert (last.kind, last.in_flight_bytes) == ("stop", 0)
    committed = len(sink.rows())
    pipeline, sink = held_up(cluster, tmp_path, uid="counted-anew", unaligned=False)
    with pytest.raises(StateIncompatible, match="state of seen"):
        pipeline.run(60)
    pipeline, sink = held_up(cluster, tmp_path, unaligned=False)
    sink.release()
    assert pipeline.run(60).state is JobState.FINISHED
    assert committed < SOURCE.records
    assert_each_once(sink)


def test_a_barrier_that_waits_its_turn_overtakes_when_its_time_has_come(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, sink = held_up(cluster, tmp_path, aligned_checkpoint_timeout=0.05)
    job = pipeline.start()
    await_rows_in_flight(job)
    sink.release()
    assert job.wait(60).state is JobState.FINISHED
    assert_each_once(sink)


def test_rows_behind_a_barrier_that_timed_out_on_its_way_are_part_of_the_next_checkpoint(
    cluster: AnyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way between two slots stands still: the next barrier is announced before the old one."""
    monkeypatch.setattr(schedule, "RETRY_PAUSE_S", 0.2)
    end, scratch = tmp_path / "end", tmp_path / "scratch"
    source = CountingSource(4_500, batch_rows=20, pause_s=0.02, ends_with=str(end))
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        cluster,
        name="stands-still",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(tmp_path / "checkpoints"),
            interval=None,
            timeout=0.5,
            tolerable_failures=1,
            unaligned=True,
        ),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        state_backend=RocksDBBackend(),
        settings=replace(SETTINGS, channel_batches=1_000, scratch_dir=str(scratch)),
    )
    records = pipeline.read(source, uid="records").key_by("account")
    balances = records.running(balance=sum_("amount"), n=count(), uid="balance")
    balances.write(sink, uid="ledger")
    with slot_ways(monkeypatch) as ways:
        job = pipeline.start()
        job.checkpoint()
        await_status(job, lambda status: bool(status.history))
        ways.pause(1)
        job.checkpoint()
        await_status(job, lambda status: status.checkpoints_failed > 0)
        await_status(job, lambda status: bool(status.checkpoints_pending))
        time.sleep(0.1)  # slot 1 has its own barrier by then, as a rule; rows are exact if not
        ways.heal()
        await_status(job, lambda status: len(status.history) > 1)
        # The snapshot that was given up has left no copy of the state in its slot.
        await_status(job, lambda _: find_copies(scratch) == [])
        kill_a_slot(job, 0)
        end.touch()
        assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


@pytest.mark.servers
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
    sink.release()
    status = pipeline.run(60)
    assert status.state is JobState.FINISHED
    assert any("rows in flight into" in dropped for dropped in status.dropped_state)
    ids = [row["id"] for row in sink.rows()]
    assert len(ids) == len(set(ids)) < SOURCE.records
