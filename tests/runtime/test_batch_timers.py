"""Timers of a function of batches fire once, through kills and rescaling, with their states."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.runtime.test_timers import await_rows
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    BatchStates,
    Checkpointing,
    FixedDelay,
    HeapBackend,
    JobState,
    KeyedBatch,
    KeyedBatchFunction,
    NoRestart,
    Pipeline,
    RocksDBBackend,
    StateBackend,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from onceflow.core.errors import UserFunctionError

FIRED = pa.schema([("id", pa.int64()), ("domain", pa.string()), ("amount", pa.int64())])


class TwoTimersForEach(KeyedBatchFunction):
    """Keeps each record's amount, and emits it by a timer of each kind, with the id as key."""

    def __init__(self, begin_ms: int) -> None:
        self._begin_ms = begin_ms

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return FIRED

    def open(self, state: BatchStates) -> None:
        self._amount = state.value_state(ValueStateDescriptor("amount", int))
        self._timers = state.timers()

    def process(self, batch: KeyedBatch) -> None:
        ids = batch.sort_by_key("id")
        self._amount.put_many(batch.sort_by_key("amount"))
        self._timers.register_event_time_timers(ids + 10)
        self._timers.register_processing_time_timers(ids + self._begin_ms)

    def on_timers(self, timers: KeyedBatch, domain: str) -> pa.RecordBatch:
        keys = timers.keys
        expected = 10 if domain == "event" else self._begin_ms
        late = timers.sort_by_key("timer_ms") - keys.column("id").to_numpy()
        assert (late == expected).all()
        domains = pa.array([domain] * timers.key_count)
        return pa.record_batch([keys.column("id"), domains, self._amount.get_many()], schema=FIRED)


def build_job(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    function: KeyedBatchFunction,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    restart: bool = True,
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
    strategy = WatermarkStrategy("id", max_out_of_orderness=0.002)
    records = pipeline.read(source, uid="records", watermarks=strategy)
    records.key_by("id").process_batches(function, uid="timers").write(sink, uid="out")
    return pipeline, sink


@pytest.mark.parametrize(
    "backend", [pytest.param(HeapBackend(), marks=pytest.mark.servers), RocksDBBackend()], ids=str
)
@pytest.mark.only_proof
def test_timers_of_batches_fire_once_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(6_000, splits_count=3, pause_s=0.005, ends_with=str(tmp_path / "ends"))
    # Those in processing time are due from soon on, the last when the second parallelism runs.
    function = TwoTimersForEach(int(time.time() * 1000) + 1_500)
    for parallelism in (2, 3):
        pipeline, sink = build_job(
            cluster, tmp_path, source, function, backend=backend, parallelism=parallelism
        )
        job = pipeline.start()
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        if parallelism == 2:
            await_rows(sink, 400)
            assert job.stop(60).state is JobState.STOPPED
            assert len(sink.rows()) < 2 * source.records
        else:
            # All but those in event time for which the watermark is still to come.
            await_rows(sink, 2 * source.records - 20)
            (tmp_path / "ends").touch()
            assert job.wait(60).state is JobState.FINISHED
    expected = [
        (record, domain, amount_of(record))
        for record in range(source.records)
        for domain in ("event", "processing")
    ]
    fired = Counter(tuple(row[name] for name in FIRED.names) for row in sink.rows())
    assert fired == Counter(expected)


class Again(TwoTimersForEach):
    """Registers a next timer when one fires, five times a key, and for ever from 90 on."""

    def process(self, batch: KeyedBatch) -> None:
        self._timers.register_event_time_timers(batch.sort_by_key("id") * 0)

    def on_timers(self, timers: KeyedBatch, domain: str) -> pa.RecordBatch:
        times = timers.lasts(timers.sort_by_key("timer_ms"))
        ids = timers.keys.column("id")
        following = pa.array(times + 1)
        is_done = pa.array((times >= 4) & (ids.to_numpy() < 90))
        nothing = pa.nulls(len(ids), pa.int64())
        self._timers.register_event_time_timers(pc.if_else(is_done, nothing, following))
        return pa.record_batch(
            [ids, pa.array([domain] * timers.key_count), pa.array(times)], schema=FIRED
        )


def test_a_timer_that_registers_the_next_does_not_keep_a_job_from_its_end(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(100, splits_count=1)
    pipeline, sink = build_job(cluster, tmp_path, source, Again(0), parallelism=1)
    assert pipeline.run(60).state is JobState.FINISHED
    fired = Counter((row["id"], row["amount"]) for row in sink.rows())
    assert max(fired.values()) == 1
    assert {record for record, _ in fired} == set(range(100))


class NoOnTimers(TwoTimersForEach):
    """Has forgotten what it must have."""

    on_timers = KeyedBatchFunction.on_timers  # type: ignore[assignment]


class TimersAtInstants(TwoTimersForEach):
    """Registers what is no number of milliseconds."""

    def process(self, batch: KeyedBatch) -> None:
        instants = pa.array([0] * batch.key_count, pa.timestamp("us"))
        self._timers.register_event_time_timers(instants)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (NoOnTimers(0), r"'timers'.*NoOnTimers registers timers and has no on_timers"),
        (TimersAtInstants(0), r"'timers'.*needs milliseconds since 1970 as whole numbers"),
    ],
    ids=["no on_timers", "instants"],
)
def test_mistakes_with_timers_of_batches_are_told_by_name(
    cluster: AnyCluster, tmp_path: Path, function: KeyedBatchFunction, says: str
) -> None:
    pipeline, _ = build_job(cluster, tmp_path, CountingSource(100), function, restart=False)
    with pytest.raises(UserFunctionError, match=says):
        pipeline.run(60)
