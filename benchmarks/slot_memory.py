"""What a slot holds while its job goes on: `python -m benchmarks.slot_memory --minutes 60`.

A producer sends payments at an even rate; a job of two slots keeps a balance for each account and
upserts it into Postgres, with a checkpoint a second. The accounts are the same all the time, so
nothing should grow once each of them was seen.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.job_spec import Backend
from benchmarks.latency import ACCOUNTS, produce
from benchmarks.latency_targets import PARTITIONS, SENT
from benchmarks.machine import describe_machine
from onceflow import (
    Checkpointing,
    HeapBackend,
    Job,
    NoRestart,
    Pipeline,
    RocksDBBackend,
    session,
    sum_,
)
from onceflow.integration.servers import EmbeddedKafka, EmbeddedPostgres
from onceflow.sinks import PostgresSink
from onceflow.sources import KafkaSource

_TOPIC = "sent"
_PARTS = 12
_SAMPLE_S = 5.0
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Held:
    """What the slots held in one part of the run, medians."""

    until_s: int
    checkpoints: int
    slots_mib: tuple[float, ...]


def watch_slots(job: Job, seconds: float) -> list[Held]:
    """Return what each slot of `job` held in each of so many parts of `seconds`."""
    began, held = time.monotonic(), list[Held]()
    for part in range(1, _PARTS + 1):
        samples: list[list[float]] = []
        while time.monotonic() - began < seconds * part / _PARTS:
            time.sleep(_SAMPLE_S)
            samples.append([slot.rss_bytes / 2**20 for slot in job.status().slots])
        medians = tuple(round(statistics.median(one), 1) for one in zip(*samples, strict=True))
        held.append(
            Held(int(time.monotonic() - began), job.status().checkpoints_completed, medians)
        )
        sys.stderr.write(f"{held[-1]}\n")
    return held


def run(backend: Backend, rate: int, seconds: float) -> list[Held]:
    """Run one job for `seconds`, and watch its slots."""
    with (
        EmbeddedKafka() as kafka,
        EmbeddedPostgres() as postgres,
        tempfile.TemporaryDirectory(prefix="onceflow-bench-") as directory,
    ):
        kafka.create_topic(_TOPIC, PARTITIONS)
        spark = session(f"local[{PARTITIONS}]")
        pipeline = Pipeline(
            spark,
            name="memory",
            parallelism=PARTITIONS,
            checkpointing=Checkpointing(storage=str(Path(directory) / "checkpoints"), interval=1),
            state_backend=RocksDBBackend() if backend == "rocksdb" else HeapBackend(),
            restart=NoRestart(),
        )
        source = KafkaSource(kafka.bootstrap_servers, topic=_TOPIC, schema=SENT)
        keyed = pipeline.read(source, uid="sent").key_by("account")
        balances = keyed.running(balance=sum_("amount"), uid="balance")
        sink = PostgresSink(
            postgres.url,
            table="balances",
            create=True,
            write_mode="upsert",
            primary_key=("account",),
        )
        balances.write(sink, uid="out")
        job = pipeline.start()
        producer = multiprocessing.get_context("spawn").Process(
            target=produce,
            args=(kafka.bootstrap_servers, _TOPIC, rate, seconds + _TIMEOUT_S),
            daemon=True,
        )
        producer.start()
        try:
            job.wait_for(checkpoints=3)
            return watch_slots(job, seconds)
        finally:
            producer.kill()
            job.stop()
            spark.stop()


def bench(
    backend: Annotated[Backend, typer.Option(help="heap or rocksdb.")] = "heap",
    minutes: Annotated[float, typer.Option(help="How long the job is watched.")] = 60,
    rate: Annotated[int, typer.Option(help="Payments a second.", min=1)] = 5_000,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure the memory of a job's slots over time, on servers of its own."""
    held = run(backend, rate, minutes * 60)
    if json_:
        found = {"machine": describe_machine(), "backend": backend, "rate": rate}
        print(json.dumps(found | {"held": [asdict(one) for one in held]}))
        return
    title = f"{backend}, {rate:,} payments/s of {ACCOUNTS:,} accounts"
    table = Table(title=title, title_justify="left")
    for column in ("until, s", "checkpoints", "a slot holds, MiB", "of the second part"):
        table.add_column(column)
    for one in held:
        sizes = ", ".join(f"{size:.0f}" for size in one.slots_mib)
        ratio = max(one.slots_mib) / max(held[1].slots_mib)
        table.add_row(f"{one.until_s:,}", f"{one.checkpoints:,}", sizes, f"{ratio:.2f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(bench)
