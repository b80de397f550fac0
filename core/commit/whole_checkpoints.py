"""One commit for all rows of a checkpoint, of all subtasks: for targets that keep versions.

    pre-committed by subtasks -> listed by a decision -> one `GlobalCommit` -> one version

The driver commits, one checkpoint after the other, and the target keeps the highest checkpoint that
it has committed: an ordered proof. It moves only upwards, in the same step in which rows become
visible, so a commit that comes late or twice finds that it is over.

Which commit a transaction belongs to must be the same whoever asks, or two drivers would put its
rows into two versions. So it belongs to the first decision at or after its own checkpoint. A
decision names those before it that were not known to be committed (`undelivered`), and the last one
that was: from the last record alone every driver finds the same commits.

A sink may have a `CommitInterval`: then a commit is of several decisions, and which ones depends on
when a driver looks. Two drivers may gather differently, so such a target leaves out, in the same
step, each transaction that is not above its highest checkpoint. Nothing else changes: what waits is
decided and not known to be committed, so every decision lists it, and whoever comes next commits
it. Without an interval each decision is a commit of its own, for targets that look at the number
alone.

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
from onceflow.core.commit.queue import Done, OrderedCommits, WaitUntil, require_named
from onceflow.core.commit.retries import CommitRetryPolicy
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.committables import CommitInterval, Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.invariant import require
from onceflow.core.protocol.log.memory import NOTHING_REMEMBERED, LogMemory
from onceflow.core.protocol.recovery import committables_of


@dataclass(frozen=True, slots=True)
class GlobalCommit:
    """All that becomes visible under one sink id with one decision, or with several together."""

    checkpoint: CheckpointId
    """The decision, the last of several: what the target records as its highest."""
    committables: tuple[Committable, ...]
    """Of all subtasks, in commit order; never empty."""

    @property
    def transaction(self) -> TransactionId:
        """The first of its names."""
        return self.committables[0].transaction

    def __str__(self) -> str:
        rows = sum(committable.rows for committable in self.committables)
        return f"checkpoint {self.checkpoint} of sink {self.transaction.sink_id} ({rows} rows)"


class PreCommits:
    """The subtask's side: what it has pre-committed and does not know to be committed."""

    def __init__(self) -> None:
        self._waiting: list[Committable] = []
        self._prepared_last = GENESIS

    def pre_committed(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> None:
        """Record what `pre_commit(checkpoint)` returned.

        Raises:
            InvariantViolation: See `queue.require_named`.
        """
        require_named(checkpoint, committables, self._prepared_last)
        self._prepared_last = checkpoint
        self._waiting += committables

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        """Return what the ack of `checkpoint` must list.

        It may list what is committed already, which does no harm, and leaves out nothing that is
        not.
        """
        return tuple(c for c in self._waiting if c.checkpoint <= checkpoint)

    def take_committed(self, through: CheckpointId) -> tuple[Committable, ...]:
        """Record that all decided up to `through` is committed; return what that was."""
        done = tuple(c for c in self._waiting if c.checkpoint <= through)
        # They stand in the order of their checkpoints, so what is done is at the beginning.
        self._waiting = self._waiting[len(done) :]
        return done


class GlobalCommitQueue(OrderedCommits[GlobalCommit]):
    """The driver's side, for one sink in one attempt.

    `restored` is where the attempt began: all that it decides is committed.
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
        """How many of those that wait are committed together now."""
        self._decided_at_s: list[float] = []
        """When each that waits was decided."""
        self._is_last = False

    def add_decision(self, completed: CompletedCheckpoint, now_s: float) -> None:
        """Record a decision, in order: what it lists after the one before is one commit.

        Raises:
            InvariantViolation: Out of order.
        """
        checkpoint, before = completed.checkpoint, self._decided_last
        require(checkpoint > before, f"decision {checkpoint} of {self._sink_id} after {before}")
        listed = _list_committables(completed, self._sink_id, after=before)
        if listed:
            self._waiting.append(GlobalCommit(checkpoint, listed))
            self._decided_at_s.append(now_s)
        # Nothing is decided after the last one, so it waits for no other.
        self._is_last = completed.final
        self.note_decision(checkpoint)

    def next_commit(self, now_s: float) -> GlobalCommit | WaitUntil | None:
        """Return what to commit now, as `StepQueue` does; None while more is to be gathered."""
        if not self._gathered and self._waiting:
            due_at_s = self._find_due_time()
            if now_s < due_at_s:
                return WaitUntil(due_at_s) if isfinite(due_at_s) else None
            self._gathered = len(self._waiting) if self._interval else 1
        return super().next_commit(now_s)

    def _find_due_time(self) -> float:
        interval = self._interval
        # What is decided and not committed begins with the first that waits: those without rows,
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
    """What a new attempt does with the transactions of one sink, each in the order given."""

    commit: tuple[GlobalCommit, ...] = ()
    """Decided, and not in the target's proof."""
    abort: tuple[Committable, ...] = ()
    """Of older attempts and not decided: their records will be, or were, sent again."""
    ahead: str = ""
    """Why nothing may be done: the target has committed more than this log has decided."""
    behind: str = ""
    """Why nothing may be done: the target lacks what the log knows to be committed."""


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
    """Return what attempt `attempt` does, from the last decision and the target's own proof.

    `read_committed_through` was called before `in_doubt`, after the attempt had claimed the log:
    nobody decides anything else meanwhile. Idempotent. `gathers`: whether the sink has a commit
    interval; then all is one commit.
    """
    last = decided.checkpoint
    # First of all: a log that is behind its target is an old copy, and whatever it says is
    # undecided may be committed. Nothing may be aborted by it.
    if committed_through > last:
        return GlobalRecoveryPlan(
            ahead=f"the target has committed checkpoint {committed_through} of sink {sink_id}, and"
            f" the last decision of this log is {last}"
        )
    listed = _list_committables(decided, sink_id, after=GENESIS)
    delivered = [c.checkpoint for c in listed if c.checkpoint <= decided.delivered_through]
    # Two memories of the same thing. The last record's own list tells only as far as
    # `delivered_through`; a sink that had no rows for some checkpoints is known by the log's memory
    # alone.
    known = max([*delivered, *(c.checkpoint for c in memory.of_sink(sink_id))], default=GENESIS)
    if committed_through < known:
        return GlobalRecoveryPlan(
            behind=f"checkpoint {known} of sink {sink_id} was committed, and the target has"
            f" {committed_through} as its highest: it has gone back to an older copy"
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
    """Return those of `in_doubt` that older attempts than `attempt` prepared and never decided.

    Asked for at a start, and again after the first checkpoint: a slot of an older attempt may have
    prepared something in between. What the log no longer remembers is left where it is: unseen.
    """
    plan = plan_commits(
        committables_of(decided), in_doubt, sink_ids=(sink_id,), attempt=attempt, memory=memory
    )
    return plan.abort


def _by_decision(
    committables: Iterable[Committable], decisions: Sequence[CheckpointId]
) -> tuple[GlobalCommit, ...]:
    """Return one commit for each of `decisions`, which rise, that is the first for any of them."""
    by_decision: dict[CheckpointId, tuple[Committable, ...]] = {}
    for committable in committables:
        # To the left: what is named for exactly the number of a decision belongs to that decision.
        decision = decisions[bisect_left(decisions, committable.checkpoint)]
        by_decision[decision] = (*by_decision.get(decision, ()), committable)
    return tuple(GlobalCommit(n, by_decision[n]) for n in sorted(by_decision))


def _merge(commits: Sequence[GlobalCommit]) -> GlobalCommit:
    """Return one commit of all that `commits`, which rise, are made of."""
    return GlobalCommit(
        commits[-1].checkpoint, tuple(c for one in commits for c in one.committables)
    )


def _list_committables(
    completed: CompletedCheckpoint, sink_id: str, *, after: CheckpointId
) -> tuple[Committable, ...]:
    return tuple(
        c
        for c in committables_of(completed)
        if c.transaction.sink_id == sink_id and c.checkpoint > after
    )
