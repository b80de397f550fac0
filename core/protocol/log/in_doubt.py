"""The facts of a decision log about transactions in doubt, and what they say of one.

decided     the last checkpoint lists it                       the next start commits it
undecided   its attempt is over and did not decide it          the next start rolls it back
pending     its attempt may be alive and may still decide      only that attempt may settle it
settled     the log knows its commit, the target does not      the next start commits it again
foreign     the log is another job's, or an older copy         nothing is known
unknown     there is no log, or the log has forgotten it       nothing is known
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import TransactionId, sink_id_of
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.recovery import committables_of


class LoggedDecision(Enum):
    """The verdict of the log; see the module."""

    DECIDED = "decided"
    UNDECIDED = "undecided"
    PENDING = "pending"
    SETTLED = "settled"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


class RecoveryAction(Enum):
    """The action of the job's next start for a transaction in doubt."""

    COMMIT = "commit"
    ABORT = "abort"
    KEEP = "keep"
    """The start leaves the transaction alone."""
    STOP = "stop"
    """The start stops and names the transaction: a person must decide."""
    UNKNOWN = "unknown"


class Resolution(Enum):
    """The action of a person for a transaction in doubt."""

    COMMIT = "commit"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class InDoubtStatus:
    """The decision, its reason in a sentence, and the action of the next start."""

    decision: LoggedDecision
    recovery_action: RecoveryAction
    reason: str


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The content of a job's decision log, as of one reading, and the signs that the job runs."""

    job: str
    log_id: str
    view: LogView
    liveness: tuple[str, ...] = ()
    """The reasons why the newest attempt may still be running; empty if there are none."""

    @property
    def last(self) -> CompletedCheckpoint | None:
        """The checkpoint from which the next start goes on."""
        return self.view.completed[-1] if self.view.decided else None

    @property
    def decided(self) -> dict[TransactionId, Committable]:
        """The transactions that the next start commits, if they are not committed yet."""
        listed = committables_of(self.last) if self.last else ()
        return {c.transaction: c for c in (*self.view.memory.committed, *listed)}

    @property
    def sink_ids(self) -> frozenset[str]:
        """The sink ids that the log knows: from its transactions and from its operators' names."""
        listed = {
            c.transaction.sink_id for kept in self.view.completed for c in committables_of(kept)
        }
        last = self.last
        operators = {o.uid for s in last.snapshots for o in s.operators} if last else set[str]()
        named = {sink_id_of(self.job, uid) for uid in operators}
        return frozenset(listed | named) | self.view.sinks
