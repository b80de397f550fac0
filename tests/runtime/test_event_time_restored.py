"""Event time goes on through a restart: what comes within the lateness is in its window."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.test_recovery import BACKENDS
from tests.runtime.test_timers import await_rows
from tests.support.clusters import AnyCluster
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.scripted_source import ScriptedSource

from onceflow import (
    AggregateFunction,
    Checkpointing,
    CoGroupFunction,
    EventTimeSessionWindows,
    FixedDelay,
    HeapBackend,
    JobState,
    KeyedFunction,
    Pipeline,
    ProcessWindowFunction,
    Record,
    StateAccess,
    StateBackend,
    Stream,
    TimeWindow,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
)

COUNTED = pa.schema([("account", pa.string()), ("start", pa.int64()), ("n", pa.int64())])
WINDOWS = TumblingEventTimeWindows(1)
LATENESS = "1 min"
WATERMARKS = WatermarkStrategy("at", idle_after=0.1)


class Counted(ProcessWindowFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return COUNTED

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> Record:
        return {"account": key, "start": window.start_ms, "n": len(records)}


class CountedOfBoth(CoGroupFunction):
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return COUNTED

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Record:
        return {"account": key, "start": window.start_ms, "n": len(left) + len(right)}


class Number(AggregateFunction[Record, int, Record]):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Record, accumulator: int) -> int:
        return accumulator + 1

    def merge(self, one: int, other: int) -> int:
        return one + other

    def get_result(self, accumulator: int) -> Record:
        return {"n": accumulator}


Work = Callable[[Stream], Stream]


def process(records: Stream) -> Stream:
    windows = records.key_by("account").window(WINDOWS, allowed_lateness=LATENESS)
    return windows.process(Counted(), uid="windows")


def aggregate(records: Stream) -> Stream:
    windows = records.key_by("account").window(WINDOWS, allowed_lateness=LATENESS)
    return windows.aggregate(n=count(), uid="windows")


def aggregate_by(records: Stream) -> Stream:
    windows = records.key_by("account").window(WINDOWS, allowed_lateness=LATENESS)
    schema = pa.schema([("n", pa.int64())])
    return windows.aggregate_by(Number(), schema=schema, uid="windows", accumulator_type=int)


def sessions(records: Stream) -> Stream:
    windows = records.key_by("account").window(
        EventTimeSessionWindows(1), allowed_lateness=LATENESS
    )
    return windows.process(Counted(), uid="windows")


def co_group(records: Stream) -> Stream:
    # Records of an even amount are the left stream, the others the right one.
    both = records.filter(is_even).connect(records.filter(is_odd)).key_by("account", "account")
    windows = both.window(WINDOWS, allowed_lateness=LATENESS)
    return windows.co_group(CountedOfBoth(), uid="windows")


def window_join(records: Stream) -> Stream:
    both = records.filter(is_even).connect(records.filter(is_odd)).key_by("account", "account")
    windows = both.window(WINDOWS, allowed_lateness=LATENESS)
    return windows.join("full").merge(uid="windows")


def is_even(record: Record) -> bool:
    return bool(record["amount"] % 2 == 0)


def is_odd(record: Record) -> bool:
    return not is_even(record)


def started(
    cluster: AnyCluster,
    directory: Path,
    work: Work,
    backend: StateBackend,
    parallelism: int = 2,
) -> tuple[Pipeline, ScriptedSource, DirectorySink]:
    source = ScriptedSource(str(directory / "records"))
    sink = DirectorySink(str(directory / "out"))
    (directory / "out" / "committed").mkdir(parents=True, exist_ok=True)
    pipeline = Pipeline(
        cluster,
        name="event-time",
        parallelism=parallelism,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.05),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    work(pipeline.read(source, uid="records", watermarks=WATERMARKS)).write(sink, uid="out")
    return pipeline, source, sink


def pass_event_time(source: ScriptedSource, sink: DirectorySink, done: Callable[[], bool]) -> None:
    """Have event time come to 2,499 ms, and wait until that has had its effect.

    The other split becomes idle meanwhile. One whose records have ended would be idle, too.
    """
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, sink.rows()
        source.write(0, ("b", 2_500, 2))
        time.sleep(0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("work", "restart"),
    [
        (process, "stop"),
        (process, "kill"),
        (aggregate_by, "rescale"),
        (sessions, "stop"),
        (co_group, "kill"),
        (window_join, "stop"),
        (aggregate, "rescale"),
    ],
)
def test_records_within_the_allowed_lateness_come_out_after_a_restart(
    cluster: AnyCluster, tmp_path: Path, work: Work, restart: str, backend: StateBackend
) -> None:
    pipeline, source, sink = started(cluster, tmp_path, work, backend)
    # The other split is idle, so after a restart event time is not known again for a while.
    source.write(0, ("a", 5, 2))
    job = pipeline.start()
    pass_event_time(source, sink, lambda: len(sink.rows()) > 0)
    if restart == "kill":
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
    else:
        assert job.stop(60).state is JobState.STOPPED
        parallelism = 3 if restart == "rescale" else 2
        pipeline, _, _ = started(cluster, tmp_path, work, backend, parallelism)
        job = pipeline.start()
    # Late by more than two seconds, and allowed to be.
    source.write(1, ("a", 10, 3))
    await_rows(sink, 2, 60)
    source.end()
    assert job.wait(60).state is JobState.FINISHED
    of_a = [row for row in sink.rows() if row["account"] == "a"]
    if work is window_join:
        assert [(row["at_left"], row["at_right"]) for row in of_a] == [(5, None), (5, 10)]
    else:
        assert [row["n"] for row in of_a] == [1, 2]


class WatermarkOfEach(KeyedFunction):
    """Emits with each record up to when event time has come, and at each timer the same."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return COUNTED

    def open(self, state: StateAccess) -> None:
        self._timers = state.timers()

    def process(self, record: Record) -> Record:
        self._timers.register_event_time_timer(record["at"])
        return {"account": record["account"], "start": self._timers.current_watermark(), "n": 0}

    def on_timer(self, timer: Any) -> Record:
        return {"account": timer.key, "start": timer.at_ms, "n": 1}


def test_timers_know_after_a_restart_how_far_event_time_had_come(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    def watermarks(records: Stream) -> Stream:
        return records.key_by("account").process(WatermarkOfEach(), uid="timers")

    backend = HeapBackend()
    pipeline, source, sink = started(cluster, tmp_path, watermarks, backend)
    source.write(0, ("a", 5, 2))
    job = pipeline.start()
    pass_event_time(source, sink, lambda: ("a", 5) in fired(sink))
    assert job.stop(60).state is JobState.STOPPED
    before = len(sink.rows())
    pipeline, _, _ = started(cluster, tmp_path, watermarks, backend, 1)
    source.write(1, ("a", 10, 3))
    job = pipeline.start()
    await_rows(sink, before + 2, 60)
    source.end()
    assert job.wait(60).state is JobState.FINISHED
    (after,) = [row for row in sink.rows()[before:] if row["account"] == "a" and row["n"] == 0]
    assert after["start"] == 2_499
    assert fired(sink) == [("a", 5), ("a", 10), ("b", 2_500)]


def fired(sink: DirectorySink) -> list[tuple[str, int]]:
    return sorted((row["account"], row["start"]) for row in sink.rows() if row["n"] == 1)
