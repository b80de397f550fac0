"""What a schedule of batches runs in: one target, one keeper of decisions, and the user's input.

Each process is a generator that stops before every step that others can see.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from onceflow.core.protocol import batches
from onceflow.core.protocol.batches import (
    BatchClaim,
    BatchDecision,
    BatchId,
    Overtaken,
    Settling,
    Stands,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId

SINK, QUERY = "sink", "query"
STAGED = b"staged"
STEPS_MAX = 4_000
TASK_TRIES_MAX = 3
Steps: TypeAlias = Generator[str, None, None]


def is_staged(one: Committable) -> bool:
    return one.payload == STAGED


class Violated(Exception):
    """An invariant does not hold."""


class Failed(Exception):
    """The query ends; it is started again."""


class Refused(Exception):
    """The batch must not be written."""


class RowsLost(Exception):
    """What is decided is neither prepared nor proved to be committed: the query stops for good."""


@dataclass(frozen=True)
class Rules:
    """What a mutant replaces."""

    name: str = "as it is"
    judge: Callable[..., object] = batches.judge_batch
    settle: Callable[..., Settling] = batches.settle_claimed
    sweep: Callable[..., Sequence[Committable]] = batches.sweep_decided
    check: Callable[..., object] = batches.check_decision
    decision: Callable[..., BatchDecision] = batches.decision_of
    abort_claims: bool = True
    claim_first: bool = True
    settled_first: bool = False
    twin: Callable[..., Committable | None] = batches.prepared_twin
    around: Callable[..., tuple[Sequence[Committable], Sequence[Committable]]] = (
        batches.around_roll_backs
    )
    takes_twin_away: bool = False
    """Whether a task that is tried again rolls back what its twin has prepared."""
    oldest_proof: Callable[[BatchDecision], CheckpointId] = batches.oldest_proof
    forgotten_before: Callable[[BatchDecision], AttemptId] = batches.forgotten_before
    checkpoint: Callable[[AttemptId, int, int], CheckpointId] = batches.task_checkpoint


@dataclass
class Batch:
    """What Spark's log of offsets says; or what the user writes at once, as one DataFrame."""

    rows: range
    fingerprint: str


@dataclass
class Outcome:
    """How a schedule ended."""

    seed: int
    violation: str = ""
    trace: tuple[str, ...] = ()
    attempts: int = 0
    decisions: int = 0
    kills: int = 0
    refused: bool = False
    lost: bool = False
    """Whether rows that somebody took away are reported as lost."""


@dataclass
class Task:
    """One try at a partition."""

    report: tuple[int, tuple[Committable, ...]] | None = None
    failed: bool = False


@dataclass
class World:
    """All that outlives processes."""

    chance: random.Random
    rules: Rules
    source: int = 0
    attempt: int = 0
    decisions: dict[BatchId, BatchDecision] = field(default_factory=dict[BatchId, BatchDecision])
    prepared: dict[TransactionId, list[int]] = field(default_factory=dict[TransactionId, list[int]])
    staged: dict[TransactionId, list[int]] = field(default_factory=dict[TransactionId, list[int]])
    committed: dict[TransactionId, list[int]] = field(
        default_factory=dict[TransactionId, list[int]]
    )
    decided: int = 0
    ever_decided: set[TransactionId] = field(default_factory=set[TransactionId])
    """All that a decision has listed, also one that is forgotten by now."""
    pruned: set[TransactionId] = field(default_factory=set[TransactionId])
    """Committed, and the proof of it is deleted."""
    taken_away: set[TransactionId] = field(default_factory=set[TransactionId])
    """What somebody else has rolled back."""
    lost: bool = False
    """Whether a driver has reported rows as lost."""
    writes: bool = False
    """Whether the user writes DataFrames: no query numbers them, or writes one again by itself."""
    written: set[int] = field(default_factory=set[int])
    """Numbers of the DataFrames that are decided, which the user looks at before he tries again."""
    numbers: dict[BatchId, int] = field(default_factory=dict[BatchId, int])
    """Of DataFrames."""
    forgetful: float = 0.0
    """How often nobody notes that a decision is committed."""
    taken_rate: float = 0.0
    """How often somebody rolls back what is in doubt."""
    rows_max: int = 1_000
    """Of one batch."""
    steps: int = 0
    prepared_at: dict[TransactionId, int] = field(default_factory=dict[TransactionId, int])
    """The step at which rows were prepared or staged."""
    looked_at: int = 0
    """The step at which a driver has looked last for what is to be rolled back."""
    keyed: bool = False
    """Whether rows have a unique key: one that is prepared locks it."""
    offsets: dict[int, Batch] = field(default_factory=dict[int, Batch])
    done: set[int] = field(default_factory=set[int])
    copy: tuple[dict[int, Batch], set[int]] | None = None
    processes: list[Process] = field(default_factory=list["Process"])
    task_ids: int = 0
    written_offsets: int = 0
    faults: bool = True
    trace: list[str] = field(default_factory=list[str])

    def note(self, text: str) -> None:
        self.trace.append(text)

    @property
    def all_written(self) -> bool:
        """Whether no input is left."""
        read = max((batch.rows.stop for batch in self.offsets.values()), default=0)
        return read == self.source and max(self.offsets) in self.done

    def visible(self) -> list[int]:
        return sorted(row for rows in self.committed.values() for row in rows)

    # --- the keeper ---------------------------------------------------------------------------

    def claim(self) -> BatchClaim:
        self.attempt += 1
        self.note(f"attempt {self.attempt} claims")
        return self.seen()

    def seen(self) -> BatchClaim:
        return BatchClaim(AttemptId(self.attempt), tuple(self.decisions.values()))

    def decide(self, proposed: BatchDecision) -> BatchDecision:
        existing = self.decisions.get(proposed.batch)
        verdict = self.rules.check(proposed, owner=AttemptId(self.attempt), existing=existing)
        if isinstance(verdict, Overtaken):
            raise Failed(verdict.reason)
        if isinstance(verdict, Stands):
            return verdict.decision
        for one in proposed.committables:
            known = self.prepared.keys() | self.staged.keys() | self.taken_away
            if one.transaction not in known:
                raise Violated(f"{proposed.batch} decides {one}, which is rolled back or gone")
        self.decisions[proposed.batch] = proposed
        self.decided += 1
        self.ever_decided.update(one.transaction for one in proposed.committables)
        if self.writes:
            self.written.add(self.numbers[proposed.batch])
        self.note(f"attempt {proposed.attempt} decides {proposed.batch.number}")
        return proposed

    def settle(self, decision: BatchDecision) -> None:
        """Note that all of `decision` is committed, and forget what nobody asks for any more."""
        if self.faults and self.chance.random() < self.forgetful:
            self.note(f"nobody notes that {decision.batch} is committed")
            return
        batch = decision.batch
        if batch in self.decisions:
            self.decisions[batch] = replace(self.decisions[batch], settled=True)
        before = self.rules.forgotten_before(decision)
        self.decisions = {
            number: kept
            for number, kept in self.decisions.items()
            if number.source != batch.source or not kept.settled or kept.attempt >= before
        }

    # --- the target ---------------------------------------------------------------------------

    def in_doubt(self) -> list[Committable]:
        prepared = [Committable(one, len(rows)) for one, rows in self.prepared.items()]
        return prepared + [Committable(one, len(rows), STAGED) for one, rows in self.staged.items()]

    def locked(self, rows: Sequence[int]) -> bool:
        """Return whether one of `rows` cannot be written now."""
        others = self.prepared.values() if self.keyed else ()
        return any(row in other for other in others for row in rows)

    def prepare(self, transaction: TransactionId, rows: list[int]) -> None:
        self.prepared[transaction] = rows
        self.prepared_at[transaction] = self.steps

    def stage(self, transaction: TransactionId, rows: list[int]) -> None:
        self.staged[transaction] = rows
        self.prepared_at[transaction] = self.steps

    def prune(self, before: CheckpointId) -> None:
        """Delete proofs of commits before checkpoint `before`."""
        self.pruned.update(one for one in self.committed if one.checkpoint < before)

    def take_away(self) -> None:
        """Roll back something that is in doubt, behind everybody's back."""
        if in_doubt := sorted([*self.prepared, *self.staged]):
            transaction = self.chance.choice(in_doubt)
            self.prepared.pop(transaction, None)
            self.staged.pop(transaction, None)
            self.taken_away.add(transaction)
            self.note(f"somebody takes {transaction} away")

    def commit(self, one: Committable) -> None:
        if one.transaction not in self.ever_decided:
            raise Violated(f"{one} is committed and no decision names it")
        if is_staged(one) and self.locked(self.staged.get(one.transaction, [])):
            raise Failed(f"{one} waits for a lock")
        where = self.staged if is_staged(one) else self.prepared
        rows = where.pop(one.transaction, None)
        if rows is not None:
            self.committed[one.transaction] = rows
            self.note(f"commits {one.transaction}")
        elif one.transaction in self.pruned:
            raise Violated(f"the proof of {one} is asked for, and pruned")
        elif one.transaction in self.taken_away:
            raise RowsLost(str(one))
        elif one.transaction not in self.committed:
            raise Violated(f"{one} is decided, and lost")

    def abort(self, one: Committable) -> None:
        if one.transaction in self.ever_decided:
            raise Violated(f"{one} is decided, and rolled back")
        self.note(f"rolls back {one.transaction}")
        (self.staged if is_staged(one) else self.prepared).pop(one.transaction, None)


@dataclass
class Process:
    """Something that can be killed."""

    name: str
    steps: Steps
    task: Task | None = None
    alive: bool = True
    stands_until: int = 0
    """The step of the schedule up to which it stands still."""
