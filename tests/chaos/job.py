"""The driver process of a chaos job: builds the pipeline of its spec and runs it.

    python -m tests.chaos.job SPEC.json

A second start with the same spec continues the job. When the spec's stop file appears, the job
drains its sources and ends. Exit status 0 means that the job stopped as requested.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa
from demo.driver import write_status
from pyspark.sql import SparkSession
from tests.chaos.broken_sink import ForgetsCommits
from tests.chaos.schedule import PARALLELISM_MAX, Backend, Graph, SinkKind, TopicGraph
from tests.support.failing_once import FailingOnceStorage
from tests.support.standalone import SPARK_JVM
from typing_extensions import assert_never

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    LocalProcesses,
    Pipeline,
    RocksDBBackend,
    RuntimeSettings,
    Stream,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
    sum_,
)
from onceflow.core.crash_points import DEATHS_VARIABLE, VARIABLE
from onceflow.core.decoding import json_decoder
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.core.spi import Sink
from onceflow.core.traces import VARIABLE as TRACES_VARIABLE
from onceflow.integration.workload import PAYMENT_SCHEMA
from onceflow.sinks import FileSink, IcebergSink, KafkaSink, MySQLSink, PostgresSink
from onceflow.sources import KafkaSource, PostgresChanges

_Delivery: TypeAlias = Literal["exactly_once", "at_least_once"]
_CommitMode: TypeAlias = Literal["auto", "two_phase", "ledger"]

JOB = "chaos"
TABLE = "original"
"""The table whose changes a job reads."""
WINDOW_MS = 500
JOIN_WITHIN_MS = 200
HEARTBEAT_TIMEOUT_S = 4.0
_LOOK_S = 0.05
_EXECUTOR_CORES = 2
_FOR_EXECUTORS = {
    "PYTHONPATH",
    VARIABLE,
    DEATHS_VARIABLE,
    TRACES_VARIABLE,
    "LD_PRELOAD",
    "CHAOS_CLOCKS",
    "CHAOS_FAILING_DISK",
}
"""The variables that the faults and the traces of slots need."""
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """A sink of the job."""

    kind: SinkKind
    address: str
    """URL of a database, bootstrap servers, or a directory."""
    target: str
    """Table or topic."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The settings that the driver process gets."""

    graph: Graph
    bootstrap_servers: str
    topics: tuple[str, ...]
    source_url: str
    """The database of the table whose changes are read, or empty if the job reads topics."""
    sinks: tuple[SinkSpec, ...]
    storage: str
    failing_calls: str
    """The directory with one file for each call of checkpoint storage that is to fail."""
    scratch: str
    status_path: str
    stop_path: str
    """The job drains and ends when this file appears."""
    drained_path: str
    """The driver creates this file when the job has drained. A stop with a savepoint does not."""
    savepoints: str
    parallelism: int
    backend: Backend
    unaligned: bool
    interval_s: float
    at_least_once: bool
    broken: bool
    from_savepoint: str | None = None
    master: str | None = None
    """The URL of Spark's master, or None if slots are processes of the driver's host."""
    driver_host: str | None = None


def group_of(topic: str) -> str:
    """Return the consumer group in which the job publishes its offsets of `topic`."""
    return f"chaos-{topic}"


def describe_catalog(directory: str) -> dict[str, str]:
    """Return the settings of the Iceberg catalog in `directory`."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }


def build(spec: JobSpec, cluster: LocalProcesses | SparkSession) -> Pipeline:
    """Return the pipeline of the spec: one stream for each sink."""
    pipeline = Pipeline(
        cluster,
        name=JOB,
        parallelism=spec.parallelism,
        checkpointing=Checkpointing(
            storage=FailingOnceStorage(spec.storage, faults=spec.failing_calls),
            interval=spec.interval_s,
            timeout=20.0,
            mode="at_least_once" if spec.at_least_once else "exactly_once",
            unaligned=spec.unaligned,
        ),
        state_backend=RocksDBBackend() if spec.backend == "rocksdb" else HeapBackend(),
        # As many as a schedule needs. No wait: the faults are what takes time.
        restart=FixedDelay(attempts=10_000, delay_s=0.2),
        settings=RuntimeSettings(
            heartbeat_interval_s=0.2,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            scratch_dir=spec.scratch,
        ),
    )
    if spec.graph == "changes":
        changes = _read_changes(pipeline, spec)
        for number, sink in enumerate(spec.sinks):
            changes.write(_make_sink(sink, spec), uid=f"sink-{number}")
        return pipeline
    sources = [_read(pipeline, spec, topic) for topic in spec.topics]
    for number, (sink, make_stream) in enumerate(
        zip(spec.sinks, _streams(spec.graph, sources), strict=False)
    ):
        make_stream().write(_make_sink(sink, spec), uid=f"sink-{number}")
    return pipeline


def _read_changes(pipeline: Pipeline, spec: JobSpec) -> Stream:
    source = PostgresChanges(
        spec.source_url,
        table=TABLE,
        schema="id BIGINT, account STRING, amount BIGINT, ts BIGINT",
        slot=f"onceflow_{spec.sinks[0].target}",
        chunk_rows=50,
        batch_rows=100,
    )
    return pipeline.read(source, uid=f"read-{TABLE}")


def _read(pipeline: Pipeline, spec: JobSpec, topic: str) -> Stream:
    source = KafkaSource(
        spec.bootstrap_servers,
        topic=topic,
        format="json",
        schema=PAYMENT_SCHEMA,
        group_id=group_of(topic),
        batch_rows=500,
    )
    return pipeline.read(source, uid=f"read-{topic}", watermarks=WatermarkStrategy("ts"))


def _streams(graph: TopicGraph, sources: Sequence[Stream]) -> Sequence[Callable[[], Stream]]:
    """Return what makes the stream of each sink. `tests.chaos.model` says what comes out."""
    first, second = sources[0], sources[-1]
    match graph:
        case "running":
            return (lambda: _run_totals(first), lambda: _aggregate_windows(first))
        case "union":
            both = first.union(second)
            return (lambda: _aggregate_windows(both), lambda: both)
        case "join":
            return (
                lambda: _join(first, second, is_outer=False),
                lambda: _run_totals(first),
            )
        case "left-join":
            return (
                lambda: _join(first, second, is_outer=True),
                lambda: _aggregate_windows(second),
            )
        case _:
            assert_never(graph)


def _run_totals(stream: Stream) -> Stream:
    return stream.key_by("account").running(uid="totals", balance=sum_("amount"), n=count())


def _aggregate_windows(stream: Stream) -> Stream:
    windows = stream.key_by("account").window(TumblingEventTimeWindows(WINDOW_MS / 1000))
    totals = windows.aggregate(uid="windows", total=sum_("amount"), n=count())
    schema = pa.schema(
        [
            pa.field("account", pa.string()),
            pa.field("begin", pa.int64()),
            pa.field("total", pa.int64()),
            pa.field("n", pa.int64()),
        ]
    )

    def to_numbers(rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            rows.column("account"),
            rows.column("window_start").cast(pa.int64()),
            rows.column("total").cast(pa.int64()),
            rows.column("n").cast(pa.int64()),
        ]
        return pa.record_batch(columns, schema=schema)

    return totals.map_batches(to_numbers, schema=schema, uid="numbers")


def _join(first: Stream, second: Stream, *, is_outer: bool) -> Stream:
    pairs = first.key_by("account").interval_join(
        second.key_by("account"), how="left" if is_outer else "inner"
    )
    within_s = JOIN_WITHIN_MS / 1000
    return pairs.between(-within_s, within_s).merge(
        "account", "id_left AS id", "id_right AS other", "amount_right AS paid", uid="pairs"
    )


def _make_sink(sink: SinkSpec, spec: JobSpec) -> Sink:
    delivery: _Delivery = "at_least_once" if spec.at_least_once else "exactly_once"
    match sink.kind:
        case SinkKind.POSTGRES | SinkKind.POSTGRES_LEDGER:
            made = PostgresSink(
                sink.address,
                table=sink.target,
                create=True,
                delivery=delivery,
                commit_mode=_commit_mode(sink.kind, spec),
                # At least once: rows are committed as they come.
                flush_rows=1 if spec.at_least_once else 10_000,
                **_choose_mode(spec.graph),
            )
            return ForgetsCommits(made) if spec.broken else made
        case SinkKind.MYSQL | SinkKind.MYSQL_LEDGER:
            return MySQLSink(
                sink.address,
                table=sink.target,
                create=True,
                delivery=delivery,
                commit_mode=_commit_mode(sink.kind, spec),
                **_choose_mode(spec.graph),
            )
        case SinkKind.KAFKA:
            return KafkaSink(sink.address, topic=sink.target, key="account", delivery=delivery)
        case SinkKind.FILES:
            return FileSink(sink.address, format="json")
        case SinkKind.ICEBERG:
            return IcebergSink(sink.target, catalog=describe_catalog(sink.address), create=True)
        case _:
            assert_never(sink.kind)


def _choose_mode(graph: Graph) -> dict[str, Any]:
    """Return the settings by which a table becomes a copy of the one whose changes are read."""
    if graph != "changes":
        return {}
    return {"write_mode": "upsert", "primary_key": ("id",), "operation_column": "_op"}


def _commit_mode(kind: SinkKind, spec: JobSpec) -> _CommitMode:
    if spec.at_least_once:
        return "auto"
    return "ledger" if kind.value.endswith("ledger") else "two_phase"


def main(spec_path: str) -> None:
    """Run the job until it has drained, or until another driver takes it over.

    Raises:
        OnceflowError: The job failed and may not be restarted.
    """
    spec = json_decoder(JobSpec).decode(Path(spec_path).read_bytes())
    cluster = _join_cluster(spec)
    job = build(spec, cluster).start(from_savepoint=spec.from_savepoint)
    stop = Path(spec.stop_path)
    while not job.state.ended and not stop.exists():
        write_status(Path(spec.status_path), job.status())
        time.sleep(_LOOK_S)
    if job.state.ended:
        final = job.wait(_STOP_TIMEOUT_S)
    else:
        final = job.stop(_STOP_TIMEOUT_S, savepoint=spec.savepoints, drain=True)
        Path(spec.drained_path).touch()
    write_status(Path(spec.status_path), final)
    if not isinstance(cluster, LocalProcesses):
        cluster.stop()


def _join_cluster(spec: JobSpec) -> LocalProcesses | SparkSession:
    if spec.master is None or spec.driver_host is None:
        fork_own_host()
        return LocalProcesses()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.Builder()
        .master(spec.master)
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config("spark.driver.host", spec.driver_host)
        .config("spark.driver.bindAddress", spec.driver_host)
        .config("spark.cores.max", PARALLELISM_MAX + 1)
        .config("spark.executor.cores", _EXECUTOR_CORES)
        .config("spark.executor.memory", "512m")
        .config("spark.executor.extraJavaOptions", SPARK_JVM)
    )
    for name in _FOR_EXECUTORS & os.environ.keys():
        builder = builder.config(f"spark.executorEnv.{name}", os.environ[name])
    return builder.getOrCreate()


if __name__ == "__main__":
    main(sys.argv[1])
