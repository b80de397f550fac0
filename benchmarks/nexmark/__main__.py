"""The benchmark Nexmark: `python -m benchmarks.nexmark`.

Each query runs twice, each time in a job of its own: into files, which are compared with the result
of DuckDB, and into nothing, which is measured. `--beside flink` measures Flink SQL, too.

Exit status: 0 all results are right, 1 a result is wrong or a job failed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.nexmark.beside_flink import (
    CHECKED_INTERVAL_US,
    FLINK_VERSION,
    Compared,
    compare_queries,
)
from benchmarks.nexmark.beside_flink import make_table as make_flink_table
from benchmarks.nexmark.expected import Judge
from benchmarks.nexmark.flink_queries import FLINK_QUERIES
from benchmarks.nexmark.job import JobSpec, Result
from benchmarks.nexmark.processes import run_job, run_killed_job
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.report import Measured, make_table
from benchmarks.stage import BenchmarkError

_KILLED_RUN_S = 10.0
"""The time that events take to come in a run that is killed."""


class Backend(str, Enum):
    """The state backends."""

    HEAP = "heap"
    ROCKSDB = "rocksdb"


class Beside(str, Enum):
    """The other engines."""

    FLINK = "flink"


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
    beside: Annotated[
        Beside | None,
        typer.Option(
            help="Read the events from Kafka, and run each query in turns with this engine, too."
            " Needs a JDK 17 and Maven."
        ),
    ] = None,
    warm_up: Annotated[
        float,
        typer.Option(
            help="CPU seconds that Flink's JVM uses for a query before it is measured.", min=0
        ),
    ] = 10.0,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Run the queries of Nexmark, check their results, and measure them."""
    console = Console(stderr=True, highlight=False)
    names = queries.split(",")
    if unknown := [name for name in names if name not in QUERIES]:
        raise typer.BadParameter(f"no query {unknown[0]!r}; there are {', '.join(QUERIES)}")
    if beside is not None and kill:
        raise typer.BadParameter("--beside and --kill exclude each other: --kill measures nothing")
    machine = describe_machine()
    spec = JobSpec(
        queries=(), events=events, directory="", backend=backend.value, parallelism=parallelism
    )
    facts: dict[str, object] = {
        "date": date.today().isoformat(),
        "machine": machine,
        "load_average": machine["load_average"],
        "events": events,
        "backend": backend.value,
        "parallelism": parallelism,
    }
    match beside:
        case None:
            is_right = _run_ours(names, spec, runs, kill, json_, facts, console)
        case Beside.FLINK:
            is_right = _run_beside_flink(names, spec, runs, warm_up, json_, facts, console)
    if not is_right:
        raise typer.Exit(1)


def _run_ours(
    names: Sequence[str],
    spec: JobSpec,
    runs: int,
    kill: bool,
    json_: bool,
    facts: Mapping[str, object],
    console: Console,
) -> bool:
    """Run the queries, and print the results. Return True if all are right."""
    checked = msgspec.structs.replace(spec, event_interval_us=CHECKED_INTERVAL_US)
    console.print(f"generating {spec.events:,} events for DuckDB")
    judge = Judge(replace(checked.source, splits_count=1))
    results: list[Measured] = []
    for name in names:
        measured = _measure(name, spec, checked, judge, runs=0 if kill else runs, kill=kill)
        console.print(measured.as_line(), markup=False, soft_wrap=True)
        results.append(measured)
    queries = [msgspec.to_builtins(measured) for measured in results]
    table = make_table(results, _describe(spec))
    _print_results({**facts, "killed": kill}, queries, table, json_)
    return not any(measured.difference for measured in results)


def _run_beside_flink(
    names: Sequence[str],
    spec: JobSpec,
    runs: int,
    warm_up_cpu_s: float,
    json_: bool,
    facts: Mapping[str, object],
    console: Console,
) -> bool:
    """Run the queries in turns with Flink, and print the results. Return True if all are right."""

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    results: list[Compared] = []
    chosen = [name for name in names if name in FLINK_QUERIES]
    error: BenchmarkError | None = None
    try:
        for compared in compare_queries(chosen, spec, runs, warm_up_cpu_s, say):
            say(compared.as_line())
            results.append(compared)
    except BenchmarkError as raised:
        error = raised
        say(str(error))
    facts = {**facts, "flink": FLINK_VERSION, "runs": runs, "warm_up_cpu_s": warm_up_cpu_s}
    queries = [compared.as_json() for compared in results]
    _print_results(facts, queries, make_flink_table(results, _describe(spec)), json_)
    return error is None and all(compared.is_right for compared in results)


def _describe(spec: JobSpec) -> str:
    return f"{spec.events:,} events, {spec.backend}, {spec.parallelism} slots"


def _print_results(
    facts: Mapping[str, object],
    queries: Sequence[Mapping[str, object]],
    table: Table,
    json_: bool,
) -> None:
    load = [round(average, 2) for average in os.getloadavg()]
    if json_:
        print(json.dumps({**facts, "load_average_end": load, "queries": queries}), flush=True)
        return
    out = Console(highlight=False, width=None if os.isatty(1) else 120)
    out.print(table)
    out.print(f"load average {facts['load_average']} -> {load}")


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
