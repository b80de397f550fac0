"""A job of Nexmark: `python -m benchmarks.nexmark.job SPEC`, with the spec as JSON.

Lines on stdout say what the parent waits for: a `Progress` after each checkpoint, and the `Result`
at the end. A job that was killed goes on if it is started again with the same spec.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from benchmarks.cpu import tree_cpu_s
from benchmarks.nexmark.queries import QUERIES, Tables
from benchmarks.nexmark.topic import Topic, read_topic
from onceflow import (
    AttemptRunning,
    CheckpointCompleted,
    Checkpointing,
    FixedDelay,
    HeapBackend,
    Job,
    JobEvent,
    JobStatus,
    LocalProcesses,
    NoRestart,
    Pipeline,
    RocksDBBackend,
    RuntimeSettings,
    Stream,
    WatermarkStrategy,
)
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.core.spi import Sink
from onceflow.sinks import DiscardSink, FileSink
from onceflow.sources import NexmarkSource

TIMEOUT_S = 900.0
PARTITIONS = {"q10": ("day", "minute")}
"""The queries whose sink is a log of partitioned files."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a job, which all its processes know."""

    queries: tuple[str, ...]
    events: int
    directory: str
    event_interval_us: int = 100
    parallelism: int = 1
    backend: Literal["heap", "rocksdb"] = "heap"
    sink: Literal["files", "discard"] = "files"
    """`files`: the rows of query q are in the directory q. `discard`: the rows are counted."""
    events_per_second: float | None = None
    checkpoint_interval_s: float = 1.0
    topic: Topic | None = None
    """A topic to read the events from, instead of generating them."""
    restarts: bool = False
    """True if the job goes on after a slot is killed."""

    @property
    def source(self) -> NexmarkSource:
        """The source of the job's events."""
        return NexmarkSource(
            events=self.events,
            splits_count=self.parallelism,
            event_interval_us=self.event_interval_us,
            events_per_second=self.events_per_second,
        )


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A completed checkpoint of an attempt."""

    attempt: int
    slot_pids: tuple[int, ...]
    events: int
    """The number of events that the attempt has read."""


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The measurements of a job that has ended."""

    events: int
    seconds: float
    cpu_s: float
    """The CPU time of all processes of the job since all slots were running."""
    state_bytes_max: int
    """The size of the largest checkpoint."""


def build(spec: JobSpec) -> Pipeline:
    """Return the pipeline with all queries of the spec."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="nexmark",
        parallelism=spec.parallelism,
        checkpointing=Checkpointing(
            storage=f"{spec.directory}/checkpoints", interval=spec.checkpoint_interval_s
        ),
        state_backend=RocksDBBackend() if spec.backend == "rocksdb" else HeapBackend(),
        restart=FixedDelay(3, 0.1) if spec.restarts else NoRestart(),
        settings=RuntimeSettings(scratch_dir=spec.directory),
    )
    tables = Tables(_read(pipeline, spec))
    for name in spec.queries:
        QUERIES[name](tables).write(_sink(spec, name), uid=f"{name}-out")
    return pipeline


def _read(pipeline: Pipeline, spec: JobSpec) -> Callable[[str], Stream]:
    """Add the source, and return a function that returns the stream of a table."""
    if spec.topic is not None:
        return read_topic(pipeline, spec.topic)
    source = spec.source
    times = {name: WatermarkStrategy("date_time", "4 s") for name in source.outputs}
    return pipeline.read_outputs(source, uid="nexmark", watermarks=times).__getitem__


def _sink(spec: JobSpec, query: str) -> Sink:
    partitions = PARTITIONS.get(query, ())
    if spec.sink == "discard" and not partitions:
        return DiscardSink()
    kind: Literal["parquet", "json"] = (
        "json" if spec.sink == "discard" and spec.topic else "parquet"
    )
    return FileSink(f"{spec.directory}/{query}", format=kind, partition_by=partitions)


def run(spec: JobSpec) -> Result:
    """Run the job to its end, and print a line after each checkpoint.

    Raises:
        OnceflowError: The job failed.
    """
    fork_own_host()
    pipeline = build(spec)
    is_running = threading.Event()
    # The listener is added after the start, so it may miss the first events.
    job = pipeline.start()
    sizes: list[int] = []

    def listen(event: JobEvent, status: JobStatus) -> None:
        if isinstance(event, CheckpointCompleted):
            sizes.extend(checkpoint.size_bytes for checkpoint in status.history[-1:])
            pids = tuple(slot.pid for slot in status.slots)
            _print(Progress(attempt=status.attempt, slot_pids=pids, events=status.records_in))
        if isinstance(event, AttemptRunning):
            is_running.set()

    job.add_listener(listen)
    _await_slots(job, is_running)
    began_s, began_cpu_s = time.monotonic(), tree_cpu_s(os.getpid())
    status = job.wait(TIMEOUT_S)
    return Result(
        events=status.records_in,
        seconds=round(time.monotonic() - began_s, 3),
        cpu_s=round(tree_cpu_s(os.getpid()) - began_cpu_s, 3),
        state_bytes_max=max([*sizes, *(one.size_bytes for one in status.history)], default=0),
    )


def _await_slots(job: Job, is_running: threading.Event) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_running.wait(0.002) and time.monotonic() < deadline:
        status = job.status()
        if status.state.ended or status.subtasks:
            return


def _print(line: Progress | Result) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _print(run(msgspec.json.decode(sys.argv[1], type=JobSpec)))
