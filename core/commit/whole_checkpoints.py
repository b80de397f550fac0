"""The commit of all rows of a checkpoint, of all subtasks, for targets that keep versions.

    pre-committed by subtasks -> listed by a decision -> one `GlobalCommit` -> one version

The driver commits one checkpoint after the other. The target keeps the highest checkpoint that it
has committed, as an ordered proof. This number only rises, in the same step in which rows become
visible. So a commit that arrives late or twice finds that it is already done.

Every process must assign a transaction to the same commit. Otherwise two drivers would put its rows
into two versions. So a transaction belongs to the first decision at or after its own checkpoint. A
decision names the earlier decisions that were not known to be committed (`undelivered`), and the
last one that was. So every driver finds the same commits from the last record alone.

A sink may have a `CommitInterval`. Then a commit contains several decisions, and which ones depends
on the time at which a driver looks. Two drivers may gather different ones. So in the same step,
such a target leaves out each transaction that is not above its highest checkpoint. Nothing else
changes: waiting transactions are decided and not known to be committed, so every decision lists
them, and the next driver commits them. Without an interval, each decision is a commit of its own,
for targets that look only at the number.

Invariants:
    transaction.checkpoint <= GlobalCommit.checkpoint, which is decided
    a transaction up to the target's highest checkpoint is committed, or was never decided
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from onceflow.core.commit.planner import plan_commits
from onceflow.core.commit.queue import (
    CommitRetryPolicy,
    Done,
    OrderedCommits,
    WaitUntil,
    require_named,
)
from onceflow.core.errors import require
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, committables_of
from onceflow.core.protocol.committables import CommitInterval, Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import NOTHING_REMEMBERED, LogMemory


@dataclass(frozen=True, slots=True)
class GlobalCommit:
    """The transactions that become visible under one sink id with one or several decisions."""

    checkpoint: CheckpointId
    """The decision, or the last of several. The target records it as its highest checkpoint."""
    committables: tuple[Committable, ...]
    """The committables of all subtasks, in commit order; never empty."""

    @property
    def transaction(self) -> TransactionId:
        """The id of the first transaction of this commit."""
        return self.committables[0].transaction

    def __str__(self) -> str:
        rows = sum(committable.rows for committable in self.committables)
        return f"checkpoint {self.checkpoint} of sink {self.transaction.sink_id} ({rows} rows)"


class PreCommits:
    """The pre-committed transactions of one subtask that may not be committed yet."""

    def __init__(self) -> None:
        self._waiting: list[Committable] = []
        self._prepared_last = GENESIS

    def pre_committed(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> None:
        """Record the result of `pre_commit(checkpoint)`.

        Raises:
            InvariantViolation: See `queue.require_named`.
        """
        require_named(checkpoint, committables, self._prepared_last)
        self._prepared_last = checkpoint
        self._waiting += committables

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        """Return the transactions that the ack of `checkpoint` must list.

        The list may contain committed ones, which is harmless. It contains all uncommitted ones.
        """
        return tuple(c for c in self._waiting if c.checkpoint <= checkpoint)

    def take_committed(self, through: CheckpointId) -> tuple[Committable, ...]:
        """Record that all decided transactions up to `through` are committed; return these."""
        done = tuple(c for c in self._waiting if c.checkpoint <= through)
        # The transactions are in the order of their checkpoints, so the committed ones are at the
        # beginning.
        self._waiting = self._waiting[len(done) :]
        return done


class GlobalCommitQueue(OrderedCommits[GlobalCommit]):
    """The driver's commits for one sink in one attempt.

    `restored` is the checkpoint at which the attempt began: all its transactions are committed.
    """

    def __init__(
        self,
        sink_id: str,
        retry: CommitRetryPolicy,
        restored: CheckpointId,
        interval: CommitInterval | None = None,
    ) -> None:
        super().__init__(retry, restored)
        self._sink_id = sink_id
        self._interval = interval
        self._gathered = 0
        """The number of waiting commits that are committed together now."""
        self._decided_at_s: list[float] = []
        """The time of the decision of each waiting commit."""
        self._is_last = False

    def add_decision(self, completed: CompletedCheckpoint, now_s: float) -> None:
        """Record the next decision. Its transactions since the previous decision become one commit.

        Raises:
            InvariantViolation: The decision is out of order.
        """
        checkpoint, before = completed.checkpoint, self._decided_last
        require(checkpoint > before, f"decision {checkpoint} of {self._sink_id} after {before}")
        listed = _list_committables(completed, self._sink_id, after=before)
        if listed:
            self._waiting.append(GlobalCommit(checkpoint, listed))
            self._decided_at_s.append(now_s)
        # Nothing is decided after the last one, so it does not wait for another.
        self._is_last = completed.final
        self.note_decision(checkpoint)

    def next_commit(self, now_s: float) -> GlobalCommit | WaitUntil | None:
        """Return the commit to carry out now, or the time at which the next one is due.

        Return None if nothing is left to commit, or if only the next decision makes it due.
        """
        if not self._gathered and self._waiting:
            due_at_s = self._find_due_time()
            if now_s < due_at_s:
                return WaitUntil(due_at_s) if isfinite(due_at_s) else None
            self._gathered = len(self._waiting) if self._interval else 1
        return super().next_commit(now_s)

    def _find_due_time(self) -> float:
        interval = self._interval
        # The decided, uncommitted checkpoints begin with the first that waits. Those without rows,
        # which wait for nothing, count, too.
        if interval is None or self._is_last or len(self._decided) >= interval.decisions_max:
            return -inf
        return inf if interval.seconds is None else self._decided_at_s[0] + interval.seconds

    def _head(self) -> GlobalCommit | None:
        return _merge(self._waiting[: self._gathered]) if self._gathered else None

    def _finish(self, *, already: bool) -> Done:
        del self._waiting[: self._gathered - 1], self._decided_at_s[: self._gathered]
        self._gathered = 0
        return super()._finish(already=already)


@dataclass(frozen=True, slots=True)
class GlobalRecoveryPlan:
    """The actions of a new attempt for the transactions of one sink.

    The attempt carries them out in the order of the fields.
    """

    commit: tuple[GlobalCommit, ...] = ()
    """The decided commits that the target does not prove."""
    abort: tuple[Committable, ...] = ()
    """The undecided transactions of older attempts: their records will be, or were, sent again."""
    ahead: str = ""
    """The reason to do nothing: the target has committed more than this log has decided."""
    behind: str = ""
    """The reason to do nothing: the target lacks commits that the log knows."""


def plan_global_recovery(
    decided: CompletedCheckpoint,
    in_doubt: Sequence[Committable],
    *,
    sink_id: str,
    attempt: AttemptId,
    committed_through: CheckpointId,
    memory: LogMemory = NOTHING_REMEMBERED,
    gathers: bool = False,
) -> GlobalRecoveryPlan:
    """Return the plan of attempt `attempt`, from the last decision and the target's own proof.

    The caller has claimed the log for the attempt, then called `in_doubt`, then
    `read_committed_through`. So no other process decides anything meanwhile. Idempotent.
    `gathers`: the sink has a commit interval, so all decisions are one commit.
    """
    last = decided.checkpoint
    # Check this first. A log that is behind its target is an old copy, and transactions that it
    # calls undecided may be committed. So nothing may be aborted by it.
    if committed_through > last:
        return GlobalRecoveryPlan(
            ahead=f"the target has committed checkpoint {committed_through} of sink {sink_id},"
            f" but the last decision of this log is {last}"
        )
    listed = _list_committables(decided, sink_id, after=GENESIS)
    delivered = [c.checkpoint for c in listed if c.checkpoint <= decided.delivered_through]
    # Use both memories. The last record's own list reaches only to `delivered_through`. If a sink
    # had no rows for some checkpoints, only the log's memory knows it.
    known = max([*delivered, *(c.checkpoint for c in memory.of_sink(sink_id))], default=GENESIS)
    if committed_through < known:
        return GlobalRecoveryPlan(
            behind=f"checkpoint {known} of sink {sink_id} was committed, but the highest"
            f" checkpoint in the target is {committed_through}: the target was set back to"
            " an older copy"
        )
    left = (c for c in listed if c.checkpoint > committed_through)
    commits = _by_decision(left, (*decided.undelivered, last))
    return GlobalRecoveryPlan(
        commit=(_merge(commits),) if gathers and commits else commits,
        abort=find_undecided(decided, in_doubt, sink_id=sink_id, attempt=attempt, memory=memory),
    )


def find_undecided(
    decided: CompletedCheckpoint,
    in_doubt: Sequence[Committable],
    *,
    sink_id: str,
    attempt: AttemptId,
    memory: LogMemory = NOTHING_REMEMBERED,
) -> tuple[Committable, ...]:
    """Return those of `in_doubt` that attempts before `attempt` prepared and never decided.

    Used at a start, and again after the first checkpoint: a slot of an older attempt may have
    prepared a transaction in between. A transaction that the log no longer remembers is left alone
    and not reported.
    """
    plan = plan_commits(
        committables_of(decided), in_doubt, sink_ids=(sink_id,), attempt=attempt, memory=memory
    )
    return plan.abort


def _by_decision(
    committables: Iterable[Committable], decisions: Sequence[CheckpointId]
) -> tuple[GlobalCommit, ...]:
    """Return one commit for each decision that is the first at or after some transaction.

    `decisions` are in rising order.
    """
    by_decision: dict[CheckpointId, tuple[Committable, ...]] = {}
    for committable in committables:
        # Bisect to the left: a transaction with exactly the number of a decision belongs to that
        # decision.
        decision = decisions[bisect_left(decisions, committable.checkpoint)]
        by_decision[decision] = (*by_decision.get(decision, ()), committable)
    return tuple(GlobalCommit(n, by_decision[n]) for n in sorted(by_decision))


def _merge(commits: Sequence[GlobalCommit]) -> GlobalCommit:
    """Return one commit of all transactions of `commits`, which are in rising order."""
    return GlobalCommit(
        commits[-1].checkpoint, tuple(c for commit in commits for c in commit.committables)
    )


def _list_committables(
    completed: CompletedCheckpoint, sink_id: str, *, after: CheckpointId
) -> tuple[Committable, ...]:
    return tuple(
        c
        for c in committables_of(completed)
        if c.transaction.sink_id == sink_id and c.checkpoint > after
    )
