"""The flags of `onceflow demo` and its exit status."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn, TypeAlias

import typer
from demo import report
from demo.run import DemoRun
from demo.settings import (
    Backend,
    DemoCommitMode,
    DemoSettings,
    KillKind,
    SinkKind,
    StorageKind,
    choose_kills,
)
from rich.console import Console

from onceflow.core.errors import OnceflowError

EXIT_VIOLATION = 1
EXIT_NO_VERDICT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)

CommitModeFlag: TypeAlias = Annotated[
    DemoCommitMode,
    typer.Option(help="Of a database: prepare transactions, or stage rows and apply them."),
]
StorageFlag: TypeAlias = Annotated[
    StorageKind, typer.Option(help="Where checkpoints are: a real S3 server is started.")
]
UnalignedFlag: TypeAlias = Annotated[
    bool, typer.Option("--unaligned", help="Let barriers overtake rows that wait.")
]
MoveFlag: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--move",
        help="After the kills, stop with a savepoint and go on with a slot more, on the other"
        " backend, in other storage.",
    ),
]
UiFlag: TypeAlias = Annotated[
    bool,
    typer.Option("--ui", help="Serve the page of `onceflow ui`, and watch the kills in a browser."),
]


@app.command()
def demo(
    sink: Annotated[SinkKind, typer.Option(help="What the job writes to.")] = SinkKind.POSTGRES,
    records: Annotated[int, typer.Option(help="Payments to produce.")] = 1_000_000,
    accounts: Annotated[int, typer.Option(help="Accounts among which they are spread.")] = 100_000,
    partitions: Annotated[int, typer.Option(help="Partitions of the topic.")] = 2,
    parallelism: Annotated[int, typer.Option(help="Slots, each a Spark task.")] = 2,
    backend: Annotated[Backend, typer.Option(help="Where keyed state lives.")] = Backend.HEAP,
    kills: Annotated[
        int | None, typer.Option(help="How many kills; default: one of each kind.", min=0)
    ] = None,
    kill: Annotated[
        list[KillKind] | None,
        typer.Option(help="Kill this kind; may be repeated. Default: slot, worker and driver."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the payments, the kills and their moments.")] = 0,
    interval: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds that the job may take at most.")] = 900.0,
    at_least_once: Annotated[
        bool,
        typer.Option("--at-least-once", help="Commit as rows come: shows the duplicates."),
    ] = False,
    commit_mode: CommitModeFlag = DemoCommitMode.AUTO,
    storage: StorageFlag = StorageKind.DIRECTORY,
    unaligned: UnalignedFlag = False,
    move: MoveFlag = False,
    ui: UiFlag = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the servers running until Enter is pressed.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Nothing on stderr but errors.")] = False,
) -> None:
    """Run payments from a real Kafka through keyed state into a real database, under SIGKILL.

    Starts the servers itself, kills what it is told to kill while the job runs, and then asks the
    table (or topic) whether every payment is there exactly once. Exit status: 0 proven, 1 violated,
    2 no verdict.
    """
    try:
        settings = DemoSettings(
            sink=sink,
            commit_mode=commit_mode,
            records=records,
            accounts=accounts,
            partitions=partitions,
            parallelism=parallelism,
            backend=backend,
            kills=choose_kills(tuple(kill or ()), kills),
            seed=seed,
            interval_s=interval,
            at_least_once=at_least_once,
            storage=storage,
            unaligned=unaligned,
            move=move,
            timeout_s=timeout,
        )
        result = _run(settings, ui=ui, json_=json_, keep=keep, quiet=quiet)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except OnceflowError as error:
        Console(stderr=True).print(
            f"onceflow demo: {error}", markup=False, style="red", soft_wrap=True
        )
        raise typer.Exit(EXIT_NO_VERDICT) from error
    if not result.ok:
        raise typer.Exit(EXIT_VIOLATION)


def _run(
    settings: DemoSettings, *, ui: bool, json_: bool, keep: bool, quiet: bool
) -> report.DemoResult:
    narrator = report.Narrator(quiet=quiet)
    with _orderly_at_sigterm(), DemoRun(settings, narrator, serves_page=ui) as run:
        with narrator:
            result = run.execute()
        if json_:
            print(json.dumps(report.as_json(result)), flush=True)
        else:
            _print(result)
        # Somebody who watches the page wants to look at the end, too.
        if (keep or (ui and sys.stdin.isatty())) and run.addresses:
            for name, address in run.addresses.items():
                narrator.say(f"{name + ':':<9} {address}")
            typer.prompt("Enter stops the servers", default="", show_default=False, err=True)
    return result


@contextmanager
def _orderly_at_sigterm() -> Generator[None, None, None]:
    """Make SIGTERM end the block as Ctrl-C does: servers, driver and files go first."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(result: report.DemoResult) -> None:
    console = Console(highlight=False)
    if result.kills:
        console.print(report.kills_table(result))
    console.print(report.proof_table(result))
    console.print(report.summary(result), soft_wrap=True)
