"""The command `onceflow top`, which shows a running job in the terminal like its web page.

0  done; without --once: the job ended without failure
1  the job has failed, or its storage cannot be read
2  usage: an option is wrong, or names something that does not exist
3  with --once: no driver of the job answers
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from onceflow.cli.closed_pipe import end_if_unread
from onceflow.cli.jobs import command
from onceflow.cli.jobs.client import Answer, DriverNotThere, DriverSilent, within
from onceflow.cli.jobs.observed_jobs import ObservedJobs
from onceflow.cli.terminal import say
from onceflow.cli.top.screen import View, print_view, render_view
from onceflow.core.errors import ConfigError, OnceflowError

_ENDED_WELL = frozenset({"finished", "stopped", "cancelled"})


def top(
    name: command.Name,
    storage: command.Storage,
    once: Annotated[bool, typer.Option("--once", help="Print the view once, and exit.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line instead of the view.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Interval between two views, in seconds.", min=0.1)
    ] = 1.0,
    timeout: command.AnswerTimeout = 60.0,
    token_file: command.TokenFile = None,
    authority: command.Authority = None,
    driver_host: command.DriverHost = None,
) -> None:
    """Watch a running job: rates, lag, checkpoints, transactions, slots. Ctrl-C ends it.

    What is piped is printed once, unless --json is given.
    """
    console = Console(highlight=False)
    jobs = ObservedJobs(storage, command.make_access(token_file, authority, driver_host))
    what = f"the driver of job {name!r}, or its storage,"

    def look() -> View:
        return within(timeout, what, lambda: read_view(jobs, name))

    try:
        view = look()
        if once or (not json_ and not console.is_terminal):
            _print(view, console, json_=json_)
            raise typer.Exit(_status_once(view.now))
        last = _follow(look, view, interval, console, json_=json_)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except (OnceflowError, TimeoutError) as error:
        say(f"onceflow: {error}", style="red")
        status = command.EXIT_USAGE if isinstance(error, ConfigError) else command.EXIT_REFUSED
        raise typer.Exit(status) from error
    raise typer.Exit(command.EXIT_REFUSED if last["state"] == "failed" else 0)


def read_view(jobs: ObservedJobs, name: str) -> View:
    """Return the current view of a job from its driver, or from its storage if none answers.

    Raises:
        ConfigError: The storage has no such job.
        StorageError: The storage cannot be read at the moment.
    """
    try:
        reply = jobs.relay(name, "GET", "overview", None, 0)
        answer: Answer = msgspec.json.decode(reply.content)
        if reply.status != 200:
            return View(jobs.read_overview(name), str(answer.get("error", reply.status)))
        return View(answer, "")
    except DriverNotThere:
        return View(jobs.read_overview(name), "no driver answers for the job")
    except DriverSilent as error:
        return View(jobs.read_overview(name), str(error))


def _follow(
    look: Callable[[], View], view: View, interval_s: float, console: Console, *, json_: bool
) -> Answer:
    """Show the job repeatedly until it has ended. Return its last state."""
    if json_:
        while True:
            _print(view, console, json_=True)
            if has_ended(view.now):
                return view.now
            end_if_unread()
            time.sleep(interval_s)
            view = look()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render_view(view), refresh=True)
            if has_ended(view.now):
                break
            time.sleep(interval_s)
            view = look()
    console.print(render_view(view))
    return view.now


def has_ended(now: Answer) -> bool:
    """Return True if the job has ended. A job whose driver was killed has not ended."""
    return now["state"] in _ENDED_WELL or now["state"] == "failed"


def _status_once(now: Answer) -> int:
    return 0 if now["running"] else command.EXIT_GONE


def _print(view: View, console: Console, *, json_: bool) -> None:
    if json_:
        known = view.now | ({"problem": view.problem} if view.problem else {})
        print(msgspec.json.encode(known, enc_hook=str).decode(), flush=True)
    else:
        print_view(view, console)
