"""The status of a transaction in doubt in the decision log, and the actions that it allows."""

from __future__ import annotations

from onceflow.core.commit.planner import BatchMemory, Standing, judge_transaction
from onceflow.core.protocol.batches import BatchClaim
from onceflow.core.protocol.checkpoints.snapshots import committables_of
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.target_records import (
    InDoubtStatus,
    LogFacts,
    LoggedDecision,
    RecoveryAction,
    Resolution,
    TargetRecord,
    last_unknown_commit,
)


def in_doubt_status(
    committable: Committable,
    log: LogFacts | None,
    *,
    claimed_by: str | None = None,
    lag: str = "",
) -> InDoubtStatus:
    """Return the decision of `log` about `committable`, which is in doubt in the target.

    `claimed_by` is the identity of the log that claimed the sink id, if the target or the place of
    the rows shows it. It decides which job owns the transaction. `lag` is the result of
    `describe_lag` for the sink id. `log` must have been read *before* the target was asked: in the
    other order, a commit in between would look like an undecided transaction.
    """
    if log is None:
        reason = "no decision log was given, so it is not known whether its checkpoint is decided"
        return InDoubtStatus(LoggedDecision.UNKNOWN, RecoveryAction.UNKNOWN, reason)
    alien = _why_foreign(committable.transaction, log, claimed_by) or lag
    if alien:
        return InDoubtStatus(LoggedDecision.FOREIGN, RecoveryAction.UNKNOWN, alien)
    return _judge_own(committable.transaction, log)


def describe_lag(log: LogFacts, record: TargetRecord) -> str:
    """Return why `log` is behind the target of a sink id; empty if it is not.

    `log` must have been read *after* the target returned `record`: in the other order, a decision
    in between would look like a missing one. A copy that lacks only decisions without a proof in
    the target cannot be distinguished from the log itself.
    """
    view = log.view
    if record.attempt > view.attempt:
        ahead = f"was claimed by attempt {record.attempt}, and the log knows {view.attempt}"
    elif committed := last_unknown_commit(view, record):
        last = log.last
        log_end = f"ends at checkpoint {last.checkpoint}" if last else "has decided nothing"
        ahead = f"has committed {committed}, and the log {log_end}"
    else:
        return ""
    return (
        f"the target of sink id {record.sink_id} {ahead}. Either this log is an older copy, or"
        " the job has run in other storage since, or a person has committed an undecided"
        " transaction. Use the storage in which the job ran last"
    )


def batch_in_doubt_status(committable: Committable, seen: BatchClaim) -> InDoubtStatus:
    """Return the decision in `seen` about `committable`, which is in doubt.

    An attempt that was overtaken decides nothing more, so "undecided" stays true from then on. The
    next batch acts as `planner.plan_claimed` says.
    """
    transaction = committable.transaction
    attempt = transaction.attempt
    decisions = seen.decisions
    standing = judge_transaction(
        transaction,
        {
            c.transaction
            for decision in decisions
            if not decision.is_committed
            for c in decision.committables
        },
        sink_ids=(transaction.sink_id,),
        attempt=AttemptId(seen.attempt + 1),
        memory=BatchMemory.from_claim(seen),
    )
    if standing in (Standing.LISTED, Standing.COMMITTED):
        lists = next(
            decision
            for decision in decisions
            if transaction in {listed.transaction for listed in decision.committables}
        )
        again = " and was already committed: the target was set back to an older copy"
        is_again = standing is Standing.COMMITTED
        return InDoubtStatus(
            LoggedDecision.SETTLED if is_again else LoggedDecision.DECIDED,
            RecoveryAction.COMMIT,
            f"{lists.batch} is decided and contains it{again if is_again else ''}",
        )
    if standing is Standing.LIVE:
        return InDoubtStatus(
            LoggedDecision.FOREIGN,
            RecoveryAction.UNKNOWN,
            f"it belongs to attempt {attempt}, but the newest known attempt is {seen.attempt}:"
            " these decisions belong to another query, or are an older copy",
        )
    # An attempt of a batch decides once. Only the newest one without a decision still can.
    if attempt == seen.attempt and attempt not in {decision.attempt for decision in decisions}:
        return InDoubtStatus(
            LoggedDecision.PENDING,
            RecoveryAction.ABORT,
            f"attempt {attempt} is the newest and may still decide it, if the query runs. Stop"
            " the query and add --fence, or start the query again",
        )
    if decisions and attempt < decisions[0].attempt:
        return InDoubtStatus(
            LoggedDecision.UNKNOWN,
            RecoveryAction.ABORT,
            f"attempt {attempt} is older than the oldest remembered decision (attempt"
            f" {decisions[0].attempt})",
        )
    return InDoubtStatus(
        LoggedDecision.UNDECIDED,
        RecoveryAction.ABORT,
        f"attempt {attempt} has ended and no decision contains it; its batch will be written again",
    )


def refusal(resolution: Resolution, status: InDoubtStatus, log: LogFacts | None) -> str | None:
    """Return the reason to refuse `resolution`, or None if the log agrees with it."""
    # Check this before the decision: a running job may decide or commit the transaction between
    # this check and the person's action.
    if log is not None and log.liveness:
        return (
            f"job {log.job} seems to be running ({'; '.join(log.liveness)}), and a running job"
            " commits or aborts its transactions itself. Stop the job first, or add --fence"
        )
    match status.decision, resolution:
        case (LoggedDecision.DECIDED | LoggedDecision.SETTLED, Resolution.COMMIT) | (
            LoggedDecision.UNDECIDED,
            Resolution.ABORT,
        ):
            return None
        case ((LoggedDecision.DECIDED | LoggedDecision.SETTLED), _):
            return f"rolling it back would lose its rows for good: {status.reason}"
        case LoggedDecision.UNDECIDED, _:
            return (
                "committing it would write its rows twice, since they are sent again:"
                f" {status.reason}"
            )
        case _:
            return status.reason


def _why_foreign(transaction: TransactionId, log: LogFacts, claimed_by: str | None) -> str:
    sink_id, view = transaction.sink_id, log.view
    if view.attempt == 0:
        return f"job {log.job} has no decision log in this storage"
    # The target's record proves the owner, so check it before names, which only suggest the owner.
    if claimed_by is not None and claimed_by != log.log_id:
        return (
            f"sink id {sink_id} belongs to the job with decision log {claimed_by}, but the"
            f" decision log of job {log.job} is {log.log_id}"
        )
    known = log.sink_ids
    # No operator of the log names a sink that was removed from the pipeline. Its id still begins
    # with the job's name, unless the user gave it another one.
    if claimed_by is None and sink_id not in known and not sink_id.startswith(f"{log.job}."):
        names = ", ".join(sorted(known)) or "none yet"
        return f"the decision log of job {log.job} contains no sink {sink_id} (it contains {names})"
    if transaction.attempt > view.attempt:
        return (
            f"it belongs to attempt {transaction.attempt}, but the newest attempt in the log is"
            f" {view.attempt}: the log belongs to another job, or is an older copy"
        )
    return ""


def _judge_own(transaction: TransactionId, log: LogFacts) -> InDoubtStatus:
    """Return the action of the job's next attempt for `transaction`, and the reason."""
    last, memory = log.last, log.view.memory
    standing = judge_transaction(
        transaction,
        {c.transaction for c in committables_of(last)} if last else (),
        sink_ids=(transaction.sink_id,),
        # Ask as the next start would: then the newest attempt of the log is over, too.
        attempt=AttemptId(log.view.attempt + 1),
        memory=memory,
    )
    decided_through = last.checkpoint if last else GENESIS
    match standing:
        case Standing.LISTED:
            return InDoubtStatus(
                LoggedDecision.DECIDED,
                RecoveryAction.COMMIT,
                f"completed checkpoint {decided_through} contains it",
            )
        case Standing.COMMITTED:
            return InDoubtStatus(
                LoggedDecision.SETTLED,
                RecoveryAction.COMMIT,
                f"attempt {transaction.attempt} decided it, and the log of checkpoint"
                f" {decided_through} counts it as committed. If the target still holds it in"
                " doubt or has no proof of its commit, the target was set back to an older copy,"
                " or a commit left it behind",
            )
        case Standing.FORGOTTEN:
            return InDoubtStatus(
                LoggedDecision.UNKNOWN,
                RecoveryAction.STOP,
                f"attempt {transaction.attempt} is older than the oldest attempt in the decision"
                f" log ({memory.since}), so it is not known whether it decided checkpoint"
                f" {transaction.checkpoint}",
            )
        case Standing.UNDECIDED:
            return _describe_undecided(transaction, log, decided_through)
        case Standing.FOREIGN | Standing.LIVE:
            # The transaction is of another log or an older copy, which the caller has already
            # reported.
            return InDoubtStatus(LoggedDecision.FOREIGN, RecoveryAction.KEEP, "not of this log")


def _describe_undecided(
    transaction: TransactionId, log: LogFacts, decided_through: CheckpointId
) -> InDoubtStatus:
    # For any older attempt this is certain: the claim of the newest one fenced it.
    if transaction.attempt == log.view.attempt and log.liveness:
        return InDoubtStatus(
            LoggedDecision.PENDING,
            RecoveryAction.ABORT,
            f"attempt {transaction.attempt}, the newest, seems to be running and may still decide"
            f" checkpoint {transaction.checkpoint} (decided so far: {decided_through})",
        )
    return InDoubtStatus(
        LoggedDecision.UNDECIDED,
        RecoveryAction.ABORT,
        f"attempt {transaction.attempt} did not decide checkpoint {transaction.checkpoint} (last"
        f" decided: {decided_through}); its records will be sent again",
    )
