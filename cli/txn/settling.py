"""Settles transactions in doubt as a person wishes, after asking; says what was done to each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import typer
from rich.console import Console

from onceflow.cli.txn import report
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.in_doubt import (
    ContradictsLog,
    InDoubtTransaction,
    InDoubtTransactions,
    SinkNeeded,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import Resolution


class UsageError(ConfigError):
    """Raised when the command line asks for nothing that can be done."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be done with which transactions."""

    resolution: Resolution
    ids: tuple[str, ...]
    everything: bool
    yes: bool
    force: bool
    fence: bool


def settle(transactions: InDoubtTransactions, wish: Wish, json_: bool) -> None:
    """Carry `wish` out as far as the log allows.

    Raises:
        UsageError: The wish cannot be understood, or there is nobody to ask.
        typer.Exit: Something was refused or failed; its status is the worst one's.
    """
    if bool(wish.ids) == wish.everything:
        raise UsageError("name transactions, or say --all")
    if wish.everything and wish.force:
        raise UsageError("--all takes what the log allows; name what is to be forced")
    ids = [parsed(text) for text in wish.ids]
    if wish.fence:
        _confirm("Take the job over? A driver that still runs will end with an error.", wish.yes)
        transactions.fence()
        say("The job is taken over: no earlier attempt decides anything more.")
    allowed, refused = _sorted_out(transactions, wish, _wanted(transactions, ids))
    if allowed:
        verb = "Commit" if wish.resolution is Resolution.COMMIT else "Roll back"
        for one in allowed:
            say(f"  {one.transaction}  ({one.status.decision.value}: {one.status.reason})")
        plural = "s" if len(allowed) > 1 else ""
        _confirm(f"{verb} {len(allowed)} transaction{plural}?", wish.yes)
    results = [*refused, *(_carried_out(transactions, wish, one) for one in allowed)]
    _print_results(wish.resolution, results, json_)


def _wanted(
    transactions: InDoubtTransactions, ids: Sequence[TransactionId]
) -> tuple[InDoubtTransaction, ...]:
    """Return what is named, or everything in doubt when nothing is."""
    if not ids:
        return transactions.in_doubt()
    found = {transaction: transactions.find(transaction) for transaction in ids}
    missing = [str(transaction) for transaction, one in found.items() if one is None]
    if missing:
        say(f"not in doubt here, and the log does not list it: {', '.join(missing)}")
        raise typer.Exit(report.EXIT_REFUSED)
    return tuple(one for one in found.values() if one is not None)


def _sorted_out(
    transactions: InDoubtTransactions, wish: Wish, wanted: Sequence[InDoubtTransaction]
) -> tuple[list[InDoubtTransaction], list[report.Result]]:
    """Return what is to be done, and what is refused."""
    allowed: list[InDoubtTransaction] = []
    refused: list[report.Result] = []
    for one in wanted:
        reason = transactions.refusal(wish.resolution, one)
        if reason is None:
            allowed.append(one)
        elif wish.force:
            say(f"{one.transaction}: forced, although {reason}")
            allowed.append(one)
        elif not wish.everything:
            refused.append(report.Result(report.EXIT_REFUSED, one, "refused", f"refused: {reason}"))
    return allowed, refused


def _carried_out(
    transactions: InDoubtTransactions, wish: Wish, one: InDoubtTransaction
) -> report.Result:
    """Settle `one`. What goes wrong with it does not keep the others from being told."""
    try:
        match wish.resolution, wish.force:
            # While the question was open the log may have gone on: it is asked once more.
            case Resolution.COMMIT, False:
                return report.result_of(wish.resolution, one, transactions.commit(one))
            case Resolution.COMMIT, True:
                return report.result_of(wish.resolution, one, transactions.force_commit(one))
            case Resolution.ABORT, False:
                return report.result_of(wish.resolution, one, transactions.abort(one))
            case _:
                return report.result_of(wish.resolution, one, transactions.force_abort(one))
    except OnceflowError as error:
        return report.Result(status_of(error), one, "failed", f"not done: {error}")


def _print_results(resolution: Resolution, results: Sequence[report.Result], json_: bool) -> None:
    if json_:
        done = [result.as_json() for result in results]
        print(json.dumps({"action": resolution.value, "results": done}))
    elif not results:
        console().print(f"nothing to {resolution.value}: the log says so of nothing in doubt here")
    for result in () if json_ else results:
        console().print(f"{result.one.transaction} {result.sentence}", markup=False, soft_wrap=True)
    worst = max((result.status for result in results), default=report.EXIT_DONE)
    if worst:
        raise typer.Exit(worst)


def status_of(error: OnceflowError) -> int:
    """Return the exit status that `error` ends with."""
    match error:
        case UsageError() | SinkNeeded():
            return report.EXIT_USAGE
        case ContradictsLog():
            return report.EXIT_REFUSED
        case _:
            return report.EXIT_UNREACHABLE


def parsed(text: str) -> TransactionId:
    """Return the id that `text` spells.

    Raises:
        UsageError: It spells none.
    """
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
        say("nothing more was changed")
        raise typer.Exit(report.EXIT_REFUSED)


def console() -> Console:
    """Return where results go."""
    return Console(highlight=False)


def say(text: str, style: str = "") -> None:
    """Print what is not a result, for people."""
    Console(stderr=True, highlight=False).print(text, markup=False, style=style, soft_wrap=True)
