"""The `onceflow` command: one module a subcommand."""

from __future__ import annotations

from typing import Annotated

import typer

import onceflow
from onceflow.cli.checkpoints.command import checkpoints
from onceflow.cli.demo.command import demo
from onceflow.cli.doctor.command import doctor
from onceflow.cli.jobs.command import (
    cancel,
    checkpoint,
    list_jobs,
    savepoint,
    status,
    stop,
)
from onceflow.cli.txn.command import txn

app = typer.Typer(
    name="onceflow",
    no_args_is_help=True,
    # A traceback with local variables could print a password.
    pretty_exceptions_show_locals=False,
)
app.command()(demo)
app.command()(doctor)
app.command("list")(list_jobs)
app.command()(status)
app.command()(checkpoint)
app.command()(savepoint)
app.command()(stop)
app.command()(cancel)
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(txn, name="txn")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(onceflow.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Exactly-once connectors for PySpark."""


def main() -> None:
    """Run the command line; the entry point of the package."""
    app()


if __name__ == "__main__":
    main()
