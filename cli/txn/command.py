"""The flags of `onceflow txn` and its exit status.

0  done; or nothing is in doubt; or something is, and --check was not asked for
1  refused, by the log or by the target; with --check: something is in doubt
2  usage: what the options name is not there or not enough
3  a target or the storage could not be reached, or could not tell now
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from onceflow.cli.txn import report
from onceflow.cli.txn.places import Where
from onceflow.cli.txn.settling import UsageError, Wish, console, parsed, say, settle, status_of
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.in_doubt import InDoubtTransactions
from onceflow.core.protocol.in_doubt import Resolution

txn = typer.Typer(
    no_args_is_help=True,
    help=(
        "Transactions in doubt: pre-committed, and neither committed nor rolled back. A job's next"
        " start settles its own; this shows them, and settles by hand what cannot wait."
        " Exit status: 0 done, 1 refused (list --check: something is in doubt), 2 usage,"
        " 3 a target or the storage cannot be reached."
    ),
)

Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Database: postgresql://user@host/db or mysql://user@host/db, every sink id in it."
        " The password may also be in --password-file, PGPASSWORD or MYSQL_PWD, or be"
        " '${env:NAME}' or '${file:/path}' here.",
        envvar="ONCEFLOW_TXN_URL",
        show_envvar=True,
    ),
]
PasswordFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="File that holds the database's password and nothing else.")
]
LedgerSchema: TypeAlias = Annotated[
    str | None, typer.Option(help="Schema or database of onceflow's own tables, if not the usual.")
]
SinkName: TypeAlias = Annotated[
    str | None, typer.Option("--sink", help="Any sink: module:name of it or of what makes it.")
]
SinkId: TypeAlias = Annotated[
    str | None, typer.Option(help="The sink id of --sink; transaction ids begin with it.")
]
Storage: TypeAlias = Annotated[
    str | None, typer.Option(help="Checkpoint storage of the job: its decision log decides.")
]
JobName: TypeAlias = Annotated[
    str | None, typer.Option("--job", help="The job's name; needed when storage holds several.")
]
Timeout: TypeAlias = Annotated[float, typer.Option(help="Seconds to wait for a server.", min=0.1)]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Ids: TypeAlias = Annotated[
    list[str] | None, typer.Argument(help="Transaction ids, as `list` shows them.")
]
Everything: TypeAlias = Annotated[
    bool, typer.Option("--all", help="Instead of ids: everything that the log allows.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Force: TypeAlias = Annotated[
    bool,
    typer.Option("--force", help="Do it although the log or a running job says otherwise."),
]
Fence: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--fence",
        help="First take the job over, so that a driver which still runs decides nothing more and"
        " ends. The job then starts again as usual.",
    ),
]


@txn.command("list")
def list_(
    url: Url = None,
    password_file: PasswordFile = None,
    ledger_schema: LedgerSchema = None,
    sink: SinkName = None,
    sink_id: SinkId = None,
    storage: Storage = None,
    job: JobName = None,
    timeout: Timeout = 10.0,
    check: Annotated[
        bool, typer.Option("--check", help="Exit status 1 when something is in doubt.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show everything in doubt, and what the decision log says about it."""
    where = Where(url, password_file, ledger_schema, sink, sink_id, storage, job, timeout)
    with _opened(where) as transactions:
        found = transactions.in_doubt()
        if json_:
            print(json.dumps({"transactions": [report.as_json(one) for one in found]}))
        else:
            report.print_transactions(console(), found)
            if found and storage is None:
                say("Add --storage DIR --job NAME to see what the decision log says.")
    if check and found:
        raise typer.Exit(report.EXIT_REFUSED)


@txn.command()
def show(
    transaction: Annotated[str, typer.Argument(help="Its id.")],
    url: Url = None,
    password_file: PasswordFile = None,
    ledger_schema: LedgerSchema = None,
    sink: SinkName = None,
    sink_id: SinkId = None,
    storage: Storage = None,
    job: JobName = None,
    timeout: Timeout = 10.0,
    json_: Json = False,
) -> None:
    """Show one transaction with all that is known about it. Exit status 1: there is none."""
    where = Where(url, password_file, ledger_schema, sink, sink_id, storage, job, timeout)
    with _opened(where) as transactions:
        found = transactions.find(parsed(transaction))
        if found is None:
            say(f"{transaction} is not in doubt here, and the log does not list it")
            raise typer.Exit(report.EXIT_REFUSED)
        if json_:
            print(json.dumps(report.as_json(found)))
        else:
            report.print_transaction(console(), found)


@txn.command()
def commit(
    ids: Ids = None,
    url: Url = None,
    password_file: PasswordFile = None,
    ledger_schema: LedgerSchema = None,
    sink: SinkName = None,
    sink_id: SinkId = None,
    storage: Storage = None,
    job: JobName = None,
    timeout: Timeout = 10.0,
    everything: Everything = False,
    yes: Yes = False,
    force: Force = False,
    fence: Fence = False,
    json_: Json = False,
) -> None:
    """Make the rows of transactions visible, if the decision log decided so."""
    where = Where(url, password_file, ledger_schema, sink, sink_id, storage, job, timeout)
    with _opened(where) as transactions:
        wish = Wish(Resolution.COMMIT, tuple(ids or ()), everything, yes, force, fence)
        settle(transactions, wish, json_)


@txn.command()
def abort(
    ids: Ids = None,
    url: Url = None,
    password_file: PasswordFile = None,
    ledger_schema: LedgerSchema = None,
    sink: SinkName = None,
    sink_id: SinkId = None,
    storage: Storage = None,
    job: JobName = None,
    timeout: Timeout = 10.0,
    everything: Everything = False,
    yes: Yes = False,
    force: Force = False,
    fence: Fence = False,
    json_: Json = False,
) -> None:
    """Roll transactions back, if the decision log did not decide them."""
    where = Where(url, password_file, ledger_schema, sink, sink_id, storage, job, timeout)
    with _opened(where) as transactions:
        wish = Wish(Resolution.ABORT, tuple(ids or ()), everything, yes, force, fence)
        settle(transactions, wish, json_)


@contextmanager
def _opened(where: Where) -> Generator[InDoubtTransactions, None, None]:
    """Yield what `where` names, and end with the exit status of whatever goes wrong."""
    try:
        try:
            transactions = where.open()
        except ConfigError as error:
            raise UsageError(str(error)) from error
        with transactions:
            yield transactions
    except OnceflowError as error:
        say(f"onceflow txn: {error}", style="red")
        raise typer.Exit(status_of(error)) from error
