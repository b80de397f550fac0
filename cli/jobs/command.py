"""The flags of the commands for running jobs, and their exit status.

0  done; for `status --watch`: the job ended without failure
1  refused or failed
2  usage: an option is wrong, or names something that does not exist
3  no driver of the job answers: none runs, it was killed, or another program answers
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import urlencode

import typer

from onceflow.cli.closed_pipe import end_if_unread
from onceflow.cli.jobs.client import (
    Answer,
    Driver,
    DriverLocation,
    DriverNotThere,
    DriverRefused,
    DriverSilent,
    begin,
    last_run_of,
    state_without_driver,
    within,
)
from onceflow.cli.jobs.driver_access import DriverAccess, UnknownDriverHost, remember_host
from onceflow.cli.terminal import console, print_listing, say
from onceflow.core.errors import ConfigError, OnceflowError, SavepointRefused
from onceflow.core.runtime.events.job_events import JobState
from onceflow.core.storage import JobStorage
from onceflow.core.storage.described_storage import savepoint_directory

EXIT_REFUSED, EXIT_USAGE, EXIT_GONE = 1, 2, 3

Name: TypeAlias = Annotated[str, typer.Argument(help="The job's name.")]
Storage: TypeAlias = Annotated[
    str,
    typer.Option(
        help="The job's checkpoint storage: a directory, or a bucket's URL. Default:"
        " ONCEFLOW_STORAGE of the environment, else ONCEFLOW_CHECKPOINTING_STORAGE.",
        envvar=["ONCEFLOW_STORAGE", "ONCEFLOW_CHECKPOINTING_STORAGE"],
        # Otherwise the error of a missing option shows a Python list.
        show_envvar=False,
    ),
]
Timeout: TypeAlias = Annotated[
    float, typer.Option(help="Time limit of the operation, in seconds.", min=0.0)
]
AnswerTimeout: TypeAlias = Annotated[
    float,
    typer.Option(help="Time limit of each answer of storage or driver, in seconds.", min=0.0),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Token file of the driver. Default: the file driver.token in checkpoint storage.",
        envvar="ONCEFLOW_TOKEN_FILE",
    ),
]
Authority: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="PEM file of the authority that signed the driver's certificate.",
        envvar="ONCEFLOW_AUTHORITY",
    ),
]
DriverHost: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Another machine to which the token may be sent. Repeat it for several machines."
        " Without it, commands such as status ask once for each machine.",
        envvar="ONCEFLOW_DRIVER_HOST",
    ),
]
Directory: TypeAlias = Annotated[
    str | None,
    typer.Option("--path", help="Directory for the savepoint. Default: the job's own."),
]
Native: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--native",
        help="Write the state backend's native form: faster, but only this backend can read it.",
    ),
]
ANSWER_TIMEOUT_S = 10.0


def list_jobs(
    storage: Storage,
    json_: Json = False,
    timeout: Annotated[
        float,
        typer.Option(help="How long to wait for the storage and all drivers, in seconds.", min=0.0),
    ] = 60.0,
    token_file: TokenFile = None,
    authority: Authority = None,
    driver_host: DriverHost = None,
) -> None:
    """List the jobs in a checkpoint storage, and what their drivers say."""
    with _exit_status(json_):
        deadline = time.monotonic() + timeout
        access = make_access(token_file, authority, driver_host)
        location = DriverLocation(storage, "_", ANSWER_TIMEOUT_S)
        names = within(timeout, f"checkpoint storage {storage}", lambda: _open_jobs(location))
        # Query all jobs concurrently, so that a job with unreadable files does not delay the
        # others.
        asked = {
            name: begin(
                f"job {name}", partial(_summary, DriverLocation(storage, name, 2.0, access))
            )
            for name in names
        }
        wait(asked.values(), max(0.0, deadline - time.monotonic()))
        summaries = [
            summary.result() if summary.done() else _late(name, timeout)
            for name, summary in asked.items()
        ]
        if json_:
            print(json.dumps({"jobs": summaries}))
            return
        headings = ("JOB", "STATE", "ATTEMPT", "CHECKPOINT", "DRIVER")
        rows = [
            [(_format_cell(job_summary, key), "") for key in map(str.lower, headings)]
            for job_summary in summaries
        ]
        print_listing(console(), headings, rows)


def status(
    name: Name,
    storage: Storage,
    json_: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print the status repeatedly until the job has ended.")
    ] = False,
    every: Annotated[
        float, typer.Option(help="Polling interval of --watch, in seconds.", min=0.1)
    ] = 1.0,
    timeout: AnswerTimeout = 60.0,
    token_file: TokenFile = None,
    authority: Authority = None,
    driver_host: DriverHost = None,
) -> None:
    """Tell how a running job is: state, checkpoints, sinks."""
    with _exit_status(json_):
        access = make_access(token_file, authority, driver_host)
        driver = find_driver(timeout, name, storage, access)
        watched = False
        while True:
            try:
                status = within(
                    timeout, _who_answers(name), lambda: driver.get("status", "state", "summary")
                )
            except DriverNotThere:
                if watched and (run := last_run_of(driver.storage)) and run.ended_ms:
                    raise typer.Exit(EXIT_REFUSED if run.state == "failed" else 0) from None
                raise
            watched = True
            print(json.dumps(status) if json_ else status["summary"], flush=True)
            if not watch:
                return
            if (state := JobState(status["state"])).ended:
                raise typer.Exit(EXIT_REFUSED if state is JobState.FAILED else 0)
            end_if_unread()
            time.sleep(every)


def checkpoint(
    name: Name,
    storage: Storage,
    timeout: Timeout = 600.0,
    json_: Json = False,
    token_file: TokenFile = None,
    authority: Authority = None,
    driver_host: DriverHost = None,
) -> None:
    """Take a checkpoint of a running job now."""
    access = make_access(token_file, authority, driver_host)
    with _driver_until(timeout, name, storage, access, json_) as (driver, deadline):
        done = driver.outcome(driver.post("checkpoint"), deadline - time.monotonic())
        _tell(done, f"checkpoint {done.get('result')} of job {name} is completed", json_)


def savepoint(
    name: Name,
    storage: Storage,
    path: Directory = None,
    native: Native = False,
    timeout: Timeout = 600.0,
    json_: Json = False,
    token_file: TokenFile = None,
    authority: Authority = None,
    driver_host: DriverHost = None,
) -> None:
    """Take a savepoint of a running job, which goes on; print its directory."""
    access = make_access(token_file, authority, driver_host)
    with _driver_until(timeout, name, storage, access, json_) as (driver, deadline):
        begun = driver.post("savepoint", path=path, native=native)
        done = _outcome(driver, begun, deadline, DriverLocation(storage, name, ANSWER_TIMEOUT_S))
        _tell(done, str(done.get("result")), json_)


def stop(
    name: Name,
    storage: Storage,
    with_savepoint: Annotated[
        bool,
        typer.Option(
            "--savepoint", help="Take a savepoint before the stop, and print its directory."
        ),
    ] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="Drain: end all sources first, then take the savepoint.")
    ] = False,
    path: Directory = None,
    native: Native = False,
    timeout: Timeout = 600.0,
    json_: Json = False,
    token_file: TokenFile = None,
    authority: Authority = None,
    driver_host: DriverHost = None,
) -> None:
    """Stop a running job with a last checkpoint: everything that it has read is committed."""
    access = make_access(token_file, authority, driver_host)
    with _driver_until(timeout, name, storage, access, json_) as (driver, deadline):
        begun = driver.post("stop", savepoint=with_savepoint, drain=drain, path=path, native=native)
        done = _outcome(driver, begun, deadline, DriverLocation(storage, name, ANSWER_TIMEOUT_S))
        _tell(done, done["place"] or f"job {name} has {done.get('result')}", json_)


def cancel(
    name: Name,
    storage: Storage,
    timeout: Timeout = 60.0,
    json_: Json = False,
    token_file: TokenFile = None,
    authority: Authority = None,
    driver_host: DriverHost = None,
) -> None:
    """End a running job at once; its next start goes on from the last checkpoint."""
    access = make_access(token_file, authority, driver_host)
    with _driver_until(timeout, name, storage, access, json_) as (driver, deadline):
        done = driver.outcome(driver.post("cancel"), deadline - time.monotonic())
        _tell(done, f"job {name} has {done.get('result')}", json_)


state = typer.Typer(
    no_args_is_help=True,
    help="The state of an operator of a running job, as of the last completed checkpoint.",
)


@state.callback()
def _state() -> None:
    """Look into the state of a running job."""


@state.command("get")
def get_state(
    name: Name,
    storage: Storage,
    uid: Annotated[str, typer.Option(help="The operator's uid.")],
    key: Annotated[
        list[str],
        typer.Option(help="The key's value. Repeat it for each column of the key, in their order."),
    ],
    state_name: Annotated[
        str | None,
        typer.Option("--state", help="Name of the state. Needed if the operator has several."),
    ] = None,
    timeout: AnswerTimeout = 60.0,
    json_: Json = False,
    token_file: TokenFile = None,
    authority: Authority = None,
    driver_host: DriverHost = None,
) -> None:
    """Print what a state holds under one key, as of the last completed checkpoint."""
    with _exit_status(json_):
        access = make_access(token_file, authority, driver_host)
        driver = find_driver(timeout, name, storage, access)
        asked = [("uid", uid), *(("key", part) for part in key)]
        asked += [("state", state_name)] if state_name is not None else []
        path = f"state?{urlencode(asked)}"
        answer = within(
            timeout,
            _who_answers(name),
            lambda: driver.get(path, "found", "value", "state", "checkpoint"),
        )
        if json_:
            print(json.dumps(answer))
        elif answer["found"]:
            print(json.dumps(answer["value"]))
        else:
            say(
                f"onceflow: state {answer['state']!r} of {uid!r} holds nothing under"
                f" {', '.join(key)} as of checkpoint {answer['checkpoint']}",
                style="red",
            )
        if not answer["found"]:
            raise typer.Exit(EXIT_REFUSED)


# --- steps ---------------------------------------------------------------------------------------


@contextmanager
def _exit_status(json_: bool) -> Generator[None, None, None]:
    """Print errors of the block, and exit with their exit status."""
    try:
        yield
    except (OnceflowError, DriverNotThere, DriverSilent, DriverRefused, TimeoutError) as error:
        match error:
            case DriverNotThere() | DriverSilent():
                exit_status = EXIT_GONE
            case ConfigError() if not isinstance(error, SavepointRefused):
                exit_status = EXIT_USAGE
            case _:
                exit_status = EXIT_REFUSED
        if json_:
            print(json.dumps({"error": str(error), "exit_status": exit_status}))
        else:
            say(f"onceflow: {error}", style="red")
        raise typer.Exit(exit_status) from error


@contextmanager
def _driver_until(
    timeout_s: float,
    name: str,
    storage: str,
    access: DriverAccess,
    json_: bool,
) -> Generator[tuple[Driver, float], None, None]:
    """Yield the job's driver, and the deadline after `timeout_s` on the monotonic clock."""
    with _exit_status(json_):
        deadline = time.monotonic() + timeout_s
        yield find_driver(timeout_s, name, storage, access), deadline


def make_access(
    token_file: Path | None, authority: Path | None, driver_host: list[str] | None
) -> DriverAccess:
    """Return the options for connecting to drivers, as one value."""
    return DriverAccess(token_file, authority, tuple(driver_host or ()))


def find_driver(timeout_s: float, name: str, storage: str, access: DriverAccess) -> Driver:
    """Return the job's driver. In a terminal, ask before sending the token to a new machine.

    Raises:
        TimeoutError: The storage did not return the address in time. No request was sent to the
            driver.
        UnknownDriverHost: The user did not consent to that machine.
    """
    what = f"checkpoint storage {storage}, which holds the driver's address,"
    # Report a silent driver before the user's timeout ends.
    answer_timeout_s = max(0.1, min(ANSWER_TIMEOUT_S, timeout_s / 2))
    location = DriverLocation(storage, name, answer_timeout_s, access)
    try:
        return within(timeout_s, what, lambda: Driver(location, location.open()))
    except UnknownDriverHost as unknown:
        if not sys.stdin.isatty() or not _agrees_to(unknown):
            raise
        remember_host(unknown.host, unknown.authority)
    return within(timeout_s, what, lambda: Driver(location, location.open()))


def _agrees_to(unknown: UnknownDriverHost) -> bool:
    authority = unknown.authority or "of this system"
    say(
        f"Checkpoint storage says that the driver is on host {unknown.host!r}, with the certificate"
        f" authority {authority!r}."
    )
    return typer.confirm(
        "Send the driver's token to that host, now and in future?", default=False, err=True
    )


def _who_answers(name: str) -> str:
    return f"the driver of job {name!r}, or the storage with the record of the job's end,"


def _open_jobs(location: DriverLocation) -> tuple[str, ...]:
    return location.described.open(location.name).jobs()


def _summary(location: DriverLocation) -> Answer:
    """Return the line of one job. If its files cannot be read, the line says so."""
    try:
        storage = location.open()
        view = storage.log.read()
    except OnceflowError as error:
        return _unread(location.name, str(error))
    known: Answer = {
        "job": location.name,
        "state": "not running",
        "attempt": view.attempt,
        "checkpoint": view.completed[-1].checkpoint if view.decided else None,
        "driver": None,
    }
    try:
        driver = Driver(location, storage)
        state = str(driver.get("status", "state")["state"])
    except DriverNotThere:
        run = last_run_of(storage)
        known |= {"state": state_without_driver(run)}
        return known | {"error": run.error} if run is not None and run.error else known
    except (DriverRefused, DriverSilent, OnceflowError) as error:
        return known | {"state": f"unknown: {error}"}
    return known | {"state": state, "driver": driver.address.url}


def _late(name: str, timeout_s: float) -> Answer:
    return _unread(name, f"its checkpoint storage did not answer within {timeout_s:g} s")


def _unread(name: str, reason: str) -> Answer:
    state = f"unknown: {reason}"
    return {"job": name, "state": state, "attempt": None, "checkpoint": None, "driver": None}


def _format_cell(summary: Answer, key: str) -> str:
    text = "-" if summary[key] is None else str(summary[key])
    error = str(summary.get("error", "")).partition("\n")[0]
    return f"{text}: {error[:200]}" if key == "state" and error else text


def _outcome(driver: Driver, begun: Answer, deadline: float, location: DriverLocation) -> Answer:
    """Wait like `Driver.outcome`. If the driver dies, the error tells the savepoint's state."""
    try:
        return driver.outcome(begun, deadline - time.monotonic())
    except DriverNotThere as gone:
        what = _describe_savepoint_left(begun, location.open(), location)
        raise DriverNotThere(f"{gone} {what}") from gone


def _describe_savepoint_left(begun: Answer, storage: JobStorage, location: DriverLocation) -> str:
    where = begun["place"]
    if not where:
        return f"Look in the decision log whether {begun['what']} was done."
    try:
        savepoint_directory(location.described, where).read()
    except OnceflowError:
        return f"The savepoint in {where} was not completed."
    return f"The savepoint in {where} is complete. Look in {storage} for later decisions."


def _tell(done: Answer, text: str, json_: bool) -> None:
    if json_:
        print(json.dumps(done))
    elif done["state"] == "done":
        print(text)
    else:
        say(f"onceflow: {done.get('error')}", style="red")
    if done["state"] != "done":
        raise typer.Exit(EXIT_REFUSED)
