"""The decision log's storage and the targets of a world, and the laws that they check.

Both are immutable values. A law is checked in the step that could break it, in the words of
docs/guarantee.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tests.exploration import calls
from tests.exploration.slot import SPLITS, parse_position

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, committables_of
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
)
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.rules import CheckpointDecided, LogRecord
from onceflow.core.protocol.log.target_records import TargetRecord, to_record
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.storage.log.record_codec import decode_record


class Violation(Exception):
    """Raised in a step that breaks a law."""


@cache
def decode(data: bytes) -> LogRecord:
    return decode_record(data, "log").record


@cache
def decided_by(records: tuple[bytes, ...]) -> frozenset[TransactionId]:
    """Return each transaction that a decision in `records` lists."""
    decisions = (r for r in map(decode, records) if isinstance(r, CheckpointDecided))
    return frozenset(c.transaction for r in decisions for c in committables_of(r.completed))


@cache
def positions(data: bytes) -> tuple[tuple[int, int], ...]:
    """Return the position of each split in the decision `data`."""
    record = decode(data)
    assert isinstance(record, CheckpointDecided)
    return positions_in(record.completed)


def positions_in(completed: CompletedCheckpoint) -> tuple[tuple[int, int], ...]:
    """Return the position of each split at a checkpoint."""
    return tuple(
        sorted(
            parse_position(element)
            for snapshot in completed.snapshots
            for operator in snapshot.operators
            for element in operator.lists.get(SPLITS, ())
        )
    )


@dataclass(frozen=True, slots=True)
class Target:
    """The target of one sink."""

    sink: str
    kind: str
    fence: int = 0
    prepared: tuple[tuple[TransactionId, tuple[int, ...]], ...] = ()
    """The prepared or staged transactions, with their rows."""
    proofs: frozenset[TransactionId] = frozenset()
    visible: tuple[int, ...] = ()
    """The number of times that each row is in the target."""
    through: int = 0
    """The last whole checkpoint that is committed."""
    must_go: frozenset[TransactionId] = frozenset()
    """The transactions of older attempts that were still prepared, and undecided, when the newest
    attempt decided first."""

    def rows_of(self, transaction: TransactionId) -> tuple[int, ...] | None:
        return next((rows for t, rows in self.prepared if t == transaction), None)

    def without(self, transactions: Iterable[TransactionId]) -> Target:
        gone = frozenset(transactions)
        kept = tuple((t, rows) for t, rows in self.prepared if t not in gone)
        return replace(self, prepared=kept, must_go=self.must_go - gone)


@dataclass(frozen=True, slots=True)
class Log:
    """The records in storage, and a request that is still on its way."""

    records: tuple[bytes, ...] = ()
    late: tuple[int, bytes] | None = None
    savepoint: Savepoint | None = None
    """The savepoint that is whole in storage."""

    @property
    def decisions(self) -> tuple[bytes, ...]:
        return tuple(d for d in self.records if isinstance(decode(d), CheckpointDecided))

    @property
    def newest_attempt(self) -> int:
        return decode(self.records[-1]).attempt if self.records else 0


# --- the log -------------------------------------------------------------------------------------


def create(
    log: Log, targets: tuple[Target, ...], sequence: int, data: bytes, *, overwrites: bool = False
) -> tuple[Log, tuple[Target, ...], bytes | None]:
    """Create a record unless its number is taken; return what is there otherwise."""
    if sequence <= len(log.records):
        if not overwrites:
            return log, targets, log.records[sequence - 1]
        raise Violation(f"record {sequence} of the log is replaced by another one")
    if sequence != len(log.records) + 1:
        raise Violation(f"record {sequence} is created, and {len(log.records)} are there")
    record = decode(data)
    if isinstance(record, CheckpointDecided):
        _check_decision(log, targets, record, data)
        if record.completed.checkpoint > GENESIS and not _has_decided(log, record.attempt):
            targets = tuple(_note_first_decision(log, t, record) for t in targets)
    return replace(log, records=(*log.records, data)), targets, None


def _check_decision(
    log: Log, targets: tuple[Target, ...], record: CheckpointDecided, data: bytes
) -> None:
    if record.attempt != log.newest_attempt:
        raise Violation("an older attempt decides")
    before = len(positions(log.decisions[0])) if log.decisions else len(positions(data))
    if len(positions(data)) != before:
        raise Violation("a decision lacks the position of a split")
    for target in targets:
        listed = [c.transaction for c in committables_of(record.completed)]
        counts = _count_in_flight(target, data)
        for transaction in listed:
            for row in target.rows_of(transaction) or ():
                counts[row] += transaction not in target.proofs
        per_split = len(counts) // len(positions(data))
        for split, position in positions(data):
            for row in range(per_split):
                count = counts[split * per_split + row]
                if count < (row < position):
                    raise Violation(
                        "a decision loses a row: it is before the barrier, and neither visible"
                        " nor listed"
                    )
                if count > (row < position):
                    raise Violation(
                        "a decision doubles a row: it is after the barrier, or listed twice"
                    )


def _count_in_flight(target: Target, data: bytes) -> list[int]:
    """Return how often each row is visible, or in flight in the decision `data`."""
    record = decode(data)
    assert isinstance(record, CheckpointDecided)
    counts = list(target.visible)
    for part in record.completed.in_flight("sink"):
        for number in part.handle.inline.decode().split(","):
            counts[int(number)] += 1
    return counts


def _has_decided(log: Log, attempt: AttemptId) -> bool:
    """Return True if `attempt` has decided a checkpoint after checkpoint 0."""
    records = map(decode, log.decisions)
    return any(r.attempt == attempt and r.completed.checkpoint > GENESIS for r in records)  # type: ignore[union-attr]


def _note_first_decision(log: Log, target: Target, record: CheckpointDecided) -> Target:
    """Note what the sweep after the first decision of an attempt must roll back (I3)."""
    decided = decided_by(log.records) | {c.transaction for c in committables_of(record.completed)}
    left = frozenset(
        t
        for t, _ in target.prepared
        if t.attempt < record.attempt and t not in decided and t not in target.proofs
    )
    return replace(target, must_go=left)


# --- targets -------------------------------------------------------------------------------------


def ask(target: Target, request: calls.TargetRequest, log: Log) -> tuple[Target, Any]:
    """Return the target after `request`, and the answer."""
    match request:
        case calls.OpenTarget(_, attempt):
            if target.fence > attempt:
                return target, False
            return replace(target, fence=attempt), True
        case calls.ReadTarget():
            return target, _record_of(target)
        case calls.ListInDoubt():
            waiting = (t for t, _ in target.prepared if t not in target.proofs)
            return target, tuple(map(Committable, sorted(waiting)))
        case calls.ReadThrough():
            return target, CheckpointId(target.through)
        case calls.CheckFence(_, attempt):
            return target, target.fence <= attempt
        case calls.Prepare(transaction, rows):
            return _prepare(target, transaction, rows), None
        case calls.CommitTransaction(transaction):
            return _commit(target, transaction, log)
        case calls.RollBack(transaction):
            return _roll_back(target, transaction, log)
        case calls.ReadStaged(transaction):
            return target, target.rows_of(transaction)
        case calls.HasProof(transaction):
            return target, transaction in target.proofs
        case calls.ApplyStaged(transaction, rows):
            if transaction in target.proofs:
                return target.without([transaction]), False
            return _make_visible(target, [(transaction, rows)], log), True
        case calls.CommitVersion(_, checkpoint, committables):
            return _commit_version(target, checkpoint, committables, log)


def _record_of(target: Target) -> TargetRecord:
    if target.kind == "versions":
        return TargetRecord(
            target.sink, AttemptId(target.fence), through=CheckpointId(target.through)
        )
    return to_record(target.sink, target.fence, sorted(target.proofs), proofs=target.proofs)


def _prepare(target: Target, transaction: TransactionId, rows: tuple[int, ...]) -> Target:
    if target.rows_of(transaction) is not None or transaction in target.proofs:
        raise Violation(f"transaction {transaction} exists already: its name is used twice")
    return replace(target, prepared=tuple(sorted((*target.prepared, (transaction, rows)))))


def _commit(target: Target, transaction: TransactionId, log: Log) -> tuple[Target, Any]:
    rows = target.rows_of(transaction)
    if rows is not None:
        return _make_visible(target, [(transaction, rows)], log), Committed()
    if transaction in target.proofs:
        return target, AlreadyCommitted()
    raise Violation(f"something decided is lost: transaction {transaction} is gone")


def _make_visible(
    target: Target, transactions: list[tuple[TransactionId, tuple[int, ...]]], log: Log
) -> Target:
    visible = list(target.visible)
    for transaction, rows in transactions:
        if transaction not in decided_by(log.records):
            raise Violation("something is visible that is not decided")
        for row in rows:
            visible[row] += 1
            if visible[row] > 1:
                raise Violation("a row is in its target twice")
    names = [transaction for transaction, _ in transactions]
    left = target.without(names)
    return replace(left, visible=tuple(visible), proofs=left.proofs | frozenset(names))


def _roll_back(target: Target, transaction: TransactionId, log: Log) -> tuple[Target, Any]:
    if transaction in target.proofs:
        return target, AlreadyCommitted()
    if transaction in decided_by(log.records):
        raise Violation("something decided is rolled back")
    return target.without([transaction]), Aborted()


def _commit_version(
    target: Target, checkpoint: CheckpointId, committables: tuple[Committable, ...], log: Log
) -> tuple[Target, Any]:
    if checkpoint <= target.through:
        return target, AlreadyCommitted()
    found: list[tuple[TransactionId, tuple[int, ...]]] = []
    for committable in committables:
        rows = target.rows_of(committable.transaction)
        if rows is None:
            if committable.transaction not in target.proofs:
                raise Violation(f"something decided is lost: {committable.transaction} is gone")
            return target, Lost("committed by another version")
        found.append((committable.transaction, rows))
    made = _make_visible(target, found, log)
    return replace(made, through=checkpoint), Committed()


# --- laws about whole moments --------------------------------------------------------------------


def check_restored(log: Log, targets: tuple[Target, ...]) -> None:
    """Check that the targets are as the job was at its last decision, where its slots begin."""
    data = log.decisions[-1]
    for target in targets:
        counts = _count_in_flight(target, data)
        per_split = len(counts) // len(positions(data))
        for split, position in positions(data):
            for row in range(per_split):
                count = counts[split * per_split + row]
                if count < (row < position):
                    raise Violation(
                        "something decided is lost: a slot starts behind a row that is not visible"
                    )
                if count > (row < position):
                    raise Violation("a row is visible, and will be read again")


def check_finished(log: Log, targets: tuple[Target, ...], *, is_stopped: bool = False) -> None:
    """Check that each row is in each target once, and that older attempts left nothing.

    If the job was stopped, the rows before the last barrier are in the targets, and no others.

    Raises:
        Violation: A row is missing or is there twice, or a transaction is still prepared.
    """
    for target in targets:
        expected = (1,) * len(target.visible)
        if is_stopped:
            per_split = len(expected) // len(positions(log.decisions[-1]))
            decided = positions(log.decisions[-1])
            expected = tuple(int(row < end) for _, end in decided for row in range(per_split))
        if target.visible != expected:
            raise Violation("the job is finished, and a row is not in its target exactly once")
        if left := sorted(target.must_go):
            raise Violation(f"transaction {left[0]} of an older attempt stays prepared for ever")


# --- savepoints ----------------------------------------------------------------------------------


def keep(log: Log, targets: tuple[Target, ...], savepoint: Savepoint) -> Log:
    """Return the log's storage with a whole savepoint, which must hold each row before its cut."""
    taken = savepoint.completed
    if taken.attempt == log.newest_attempt:
        listed = decided_by(log.records) | {c.transaction for c in committables_of(taken)}
        for target in targets:
            there = {n for n, count in enumerate(target.visible) if count}
            there |= {row for t, rows in target.prepared if t in listed for row in rows}
            per_split = len(target.visible) // len(positions(log.decisions[-1]))
            for split, position in positions_in(taken):
                if {split * per_split + row for row in range(position)} - there:
                    raise Violation("a savepoint lacks a row that is before its barrier")
    return replace(log, savepoint=savepoint)


def check_answer(log: Log, *, is_written: bool) -> None:
    """Check that a savepoint is whole if its user is told so, and not there otherwise.

    Raises:
        Violation: The answer is wrong.
    """
    if is_written and log.savepoint is None:
        raise Violation("a savepoint is reported as written, and is not whole")
    if not is_written and log.savepoint is not None:
        raise Violation("a savepoint is reported as failed, and is whole")


def check_refused(log: Log, reason: str) -> None:
    """Check that no start is refused from the savepoint with which the job has stopped.

    Raises:
        Violation: It is refused.
    """
    last = decode(log.decisions[-1])
    if log.savepoint is None or not isinstance(last, CheckpointDecided):
        return
    is_last = last.completed.final and last.attempt == log.savepoint.completed.attempt
    if log.savepoint.kind.ends_emission and is_last:
        raise Violation(f"the job has stopped with the savepoint, and may not start: {reason}")
