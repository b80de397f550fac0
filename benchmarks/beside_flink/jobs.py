"""Our side: the process that runs the jobs, in one session of Spark.

It does what flink/src/main/java/onceflow/bench/Main.java does, as the same lines on stdin say.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from benchmarks.beside_flink import works
from benchmarks.beside_flink.metered_source import MeteredSource
from benchmarks.beside_flink.works import PARALLELISM
from benchmarks.discarding_sink import DiscardingSink
from benchmarks.keyed_balance import BatchBalance, KeyedBalance
from onceflow import (
    Checkpointing,
    HeapBackend,
    KeyedFunction,
    NoRestart,
    Pipeline,
    Record,
    RocksDBBackend,
    RuntimeSettings,
    StateAccess,
    StateTtlConfig,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    count,
    sum_,
)
from onceflow.core.api.stream import Stream
from onceflow.core.runtime.events.status import CheckpointStats
from onceflow.sources import DatagenSource

# Prime to the number of keys: so many changes in a row are as many keys.
STEP = 7_919
FAR_MS = 1 << 60
# What waits in channels is worked through first: of a slow job half a million rows.
_STOP_TIMEOUT_S = 200.0


class BalanceWithTimers(KeyedBalance):
    """The balance, and a timer that never comes for each of the first payments."""

    def open(self, state: StateAccess) -> None:
        super().open(state)
        self._timers = state.timers()

    def process(self, record: Record) -> Record:
        if record["id"] < works.TIMERS:
            self._timers.register_event_time_timer(FAR_MS + record["id"])
        return super().process(record)


class NewBytes(KeyedFunction):
    """Gives the key of each record 100 other random bytes."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return pa.schema([("key", pa.int64())])

    def open(self, state: StateAccess) -> None:
        self._payload = state.value_state(ValueStateDescriptor[bytes]("payload", bytes))

    def process(self, record: Record) -> Record:
        self._payload.set(os.urandom(100))
        return record


def build(spark: SparkSession, work: str, backend: str, directory: str) -> Pipeline:
    """Return the pipeline of `work`."""
    pipeline = Pipeline(
        spark,
        name="beside-flink",
        parallelism=PARALLELISM,
        max_parallelism=128,
        checkpointing=Checkpointing(
            storage=f"{directory}/checkpoints",
            # Without an interval, it is taken on request.
            interval=None if work == "million-keys-whole" else 1.0,
        ),
        state_backend=RocksDBBackend() if backend == "rocksdb" else HeapBackend(),
        restart=NoRestart(),
        settings=RuntimeSettings(scratch_dir=directory),
    )
    _worked(pipeline, work, directory).write(DiscardingSink(directory), uid="out")
    return pipeline


def _worked(pipeline: Pipeline, work: str, directory: str) -> Stream:
    if work in ("million-keys", "million-keys-whole"):
        return _million_keys(pipeline, directory)
    timed = WatermarkStrategy("ts") if work in ("windows", "join") else None
    keyed = _payments(pipeline, directory, "payments", 0, timed).key_by("account")
    if work == "windows":
        windows = keyed.window(TumblingEventTimeWindows(works.WINDOW_MS / 1000))
        return windows.aggregate(balance=sum_("amount"), n=count(), uid="work")
    if work == "join":
        others = _payments(pipeline, directory, "others", 1, timed).key_by("account")
        return (
            keyed.interval_join(others)
            .between(-works.JOIN_MS / 1000, works.JOIN_MS / 1000)
            .merge(uid="work")
        )
    if work == "function-batches":
        return keyed.process_batches(BatchBalance(), uid="work")
    if work in ("function", "function-compiled", "timers"):
        function = BalanceWithTimers() if work == "timers" else KeyedBalance()
        return keyed.process(function, uid="work", compiled=work == "function-compiled")
    ttl = {"balance": None, "balance-ttl": StateTtlConfig("1 h")}[work]
    return keyed.running(uid="work", balance=sum_("amount"), n=count(), ttl=ttl)


def _payments(
    pipeline: Pipeline, directory: str, name: str, seed: int, timed: WatermarkStrategy | None
) -> Stream:
    source = DatagenSource(rows=None, splits_count=PARALLELISM, seed=seed, accounts=works.ACCOUNTS)
    return pipeline.read(MeteredSource(source, directory, name), uid=name, watermarks=timed)


def _million_keys(pipeline: Pipeline, directory: str) -> Stream:
    # Small batches: those of the pace that follows the first million come evenly.
    source = DatagenSource(rows=None, splits_count=PARALLELISM, accounts=1, batch_rows=500)
    metered = MeteredSource(source, directory, "payments", works.KEYS, works.CHANGED_PER_SECOND)
    payments = pipeline.read(metered, uid="payments")
    keys = payments.map_batches(_with_keys, schema=pa.schema([("key", pa.int64())]))
    return keys.key_by("key").process(NewBytes(), uid="work")


def _with_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
    ids = batch.column("id").to_numpy()
    keys = pc.if_else(pa.array(ids < works.KEYS), ids, ids * STEP % works.KEYS)
    return pa.record_batch([keys], names=["key"])


def main() -> None:
    """Run the jobs that stdin names, each until it says "stop"."""
    spark = (
        SparkSession.Builder()
        .master(f"local[{PARALLELISM}]")
        .appName("onceflow beside Flink")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    print("ready", flush=True)
    for line in sys.stdin:
        _, work, backend, directory = line.rstrip("\n").split(" ", 3)
        try:
            job = build(spark, work, backend, directory).start()
            while sys.stdin.readline() == "checkpoint\n":
                taken = job.status().checkpoints_completed
                job.checkpoint()
                job.wait_for(checkpoints=taken + 1)
                print("checkpointed", flush=True)
            checkpoints = job.status().history
            Path(directory, "checkpoint-times").write_text("".join(map(_told, checkpoints)))
            job.stop(_STOP_TIMEOUT_S)
            print("stopped", flush=True)
        except Exception as error:
            traceback.print_exc()
            print(f"failed: {error!r}", flush=True)
    spark.stop()


def _told(one: CheckpointStats) -> str:
    return f"{one.triggered_at_ms / 1e3} {one.duration_ms} {one.sync_ms} {one.uploaded_bytes}\n"


if __name__ == "__main__":
    main()
