"""The whole benchmark: `python -m benchmarks`, or `script/bench`, which sets everything up.

Exit status: 0 measured, 1 a run failed, its rows are wrong, or a figure has fallen.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.backlog import backlog_checkpoints
from benchmarks.beside_flink.databases import compare_ledgers
from benchmarks.beside_flink.measuring import Seconds
from benchmarks.beside_flink.measuring import compare as compare_with_flink
from benchmarks.beside_flink.works import WORKS
from benchmarks.changes.copies import measure_copies
from benchmarks.changes.measuring import measure_changes
from benchmarks.driver_kill import recover_driver
from benchmarks.job_spec import Backend, JobSpec
from benchmarks.machine import describe_machine
from benchmarks.promises import find_broken, read_promises
from benchmarks.ratios import ratios
from benchmarks.recovery import RECORDS_MIN, recover
from benchmarks.report import Report
from benchmarks.revisions import compare_revisions
from benchmarks.sinks.lake import lake_places
from benchmarks.sinks.measuring import measure_sinks
from benchmarks.sinks.places import places
from benchmarks.sinks.rows import Rows
from benchmarks.stage import Stage
from benchmarks.throughput import measure, variants
from onceflow.connectors.spark.class_archive import NoArchive, archive_classes
from onceflow.core.errors import OnceflowError
from onceflow.integration.workload import Payments

_JOB_SCENARIOS = ("ledger", "delivery", "databases", "storage", "unaligned")
_SINK_ROWS_MAX = 1_000_000


class Scenario(str, Enum):
    """The scenarios that can be measured by themselves."""

    LEDGER = "ledger"
    DELIVERY = "delivery"
    DATABASES = "databases"
    STORAGE = "storage"
    SINKS = "sinks"
    LAKE = "lake"
    RECOVERY = "recovery"
    UNALIGNED = "unaligned"
    FLINK_STATE = "flink-state"
    FLINK_DATABASES = "flink-databases"
    CHANGES = "changes"
    FIRST_COPY = "first-copy"


_ASKED_FOR = (
    Scenario.LAKE,
    Scenario.FLINK_STATE,
    Scenario.FLINK_DATABASES,
    Scenario.CHANGES,
    Scenario.FIRST_COPY,
)
_WITHOUT_STAGE = {
    *(Scenario.LAKE, Scenario.FLINK_STATE, Scenario.SINKS, Scenario.CHANGES, Scenario.FIRST_COPY)
}


class Backends(str, Enum):
    """The state backends."""

    HEAP = "heap"
    ROCKSDB = "rocksdb"
    BOTH = "both"

    @property
    def each(self) -> tuple[Backend, ...]:
        """The backends one by one."""
        match self:
            case Backends.HEAP:
                return ("heap",)
            case Backends.ROCKSDB:
                return ("rocksdb",)
            case Backends.BOTH:
                return ("heap", "rocksdb")


def bench(
    records: Annotated[int, typer.Option(help="Payments in the topic.", min=1)] = 2_000_000,
    backend: Annotated[Backends, typer.Option(help="State backend.")] = Backends.BOTH,
    runs: Annotated[int, typer.Option(help="Runs of everything; medians are shown.", min=1)] = 3,
    scenario: Annotated[
        list[Scenario] | None,
        typer.Option(
            help="Only this; may be repeated. Default: all but lake, which is part of sinks,"
            " changes, which has another load and needs a JDK 17, first-copy, which is part of"
            " changes, and flink-state and flink-databases, which need Java 17 and Maven."
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="REV",
            help="Measure this revision and REV in turns, and print the ratios of their figures.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare the ratios of this run with those of benchmarks/promises.json."
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure whole jobs, sinks beside plain bulk loads, and recovery, on real servers."""
    chosen = tuple(scenario or [one for one in Scenario if one not in _ASKED_FOR])
    console = Console(stderr=True, highlight=False)
    if compare is not None:
        names = [word for one in chosen for word in ("--scenario", one.value)]
        arguments = ["--records", str(records), "--backend", backend.value, *names]
        _compare(console, compare, arguments, runs, as_json=json_)
        return
    report = Report(records=records, runs=runs, machine=describe_machine())
    try:
        _measure(report, chosen, backend.each, lambda text: console.print(text, markup=False))
    except OnceflowError as error:
        report.error = str(error)
    report.load_average_end = tuple(round(load, 2) for load in os.getloadavg())
    if json_:
        print(json.dumps(report.as_json()), flush=True)
    else:
        out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        for table in report.tables():
            out.print(table)
        out.print(f"load average {report.machine['load_average']} -> {report.load_average_end}")
    if report.error:
        console.print(f"bench: {report.error}", markup=False, style="red", soft_wrap=True)
        raise typer.Exit(1)
    if check:
        broken = find_broken(ratios(report.jobs), read_promises())
        for promise in broken:
            console.print(f"bench: {promise}", markup=False, style="red", soft_wrap=True)
        if broken:
            raise typer.Exit(1)


def _compare(
    console: Console, revision: str, arguments: list[str], runs: int, *, as_json: bool
) -> None:
    try:
        comparison = compare_revisions(
            revision, arguments, runs, lambda text: console.print(text, markup=False)
        )
    except OnceflowError as error:
        console.print(f"bench: {error}", markup=False, style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(comparison.as_json()), flush=True)
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(
            comparison.table()
        )
    if comparison.fallen:
        raise typer.Exit(1)


def _measure(
    report: Report,
    chosen: tuple[Scenario, ...],
    backends: tuple[Backend, ...],
    say: Callable[[str], None],
) -> None:
    if not set(chosen) <= _WITHOUT_STAGE:
        with Stage(Payments(report.records)) as stage:
            say(f"producing {report.records:,} payments")
            _measure_on(stage, stage.fill(), report, chosen, backends, say)
    if Scenario.SINKS in chosen:
        # Servers of their own: what jobs have left in them would be on their way to disk still.
        with Stage(Payments(min(report.records, _SINK_ROWS_MAX))) as stage:
            rows = Rows.of(stage.payments)
            report.sinks = measure_sinks(places(stage), rows, report.runs, say)
    with tempfile.TemporaryDirectory(prefix="onceflow-bench-") as name:
        if Scenario.LAKE in chosen:
            rows = Rows.of(Payments(min(report.records, _SINK_ROWS_MAX)))
            report.sinks += measure_sinks(lake_places(Path(name)), rows, report.runs, say)
        if Scenario.UNALIGNED in chosen:
            report.durability.backlog = backlog_checkpoints(Path(name), say=say)
    if Scenario.CHANGES in chosen:
        report.changes = measure_changes(report.records, report.runs, say)
    if Scenario.CHANGES in chosen or Scenario.FIRST_COPY in chosen:
        report.copies = measure_copies(report.records, report.runs, say)
    if Scenario.FLINK_STATE in chosen:
        for turns in compare_with_flink(WORKS, backends, report.runs, Seconds(), say):
            report.beside_flink.append(turns)


def _measure_on(
    stage: Stage,
    topic: str,
    report: Report,
    chosen: tuple[Scenario, ...],
    backends: tuple[Backend, ...],
    say: Callable[[str], None],
) -> None:
    names = [one.value for one in chosen if one.value in _JOB_SCENARIOS]
    report.jobs = measure(stage, variants(names, report.records, backends, topic), report.runs, say)
    if Scenario.FLINK_DATABASES in chosen:
        for turns in compare_ledgers(stage, topic, backends, report.runs, say):
            report.ledgers_beside_flink.append(turns)
    if Scenario.RECOVERY in chosen:
        _recover(stage, topic, report, backends[0], say)


def _recover(
    stage: Stage, topic: str, report: Report, backend: Backend, say: Callable[[str], None]
) -> None:
    try:
        archive_classes()
    except NoArchive as error:
        say(f"Spark's JVM starts without an archive of classes: {error}")
    if report.records < RECORDS_MIN:
        say(f"producing {RECORDS_MIN:,} payments to recover in the midst of")
        stage.payments = Payments(RECORDS_MIN)
        topic = stage.fill("payments-to-recover")
    spec = JobSpec(records=stage.payments.records, topic=topic, backend=backend)
    for run in range(report.runs):
        report.durability.slot_recoveries.append(recover(stage, spec))
        again_s = report.durability.slot_recoveries[-1].rows_flow_s
        say(f"run {run + 1} of {report.runs}: rows flow {again_s} s after a slot's SIGKILL")
        report.durability.driver_recoveries.append(recover_driver(stage, spec))
        again_s = report.durability.driver_recoveries[-1].rows_flow_s
        say(f"run {run + 1} of {report.runs}: rows flow {again_s} s after a driver's start")


if __name__ == "__main__":
    typer.run(bench)
