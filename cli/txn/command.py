"""The flags of `onceflow txn` and its exit status.

0  done; `list` exits with 0 even if transactions are in doubt, except with --check
1  refused by the log or by the target; with --check: transactions are in doubt
2  usage: an option is wrong or missing, or names something that does not exist
3  a target or the storage could not be reached, or could not answer
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import typer

from onceflow.cli.terminal import console, say
from onceflow.cli.txn import settling
from onceflow.cli.txn.where import Where, add_where_options
from onceflow.core.commit.by_hand import TransactionSettler
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.protocol.log.target_records import Resolution

txn = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help=(
        "List transactions in doubt, which are pre-committed but neither committed nor rolled"
        " back, and commit or abort them by hand. The next start of a job does so for its own"
        " transactions. Exit status: 0 done, 1 refused (list --check: something is in doubt), 2"
        " usage, 3 a target or the storage cannot be reached."
    ),
)

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Ids: TypeAlias = Annotated[
    list[str] | None, typer.Argument(help="Transaction ids, as `list` shows them.")
]
Everything: TypeAlias = Annotated[
    bool, typer.Option("--all", help="All transactions that the log allows, instead of ids.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Force: TypeAlias = Annotated[
    bool,
    typer.Option("--force", help="Act even if the log or a running job forbids it."),
]
Fence: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--fence",
        help="First take over the job: a driver that still runs can then decide nothing more,"
        " and ends. The job can be started again as usual.",
    ),
]


@txn.command("list")
@add_where_options
def list_(
    where: Where,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with status 1 if anything is in doubt.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show everything in doubt, and what the decision log says about it."""
    with _open(where) as transactions:
        transactions_in_doubt = transactions.in_doubt()
        if json_:
            print(
                json.dumps(
                    {"transactions": [settling.as_json(entry) for entry in transactions_in_doubt]}
                )
            )
        else:
            settling.print_transactions(console(), transactions_in_doubt)
            of_batches = where.checkpoint_location is not None or where.txn_app_id is not None
            if transactions_in_doubt and where.storage is None and not of_batches:
                say("Add --storage DIR --job NAME to see the verdict of the decision log.")
    if check and transactions_in_doubt:
        raise typer.Exit(settling.EXIT_REFUSED)


@txn.command()
@add_where_options
def show(
    where: Where,
    transaction: Annotated[str, typer.Argument(help="Id of the transaction.")],
    json_: Json = False,
) -> None:
    """Show one transaction with all that is known about it. Exit status 1: there is none."""
    with _open(where) as transactions:
        entry = transactions.find(settling.parse_transaction(transaction))
        if entry is None:
            say(f"{transaction} is not in doubt here, and the log does not contain it")
            raise typer.Exit(settling.EXIT_REFUSED)
        if json_:
            print(json.dumps(settling.as_json(entry)))
        else:
            settling.print_transaction(console(), entry)


def _settles(resolution: Resolution, help_: str) -> None:
    """Add the command that carries out `resolution`."""

    @txn.command(resolution.value, help=help_)
    @add_where_options
    def command(
        where: Where,
        ids: Ids = None,
        everything: Everything = False,
        yes: Yes = False,
        force: Force = False,
        fence: Fence = False,
        json_: Json = False,
    ) -> None:
        with _open(where) as transactions:
            wish = settling.Wish(resolution, tuple(ids or ()), everything, yes, force, fence)
            settling.settle(transactions, wish, json_)


_settles(
    Resolution.COMMIT,
    "Commit transactions, if the decision log decided them. Their rows become visible.",
)
_settles(Resolution.ABORT, "Roll transactions back, if the decision log did not decide them.")


@contextmanager
def _open(where: Where) -> Generator[TransactionSettler, None, None]:
    """Yield the transactions of `where`. Print errors, and exit with their exit status."""
    try:
        try:
            transactions = where.open()
        except ConfigError as error:
            raise settling.UsageError(str(error)) from error
        with transactions:
            yield transactions
    except OnceflowError as error:
        say(f"onceflow txn: {error}", style="red")
        raise typer.Exit(settling.status_of(error)) from error
