"""The flags of `onceflow txn` and its exit status.

0  done; or nothing is in doubt; or something is, and --check was not asked for
1  refused, by the log or by the target; with --check: something is in doubt
2  usage: what the options name is not there or not enough
3  a target or the storage could not be reached, or could not tell now
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console

from onceflow.cli.txn import report
from onceflow.cli.txn.places import Where
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import Action
from onceflow.core.transactions import (
    ContradictsLog,
    InDoubtTransaction,
    InDoubtTransactions,
    SinkNeeded,
)

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


class UsageError(ConfigError):
    """Raised when the command line asks for nothing that can be done."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be done with which transactions."""

    action: Action
    ids: tuple[str, ...]
    everything: bool
    yes: bool
    force: bool
    fence: bool


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
            report.print_transactions(_console(), found)
            if found and storage is None:
                _say("Add --storage DIR --job NAME to see what the decision log says.")
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
        found = transactions.find(_parsed(transaction))
        if found is None:
            _say(f"{transaction} is not in doubt here, and the log does not list it")
            raise typer.Exit(report.EXIT_REFUSED)
        if json_:
            print(json.dumps(report.as_json(found)))
        else:
            report.print_transaction(_console(), found)


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
        wish = Wish(Action.COMMIT, tuple(ids or ()), everything, yes, force, fence)
        _settle(transactions, wish, json_)


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
        wish = Wish(Action.ABORT, tuple(ids or ()), everything, yes, force, fence)
        _settle(transactions, wish, json_)


def _settle(transactions: InDoubtTransactions, wish: Wish, json_: bool) -> None:
    if bool(wish.ids) == wish.everything:
        raise UsageError("name transactions, or say --all")
    if wish.everything and wish.force:
        raise UsageError("--all takes what the log allows; name what is to be forced")
    ids = [_parsed(text) for text in wish.ids]
    if wish.fence:
        _confirm("Take the job over? A driver that still runs will end with an error.", wish.yes)
        transactions.fence()
        _say("The job is taken over: no earlier attempt decides anything more.")
    allowed, refused = _sorted_out(transactions, wish, _wanted(transactions, ids))
    if allowed:
        verb = "Commit" if wish.action is Action.COMMIT else "Roll back"
        for one in allowed:
            _say(f"  {one.transaction}  ({one.judgement.verdict.value}: {one.judgement.reason})")
        plural = "s" if len(allowed) > 1 else ""
        _confirm(f"{verb} {len(allowed)} transaction{plural}?", wish.yes)
    results = [*refused, *(_carried_out(transactions, wish, one) for one in allowed)]
    _print_results(wish.action, results, json_)


def _wanted(
    transactions: InDoubtTransactions, ids: Sequence[TransactionId]
) -> tuple[InDoubtTransaction, ...]:
    """Return what is named, or everything in doubt when nothing is."""
    if not ids:
        return transactions.in_doubt()
    found = {transaction: transactions.find(transaction) for transaction in ids}
    missing = [str(transaction) for transaction, one in found.items() if one is None]
    if missing:
        _say(f"not in doubt here, and the log does not list it: {', '.join(missing)}")
        raise typer.Exit(report.EXIT_REFUSED)
    return tuple(one for one in found.values() if one is not None)


def _sorted_out(
    transactions: InDoubtTransactions, wish: Wish, wanted: Sequence[InDoubtTransaction]
) -> tuple[list[InDoubtTransaction], list[report.Result]]:
    """Return what is to be done, and what is refused."""
    allowed: list[InDoubtTransaction] = []
    refused: list[report.Result] = []
    for one in wanted:
        reason = transactions.objection(wish.action, one)
        if reason is None:
            allowed.append(one)
        elif wish.force:
            _say(f"{one.transaction}: forced, although {reason}")
            allowed.append(one)
        elif not wish.everything:
            refused.append(report.Result(report.EXIT_REFUSED, one, "refused", f"refused: {reason}"))
    return allowed, refused


def _carried_out(
    transactions: InDoubtTransactions, wish: Wish, one: InDoubtTransaction
) -> report.Result:
    """Settle `one`. What goes wrong with it does not keep the others from being told."""
    try:
        match wish.action, wish.force:
            # While the question was open the log may have gone on: it is asked once more.
            case Action.COMMIT, False:
                return report.result_of(wish.action, one, transactions.commit(one))
            case Action.COMMIT, True:
                return report.result_of(wish.action, one, transactions.force_commit(one))
            case Action.ABORT, False:
                return report.result_of(wish.action, one, transactions.abort(one))
            case _:
                return report.result_of(wish.action, one, transactions.force_abort(one))
    except OnceflowError as error:
        return report.Result(_status_of(error), one, "failed", f"not done: {error}")


def _print_results(action: Action, results: Sequence[report.Result], json_: bool) -> None:
    if json_:
        done = [result.as_json() for result in results]
        print(json.dumps({"action": action.value, "results": done}))
    elif not results:
        _console().print(f"nothing to {action.value}: the log says so of nothing in doubt here")
    for result in () if json_ else results:
        _console().print(
            f"{result.one.transaction} {result.sentence}", markup=False, soft_wrap=True
        )
    worst = max((result.status for result in results), default=report.EXIT_DONE)
    if worst:
        raise typer.Exit(worst)


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
        _say(f"onceflow txn: {error}", style="red")
        raise typer.Exit(_status_of(error)) from error


def _status_of(error: OnceflowError) -> int:
    match error:
        case UsageError() | SinkNeeded():
            return report.EXIT_USAGE
        case ContradictsLog():
            return report.EXIT_REFUSED
        case _:
            return report.EXIT_UNREACHABLE


def _parsed(text: str) -> TransactionId:
    transaction = TransactionId.parse(text)
    if transaction is None:
        raise UsageError(
            f"{text!r} is no transaction id: <sink id>/<attempt>/<checkpoint>/<subtask>/<sequence>"
        )
    return transaction


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("this is no terminal to ask on: add --yes")
    if not typer.confirm(question, err=True):
        _say("nothing more was changed")
        raise typer.Exit(report.EXIT_REFUSED)


def _console() -> Console:
    return Console(highlight=False)


def _say(text: str, style: str = "") -> None:
    Console(stderr=True, highlight=False).print(text, markup=False, style=style, soft_wrap=True)
