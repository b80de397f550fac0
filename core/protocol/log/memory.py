"""What the decision log remembers of records that it has pruned.

decided     how far each attempt decided: what it left in doubt up to there was committed once,
            so finding it in doubt means that the target has gone back to an older copy
sinks       under which sink ids something may be in doubt; one leaves when it has been settled
committed   the last transactions of each sink that are known to be committed: a target that
            cannot prove them has lost them, also when the last checkpoint lists nothing
savepoint   from which savepoint the job has begun last: told so again, it goes on from its log
rewound     what targets had committed when the user let the job go back behind it: known, and
            nothing that this log has decided
kept        what was decided before a rewind and stays so for the sinks whose targets do not tell
            what they have committed; of all others it was taken back
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId

ATTEMPTS_MAX = 128
"""Attempts remembered, of those that decided anything: some 4 KB a record."""


class Coverage(Enum):
    """Whether the attempt of a transaction decided its checkpoint, or a later one."""

    DECIDED = "decided"
    UNDECIDED = "undecided"
    FORGOTTEN = "forgotten"
    """The attempt is older than what the log remembers."""


@dataclass(frozen=True, slots=True)
class Decided:
    """`checkpoint` is the last one that `attempt` decided."""

    attempt: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class DecidedOfSink:
    """`checkpoint` is the last one that `attempt` decided, for one sink id alone."""

    sink_id: str
    attempt: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class LogMemory:
    """As of one record, that record included."""

    since: int = 1
    """Attempts before this one are forgotten."""
    decided: tuple[Decided, ...] = ()
    """By attempt, rising, no more than `ATTEMPTS_MAX`; one that is missing decided nothing."""
    sinks: tuple[str, ...] = ()
    committed: tuple[Committable, ...] = ()
    """Of each of `sinks`, those of the last checkpoint in which it had rows."""
    savepoint: str = ""
    """Its id, a space, and where it was; empty when the job has begun from none."""
    rewound: tuple[Decided, ...] = ()
    """By attempt, rising: the last checkpoint that a target had committed at the last rewind."""
    kept: tuple[DecidedOfSink, ...] = ()
    """Of each sink id by attempt, rising."""

    def coverage(self, transaction: TransactionId) -> Coverage:
        """Return what the log knows of a transaction that no retained checkpoint lists."""
        if transaction.attempt < self.since:
            return Coverage.FORGOTTEN
        through = {one.attempt: one.checkpoint for one in self.decided}.get(transaction.attempt, -1)
        for one in self.kept:
            if (one.sink_id, one.attempt) == (transaction.sink_id, transaction.attempt):
                through = max(through, one.checkpoint)
        return Coverage.DECIDED if transaction.checkpoint <= through else Coverage.UNDECIDED

    def knows(self, mark: Decided, sink_id: str = "") -> bool:
        """Return whether a target may hold commits of an attempt up to a checkpoint, by this log.

        They are decided, of all sinks or of `sink_id`; too old to be remembered; or were accepted
        at a rewind.
        """
        known = (*self.marks_of(sink_id), *self.rewound)
        through = max((one.checkpoint for one in known if one.attempt == mark.attempt), default=-1)
        return mark.attempt < self.since or mark.checkpoint <= through

    def remember_decided(self, committables: Iterable[Committable]) -> LogMemory:
        """Return the memory that knows `committables`, of whatever attempts, as decided.

        What is `kept` is so already; a mark for all sinks would take back the others' rewind.
        """
        marks = {one.attempt: one.checkpoint for one in self.decided}
        kept = {(one.sink_id, one.attempt): one.checkpoint for one in self.kept}
        for transaction in (committable.transaction for committable in committables):
            if transaction.checkpoint <= kept.get((transaction.sink_id, transaction.attempt), -1):
                continue
            if transaction.attempt >= self.since:
                through = marks.get(transaction.attempt, -1)
                marks[transaction.attempt] = max(through, transaction.checkpoint)
        return replace(self, decided=tuple(Decided(*one) for one in sorted(marks.items())))

    def as_decided(self, committable: Committable) -> Committable:
        """Return `committable` as a decision had it; itself where that is not remembered."""
        own = (one for one in self.committed if one.transaction == committable.transaction)
        return next(own, committable)

    def of_sink(self, sink_id: str) -> tuple[Committable, ...]:
        """Return the last transactions of `sink_id` that are known to be committed."""
        return tuple(one for one in self.committed if one.transaction.sink_id == sink_id)

    def with_sinks(self, sinks: Iterable[str]) -> LogMemory:
        """Return the memory once an attempt may write under `sinks`, too."""
        return replace(self, sinks=tuple(sorted({*self.sinks, *sinks})))

    def until(self, attempt: AttemptId, checkpoint: CheckpointId) -> LogMemory:
        """Return the memory without what `attempt` has decided above `checkpoint`."""
        marks = (
            Decided(one.attempt, min(one.checkpoint, checkpoint)) if one.attempt == attempt else one
            for one in self.decided
        )
        before = (
            one
            for one in self.committed
            if one.transaction.attempt != attempt or one.transaction.checkpoint <= checkpoint
        )
        return replace(self, decided=tuple(marks), committed=tuple(before))

    def with_committed(
        self, *, listed_before: Iterable[Committable], listed: Iterable[Committable]
    ) -> LogMemory:
        """Return the memory once all of `listed_before` is committed that is not `listed` again."""
        still = {committable.transaction for committable in listed}
        done = (one for one in listed_before if one.transaction not in still)
        return replace(self, committed=_last_of((*self.committed, *done), self.sinks))

    def without_sinks(self, sinks: Iterable[str]) -> LogMemory:
        """Return the memory once nothing is, or ever will be, in doubt under `sinks`."""
        left = tuple(sorted(set(self.sinks) - set(sinks)))
        kept = tuple(one for one in self.kept if one.sink_id in left)
        return replace(self, sinks=left, committed=_last_of(self.committed, left), kept=kept)

    def keeping(self, before: LogMemory, sinks: Iterable[str]) -> LogMemory:
        """Return the memory to which `sinks` are as they are to `before`, all others as they are.

        For a rewind: what `before` has as decided and this one has not stays decided of `sinks`.
        """
        sinks = frozenset(sinks)
        kept = [
            DecidedOfSink(sink_id, mark.attempt, mark.checkpoint)
            for sink_id in sorted(sinks)
            for mark in before.marks_of(sink_id)
            if not self._has_decided(mark)
        ]
        others = (one for one in self.kept if one.sink_id not in sinks)
        return replace(self, kept=(*others, *kept))

    def marks_of(self, sink_id: str) -> tuple[Decided, ...]:
        """Return how far each attempt has decided for `sink_id`, by attempt, rising."""
        marks = {one.attempt: one.checkpoint for one in self.decided}
        for one in self.kept:
            if one.sink_id == sink_id:
                marks[one.attempt] = max(one.checkpoint, marks.get(one.attempt, -1))
        return tuple(Decided(*one) for one in sorted(marks.items()))

    def _has_decided(self, mark: Decided) -> bool:
        through = {one.attempt: one.checkpoint for one in self.decided}.get(mark.attempt, -1)
        return mark.attempt < self.since or mark.checkpoint <= through

    def with_decision(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        *,
        listed_before: Iterable[Committable],
        listed: Iterable[Committable],
    ) -> LogMemory:
        """Return the memory once `attempt` has decided `checkpoint`, which lists `listed`.

        What the decision before listed and this one does not is committed: its own attempt knew it,
        or a later one's recovery did it before anything else.
        """
        listed = tuple(listed)
        # What an attempt prepared, a later one decides where it begins from a savepoint.
        decided = self.remember_decided(listed).decided
        # Checkpoint 0 decides nothing of anybody's.
        if checkpoint > GENESIS:
            earlier = (one for one in decided if one.attempt != attempt)
            decided = (*earlier, Decided(attempt, checkpoint))
        # Every record repeats the memory, so it must not grow with the life of a job that restarts
        # for years.
        forgotten, decided = decided[:-ATTEMPTS_MAX], decided[-ATTEMPTS_MAX:]
        since = forgotten[-1].attempt + 1 if forgotten else self.since
        memory = self.with_committed(listed_before=listed_before, listed=listed)
        kept = tuple(one for one in self.kept if one.attempt >= since)
        return replace(memory, since=since, decided=decided, kept=kept)


NOTHING_REMEMBERED = LogMemory()
"""That of a job that never ran."""


def _last_of(committed: Iterable[Committable], sinks: Iterable[str]) -> tuple[Committable, ...]:
    by_sink: dict[str, list[Committable]] = {sink_id: [] for sink_id in sinks}
    for one in committed:
        last = by_sink.get(one.transaction.sink_id)
        # Only the highest checkpoint of a sink is kept, with all its transactions: its proofs are
        # the last that pruning leaves.
        if last is None or (last and one.transaction.checkpoint < last[0].transaction.checkpoint):
            continue
        if last and one.transaction.checkpoint > last[0].transaction.checkpoint:
            last.clear()
        last.append(one)
    return tuple(one for last in by_sink.values() for one in last)
