"""The reports of `onceflow run`: its plan, its checks, and its progress on stderr.

The plan has operators, their inputs and exchanges, and all settings. `--check` runs the checks of
the pipeline and those of the doctor. On a terminal the progress is one line that changes.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from onceflow.cli.doctor.command import (
    MARGIN_S,
    Check,
    examine,
    examine_sink,
    examine_source,
)
from onceflow.cli.doctor.machine import check_java, check_python
from onceflow.cli.doctor.spark import SparkQuestion, check_spark
from onceflow.cli.doctor.storage import check_storage, missing_directories
from onceflow.cli.run.cluster import OpenedCluster
from onceflow.cli.terminal import print_listing, say
from onceflow.core.api.pipeline import Job, Pipeline, PipelineDescription
from onceflow.core.runtime.cluster.local_processes import LocalProcesses
from onceflow.core.runtime.driver.job_views import OperatorView
from onceflow.core.runtime.events.job_events import AttemptRunning, JobEvent
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.events.status_parts import (
    describe_copy,
    describe_progress,
    describe_warnings,
)
from onceflow.core.spi import CopyProgress, SourceProgress
from onceflow.core.spi.connector import Finding
from onceflow.core.storage import CheckpointStorage, FileSystemStorage, HdfsStorage, ObjectStorage


def print_plan(console: Console, plan: PipelineDescription) -> None:
    """Print `plan` for people: a listing of operators, then a listing of settings."""
    console.print(
        f"job {plan.name}, parallelism {plan.graph.parallelism}, checkpoints in"
        f" {plan.storage.open(plan.name)}",
        markup=False,
        soft_wrap=True,
    )
    headings = ("OPERATOR", "WHAT", "INPUT", "EXCHANGE")
    rows = [
        [(operator.uid, "bold"), *((cell, "") for cell in _describe(operator, plan))]
        for operator in plan.graph.operators
    ]
    print_listing(console, headings, rows)
    settings = [
        [
            (setting.name, "" if setting.origin == "default" else "bold"),
            *((cell, "") for cell in (setting.value, setting.origin)),
        ]
        for setting in plan.settings
    ]
    print_listing(console, ("SETTING", "VALUE", "ORIGIN"), settings)


def to_json(plan: PipelineDescription) -> dict[str, Any]:
    """Return the `--json` output for `plan`."""
    return {
        "job": plan.name,
        "storage": str(plan.storage.open(plan.name)),
        "graph": asdict(plan.graph),
        "settings": [asdict(setting) for setting in plan.settings],
    }


def _describe(operator: OperatorView, plan: PipelineDescription) -> tuple[str, str, str]:
    """Return an operator's kind and name, its inputs, and its exchange."""
    edges = [edge for edge in plan.graph.edges if edge.below == operator.uid]
    ways = dict.fromkeys(
        edge.exchange.replace("_", " ") + (f" {', '.join(edge.key)}" if edge.key else "")
        for edge in edges
    )
    what = operator.name if operator.name == operator.kind else f"{operator.kind} {operator.name}"
    letters = " (dead letters)" if operator.takes_dead_letters else ""
    exchange = ", ".join(ways) or ("-" if operator.kind == "source" else "same slot")
    return what + letters, ", ".join(operator.streams) or "-", exchange


def check_pipeline(
    pipeline: Pipeline, cluster: OpenedCluster, timeout_s: float
) -> tuple[Finding, ...]:
    """Return all findings. Ends the Spark session, because the last check starts its own.

    Raises:
        ConfigError: The graph is incomplete, or a sink is both written and retired.
    """
    plan = pipeline.describe()
    parallelism = plan.graph.parallelism
    checks = [Check("python", check_python), Check("pipeline", pipeline.validate)]
    location = _locate(plan.storage)
    missing = missing_directories(location) if location is not None else ()
    if location is not None:
        checks.append(Check("storage", partial(check_storage, location, missing)))
    for uid, source in plan.sources.items():
        if (questions := examine_source(source, parallelism)) is not None:
            checks.append(Check(f"server of {uid}", questions))
    for uid, sink in plan.sinks.items():
        if (questions := examine_sink(sink, parallelism)) is not None:
            checks.append(Check(f"server of {uid}", questions))
    findings = examine(checks, timeout_s)
    on_spark = not isinstance(pipeline.cluster, LocalProcesses)
    is_remote = type(pipeline.cluster).__module__.startswith("pyspark.sql.connect.")
    if not on_spark or is_remote:
        return findings
    # Close the session first: it may occupy all slots of the cluster.
    master = cluster.master or _read_master(pipeline)
    cluster.close()
    question = SparkQuestion(master, parallelism, location, timeout_s, missing)
    spark = [
        Check("java", partial(check_java, timeout_s)),
        Check("spark", partial(check_spark, question)),
    ]
    return (*findings, *examine(spark, timeout_s + MARGIN_S))


def _read_master(pipeline: Pipeline) -> str | None:
    context = getattr(pipeline.cluster, "sparkContext", None)
    return None if context is None else str(context.master)


def _locate(storage: CheckpointStorage) -> str | None:
    """Return `storage` as a path or URL for the doctor, or None if there is nothing to check."""
    match storage:
        case FileSystemStorage():
            return storage.root
        case ObjectStorage() | HdfsStorage():
            return storage.url
        case _:  # in memory, or a storage of another package
            return None


_PER_SECOND = 2.0
BAR_WIDTH = 24
"""The number of cells of the bar of a first copy."""


@contextmanager
def show_progress(job: Job) -> Generator[None]:
    """Show the progress of `job` during the block. Without a terminal, show only attempt starts."""
    job.add_listener(_say_when_running)
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    with Live(
        get_renderable=lambda: draw_progress(job.status()),
        console=console,
        refresh_per_second=_PER_SECOND,
        transient=True,
    ):
        yield


def draw_progress(status: JobStatus) -> Text:
    """Return a line with the state, the numbers of records and rows, and the last checkpoint.

    More lines follow for sources that measure bytes and times: bars of first copies, the distance,
    and warnings.
    """
    committed = sum(sink.rows_committed for sink in status.sinks)
    last = status.last_checkpoint
    checkpoint = f"{last.checkpoint} in {last.duration_ms:.0f} ms" if last else "none yet"
    lag = sum(status.lag.values())
    text = (
        f"{status.job}: {status.state.value}, {status.records_in:,} records read,"
        f" {committed:,} rows committed, checkpoint {checkpoint}"
    )
    text += f", {lag:,} records behind" if lag else ""
    measured = dict[str, SourceProgress]() if status.state.ended else status.progress
    lines = [Text(text, no_wrap=True, overflow="ellipsis")]
    lines += [
        _draw_copy(uid, copy) for uid, progress in measured.items() for copy in progress.copies
    ]
    lines += [
        Text(f"{uid} {text}", no_wrap=True, overflow="ellipsis")
        for uid, progress in measured.items()
        for text in describe_progress(replace(progress, copies=()), time.time())
    ]
    lines += [Text(warning, "yellow") for warning in describe_warnings(measured)]
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _draw_copy(uid: str, copy: CopyProgress) -> Text:
    """Return a bar of BAR_WIDTH cells and the numbers; without an estimate only the numbers."""
    text = Text(f"{uid} ")
    if copy.share is not None:
        filled = int(copy.share * BAR_WIDTH)
        text.append("━" * filled, "green").append("─" * (BAR_WIDTH - filled) + " ", "dim")
    return text.append(describe_copy(copy))


def _say_when_running(event: JobEvent, status: JobStatus) -> None:
    if isinstance(event, AttemptRunning):
        attempt = status.attempts[-1]
        restored = attempt.restored_checkpoint
        since = f"from checkpoint {restored}" if restored else "from the beginning"
        say(f"onceflow: job {status.job} runs, attempt {attempt.attempt}, {since}")
