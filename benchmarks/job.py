"""The driver process of one measured run: `python -m benchmarks.job SPEC.json RESULT.json`.

When it is measured: `reading_at_s` is when the first reader in any slot is first asked for records;
`committed_at_s` is when the driver hears that the last transaction of the last checkpoint is
committed. So starting Spark and connecting are left out, and waiting for the first record is not.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
from pyspark.sql import SparkSession

from benchmarks.clocked_source import ClockedSource
from benchmarks.cpu import began_at_s, groups_cpu_s, own_cpu_s, tree_cpu_s
from benchmarks.discarding_sink import DiscardingSink
from benchmarks.job_spec import AttemptStart, CheckpointTimes, JobResult, JobSpec, Recovery
from benchmarks.slot_kill import kill_a_slot
from benchmarks.watch import TIMEOUT_S, Watch
from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    NoRestart,
    Pipeline,
    RocksDBBackend,
    RuntimeSettings,
    count,
    sum_,
)
from onceflow.connectors.spark.class_archive import archive_options
from onceflow.core.runtime.events.status import AttemptStats
from onceflow.core.spi import Sink, Source
from onceflow.integration.faults.processes import children_of
from onceflow.integration.workload import PAYMENT_SCHEMA
from onceflow.sinks import MySQLSink, PostgresSink
from onceflow.sources import KafkaSource
from onceflow.sources.datagen import DatagenSource

_SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""It only starts slots."""
_ACCOUNTS = 100_000


def build(spec: JobSpec, spark: SparkSession) -> Pipeline:
    """Return the pipeline: payments, keyed by account, with the balance after each."""
    pipeline = Pipeline(
        spark,
        name="bench",
        parallelism=spec.parallelism,
        checkpointing=Checkpointing(
            storage=spec.storage_url,
            interval=1.0,
            mode=spec.delivery,
            unaligned=spec.barriers == "overtaking",
        ),
        state_backend=RocksDBBackend() if spec.backend == "rocksdb" else HeapBackend(),
        # A restart nobody asked for would hide in the figure.
        restart=FixedDelay(1, 0.1) if spec.task == "kill_slot" else NoRestart(),
        # Counters every 0.1 s instead of every second: what is reported of them is that fresh.
        settings=RuntimeSettings(heartbeat_interval_s=0.1, scratch_dir=spec.directory),
    )
    keyed = pipeline.read(ClockedSource(_source(spec), spec.directory), uid="payments").key_by(
        "account"
    )
    balances = keyed.running(uid="balance", balance=sum_("amount"), n=count())
    balances.write(_sink(spec), uid="ledger")
    return pipeline


def _source(spec: JobSpec) -> Source:
    if spec.source == "generated":
        return DatagenSource(
            rows=spec.records,
            splits_count=spec.parallelism,
            accounts=_ACCOUNTS,
        )
    return KafkaSource(
        spec.bootstrap_servers,
        topic=spec.topic,
        format="json",
        schema=PAYMENT_SCHEMA,
        ending_offsets="latest",
    )


def _sink(spec: JobSpec) -> Sink:
    if spec.sink == "discard":
        return DiscardingSink(spec.directory)
    sink = PostgresSink if spec.sink == "postgres" else MySQLSink
    return sink(
        spec.database_url,
        table=spec.table,
        create=True,
        delivery=spec.delivery,
        commit_mode=spec.commit_mode,
    )


def main(spec_path: str, result_path: str) -> None:
    """Run the job of the spec to its end and write what was measured.

    Raises:
        OnceflowError: The job failed.
        TimeoutError: It did not get as far as it should in time.
    """
    imported_at_s = time.time()
    spec = msgspec.json.decode(Path(spec_path).read_bytes(), type=JobSpec)
    spark = (
        SparkSession.Builder()
        .master(f"local[{spec.parallelism}]")
        .appName("onceflow benchmark")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.extraJavaOptions", f"{_SHORT_LIVED_JVM} {archive_options()}".strip())
        .getOrCreate()
    )
    result = _run(spec, spark, imported_at_s)
    Path(result_path).write_bytes(msgspec.json.encode(result))
    spark.stop()


def _run(spec: JobSpec, spark: SparkSession, imported_at_s: float) -> JobResult:
    session_at_s = time.time()
    roots = {"engine": os.getpid(), **spec.server_pids}
    clock = ClockedSource(_source(spec), spec.directory)
    job = build(spec, spark).start()
    watch = Watch(job)
    watch.until(lambda status: bool(status.attempts) and clock.began(status.attempts[0].attempt))
    slots = job.status().slots
    daemon_at_s = min((began_at_s(slot.parent_pid) for slot in slots), default=0.0)
    forked_at_s = max((began_at_s(slot.pid) for slot in slots), default=0.0)
    cpu_before = _cpu_s(roots)
    recovery: Recovery | None = None
    if spec.task == "kill_slot":
        recovery = kill_a_slot(job, spec)
    watch.until(lambda status: status.state.ended)
    cpu_after = _cpu_s(roots)
    status = job.wait(TIMEOUT_S)
    ended_at = time.time()
    first = status.attempts[0]
    last = status.last_checkpoint
    committed_at = ended_at
    if last is not None and last.committed_ms is not None:
        committed_at = (last.triggered_at_ms + last.duration_ms + last.committed_ms) / 1000
    return JobResult(
        state=status.state.value,
        imported_at_s=imported_at_s,
        session_at_s=session_at_s,
        reading_at_s=clock.began_at_s(first.attempt),
        start=_start(first, daemon_at_s, forked_at_s),
        committed_at_s=committed_at,
        cpu_s={name: round(cpu_after[name] - cpu_before[name], 3) for name in cpu_after},
        engine_life_cpu_s=round(tree_cpu_s(os.getpid()), 3),
        stage_cpu_us=watch.stage_cpu_us(),
        slot_rss_bytes_max=watch.slot_rss_bytes_max,
        checkpoints=tuple(
            CheckpointTimes(
                one.duration_ms,
                one.alignment_ms,
                one.sync_ms,
                one.async_ms,
                one.append_ms,
                one.committed_ms,
                one.size_bytes,
            )
            for one in status.history
        ),
        recovery=recovery,
    )


def _start(first: AttemptStats, daemon_at_s: float, forked_at_s: float) -> AttemptStart:
    return AttemptStart(
        claimed_at_s=first.began_at_s + first.claimed_s,
        recovered_at_s=first.began_at_s + first.recovered_s,
        daemon_at_s=daemon_at_s,
        forked_at_s=forked_at_s,
        slots_up_at_s=first.began_at_s + first.slots_up_s,
        deployed_at_s=first.began_at_s + first.deployed_s,
        running_at_s=first.began_at_s + first.running_s,
    )


def _cpu_s(roots: dict[str, int]) -> dict[str, float]:
    """Return seconds by group; the engine's also apart: driver, its JVM, and the slots."""
    seconds = groups_cpu_s(roots)
    # The driver's only child is the JVM, whose descendants are Spark's Python processes.
    seconds["driver"] = own_cpu_s(os.getpid())
    seconds["jvm"] = sum(own_cpu_s(child) for child in children_of(os.getpid()))
    seconds["slots"] = seconds["engine"] - seconds["driver"] - seconds["jvm"]
    return seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
