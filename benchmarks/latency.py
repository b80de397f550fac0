"""How long a row takes from its producer until everybody sees it: `python -m benchmarks.latency`.

A producer, a process of its own, sends records at an even rate, each with the time at which it is
sent. A job with default settings reads them, keeps a running balance, and writes a row for each,
exactly once. A row is there when its transaction is committed: Postgres tells when that was
(`track_commit_timestamp`), and for Kafka a consumer that reads committed records looks at its clock
as each one comes. So a latency has all that a reader waits for, and nothing else. Rows of the first
seconds are left out. All are on one machine and have one clock.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import typer
from confluent_kafka import Consumer, Message, Producer
from psycopg import sql
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from onceflow import (
    CheckpointAcked,
    CheckpointCompleted,
    Checkpointing,
    CheckpointTriggered,
    JobEvent,
    JobStatus,
    NoRestart,
    Pipeline,
    SubtaskCommitted,
    session,
    sum_,
)
from onceflow.core.spi import Sink
from onceflow.integration.servers import EmbeddedKafka, EmbeddedPostgres
from onceflow.sinks import KafkaSink, PostgresSink
from onceflow.sources import KafkaSource

SENT = pa.schema([("account", pa.string()), ("amount", pa.int64()), ("sent_us", pa.int64())])
ACCOUNTS = 10_000
WARM_UP_S = 5.0
_PACE_S = 0.002
_PARTITIONS = 2
_TIMEOUT_S = 120.0

Latencies = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one job took: milliseconds from the sending of a row until it was there."""

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
    """Medians, from the trigger of a checkpoint on."""


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
            producer.produce(topic, value, partition=sent % _PARTITIONS)
            sent += 1
        producer.poll(0)
        time.sleep(_PACE_S)
    producer.flush(_TIMEOUT_S)


class Target:
    """Where the rows go, and what says when they were there."""

    def sink(self, topic: str) -> Sink:
        """Return the sink of one job."""
        raise NotImplementedError

    @contextmanager
    def watch(self, topic: str) -> Generator[list[Latencies]]:
        """Note each row's latency; what is yielded is filled at the end."""
        raise NotImplementedError


class PostgresTarget(Target):
    """A table; the server says when each row's transaction was committed."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._url = server.url

    def sink(self, topic: str) -> Sink:
        """Return the sink of one job."""
        return PostgresSink(self._url, table=_table(topic), create=True)

    @contextmanager
    def watch(self, topic: str) -> Generator[list[Latencies]]:
        """Ask the table when the job has ended."""
        latencies: list[Latencies] = []
        yield latencies
        query = sql.SQL(
            "SELECT sent_us, extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1e6 - sent_us"
            " FROM {}"
        ).format(sql.Identifier(_table(topic)))
        with psycopg.connect(self._url) as connection:
            rows = np.array(connection.execute(query).fetchall(), np.float64).reshape(-1, 2)
        latencies.append(rows)


class KafkaTarget(Target):
    """A topic; a consumer of committed records looks at its clock."""

    def __init__(self, server: EmbeddedKafka) -> None:
        self._server = server

    def sink(self, topic: str) -> Sink:
        """Return the sink of one job."""
        self._server.create_topic(f"{topic}-out", _PARTITIONS)
        return KafkaSink(self._server.bootstrap_servers, topic=f"{topic}-out")

    @contextmanager
    def watch(self, topic: str) -> Generator[list[Latencies]]:
        """Read the topic while the job runs."""
        latencies: list[Latencies] = []
        ended = threading.Event()
        rows: list[tuple[float, float]] = []
        consumer = Consumer(
            {
                "bootstrap.servers": self._server.bootstrap_servers,
                "group.id": topic,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
            }
        )
        consumer.subscribe([f"{topic}-out"])

        def read() -> None:
            messages: list[Message] = []
            # To the end of the topic, once the job has ended.
            while messages or not ended.is_set():
                messages = consumer.consume(5_000, 1.0 if ended.is_set() else 0.005)
                now_us = time.time_ns() / 1000
                for message in messages:
                    value = message.value()
                    if value is not None and message.error() is None:
                        sent_us = json.loads(value)["sent_us"]
                        rows.append((sent_us, now_us - sent_us))

        thread = threading.Thread(target=read, name="latency-consumer", daemon=True)
        thread.start()
        try:
            yield latencies
        finally:
            ended.set()
            thread.join(_TIMEOUT_S)
            consumer.close()
        latencies.append(np.array(rows, np.float64).reshape(-1, 2))


def _table(topic: str) -> str:
    return topic.replace("-", "_")


def measure(
    spark: SparkSession,
    kafka: EmbeddedKafka,
    target: Target,
    directory: Path,
    interval_ms: int,
    rate: int,
    seconds: float,
) -> Measured:
    """Run one job for `seconds` after it has warmed up."""
    topic = f"sent-{interval_ms}-{rate}"
    kafka.create_topic(topic, _PARTITIONS)
    pipeline = Pipeline(
        spark,
        name=topic,
        parallelism=_PARTITIONS,
        checkpointing=Checkpointing(storage=str(directory / topic), interval=interval_ms / 1000),
        restart=NoRestart(),
    )
    source = KafkaSource(kafka.bootstrap_servers, topic=topic, schema=SENT)
    balances = pipeline.read(source, uid="sent").key_by("account")
    balances.running(balance=sum_("amount"), uid="balance").write(target.sink(topic), uid="out")
    steps = Steps()
    with target.watch(topic) as watched:
        job = pipeline.start()
        job.wait_for(checkpoints=3)
        began_us = time.time_ns() / 1000
        process = multiprocessing.get_context("spawn").Process(
            target=produce, args=(kafka.bootstrap_servers, topic, rate, WARM_UP_S + seconds)
        )
        process.start()
        job.add_listener(steps)
        before = job.status().checkpoints_completed
        process.join(WARM_UP_S + seconds + _TIMEOUT_S)
        passed_s = time.time() - began_us / 1e6
        completed = job.status().checkpoints_completed - before
        # The last rows are there with the checkpoint after them.
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        job.stop()
    (rows,) = watched
    kept = rows[rows[:, 0] >= rows[:, 0].min() + WARM_UP_S * 1e6]
    spans_s = (kept[:, 0].max() - kept[:, 0].min()) / 1e6
    p50, p90, p99 = np.percentile(kept[:, 1], [50, 90, 99]) / 1000
    return Measured(
        interval_ms,
        rate,
        len(kept),
        round(len(kept) / spans_s),
        round(float(p50), 1),
        round(float(p90), 1),
        round(float(p99), 1),
        round(float(kept[:, 1].max()) / 1000, 1),
        round(completed / passed_s, 1),
        steps.medians_ms(),
    )


def latency(
    sink: Annotated[str, typer.Option(help="postgres or kafka.")] = "postgres",
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
    table = Table("interval, ms", "rows/s", "p50, ms", "p90", "p99", "max", "checkpoints/s")
    options = {"track_commit_timestamp": "on"}
    with (
        tempfile.TemporaryDirectory(prefix="onceflow-latency-") as directory,
        EmbeddedKafka() as kafka,
        EmbeddedPostgres(options) as postgres,
    ):
        target = PostgresTarget(postgres) if sink == "postgres" else KafkaTarget(kafka)
        spark = session(f"local[{_PARTITIONS}]")
        for one_rate in rate or [1_000, 20_000, 100_000]:
            for one_interval in interval or [25, 50, 100, 250, 1_000]:
                found = measure(
                    spark, kafka, target, Path(directory), one_interval, one_rate, seconds
                )
                print(json.dumps(_as_json(found)), file=sys.stdout if as_json else sys.stderr)
                figures = (found.p50_ms, found.p90_ms, found.p99_ms, found.max_ms)
                table.add_row(
                    str(found.interval_ms),
                    f"{found.rows_per_second:,.0f}",
                    *(f"{one:,.0f}" for one in figures),
                    f"{found.checkpoints_per_second:,.0f}",
                )
        spark.stop()
    if not as_json:
        load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
        Console(highlight=False).print(table, f"load average {load}")


def _as_json(found: Measured) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Measured.__dataclass_fields__}


if __name__ == "__main__":
    typer.run(latency)
