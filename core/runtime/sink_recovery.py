"""Makes every sink agree with the decision log before an attempt's slots begin.

Runs on the driver, once for all subtasks: which transactions are whose is decided by what the
restored checkpoint lists, never by a subtask's index, so rescaling between attempts changes
nothing. Which to commit and which to abort is decided by `protocol.recovery.plan_recovery`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from onceflow.core.errors import CommitFailed, CommitOutcomeUnknown, PreparedTransactionLost
from onceflow.core.graph import Graph, Operator, WriteTo
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.recovery import RecoveryPlan, plan_recovery
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.runtime.status import SinkStatus
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.storage import JobStorage


@dataclass(frozen=True, slots=True)
class RecoveryCounts:
    """What recovery did to transactions."""

    sinks: tuple[SinkStatus, ...] = ()
    """By uid, with `committed`, `rows_committed` and `aborted` alone."""

    @property
    def committed(self) -> int:
        """Transactions that this call committed; not those that it found committed."""
        return sum(sink.committed for sink in self.sinks)

    @property
    def aborted(self) -> int:
        """Transactions that were rolled back."""
        return sum(sink.aborted for sink in self.sinks)


@dataclass(frozen=True, slots=True)
class RecoveryStep:
    """What recovery waits for."""

    text: str
    began_at: float
    """As of `time.monotonic`."""


class SinkRecovery:
    """The driver's committers for one attempt, one a sink, kept for the sweep that follows."""

    def __init__(
        self, graph: Graph, job: str, attempt: AttemptId, storage: JobStorage, deadline_s: float
    ) -> None:
        self._attempt = attempt
        self._deadline_s = deadline_s
        self.step = RecoveryStep("its turn", time.monotonic())
        self._sinks: list[tuple[Operator, WriteTo, CommitterContext]] = [
            (
                operator,
                work,
                CommitterContext(
                    job,
                    operator.uid,
                    work.sink_id,
                    attempt,
                    log_id=storage.log_id,
                    staging=storage.staging(work.sink_id),
                ),
            )
            for operator, work in graph.sinks()
        ]
        self._committers: dict[str, Committer] = {}

    def check(self) -> None:
        """Return when every sink can be written; creates tables and fences older attempts.

        Raises:
            ConfigError: A sink cannot be written; the message says what to do.
            Fenced: A newer attempt, or another job, owns a sink id.
        """
        for operator, work, context in self._sinks:
            self._begin(f"the check of sink {operator.uid}")
            work.sink.check(context, operator.schema)

    def recover(self, restored: CompletedCheckpoint) -> RecoveryCounts:
        """Commit all that `restored` lists and abort what older attempts left besides. Idempotent.

        Raises:
            PreparedTransactionLost: A decided transaction is gone without having been committed.
            CommitFailed: A sink did not answer in time; the next attempt tries again.
        """
        counts: list[SinkStatus] = []
        for operator, work, context in self._sinks:
            plan, committer = self._plan(operator.uid, work, context, restored)
            committed = [c.rows for c in plan.commit if self._commit(committer, c)]
            for committable in plan.abort:
                self._abort(committer, committable)
            counts.append(
                SinkStatus(
                    operator.uid,
                    work.sink_id,
                    committed=len(committed),
                    rows_committed=sum(committed),
                    aborted=len(plan.abort),
                )
            )
        return RecoveryCounts(tuple(counts))

    def sweep(self, completed: CompletedCheckpoint) -> RecoveryCounts:
        """Abort what a slot of an older attempt prepared after `recover` had looked (I3).

        Commits nothing: what `completed` lists is its own slots' to commit.
        """
        counts: list[SinkStatus] = []
        for operator, work, context in self._sinks:
            plan, committer = self._plan(operator.uid, work, context, completed)
            for committable in plan.abort:
                self._abort(committer, committable)
            counts.append(SinkStatus(operator.uid, work.sink_id, aborted=len(plan.abort)))
        return RecoveryCounts(tuple(counts))

    def close(self) -> None:
        """Close every committer."""
        for committer in self._committers.values():
            committer.close()
        self._committers.clear()

    def _plan(
        self,
        uid: str,
        work: WriteTo,
        context: CommitterContext,
        checkpoint: CompletedCheckpoint,
    ) -> tuple[RecoveryPlan, Committer]:
        committer = self._committers.get(uid)
        self._begin(f"what sink {uid} holds in doubt")
        if committer is None:
            committer = self._committers[uid] = work.sink.committer(context)
        decided = [
            committable
            for _, snapshot in checkpoint.operator(uid)
            for committable in snapshot.committables
        ]
        plan = plan_recovery(
            decided, committer.in_doubt(), sink_id=work.sink_id, attempt=self._attempt
        )
        return plan, committer

    def _commit(self, committer: Committer, committable: Committable) -> bool:
        self._begin(f"the commit of transaction {committable.transaction}")
        outcome = self._until_settled(lambda: committer.commit(committable))
        name = f"transaction {committable.transaction} ({committable.rows} rows)"
        more = (
            f". `onceflow txn show {committable.transaction}` tells more, docs/operations.md"
            " what to do"
        )
        match outcome:
            case Committed():
                return True
            case AlreadyCommitted():
                return False
            case Lost(reason):
                raise PreparedTransactionLost(f"{name}: {reason}{more}")
            case Unknown(reason):
                raise CommitOutcomeUnknown(f"{name}: {reason}{more}")
            case _:
                raise CommitFailed(f"{name} is decided and could not be committed: {outcome}{more}")

    def _abort(self, committer: Committer, committable: Committable) -> None:
        self._begin(f"the rollback of transaction {committable.transaction}")
        outcome = self._until_settled(lambda: committer.abort(committable))
        match outcome:
            case Aborted():
                return
            case AlreadyCommitted():
                raise CommitFailed(
                    f"transaction {committable.transaction} is not decided by the log, and the sink"
                    " says it was committed: another job writes under this sink id"
                )
            case _:
                raise CommitFailed(
                    f"transaction {committable.transaction} of an older attempt could not be rolled"
                    f" back: {outcome}"
                )

    def _begin(self, text: str) -> None:
        self.step = RecoveryStep(text, time.monotonic())

    def _until_settled(self, call: Callable[[], object]) -> object:
        """Repeat `call` while nobody can tell or it says "later", up to the deadline."""
        deadline = time.monotonic() + self._deadline_s
        pause_s = 0.02
        while True:
            outcome = call()
            if (
                not isinstance(outcome, (RetryLater, Unknown))
                or time.monotonic() + pause_s > deadline
            ):
                return outcome
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 1.0)
