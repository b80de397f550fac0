"""What a query's decisions say about a transaction in doubt, in the words of `in_doubt`."""

from __future__ import annotations

from onceflow.core.protocol.batches import BatchClaim
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.in_doubt import InDoubtStatus, LoggedDecision, RecoveryAction


def batch_in_doubt_status(committable: Committable, seen: BatchClaim) -> InDoubtStatus:
    """Return what the decisions in `seen` say about `committable`, which the target holds.

    An attempt that was overtaken decides nothing more, so "undecided" stays true from then on. The
    next batch acts as `batches.settle_claimed` says.
    """
    transaction = committable.transaction
    attempt = transaction.attempt
    decisions = seen.decisions
    for one in decisions:
        if transaction in {listed.transaction for listed in one.committables}:
            decision = LoggedDecision.SETTLED if one.settled else LoggedDecision.DECIDED
            again = ", and was committed: the target has gone back to an older copy"
            return InDoubtStatus(
                decision,
                RecoveryAction.COMMIT,
                f"{one.batch} is decided and lists it{again if one.settled else ''}",
            )
    if attempt > seen.attempt:
        return InDoubtStatus(
            LoggedDecision.FOREIGN,
            RecoveryAction.UNKNOWN,
            f"it is of attempt {attempt}, and the newest that is known is {seen.attempt}: these"
            " decisions are another query's, or an older copy",
        )
    if attempt == seen.attempt and attempt not in {one.attempt for one in decisions}:
        return InDoubtStatus(
            LoggedDecision.PENDING,
            RecoveryAction.ABORT,
            f"attempt {attempt} is the newest, and may decide it yet if the query still runs: stop"
            " the query and add --fence, or start it again",
        )
    if decisions and attempt < decisions[0].attempt:
        return InDoubtStatus(
            LoggedDecision.UNKNOWN,
            RecoveryAction.ABORT,
            f"attempt {attempt} is older than all that is remembered (from attempt"
            f" {decisions[0].attempt} on)",
        )
    return InDoubtStatus(
        LoggedDecision.UNDECIDED,
        RecoveryAction.ABORT,
        f"attempt {attempt} is over, and no decision lists it; its batch comes again",
    )
