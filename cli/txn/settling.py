"""The output of transactions in doubt, and their commit or abort after confirmation."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import typer
from rich.console import Console
from typing_extensions import assert_never

from onceflow.cli.terminal import console, print_listing, say
from onceflow.core.commit.by_hand import (
    ContradictsLog,
    InDoubtTransaction,
    SinkNeeded,
    TransactionSettler,
)
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.target_records import LoggedDecision, RecoveryAction, Resolution

EXIT_DONE = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

_COLOURS = {
    LoggedDecision.DECIDED: "green",
    LoggedDecision.UNDECIDED: "yellow",
    LoggedDecision.PENDING: "cyan",
    LoggedDecision.SETTLED: "bold red",
    LoggedDecision.FOREIGN: "magenta",
    LoggedDecision.UNKNOWN: "magenta",
}
_NEXT_START = {
    RecoveryAction.COMMIT: "commits it",
    RecoveryAction.ABORT: "rolls it back",
    RecoveryAction.KEEP: "leaves it",
    RecoveryAction.STOP: "stops and says so",
    RecoveryAction.UNKNOWN: "unknown",
}


class UsageError(ConfigError):
    """Raised when the command line is contradictory or incomplete."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The requested resolution, and the transactions that it applies to."""

    resolution: Resolution
    ids: tuple[str, ...]
    everything: bool
    yes: bool
    force: bool
    fence: bool


def settle(transactions: TransactionSettler, wish: Wish, json_: bool) -> None:
    """Carry out `wish` as far as the log allows.

    Raises:
        UsageError: The wish is contradictory, or there is no terminal for a confirmation.
        typer.Exit: A transaction was refused or failed. The exit status is the highest of all
            results.
    """
    # Exactly one of both must be given.
    if bool(wish.ids) == wish.everything:
        raise UsageError("give transaction ids, or --all")
    if wish.everything and wish.force:
        raise UsageError(
            "--all includes only transactions that the log allows; give the ids of the"
            " transactions to force"
        )
    ids = [parse_transaction(text) for text in wish.ids]
    if wish.fence:
        _confirm("Take the job over? A driver that still runs will end with an error.", wish.yes)
        transactions.fence()
        say("The job is taken over: no earlier attempt can decide anything more.")
    allowed, refused = _sort_out(transactions, wish, _select(transactions, ids))
    if allowed:
        verb = "Commit" if wish.resolution is Resolution.COMMIT else "Roll back"
        for entry in allowed:
            say(f"  {entry.transaction}  ({entry.status.decision.value}: {entry.status.reason})")
        plural = "s" if len(allowed) > 1 else ""
        _confirm(f"{verb} {len(allowed)} transaction{plural}?", wish.yes)
    results = [*refused, *(_carry_out(transactions, wish, entry) for entry in allowed)]
    _print_results(wish.resolution, results, json_)


def _select(
    transactions: TransactionSettler, ids: Sequence[TransactionId]
) -> tuple[InDoubtTransaction, ...]:
    """Return the named transactions, or all transactions in doubt if none is named."""
    if not ids:
        return transactions.in_doubt()
    entries = {transaction: transactions.find(transaction) for transaction in ids}
    missing = [str(transaction) for transaction, entry in entries.items() if entry is None]
    if missing:
        say(f"not in doubt here, and not contained in the log: {', '.join(missing)}")
        raise typer.Exit(EXIT_REFUSED)
    return tuple(entry for entry in entries.values() if entry is not None)


def _sort_out(
    transactions: TransactionSettler, wish: Wish, selected: Sequence[InDoubtTransaction]
) -> tuple[list[InDoubtTransaction], list[Result]]:
    """Return the transactions to resolve, and the refused ones."""
    allowed: list[InDoubtTransaction] = []
    refused: list[Result] = []
    for entry in selected:
        reason = transactions.refusal(wish.resolution, entry)
        if reason is None:
            allowed.append(entry)
        elif wish.force:
            say(f"{entry.transaction}: forced, although {reason}")
            allowed.append(entry)
        # With --all, silently skip transactions that the log refuses: the user did not name them.
        elif not wish.everything:
            refused.append(Result(EXIT_REFUSED, entry, "refused", f"refused: {reason}"))
    return allowed, refused


def _carry_out(transactions: TransactionSettler, wish: Wish, entry: InDoubtTransaction) -> Result:
    """Commit or abort `entry`. An error becomes its result, so that the others are still tried."""
    try:
        # The log may have changed during the confirmation, so it is read once more.
        match wish.resolution:
            case Resolution.COMMIT:
                commit = transactions.force_commit if wish.force else transactions.commit
                return result_of(wish.resolution, entry, commit(entry))
            case Resolution.ABORT:
                abort = transactions.force_abort if wish.force else transactions.abort
                return result_of(wish.resolution, entry, abort(entry))
            case _:
                assert_never(wish.resolution)
    except OnceflowError as error:
        return Result(status_of(error), entry, "failed", f"not done: {error}")


def _print_results(resolution: Resolution, results: Sequence[Result], json_: bool) -> None:
    if json_:
        done = [result.as_json() for result in results]
        print(json.dumps({"action": resolution.value, "results": done}))
    elif not results:
        console().print(
            f"nothing to {resolution.value}: the log allows that for no transaction in doubt here"
        )
    for result in () if json_ else results:
        console().print(
            f"{result.in_doubt.transaction} {result.sentence}", markup=False, soft_wrap=True
        )
    # Higher exit statuses are more serious for scripts.
    worst = max((result.status for result in results), default=EXIT_DONE)
    if worst:
        raise typer.Exit(worst)


def status_of(error: OnceflowError) -> int:
    """Return the exit status for `error`."""
    match error:
        case UsageError() | SinkNeeded():
            return EXIT_USAGE
        case ContradictsLog():
            return EXIT_REFUSED
        case _:
            return EXIT_UNREACHABLE


def parse_transaction(text: str) -> TransactionId:
    """Parse `text` as a transaction id.

    Raises:
        UsageError: It is not a transaction id.
    """
    transaction = TransactionId.parse(text)
    if transaction is None:
        raise UsageError(
            f"{text!r} is not a transaction id; write it as `onceflow txn list` shows it:"
            " <sink id>/<attempt>/<checkpoint>/<subtask>/<sequence>"
        )
    return transaction


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    # A script without a terminal would wait forever for an answer.
    if not sys.stdin.isatty():
        raise UsageError(
            "this command asks before it changes anything, but the input is not a terminal: add"
            " --yes"
        )
    if not typer.confirm(question, err=True):
        say("nothing more was changed")
        raise typer.Exit(EXIT_REFUSED)


def age_seconds(entry: InDoubtTransaction) -> float | None:
    """Return the seconds since it was prepared, by this machine's clock, or None if unknown."""
    if entry.prepared_at is None:
        return None
    return max(0.0, (datetime.now(timezone.utc) - entry.prepared_at).total_seconds())


def as_json(entry: InDoubtTransaction) -> dict[str, object]:
    """Return the `--json` output for one transaction."""
    transaction, age_s = entry.transaction, age_seconds(entry)
    return {
        "id": str(transaction),
        "sink": transaction.sink_id,
        "attempt": transaction.attempt,
        "checkpoint": transaction.checkpoint,
        "subtask": transaction.subtask,
        "sequence": transaction.sequence,
        "kind": entry.kind.value,
        "place": entry.held_by,
        "in_doubt": entry.held,
        "rows": entry.rows,
        "prepared_at": entry.prepared_at.isoformat() if entry.prepared_at else None,
        "age_seconds": None if age_s is None else round(age_s, 3),
        "verdict": entry.status.decision.value,
        "next_start": entry.status.recovery_action.value,
        "reason": entry.status.reason,
    }


def print_transactions(console: Console, transactions: tuple[InDoubtTransaction, ...]) -> None:
    """Print one line for each transaction, with the log's decision and the next start's action."""
    if not transactions:
        console.print("nothing is in doubt")
        return
    headings = ("transaction", "kind", "rows", "age", "the log says", "the next start")
    rows = [
        (
            (str(entry.transaction), "bold"),
            (entry.kind.value, ""),
            ("?" if entry.rows is None else f"{entry.rows:,}", ""),
            (_age(entry), ""),
            (entry.status.decision.value, _COLOURS[entry.status.decision]),
            (_NEXT_START[entry.status.recovery_action], ""),
        )
        for entry in transactions
    ]
    print_listing(console, headings, rows)


def print_transaction(console: Console, entry: InDoubtTransaction) -> None:
    """Print everything about one transaction."""
    transaction = entry.transaction
    lines = {
        "transaction": str(transaction),
        "sink id": transaction.sink_id,
        "attempt": str(transaction.attempt),
        "checkpoint": str(transaction.checkpoint),
        "subtask": f"{transaction.subtask} (sequence {transaction.sequence})",
        "held by": entry.held_by
        if entry.held
        else f"no session: {entry.held_by} no longer holds it",
        "kind": entry.kind.value,
        "rows": "not known" if entry.rows is None else f"{entry.rows:,}",
        "prepared": f"{entry.prepared_at:%Y-%m-%d %H:%M:%S %Z}, {_age(entry)} ago"
        if entry.prepared_at
        else "not known",
        "the log says": f"{entry.status.decision.value}: {entry.status.reason}",
        "the next start": _NEXT_START[entry.status.recovery_action],
    }
    width = max(map(len, lines))
    for name, text in lines.items():
        console.print(f"{name.ljust(width)}  {text}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one transaction."""

    status: int
    in_doubt: InDoubtTransaction
    outcome: str
    sentence: str

    def as_json(self) -> dict[str, object]:
        """Return the `--json` output for the result."""
        return as_json(self.in_doubt) | {"outcome": self.outcome, "message": self.sentence}


def result_of(
    resolution: Resolution,
    entry: InDoubtTransaction,
    outcome: committables.CommitOutcome | committables.AbortOutcome,
) -> Result:
    """Return the result with its exit status and a sentence."""
    rows = "its rows" if entry.rows is None else f"its rows ({entry.rows:,})"
    match outcome:
        case committables.Committed():
            result = (EXIT_DONE, "committed", f"committed: {rows} are visible now")
        case committables.Aborted():
            result = (
                EXIT_DONE,
                "aborted",
                f"rolled back: {rows} are deleted and were never visible",
            )
        case committables.AlreadyCommitted() if resolution is Resolution.COMMIT:
            result = (EXIT_DONE, "already_committed", "was already committed; nothing was changed")
        case committables.AlreadyCommitted():
            result = (EXIT_REFUSED, "already_committed", f"was already committed: {rows} stay")
        case committables.Lost(reason):
            result = (EXIT_REFUSED, "lost", f"can no longer be committed: {reason}")
        case committables.RetryLater(reason):
            result = (EXIT_UNREACHABLE, "retry_later", f"nothing was changed, try later: {reason}")
        case committables.Unknown(reason):
            result = (
                EXIT_UNREACHABLE,
                "unknown",
                f"the outcome is not known, run the command again: {reason}",
            )
    status, word, sentence = result
    return Result(status, entry, word, sentence)


def _age(entry: InDoubtTransaction) -> str:
    age_s = age_seconds(entry)
    if age_s is None:
        return "?"
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        # Use a unit from two of it on: "90 min" is more precise than "2 h".
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
