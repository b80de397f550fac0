"""Transactions in doubt, for a person and for a program."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from rich.console import Console

from onceflow.cli.listing import print_listing
from onceflow.core.in_doubt import InDoubtTransaction
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.in_doubt import LoggedDecision, RecoveryAction, Resolution

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


def age_seconds(one: InDoubtTransaction) -> float | None:
    """Return how long ago it was prepared, by this machine's clock; None when nobody tells."""
    if one.prepared_at is None:
        return None
    return max(0.0, (datetime.now(timezone.utc) - one.prepared_at).total_seconds())


def as_json(one: InDoubtTransaction) -> dict[str, object]:
    """Return what `--json` prints of one transaction."""
    transaction, age_s = one.transaction, age_seconds(one)
    return {
        "id": str(transaction),
        "sink": transaction.sink_id,
        "attempt": transaction.attempt,
        "checkpoint": transaction.checkpoint,
        "subtask": transaction.subtask,
        "sequence": transaction.sequence,
        "kind": one.kind.value,
        "place": one.held_by,
        "in_doubt": one.held,
        "rows": one.rows,
        "prepared_at": one.prepared_at.isoformat() if one.prepared_at else None,
        "age_seconds": None if age_s is None else round(age_s, 3),
        "verdict": one.status.decision.value,
        "next_start": one.status.recovery_action.value,
        "reason": one.status.reason,
    }


def print_transactions(console: Console, found: tuple[InDoubtTransaction, ...]) -> None:
    """Print one line a transaction, and what to do next."""
    if not found:
        console.print("nothing is in doubt")
        return
    headings = ("transaction", "kind", "rows", "age", "the log says", "the next start")
    rows = [
        (
            (str(one.transaction), "bold"),
            (one.kind.value, ""),
            ("?" if one.rows is None else f"{one.rows:,}", ""),
            (_age(one), ""),
            (one.status.decision.value, _COLOURS[one.status.decision]),
            (_NEXT_START[one.status.recovery_action], ""),
        )
        for one in found
    ]
    print_listing(console, headings, rows)


def print_transaction(console: Console, one: InDoubtTransaction) -> None:
    """Print everything about one transaction."""
    transaction = one.transaction
    lines = {
        "transaction": str(transaction),
        "sink id": transaction.sink_id,
        "attempt": str(transaction.attempt),
        "checkpoint": str(transaction.checkpoint),
        "subtask": f"{transaction.subtask} (sequence {transaction.sequence})",
        "held by": one.held_by if one.held else f"nobody: {one.held_by} has it no longer",
        "kind": one.kind.value,
        "rows": "not known" if one.rows is None else f"{one.rows:,}",
        "prepared": f"{one.prepared_at:%Y-%m-%d %H:%M:%S %Z}, {_age(one)} ago"
        if one.prepared_at
        else "not known",
        "the log says": f"{one.status.decision.value}: {one.status.reason}",
        "the next start": _NEXT_START[one.status.recovery_action],
    }
    width = max(map(len, lines))
    for name, text in lines.items():
        console.print(f"{name.ljust(width)}  {text}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one transaction."""

    status: int
    one: InDoubtTransaction
    outcome: str
    sentence: str

    def as_json(self) -> dict[str, object]:
        """Return what `--json` prints of it."""
        return as_json(self.one) | {"outcome": self.outcome, "message": self.sentence}


def result_of(
    resolution: Resolution, one: InDoubtTransaction, outcome: CommitOutcome | AbortOutcome
) -> Result:
    """Return how it ended, in words and as an exit status."""
    rows = "its rows" if one.rows is None else f"its rows ({one.rows:,})"
    match outcome:
        case Committed():
            said = (EXIT_DONE, "committed", f"committed: {rows} are visible now")
        case Aborted():
            said = (EXIT_DONE, "aborted", f"rolled back: {rows} are gone and never were visible")
        case AlreadyCommitted() if resolution is Resolution.COMMIT:
            said = (EXIT_DONE, "already_committed", "was committed before; nothing was changed")
        case AlreadyCommitted():
            said = (EXIT_REFUSED, "already_committed", f"was committed before: {rows} stay")
        case Lost(reason):
            said = (EXIT_REFUSED, "lost", f"cannot be committed any more: {reason}")
        case RetryLater(reason):
            said = (EXIT_UNREACHABLE, "retry_later", f"nothing was changed, try later: {reason}")
        case Unknown(reason):
            said = (EXIT_UNREACHABLE, "unknown", f"nobody knows how it ended, ask again: {reason}")
    status, word, sentence = said
    return Result(status, one, word, sentence)


def _age(one: InDoubtTransaction) -> str:
    age_s = age_seconds(one)
    if age_s is None:
        return "?"
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
