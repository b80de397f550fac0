"""Measures the time of a row from its producer to its readers: `python -m benchmarks.latency`.

A producer, a process of its own, sends records at an even rate, each with the time at which it is
sent. A job with default settings reads them, keeps a running balance, and writes a row for each,
exactly once. A row is there when its transaction is committed: Postgres tells when that was
(`track_commit_timestamp`), and for Kafka a consumer that reads committed records looks at its clock
as each one comes. So a latency has all that a reader waits for, and nothing else. Rows of the first
seconds are left out. All are on one machine and have one clock.

With `--engine flink` the job is one of Flink's, in Java, which does the same work. A JVM compiles
its code while it runs, and rows queue up meanwhile. So Flink's first 20 seconds are left out, ours
5, and its JVM has run a job for 40 seconds before the first one that is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from benchmarks.flink_latency import FLINK_WARM_UP_S, FlinkJob, run_flink
from benchmarks.latency_targets import PARTITIONS, SENT, KafkaTarget, PostgresTarget, Target
from onceflow import (
    CheckpointAcked,
    CheckpointCompleted,
    Checkpointing,
    CheckpointTriggered,
    Job,
    JobEvent,
    JobStatus,
    NoRestart,
    Pipeline,
    SubtaskCommitted,
    session,
    sum_,
)
from onceflow.integration.servers import EmbeddedKafka, EmbeddedPostgres
from onceflow.sources import KafkaSource

ACCOUNTS = 10_000
WARM_UP_S = 5.0
_PACE_S = 0.002
_CHECKPOINTS_BEFORE = 3
"""A job has completed as many before records are sent: all of it runs."""
_TIMEOUT_S = 120.0


class EngineName(str, Enum):
    """The engine that runs the measured job."""

    ONCEFLOW = "onceflow"
    FLINK = "flink"

    @property
    def warm_up_s(self) -> float:
        """The time that a job runs before it is measured."""
        return WARM_UP_S if self is EngineName.ONCEFLOW else FLINK_WARM_UP_S


@dataclass(frozen=True, slots=True)
class Trial:
    """One job to measure."""

    engine: EngineName
    interval_ms: int
    rate: int
    name: str = "sent"

    @property
    def topic(self) -> str:
        """The topic that the job reads. Its target is named after it."""
        return f"{self.name}-{self.engine.value}-{self.interval_ms}-{self.rate}"


REHEARSAL = Trial(EngineName.FLINK, interval_ms=100, rate=20_000, name="rehearsed")
"""What a fresh JVM runs first, for its 20 seconds and as many again."""


class MeasuredJob(Protocol):
    """A job of any engine, from its start on."""

    def count_checkpoints(self) -> int:
        """Return how many checkpoints are completed."""
        ...

    def wait_for(self, checkpoints: int) -> None:
        """Return once so many checkpoints are completed."""
        ...

    def stop(self) -> None:
        """Return when the job has ended."""
        ...

    def steps_ms(self) -> dict[str, float]:
        """Return medians of when each step of a checkpoint had ended; empty if not known."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """The milliseconds of each row of one job, from its sending until it was visible."""

    engine: str
    interval_ms: int
    rate: int
    rows: int
    rows_per_second: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    checkpoints_per_second: float
    steps_ms: dict[str, float]
    """Medians, from the trigger of a checkpoint on; not of Flink's."""


STEPS = (
    "sources have sent the barrier",
    "sinks have prepared their rows",
    "all is acknowledged",
    "decided",
    "all is committed",
)


class Steps:
    """A listener that notes when each checkpoint had come so far, from its trigger on."""

    def __init__(self) -> None:
        self._triggered_s: dict[int, float] = {}
        self._ended_ms: dict[int, dict[str, float]] = {}

    def __call__(self, event: JobEvent, status: JobStatus) -> None:
        """Note one event; on a thread of the driver's."""
        if isinstance(event, CheckpointTriggered):
            self._triggered_s[event.checkpoint] = event.at.monotonic_s
            self._ended_ms[event.checkpoint] = {}
        elif (
            isinstance(event, CheckpointAcked | CheckpointCompleted | SubtaskCommitted)
            and event.checkpoint in self._triggered_s
        ):
            self._note_step(event)

    def medians_ms(self) -> dict[str, float]:
        """Return when each step had ended, of checkpoints that came so far as to be committed."""
        whole = [ended for ended in self._ended_ms.values() if len(ended) == len(STEPS)]
        return {
            step: round(float(np.median([one[step] for one in whole])), 1) if whole else 0.0
            for step in STEPS
        }

    def _note_step(self, event: CheckpointAcked | CheckpointCompleted | SubtaskCommitted) -> None:
        passed_ms = (event.at.monotonic_s - self._triggered_s[event.checkpoint]) * 1000
        match event:
            case CheckpointAcked(subtask=subtask, timings=timings):
                began_ms = timings.start_delay_ms + timings.alignment_ms
                step = STEPS[0] if subtask.chain == "sent" else STEPS[1]
                self._note(event.checkpoint, step, began_ms + timings.sync_ms)
                self._note(event.checkpoint, STEPS[2], passed_ms)
            case CheckpointCompleted():
                self._note(event.checkpoint, STEPS[3], passed_ms)
            case SubtaskCommitted():
                self._note(event.checkpoint, STEPS[4], passed_ms)

    def _note(self, checkpoint: int, step: str, ended_ms: float) -> None:
        ended = self._ended_ms[checkpoint]
        ended[step] = max(ended_ms, ended.get(step, 0.0))


def produce(servers: str, topic: str, rate: int, seconds: float) -> None:
    """Send `rate` records a second for `seconds`, a few every two milliseconds."""
    # `linger.ms`: what a producer waits to fill a batch is part of a row's latency.
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 1, "acks": "all"})
    began = time.monotonic()
    sent = 0
    while (passed := time.monotonic() - began) < seconds:
        due = int(passed * rate)
        now_us = time.time_ns() // 1000
        while sent < due:
            value = (
                f'{{"account": "{sent % ACCOUNTS}", "amount": {sent % 999}, "sent_us": {now_us}}}'
            )
            producer.produce(topic, value, partition=sent % PARTITIONS)
            sent += 1
        producer.poll(0)
        time.sleep(_PACE_S)
    producer.flush(_TIMEOUT_S)


class OnceflowJob:
    """A job of ours."""

    def __init__(self, job: Job) -> None:
        """Note steps from now on."""
        self._job = job
        self._steps = Steps()
        job.add_listener(self._steps)

    def count_checkpoints(self) -> int:
        """Return how many checkpoints are completed."""
        return self._job.status().checkpoints_completed

    def wait_for(self, checkpoints: int) -> None:
        """Return once so many checkpoints are completed."""
        self._job.wait_for(checkpoints=checkpoints)

    def stop(self) -> None:
        """Return when the job has ended."""
        self._job.stop()

    def steps_ms(self) -> dict[str, float]:
        """Return medians of when each step of a checkpoint had ended."""
        return self._steps.medians_ms()


Start = Callable[[Trial], MeasuredJob]
"""Starts a job; returns once it has completed `_CHECKPOINTS_BEFORE` checkpoints."""


@contextmanager
def run_onceflow(kafka: EmbeddedKafka, target: Target, directory: Path) -> Generator[Start]:
    """Yield what starts a job of ours, in one session of Spark; after the block that is gone."""
    spark = session(f"local[{PARTITIONS}]")

    def start(trial: Trial) -> OnceflowJob:
        pipeline = Pipeline(
            spark,
            name=trial.topic,
            parallelism=PARTITIONS,
            checkpointing=Checkpointing(
                storage=str(directory / trial.topic), interval=trial.interval_ms / 1000
            ),
            restart=NoRestart(),
        )
        source = KafkaSource(kafka.bootstrap_servers, topic=trial.topic, schema=SENT)
        balances = (
            pipeline.read(source, uid="sent")
            .key_by("account")
            .running(balance=sum_("amount"), uid="balance")
        )
        balances.write(target.sink(trial.topic), uid="out")
        job = pipeline.start()
        job.wait_for(checkpoints=_CHECKPOINTS_BEFORE)
        return OnceflowJob(job)

    try:
        yield start
    finally:
        spark.stop()


@contextmanager
def run_engine(
    engine: EngineName, kafka: EmbeddedKafka, target: Target, directory: Path
) -> Generator[Start]:
    """Yield what starts a job of `engine`; after the block the engine is gone."""
    match engine:
        case EngineName.ONCEFLOW:
            with run_onceflow(kafka, target, directory) as start:
                yield start
        case EngineName.FLINK:
            with run_flink(directory) as jvm:

                def start_in_jvm(trial: Trial) -> FlinkJob:
                    sink = target.flink_sink(trial.topic)
                    job = jvm.start(kafka.bootstrap_servers, trial.topic, sink, trial.interval_ms)
                    job.wait_for(checkpoints=_CHECKPOINTS_BEFORE)
                    return job

                measure(REHEARSAL, start_in_jvm, kafka, target, FLINK_WARM_UP_S)
                yield start_in_jvm


def measure(
    trial: Trial, start: Start, kafka: EmbeddedKafka, target: Target, seconds: float
) -> Measured:
    """Run one job for `seconds` after it has warmed up."""
    kafka.create_topic(trial.topic, PARTITIONS)
    produced_s = trial.engine.warm_up_s + seconds
    with target.watch(trial.topic) as watched:
        job = start(trial)
        began_us = time.time_ns() / 1000
        process = multiprocessing.get_context("spawn").Process(
            target=produce,
            args=(kafka.bootstrap_servers, trial.topic, trial.rate, produced_s),
            daemon=True,
        )
        process.start()
        before = job.count_checkpoints()
        process.join(produced_s + _TIMEOUT_S)
        passed_s = time.time() - began_us / 1e6
        completed = job.count_checkpoints() - before
        # The last rows are there with the checkpoint after them.
        job.wait_for(checkpoints=before + completed + 2)
        job.stop()
    (rows,) = watched
    kept = rows[rows[:, 0] >= rows[:, 0].min() + trial.engine.warm_up_s * 1e6]
    spans_s = (kept[:, 0].max() - kept[:, 0].min()) / 1e6
    p50, p90, p99 = np.percentile(kept[:, 1], [50, 90, 99]) / 1000
    return Measured(
        trial.engine.value,
        trial.interval_ms,
        trial.rate,
        len(kept),
        round(len(kept) / spans_s),
        round(float(p50), 1),
        round(float(p90), 1),
        round(float(p99), 1),
        round(float(kept[:, 1].max()) / 1000, 1),
        round(completed / passed_s, 1),
        job.steps_ms(),
    )


def latency(
    sink: Annotated[str, typer.Option(help="postgres or kafka.")] = "postgres",
    engine: Annotated[
        list[EngineName] | None,
        typer.Option(
            help="Whose job is measured; may be repeated, and each pair is then measured with one"
            " after the other. Default: onceflow. flink needs Java 17 and Maven."
        ),
    ] = None,
    interval: Annotated[
        list[int] | None,
        typer.Option(help="Milliseconds between checkpoints; may be repeated.", min=1),
    ] = None,
    rate: Annotated[
        list[int] | None, typer.Option(help="Rows a second; may be repeated.", min=1)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Measured for each pair.", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Measure every interval with every rate, and print a row for each."""
    trials = [
        Trial(one_engine, one_interval, one_rate)
        for one_rate in rate or [1_000, 20_000, 100_000]
        for one_interval in interval or [25, 50, 100, 250, 1_000]
        for one_engine in dict.fromkeys(engine or [EngineName.ONCEFLOW])
    ]
    measured: list[Measured] = []
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="onceflow-latency-"))
        kafka = stack.enter_context(EmbeddedKafka())
        postgres = stack.enter_context(EmbeddedPostgres({"track_commit_timestamp": "on"}))
        target = PostgresTarget(postgres) if sink == "postgres" else KafkaTarget(kafka)
        starts = {
            engine: stack.enter_context(run_engine(engine, kafka, target, Path(name)))
            for engine in dict.fromkeys(trial.engine for trial in trials)
        }
        for trial in trials:
            measured.append(measure(trial, starts[trial.engine], kafka, target, seconds))
            line = json.dumps(_as_json(measured[-1]))
            print(line, file=sys.stdout if as_json else sys.stderr, flush=True)
    if not as_json:
        load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        console.print(_to_table(measured), f"load average {load}")


def _to_table(measured: Sequence[Measured]) -> Table:
    table = Table(
        "engine", "interval, ms", "rows/s", "p50, ms", "p90", "p99", "max", "checkpoints/s"
    )
    for one in measured:
        figures = (one.p50_ms, one.p90_ms, one.p99_ms, one.max_ms)
        table.add_row(
            one.engine,
            str(one.interval_ms),
            f"{one.rows_per_second:,.0f}",
            *(f"{figure:,.0f}" for figure in figures),
            f"{one.checkpoints_per_second:,.0f}",
        )
    return table


def _as_json(found: Measured) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Measured.__dataclass_fields__}


if __name__ == "__main__":
    typer.run(latency)
