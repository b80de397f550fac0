"""The benchmark Nexmark: `python -m benchmarks.nexmark`.

Each query runs twice, each time in a job of its own: into files, which are compared with the result
of DuckDB, and into nothing, which is measured. Exit status: 0 all results are right, 1 a result is
wrong or a job failed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.machine import describe_machine
from benchmarks.nexmark.expected import Judge
from benchmarks.nexmark.job import JobSpec, Result
from benchmarks.nexmark.processes import run_job, run_killed_job
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.report import Measured, make_table
from benchmarks.stage import BenchmarkError

_CHECKED_INTERVAL_US = 1_000
"""Each event of a checked run has a time of its own, so that the last of several is defined."""
_KILLED_RUN_S = 10.0
"""The time that events take to come in a run that is killed."""


class Backend(str, Enum):
    """The state backends."""

    HEAP = "heap"
    ROCKSDB = "rocksdb"


def bench(
    events: Annotated[int, typer.Option(help="Number of events.", min=1)] = 1_000_000,
    queries: Annotated[
        str, typer.Option(help="Names of queries, separated by commas. Default: all.")
    ] = ",".join(QUERIES),
    backend: Annotated[Backend, typer.Option(help="State backend.")] = Backend.HEAP,
    parallelism: Annotated[int, typer.Option(help="Number of slots.", min=1)] = 1,
    runs: Annotated[int, typer.Option(help="Measured runs; the median is shown.", min=1)] = 1,
    kill: Annotated[
        bool,
        typer.Option(
            "--kill",
            help="Send SIGKILL to a slot and then to the driver of each job, and compare the"
            " results. Nothing is measured.",
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Run the queries of Nexmark, check their results, and measure them."""
    console = Console(stderr=True, highlight=False)
    names = queries.split(",")
    if unknown := [name for name in names if name not in QUERIES]:
        raise typer.BadParameter(f"no query {unknown[0]!r}; there are {', '.join(QUERIES)}")
    machine = describe_machine()
    spec = JobSpec(
        queries=(), events=events, directory="", backend=backend.value, parallelism=parallelism
    )
    checked = msgspec.structs.replace(spec, event_interval_us=_CHECKED_INTERVAL_US)
    console.print(f"generating {events:,} events for DuckDB")
    judge = Judge(replace(checked.source, splits_count=1))
    results: list[Measured] = []
    for name in names:
        measured = _measure(name, spec, checked, judge, runs=0 if kill else runs, kill=kill)
        console.print(measured.as_line(), markup=False, soft_wrap=True)
        results.append(measured)
    if json_:
        print(
            json.dumps(
                {
                    "date": date.today().isoformat(),
                    "machine": machine,
                    "load_average": machine["load_average"],
                    "load_average_end": [round(load, 2) for load in os.getloadavg()],
                    "events": events,
                    "backend": backend.value,
                    "parallelism": parallelism,
                    "killed": kill,
                    "queries": [msgspec.to_builtins(measured) for measured in results],
                }
            ),
            flush=True,
        )
    else:
        out = Console(highlight=False, width=None if os.isatty(1) else 120)
        out.print(make_table(results, f"{events:,} events, {backend.value}, {parallelism} slots"))
        out.print(f"load average {machine['load_average']} -> {os.getloadavg()}")
    if any(measured.difference for measured in results):
        raise typer.Exit(1)


def _measure(
    query: str, spec: JobSpec, checked: JobSpec, judge: Judge, *, runs: int, kill: bool
) -> Measured:
    """Return the result of one query."""
    try:
        difference = ""
        if kill:
            difference = _check_killed(query, checked, judge)
        else:
            with _directory() as directory:
                run_job(_of(checked, query, directory))
                difference = judge.find_difference(query, Path(directory, query))
        measured: list[Result] = []
        for _ in range(runs):
            with _directory() as directory:
                job = _of(spec, query, directory)
                measured.append(run_job(msgspec.structs.replace(job, sink="discard")))
    except BenchmarkError as error:
        return Measured(query=query, difference=str(error))
    return Measured.of(query, difference, measured)


def _check_killed(query: str, checked: JobSpec, judge: Judge) -> str:
    with _directory() as directory:
        job = msgspec.structs.replace(
            _of(checked, query, directory),
            events_per_second=checked.events / _KILLED_RUN_S,
            checkpoint_interval_s=0.2,
            restarts=True,
        )
        run_killed_job(job)
        return judge.find_difference(query, Path(directory, query))


def _of(spec: JobSpec, query: str, directory: str) -> JobSpec:
    return msgspec.structs.replace(spec, queries=(query,), directory=directory)


@contextmanager
def _directory() -> Generator[str, None, None]:
    directory = tempfile.mkdtemp(prefix="onceflow-nexmark-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    typer.run(bench)
