"""The comparison of the decision log with a sink's target.

    agrees       the target proves every decision in which the sink had rows
    committing   the target does not prove the last decision yet: its commits are running
    behind       the target lacks commits that the log knows: it was put back
    ahead        the target has commits that the log does not know: rows may be written twice
    silent       the target keeps no record that can be read
    unreachable  the target cannot be asked now

The log is read twice, before the target and after it. Otherwise a decision and its commit between
two readings would look like a contradiction. The target must prove the decisions made before it was
asked. The log must know all decisions made until the target had answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from onceflow.core.protocol.checkpoints.snapshots import committables_of
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.log import target_records
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.protocol.log.rules import LogView


class Agreement(Enum):
    """The agreement of log and target; see the module."""

    AGREES = "agrees"
    COMMITTING = "committing"
    BEHIND = "behind"
    AHEAD = "ahead"
    SILENT = "silent"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class SinkProof:
    """The state of one sink, according to log and target."""

    uid: str
    sink_id: str
    agreement: Agreement
    reason: str
    """A sentence for people."""
    decided: Decided | None
    """The last decision of the log in which the sink had rows; None if it had none yet."""
    listed_transactions: int
    """The number of transactions in the last decision that the job did not know to be committed
    then."""
    listed_rows: int
    proven: Decided | None
    """The last commit that the target's ledger proves."""
    claimed_attempt: int | None
    """The newest attempt that the target has seen."""
    in_doubt: int | None
    """The number of transactions that the target holds prepared; None if it was not asked."""


def find_decided_last(view: LogView, sink_id: str) -> Decided | None:
    """Return the last decision in which `sink_id` had rows, or None if none is remembered."""
    listed = committables_of(view.completed[-1]) if view.decided else ()
    known = (*listed, *view.memory.of_sink(sink_id))
    marks = [
        (committable.transaction.attempt, committable.transaction.checkpoint)
        for committable in known
        if committable.transaction.sink_id == sink_id
    ]
    return Decided(*max(marks)) if marks else None


def judge_sink(
    uid: str,
    sink_id: str,
    before: LogView,
    record: target_records.TargetRecord | None,
    after: LogView,
    in_doubt: int | None,
) -> SinkProof:
    """Return the comparison of the target's `record` with the log, read `before` and `after` it."""
    decided = find_decided_last(before, sink_id)
    listed = [
        committable
        for committable in (committables_of(before.completed[-1]) if before.decided else ())
        if committable.transaction.sink_id == sink_id
    ]
    agreement, reason = _judge(decided, listed, record, before, after)
    return SinkProof(
        uid=uid,
        sink_id=sink_id,
        agreement=agreement,
        reason=reason,
        decided=decided,
        listed_transactions=len(listed),
        listed_rows=sum(committable.rows for committable in listed),
        proven=None if record is None else _find_last_commit(record),
        claimed_attempt=record.attempt if record and record.attempt else None,
        in_doubt=in_doubt,
    )


def describe_unreachable(uid: str, sink_id: str, view: LogView, error: str) -> SinkProof:
    """Return the known facts about a sink whose target cannot be asked now."""
    silent = judge_sink(uid, sink_id, view, None, view, None)
    return SinkProof(
        uid,
        sink_id,
        Agreement.UNREACHABLE,
        error,
        silent.decided,
        silent.listed_transactions,
        silent.listed_rows,
        None,
        None,
        None,
    )


def _judge(
    decided: Decided | None,
    listed: Sequence[Committable],
    record: target_records.TargetRecord | None,
    before: LogView,
    after: LogView,
) -> tuple[Agreement, str]:
    if record is None:
        return Agreement.SILENT, "the target keeps no record of what was committed"
    if unknown := target_records.last_unknown_commit(after, record):
        return Agreement.AHEAD, (
            f"the target has committed {unknown}, which the decision log does not contain. Stop"
            " the job and see 'Storage that is behind its target' in docs/operations.md"
        )
    if target_records.is_set_back(record, before.memory.of_sink(record.sink_id)):
        return Agreement.BEHIND, (
            "the target lacks rows that the decision log counts as committed: the target was set"
            " back to an older copy. Stop the job and see docs/operations.md"
        )
    proven = _find_last_commit(record)
    if decided is None:
        return (
            Agreement.AGREES,
            "no checkpoint of this sink is decided yet, and nothing is committed",
        )
    through = record.through >= decided.checkpoint
    reached = proven and (proven.attempt, proven.checkpoint) >= (
        decided.attempt,
        decided.checkpoint,
    )
    # Not by the highest proof alone: one subtask may have committed the checkpoint, another not.
    if through or (reached and not target_records.is_set_back(record, listed)):
        return Agreement.AGREES, "the target proves the last decision of the log"
    return Agreement.COMMITTING, (
        f"checkpoint {decided.checkpoint} is decided, but the target does not prove its commit yet"
    )


def _find_last_commit(record: target_records.TargetRecord) -> Decided | None:
    if record.committed:
        return record.committed[-1]
    return Decided(record.attempt, record.through) if record.through else None
