"""The `onceflow` command. The module of a subcommand is imported when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typing_extensions import override

import onceflow
from onceflow.cli.closed_pipe import ignore_closed_pipes

_SUBCOMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "demo": "onceflow.cli.demo:demo",
        "config": "onceflow.cli.config:config",
        "run": "onceflow.cli.run.command:run",
        "doctor": "onceflow.cli.doctor.command:doctor",
        "list": "onceflow.cli.jobs.command:list_jobs",
        "status": "onceflow.cli.jobs.command:status",
        "top": "onceflow.cli.top.command:top",
        "ui": "onceflow.cli.ui.command:ui",
        "checkpoint": "onceflow.cli.jobs.command:checkpoint",
        "savepoint": "onceflow.cli.jobs.command:savepoint",
        "stop": "onceflow.cli.jobs.command:stop",
        "cancel": "onceflow.cli.jobs.command:cancel",
        "state": "onceflow.cli.jobs.command:state",
        "checkpoints": "onceflow.cli.checkpoints:checkpoints",
        "txn": "onceflow.cli.txn.command:txn",
        "slots": "onceflow.cli.slots:slots",
    }
)


class _Subcommands(TyperGroup):
    """A command group that imports the module of a subcommand only when the subcommand is called.

    The types are those of click, which some versions of typer include under another name.
    """

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return list(_SUBCOMMANDS)

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _SUBCOMMANDS:
            return None
        module, _, name = _SUBCOMMANDS[cmd_name].partition(":")
        target: object = getattr(importlib.import_module(module), name)
        if not isinstance(target, typer.Typer):
            of_one = typer.Typer(add_completion=False)
            of_one.command(cmd_name)(cast("Callable[..., None]", target))
            target = of_one
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="onceflow",
    cls=_Subcommands,
    no_args_is_help=True,
    # A traceback with local variables could print a password.
    pretty_exceptions_show_locals=False,
)


def _print_version(asked: bool) -> None:
    if asked:
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
    """Run the command line. This is the entry point of the package."""
    ignore_closed_pipes()
    app()


if __name__ == "__main__":
    main()
