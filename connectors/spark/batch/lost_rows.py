"""The search for decided rows whose staged files are missing, and the advice for users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onceflow.core.protocol.batches import BatchDecision
from onceflow.core.protocol.committables import CommitOutcome, Committable, Lost, RetryLater
from onceflow.core.spi import Committer
from onceflow.core.spi.staging import is_staged

_IDS_MAX = 20
"""The maximum number of ids in an error. The error of the next try names the others."""


def find_lost_rows(
    committer: Committer, decided: Iterable[Committable], in_doubt: Iterable[Committable]
) -> Sequence[Committable]:
    """Return those of `decided` that are staged, not committed, and have no file. Changes no rows.

    `in_doubt` are the transactions that have a file. A transaction without a file is committed
    already, or lost.
    """
    held = {committable.transaction for committable in in_doubt}
    missing = [
        committable
        for committable in decided
        if is_staged(committable) and committable.transaction not in held
    ]
    return [committable for committable in missing if _is_lost(committer.commit(committable))]


def _is_lost(outcome: CommitOutcome) -> bool:
    """Return True if rows are gone, or are in a place that is not used.

    False while a server is down.
    """
    match outcome:
        case Lost():
            return True
        case RetryLater(until_fixed=until_fixed):
            return until_fixed
        case _:
            return False


def describe_lost_rows(
    decisions: Sequence[BatchDecision],
    lost: Sequence[Committable],
    *,
    part_of: Callable[[str], str],
    owner: str,
    can_give_up: bool,
) -> str:
    """Return a text about the lost rows, their batch and table, and the user's options.

    `part_of` returns the target of a sink id. `owner` is the writer: a query, or batch writes.
    """
    names = {committable.transaction for committable in lost}
    batches = [
        str(decision.batch)
        for decision in decisions
        if any(listed.transaction in names for listed in decision.committables)
    ]
    rows = ", ".join(
        f"{committable.transaction} ({committable.rows} rows for"
        f" {part_of(committable.transaction.sink_id)})"
        for committable in lost[:_IDS_MAX]
    )
    more = f" and {len(lost) - _IDS_MAX} more" if len(lost) > _IDS_MAX else ""
    text = (
        f"{', '.join(batches)} of {owner} is decided, but some of its staged rows are missing:"
        f" {rows}{more}. Nothing is written under this name until they are restored or given up."
        " Restore the directory, or give option stagingLocation (for a query perhaps"
        " checkpointLocation) the value that it had when the batch was written. Then run again:"
        " the run commits them"
    )
    command = _command(decisions[0], owner) if can_give_up and decisions else ""
    if not command:
        return text
    ids = " ".join(str(committable.transaction) for committable in lost[:_IDS_MAX])
    return (
        f"{text}. If the directory is lost for good, give the rows up: onceflow txn abort {ids}"
        f" --force --url URL {command} --storage DIRECTORY. DIRECTORY is the present"
        " stagingLocation, and may be empty. The batch then counts as written without these"
        " rows. If it has no other rows, it counts as never written, and a repeated write"
        " writes it"
    )


def _command(decision: BatchDecision, owner: str) -> str:
    if owner.startswith("Spark query"):
        return "--checkpoint-location LOCATION"
    app = decision.batch.source.rpartition("@")[0]
    return f"--txn-app-id {app!r}" if app else ""
