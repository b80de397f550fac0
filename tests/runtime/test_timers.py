"""Timers fire once, whatever happens to slots and however many there are."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from examples.session_timeout import QuietAccounts
from tests.runtime.test_recovery import BACKENDS
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    FixedDelay,
    JobState,
    KeyedFunction,
    NoRestart,
    Pipeline,
    Record,
    StateAccess,
    StateBackend,
    Timer,
    WatermarkStrategy,
)
from onceflow.core.errors import UserFunctionError


class TimerForEach(KeyedFunction):
    """Registers one timer for each record, after `begin_ms`, and emits it when it fires."""

    def __init__(self, begin_ms: int) -> None:
        self._begin_ms = begin_ms

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return pa.schema([("account", pa.string()), ("id", pa.int64())])

    def open(self, state: StateAccess) -> None:
        self._timers = state.timers()

    def process(self, record: Record) -> None:
        self._timers.register_processing_time_timer(self._begin_ms + record["id"])

    def on_timer(self, timer: Timer) -> Record:
        return {"account": timer.key, "id": timer.at_ms - self._begin_ms}


def timed(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    function: KeyedFunction,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    restart: bool = True,
    watermarks: WatermarkStrategy | None = None,
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        cluster,
        name="timers",
        parallelism=parallelism,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01) if restart else NoRestart(),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records", watermarks=watermarks)
    records.key_by("account").process(function, uid="timers").write(sink, uid="out")
    return pipeline, sink


def await_rows(sink: DirectorySink, count: int, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while len(sink.rows()) < count:
        assert time.monotonic() < deadline, f"{len(sink.rows())} of {count} rows"
        time.sleep(0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.servers
def test_timers_fire_once_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(4_000, ends_with=str(tmp_path / "ends"))
    # The first is due soon, the last when the third parallelism runs.
    function = TimerForEach(int(time.time() * 1000) + 1_500)
    for parallelism in (2, 1, 3):
        pipeline, sink = timed(
            cluster, tmp_path, source, function, backend=backend, parallelism=parallelism
        )
        job = pipeline.start()
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        await_rows(sink, {2: 400, 1: 1_200, 3: 4_000}[parallelism])
        if parallelism == 3:
            (tmp_path / "ends").touch()
            assert job.wait(60).state is JobState.FINISHED
        else:
            assert job.stop(60).state is JobState.STOPPED
    rows = sink.rows()
    assert Counter(row["id"] for row in rows) == Counter(range(source.records))
    assert all(row["account"] == str(row["id"] % source.accounts) for row in rows)


def test_the_example_tells_each_quiet_account_once(cluster: AnyCluster, tmp_path: Path) -> None:
    # All records of an account are in one batch: between two batches a busy machine is quiet, too.
    source = CountingSource(100, accounts=10, ends_with=str(tmp_path / "ends"))
    pipeline, sink = timed(cluster, tmp_path, source, QuietAccounts(1_000))
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    await_rows(sink, 10)
    (tmp_path / "ends").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert sorted(row["account"] for row in sink.rows()) == sorted(map(str, range(10)))


class NoOnTimer(TimerForEach):
    """Has forgotten what it must have."""

    on_timer = KeyedFunction.on_timer  # type: ignore[assignment]


class TimerAtAWord(TimerForEach):
    """Registers what is no time."""

    def process(self, record: Record) -> None:
        self._timers.register_event_time_timer("soon")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (NoOnTimer(0), r"'timers'.*NoOnTimer registers timers and has no on_timer"),
        (TimerAtAWord(0), r"'timers'.*'soon' is not a valid time for a timer in event time"),
    ],
    ids=["no on_timer", "no time"],
)
def test_mistakes_with_timers_are_told_by_name(
    cluster: AnyCluster, tmp_path: Path, function: KeyedFunction, says: str
) -> None:
    source = CountingSource(100, ends_with=str(tmp_path / "ends"))
    pipeline, _ = timed(cluster, tmp_path, source, function, restart=False)
    with pytest.raises(UserFunctionError, match=says):
        pipeline.run(60)


class PastTimers(TimerForEach):
    """Registers both kinds at times that have come already, each its own."""

    def process(self, record: Record) -> None:
        self._timers.register_processing_time_timer(1 + 2 * record["id"])
        self._timers.register_event_time_timer(-2 * (1 + record["id"]))

    def on_timer(self, timer: Timer) -> Record:
        return {"account": timer.key, "id": timer.at_ms}


def test_a_timer_in_the_past_fires_once_after_the_records_at_hand(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(200, ends_with=str(tmp_path / "ends"))
    pipeline, sink = timed(
        cluster, tmp_path, source, PastTimers(0), watermarks=WatermarkStrategy("id")
    )
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    await_rows(sink, 400, timeout_s=60)
    (tmp_path / "ends").touch()
    assert job.wait(60).state is JobState.FINISHED
    registered = [1 + 2 * n for n in range(200)] + [-2 * (1 + n) for n in range(200)]
    assert Counter(row["id"] for row in sink.rows()) == Counter(registered)


class EventTimer(TimerForEach):
    """Fires by event time, and reports the watermark at that moment."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return super().output_schema(input_schema).append(pa.field("watermark", pa.int64()))

    def process(self, record: Record) -> None:
        self._timers.register_event_time_timer(record["id"] + 10)

    def on_timer(self, timer: Timer) -> Record:
        watermark = self._timers.current_watermark()
        return {"account": timer.key, "id": timer.at_ms - 10, "watermark": watermark}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.only_proof
def test_event_timers_fire_once_in_event_time_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(6_000, splits_count=3, pause_s=0.01, ends_with=str(tmp_path / "ends"))
    strategy = WatermarkStrategy("id", max_out_of_orderness=0.002)
    for parallelism in (2, 3):
        pipeline, sink = timed(
            cluster,
            tmp_path,
            source,
            EventTimer(0),
            backend=backend,
            parallelism=parallelism,
            watermarks=strategy,
        )
        job = pipeline.start()
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        if parallelism == 2:
            await_rows(sink, 100)
            assert job.stop(60).state is JobState.STOPPED
            assert len(sink.rows()) < source.records
        else:
            # All but those for which the watermark is still to come.
            await_rows(sink, source.records - 20)
            held = len(sink.rows())
            assert held < source.records
            (tmp_path / "ends").touch()
            assert job.wait(60).state is JobState.FINISHED
    rows = sink.rows()
    assert Counter(row["id"] for row in rows) == Counter(range(source.records))
    assert all(row["watermark"] >= row["id"] + 10 for row in rows)
