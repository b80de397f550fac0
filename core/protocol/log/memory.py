"""The part of the decision log that survives pruning: facts about records that were deleted.

decided     the last checkpoint that each attempt decided. A transaction that an attempt left in
            doubt up to that checkpoint was committed once. If a target holds it in doubt again,
            the target has gone back to an older copy
sinks       the sink ids under which transactions may be in doubt. A sink id is removed once
            none of its transactions is in doubt
committed   the last transactions of each sink that are known to be committed. A target that
            cannot prove them has lost them, even if the last checkpoint lists none
savepoint   the savepoint from which the job started last. If the user names it again, the job
            goes on from its log
rewound     the commits that targets had when the user let the job go back behind them: they are
            known, but this log has not decided them
kept        the decisions from before a rewind that stay valid for sinks whose targets do not
            prove each commit. For all other sinks the rewind revoked them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId

ATTEMPTS_MAX = 128
"""The number of attempts remembered, of those that decided anything: some 4 KB per record."""


class Coverage(Enum):
    """The answer whether the attempt of a transaction decided its checkpoint, or a later one."""

    DECIDED = "decided"
    UNDECIDED = "undecided"
    FORGOTTEN = "forgotten"
    """The attempt is older than the attempts that the log remembers."""


@dataclass(frozen=True, slots=True)
class Decided:
    """The mark that `checkpoint` is the last one that `attempt` decided."""

    attempt: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class DecidedOfSink:
    """The mark that `checkpoint` is the last one that `attempt` decided, for one sink id only."""

    sink_id: str
    attempt: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class LogMemory:
    """The memory as of one record, including that record."""

    since: int = 1
    """The first attempt that is remembered. Earlier ones are forgotten."""
    decided: tuple[Decided, ...] = ()
    """The marks in rising order of attempts, at most `ATTEMPTS_MAX`. An attempt without a mark
    decided nothing."""
    sinks: tuple[str, ...] = ()
    committed: tuple[Committable, ...] = ()
    """For each of `sinks`, the transactions of the last checkpoint in which the sink had rows."""
    savepoint: str = ""
    """The savepoint's id, a space, and its location; empty if the job started from none."""
    rewound: tuple[Decided, ...] = ()
    """The last checkpoint of each attempt that a target had committed at the last rewind, in rising
    order of attempts."""
    kept: tuple[DecidedOfSink, ...] = ()
    """The marks of each sink id, in rising order of attempts."""

    def coverage(self, transaction: TransactionId) -> Coverage:
        """Return the log's decision about a transaction that no retained checkpoint lists."""
        if transaction.attempt < self.since:
            return Coverage.FORGOTTEN
        through = {mark.attempt: mark.checkpoint for mark in self.decided}.get(
            transaction.attempt, -1
        )
        for mark in self.kept:
            if (mark.sink_id, mark.attempt) == (transaction.sink_id, transaction.attempt):
                through = max(through, mark.checkpoint)
        return Coverage.DECIDED if transaction.checkpoint <= through else Coverage.UNDECIDED

    def knows(self, mark: Decided, sink_id: str = "") -> bool:
        """Return True if this log accounts for a target's commits up to `mark`.

        It does if they are decided, for all sinks or for `sink_id`. It also does if they are too
        old to be remembered, or were accepted at a rewind.
        """
        known = (*self.marks_of(sink_id), *self.rewound)
        through = max(
            (known_mark.checkpoint for known_mark in known if known_mark.attempt == mark.attempt),
            default=-1,
        )
        return mark.attempt < self.since or mark.checkpoint <= through

    def remember_decided(self, committables: Iterable[Committable]) -> LogMemory:
        """Return the memory with `committables`, of any attempts, marked as decided.

        Transactions that `kept` already covers are skipped: a mark in `decided` applies to all
        sinks and would undo the rewind for the others.
        """
        marks = {mark.attempt: mark.checkpoint for mark in self.decided}
        kept = {(mark.sink_id, mark.attempt): mark.checkpoint for mark in self.kept}
        for transaction in (committable.transaction for committable in committables):
            if transaction.checkpoint <= kept.get((transaction.sink_id, transaction.attempt), -1):
                continue
            if transaction.attempt >= self.since:
                through = marks.get(transaction.attempt, -1)
                marks[transaction.attempt] = max(through, transaction.checkpoint)
        return replace(self, decided=tuple(Decided(*pair) for pair in sorted(marks.items())))

    def as_decided(self, committable: Committable) -> Committable:
        """Return the remembered decided version of `committable`, or `committable` itself."""
        own = (
            remembered
            for remembered in self.committed
            if remembered.transaction == committable.transaction
        )
        return next(own, committable)

    def of_sink(self, sink_id: str) -> tuple[Committable, ...]:
        """Return the last transactions of `sink_id` that are known to be committed."""
        return tuple(
            committable
            for committable in self.committed
            if committable.transaction.sink_id == sink_id
        )

    def with_sinks(self, sinks: Iterable[str]) -> LogMemory:
        """Return the memory with `sinks` added: an attempt may write under them from now on."""
        return replace(self, sinks=tuple(sorted({*self.sinks, *sinks})))

    def until(self, attempt: AttemptId, checkpoint: CheckpointId) -> LogMemory:
        """Return the memory without the decisions of `attempt` above `checkpoint`."""
        marks = (
            Decided(mark.attempt, min(mark.checkpoint, checkpoint))
            if mark.attempt == attempt
            else mark
            for mark in self.decided
        )
        before = (
            committable
            for committable in self.committed
            if committable.transaction.attempt != attempt
            or committable.transaction.checkpoint <= checkpoint
        )
        return replace(self, decided=tuple(marks), committed=tuple(before))

    def with_committed(
        self, *, listed_before: Iterable[Committable], listed: Iterable[Committable]
    ) -> LogMemory:
        """Return the memory with those of `listed_before` committed that are not in `listed`."""
        still = {committable.transaction for committable in listed}
        done = (earlier for earlier in listed_before if earlier.transaction not in still)
        return replace(self, committed=_select_last((*self.committed, *done), self.sinks))

    def without_sinks(self, sinks: Iterable[str]) -> LogMemory:
        """Return the memory without `sinks`, under which nothing is, or ever will be, in doubt."""
        left = tuple(sorted(set(self.sinks) - set(sinks)))
        kept = tuple(mark for mark in self.kept if mark.sink_id in left)
        return replace(self, sinks=left, committed=_select_last(self.committed, left), kept=kept)

    def keeping(self, before: LogMemory, sinks: Iterable[str]) -> LogMemory:
        """Return this memory with the decisions of `before` kept for `sinks`; others are unchanged.

        Used for a rewind: decisions that only `before` contains stay valid for `sinks`.
        """
        sinks = frozenset(sinks)
        kept = [
            DecidedOfSink(sink_id, mark.attempt, mark.checkpoint)
            for sink_id in sorted(sinks)
            for mark in before.marks_of(sink_id)
            if not self._has_decided(mark)
        ]
        others = (kept_mark for kept_mark in self.kept if kept_mark.sink_id not in sinks)
        return replace(self, kept=(*others, *kept))

    def marks_of(self, sink_id: str) -> tuple[Decided, ...]:
        """Return the last checkpoint that each attempt decided for `sink_id`, in rising order."""
        marks = {mark.attempt: mark.checkpoint for mark in self.decided}
        for mark in self.kept:
            if mark.sink_id == sink_id:
                marks[mark.attempt] = max(mark.checkpoint, marks.get(mark.attempt, -1))
        return tuple(Decided(*pair) for pair in sorted(marks.items()))

    def _has_decided(self, mark: Decided) -> bool:
        through = {decided.attempt: decided.checkpoint for decided in self.decided}.get(
            mark.attempt, -1
        )
        return mark.attempt < self.since or mark.checkpoint <= through

    def with_decision(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        *,
        listed_before: Iterable[Committable],
        listed: Iterable[Committable],
    ) -> LogMemory:
        """Return the memory after `attempt` has decided `checkpoint`, which lists `listed`.

        A transaction that the previous decision listed and this one does not is committed: either
        its own attempt knew so, or the recovery of a later attempt committed it before anything
        else.
        """
        listed = tuple(listed)
        # If a job starts from a savepoint, a later attempt decides transactions that an earlier one
        # prepared.
        decided = self.remember_decided(listed).decided
        # Checkpoint 0 decides no transaction.
        if checkpoint > GENESIS:
            earlier = (mark for mark in decided if mark.attempt != attempt)
            decided = (*earlier, Decided(attempt, checkpoint))
        # Every record repeats the memory, so it must not grow with the age of a job that restarts
        # for years.
        forgotten, decided = decided[:-ATTEMPTS_MAX], decided[-ATTEMPTS_MAX:]
        since = forgotten[-1].attempt + 1 if forgotten else self.since
        memory = self.with_committed(listed_before=listed_before, listed=listed)
        kept = tuple(mark for mark in self.kept if mark.attempt >= since)
        return replace(memory, since=since, decided=decided, kept=kept)


NOTHING_REMEMBERED = LogMemory()
"""The memory of a job that never ran."""


def _select_last(committed: Iterable[Committable], sinks: Iterable[str]) -> tuple[Committable, ...]:
    by_sink: dict[str, list[Committable]] = {sink_id: [] for sink_id in sinks}
    for committable in committed:
        last = by_sink.get(committable.transaction.sink_id)
        # Keep only the highest checkpoint of a sink, with all its transactions: pruning leaves its
        # proofs until last.
        if last is None or (
            last and committable.transaction.checkpoint < last[0].transaction.checkpoint
        ):
            continue
        if last and committable.transaction.checkpoint > last[0].transaction.checkpoint:
            last.clear()
        last.append(committable)
    return tuple(committable for last in by_sink.values() for committable in last)
