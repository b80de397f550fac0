"""The flags of `onceflow run` and its exit status.

0  the job has finished, or a signal has stopped it with a last checkpoint; --check: no problem
1  the job failed, was cancelled, or had not finished within --timeout; --check: there are problems
2  usage: the target, a flag or a setting is wrong
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import typer

from onceflow.cli.doctor.command import print_findings
from onceflow.cli.run.cluster import OpenedCluster
from onceflow.cli.run.file.schema import make_schema
from onceflow.cli.run.reports import check_pipeline, print_plan, show_progress, to_json
from onceflow.cli.run.target import TargetFailed, load_target
from onceflow.cli.terminal import console, say
from onceflow.core.api.pipeline import Job, Pipeline
from onceflow.core.errors import ConfigError, OnceflowError, SavepointRefused
from onceflow.core.runtime.cluster.local_processes import LocalProcesses
from onceflow.core.runtime.events.job_events import JobState
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.settings.configuration import force_settings, parse_assignments
from onceflow.core.spi.connector import Level

EXIT_FAILED, EXIT_USAGE = 1, 2
CHECK_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
"""The time for the last checkpoint after --timeout, before the job is cancelled."""

Target: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        help="The job: a file connector.toml, or job.py:NAME or package.module:NAME. NAME is a"
        " Pipeline, or a function that returns one and takes a Spark session or nothing.",
        show_default=False,
    ),
]
Master: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Spark master (local[4], spark://host:7077, sc://host:15002), or local-processes:"
        " without Spark. Default: as Spark is configured, else local[*]."
    ),
]
Assignments: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Setting, as name=value; may be repeated. Overrides the program. `onceflow config`"
        " prints all names.",
    ),
]
Savepoint: TypeAlias = Annotated[
    str | None, typer.Option(help="Savepoint or retained checkpoint from which the job starts.")
]
Claim: TypeAlias = Annotated[
    bool, typer.Option("--claim", help="Delete that savepoint once the job has started from it.")
]
Rewind: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--allow-rewind",
        help=(
            "Allow a start although rows that were committed since then will be written a second"
            " time."
        ),
    ),
]
Timeout: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which the job is stopped with a last checkpoint; exit status 1."
        " With --check: seconds for each check.",
        min=0.0,
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@dataclass(frozen=True, slots=True)
class _Start:
    """The options of the start, and the time limit of the run."""

    from_savepoint: str | None
    claim: bool
    allow_rewind: bool
    timeout_s: float | None


def run(
    target: Target = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check everything that can be checked before a start, and exit."
        ),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the operators and every setting, and exit.")
    ] = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the JSON schema of connector files, and exit."),
    ] = False,
    master: Master = None,
    assignments: Assignments = None,
    from_savepoint: Savepoint = None,
    claim: Claim = False,
    allow_rewind: Rewind = False,
    timeout: Timeout = None,
    json_: Json = False,
) -> None:
    """Run a pipeline or a connector file, until its input ends or SIGINT or SIGTERM stops it.

    The first signal stops the job with a last checkpoint; a second one cancels it. The next run
    goes on where it ended. Exit status: 0 finished or stopped, 1 failed, 2 usage.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cluster = OpenedCluster(master)
    with _exit_status(json_), _closing(cluster):
        if schema:
            print(json.dumps(make_schema(), indent=2))
            return
        if target is None:
            raise ConfigError("give the job to run: connector.toml, job.py:NAME or module:NAME")
        if check and plan:
            raise ConfigError("--check and --plan: give one of the two")
        with force_settings(parse_assignments(assignments or ())):
            pipeline = _build(target, cluster, only_describes=plan)
        if plan:
            _print_plan(pipeline, json_)
        elif check:
            _check(pipeline, cluster, timeout or CHECK_TIMEOUT_S, json_)
        else:
            _run(pipeline, _Start(from_savepoint, claim, allow_rewind, timeout), json_)


def _build(text: str, cluster: OpenedCluster, *, only_describes: bool) -> Pipeline:
    target = load_target(text)
    if target.is_file:
        # Build once without Spark, so that errors are found before Spark starts, which takes
        # seconds.
        described = target.build(LocalProcesses)
        if only_describes:
            return described
    cluster.master = cluster.master or target.master
    cluster.conf.update(target.spark)
    pipeline = target.build(cluster.open)
    if not target.takes_cluster:
        if cluster.master is not None:
            raise ConfigError(
                f"--master {cluster.master}: {text} already has a cluster. Make it a function of"
                " a Spark session, and the session is opened at this master"
            )
        cluster.adopt(pipeline)
    return pipeline


def _print_plan(pipeline: Pipeline, json_: bool) -> None:
    description = pipeline.describe()
    if json_:
        print(json.dumps(to_json(description)))
    else:
        print_plan(console(), description)


def _check(pipeline: Pipeline, cluster: OpenedCluster, timeout_s: float, json_: bool) -> None:
    findings = check_pipeline(pipeline, cluster, timeout_s)
    is_well = all(finding.level is not Level.PROBLEM for finding in findings)
    if json_:
        print(json.dumps({"ok": is_well, "findings": [result.as_json() for result in findings]}))
    else:
        print_findings(findings)
    if not is_well:
        raise typer.Exit(EXIT_FAILED)


def _run(pipeline: Pipeline, start: _Start, json_: bool) -> None:
    job = pipeline.start(
        from_savepoint=start.from_savepoint, claim=start.claim, allow_rewind=start.allow_rewind
    )
    with job.stopping_on_signals(), show_progress(job):
        status, error = _await_end(job, start.timeout_s)
    is_well = not error and status.state in {JobState.FINISHED, JobState.STOPPED}
    exit_status = 0 if is_well else EXIT_FAILED
    if json_:
        print(json.dumps(_describe(status) | {"error": error, "exit_status": exit_status}))
    else:
        print(status)
        if error:
            say(f"onceflow: {error}", style="red")
    if exit_status:
        raise typer.Exit(exit_status)


def _await_end(job: Job, timeout_s: float | None) -> tuple[JobStatus, str]:
    """Return the status of the job at its end, and the error or ""."""
    try:
        return job.wait(timeout_s), ""
    except OnceflowError as error:
        return job.status(), str(error)
    except TimeoutError:
        pass
    late = f"job {job.status().job!r} had not finished after {timeout_s:g} s"
    try:
        status = job.stop(STOP_TIMEOUT_S)
    except TimeoutError:
        status = job.cancel(None)
    except OnceflowError as error:
        return job.status(), f"{late}, and then failed: {error}"
    return status, f"{late}: {status.state.value}"


def _describe(status: JobStatus) -> dict[str, object]:
    last = status.last_checkpoint
    return {
        "job": status.job,
        "state": status.state.value,
        "attempt": status.attempt,
        "records_in": status.records_in,
        "rows_committed": sum(sink.rows_committed for sink in status.sinks),
        "rejected": status.rejected,
        "checkpoints_completed": status.checkpoints_completed,
        "last_checkpoint": last.checkpoint if last else None,
        "restored_savepoint": status.restored_savepoint or None,
        "summary": str(status),
    }


@contextmanager
def _closing(cluster: OpenedCluster) -> Generator[None]:
    try:
        yield
    finally:
        cluster.close()


@contextmanager
def _exit_status(json_: bool) -> Generator[None]:
    """Print errors of the block, and exit with their exit status."""
    try:
        yield
    except TargetFailed as failed:
        cause = failed.__cause__
        assert cause is not None
        if not json_:
            say("".join(traceback.format_exception(_cut_our_frames(cause))).rstrip())
        raise _end(f"{failed}: {type(cause).__name__}: {cause}", EXIT_FAILED, json_) from failed
    except OnceflowError as error:
        is_usage = isinstance(error, ConfigError) and not isinstance(error, SavepointRefused)
        raise _end(str(error), EXIT_USAGE if is_usage else EXIT_FAILED, json_) from error


def _cut_our_frames(error: BaseException) -> BaseException:
    """Return `error` with a traceback that starts in the user's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if "importlib" not in file and not file.endswith("cli/run/target.py"):
            break
        trace = trace.tb_next
    return error.with_traceback(trace)


def _end(text: str, exit_status: int, json_: bool) -> typer.Exit:
    if json_:
        print(json.dumps({"error": text, "exit_status": exit_status}))
    else:
        say(f"onceflow: {text}", style="red")
    return typer.Exit(exit_status)
