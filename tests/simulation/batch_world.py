"""The world of a schedule of batches: targets, one keeper of decisions, and the user's input.

Each process is a generator that stops before every step that others can see.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from onceflow.core.commit.planner import CommitPlan, around_roll_backs, plan_claimed, plan_sweep
from onceflow.core.protocol import batches
from onceflow.core.protocol.batches import BatchClaim, BatchDecision, BatchId, Overtaken, Stands
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId

SINK, QUERY = "sink", "query"
OTHER = "other"
"""What a batch is written to besides, where it goes to a group of sinks."""
STAGED = b"staged"
STEPS_MAX = 4_000
TASK_TRIES_MAX = 3
Steps: TypeAlias = Generator[str, None, None]


def is_staged(one: Committable) -> bool:
    return one.payload == STAGED


class Violated(Exception):
    """An invariant does not hold."""


class Kind(Enum):
    """The kind of a target, which determines the keeper of its decisions."""

    DATABASE = "database"
    """It prepares, or rows are staged; decisions are in a table beside, with staged rows."""
    TOPIC = "topic"
    """All rows are staged; decisions are in a log of files."""
    VERSIONS = "versions"
    """Files of which one commit makes a version, in order; decisions are in a log of files."""


class Failed(Exception):
    """The query ends; it is started again."""


class Refused(Exception):
    """The batch must not be written."""


class RowsLost(Exception):
    """A decided transaction is neither prepared nor proved to be committed: the query ends."""


def _version_of(decided: AttemptId, committing: AttemptId) -> CheckpointId:
    del committing
    return batches.batch_checkpoint(decided)


@dataclass(frozen=True)
class Rules:
    """The rules that a mutant replaces."""

    name: str = "as it is"
    judge: Callable[..., object] = batches.judge_batch
    settle: Callable[..., CommitPlan] = plan_claimed
    sweep: Callable[..., Sequence[Committable]] = plan_sweep
    check: Callable[..., object] = batches.check_decision
    decision: Callable[..., BatchDecision] = batches.decision_of
    abort_claims: bool = True
    claim_first: bool = True
    settled_first: bool = False
    twin: Callable[..., Committable | None] = batches.find_prepared_twin
    around: Callable[..., tuple[Sequence[Committable], Sequence[Committable]]] = around_roll_backs
    takes_twin_away: bool = False
    """True if a task that is tried again rolls back what its twin has prepared."""
    oldest_proof: Callable[[BatchDecision], CheckpointId] = batches.oldest_proof
    forgotten_before: Callable[[BatchDecision], AttemptId] = batches.forgotten_before
    checkpoint: Callable[[AttemptId, int, int], CheckpointId] = batches.task_checkpoint
    version: Callable[[AttemptId, AttemptId], CheckpointId] = _version_of
    """Of what the first attempt has decided and the second commits."""
    settles_group: bool = True
    """True if what other sinks of a group hold is settled, too."""
    rows_first: bool = False
    """True if staged rows are applied, and old ones deleted, in a step before the decision."""
    deletes_first: bool = False
    """True if the rows that a batch replaces are deleted in a step before the decision."""
    proves_applied: bool = True
    """True if rows that are applied with the decision leave a proof, as those of a commit do."""
    empty_replaces: bool = True
    """True if a batch without rows that replaces all others is decided."""


@dataclass
class Batch:
    """A batch of Spark's offset log, or one DataFrame that the user writes at once."""

    rows: range
    fingerprint: str
    replaces: bool = False
    """True if it takes the place of all rows that are there."""


@dataclass
class Outcome:
    """The end of a schedule."""

    seed: int
    violation: str = ""
    trace: tuple[str, ...] = ()
    attempts: int = 0
    decisions: int = 0
    kills: int = 0
    refused: bool = False
    lost: bool = False
    """True if rows that somebody took away are reported as lost."""


@dataclass
class Task:
    """One try at a partition."""

    report: tuple[int, tuple[Committable, ...]] | None = None
    beside: bool = False
    """True if its rows are staged because another try at the partition is prepared."""
    failed: bool = False


@dataclass
class World:
    """All that outlives processes."""

    chance: random.Random
    rules: Rules
    source: int = 0
    kind: Kind = Kind.DATABASE
    sinks: tuple[str, ...] = (SINK,)
    """What each batch is written to; the first one's target keeps the decisions."""
    in_keeper: tuple[str, ...] = (SINK,)
    """Those of them that are in the database of the decisions."""
    stages: bool = False
    """True if all rows are staged, and none prepared."""
    replace_rate: float = 0.0
    """The part of the DataFrames of a user that replace all rows."""
    is_complete: bool = False
    """True if each batch of the query replaces all rows by all that there are by then."""
    retained: int | None = None
    """The number of decisions that a log of files retains; None: they are in a table."""
    attempt: int = 0
    decisions: dict[BatchId, BatchDecision] = field(default_factory=dict[BatchId, BatchDecision])
    prepared: dict[TransactionId, list[int]] = field(default_factory=dict[TransactionId, list[int]])
    staged: dict[TransactionId, list[int]] = field(default_factory=dict[TransactionId, list[int]])
    committed: set[TransactionId] = field(default_factory=set[TransactionId])
    """The transactions of which there is a proof."""
    rows: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The rows that everybody sees, by sink."""
    version: CheckpointId = GENESIS
    """The last that is committed, where there are versions."""
    decided: int = 0
    ever_decided: set[TransactionId] = field(default_factory=set[TransactionId])
    """All that a decision has listed, also one that is forgotten by now."""
    pruned: set[TransactionId] = field(default_factory=set[TransactionId])
    """Committed, and the proof of it is deleted."""
    taken_away: set[TransactionId] = field(default_factory=set[TransactionId])
    """The transactions that somebody else has rolled back."""
    lost: bool = False
    """True if a driver has reported rows as lost."""
    writes: bool = False
    """True if the user writes DataFrames: no query numbers them, or writes one again by itself."""
    numbered: bool = False
    """True if the user gives each DataFrame a number, and writes again what failed."""
    written: set[int] = field(default_factory=set[int])
    """Numbers of the DataFrames that are decided, which the user looks at before he tries again."""
    numbers: dict[BatchId, int] = field(default_factory=dict[BatchId, int])
    """The number of each DataFrame."""
    forgetful: float = 0.0
    """How often nobody notes that a decision is committed."""
    taken_rate: float = 0.0
    """How often somebody rolls back what is in doubt."""
    rows_max: int = 1_000
    """The largest number of rows of one batch."""
    steps: int = 0
    prepared_at: dict[TransactionId, int] = field(default_factory=dict[TransactionId, int])
    """The step at which rows were prepared or staged."""
    looked_at: int = 0
    """The step at which a driver has looked last for what is to be rolled back."""
    keyed: bool = False
    """True if rows have a unique key: one that is prepared locks it."""
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
    def looks(self) -> bool:
        """True if the user looks what is written, for nothing numbers his DataFrames."""
        return self.writes and not self.numbered

    @property
    def all_written(self) -> bool:
        """True if no input is left."""
        read = max((batch.rows.stop for batch in self.offsets.values()), default=0)
        return read == self.source and max(self.offsets) in self.done

    def visible(self, sink: str = SINK) -> list[int]:
        return sorted(self.rows.get(sink, []))

    @property
    def wanted(self) -> list[int]:
        """Return the rows that must be visible once all input is written."""
        found: list[int] = []
        for _, batch in sorted(self.offsets.items()):
            found = [*(() if batch.replaces else found), *batch.rows]
        return found

    # --- the keeper ---------------------------------------------------------------------------

    def claim(self) -> BatchClaim:
        self.attempt += 1
        self.note(f"attempt {self.attempt} claims")
        return self.seen()

    def seen(self) -> BatchClaim:
        decisions = tuple(self.decisions.values())
        if self.retained is not None:
            # A log tells by its next decision that one is committed.
            before = tuple(replace(decision, is_committed=True) for decision in decisions[:-1])
            decisions = (*before, *decisions[-1:])
        return BatchClaim(AttemptId(self.attempt), decisions)

    def decide(self, proposed: BatchDecision, batch: Batch, *, with_rows: bool) -> BatchDecision:
        """Return what is decided; the keeper applies staged rows in the same step if it can."""
        existing = self.decisions.get(proposed.batch)
        verdict = self.rules.check(proposed, owner=AttemptId(self.attempt), existing=existing)
        if isinstance(verdict, Overtaken):
            raise Failed(verdict.reason)
        if isinstance(verdict, Stands):
            return verdict.decision
        for committable in proposed.committables:
            known = self.prepared.keys() | self.staged.keys() | self.taken_away
            if committable.transaction not in known:
                raise Violated(
                    f"{proposed.batch} decides {committable}, which is rolled back or gone"
                )
        if with_rows and self.kind is Kind.DATABASE and not self.rules.rows_first:
            self.apply_staged(proposed, batch)
        if batch.replaces and self.visible() != list(batch.rows):
            raise Violated(f"{proposed.batch} is to replace all rows: {self.visible()} are visible")
        self.decisions[proposed.batch] = proposed
        self.decided += 1
        self.ever_decided.update(committable.transaction for committable in proposed.committables)
        if self.looks:
            self.written.add(self.numbers[proposed.batch])
        self.note(f"attempt {proposed.attempt} decides {proposed.batch.number}")
        return proposed

    def settle(self, decision: BatchDecision) -> None:
        """Note that all of `decision` is committed, and forget what nobody asks for any more."""
        if self.retained is not None:
            kept = sorted(self.decisions.items(), key=lambda one: one[1].attempt)
            self.decisions = dict(kept[-self.retained :])
            return
        if self.faults and self.chance.random() < self.forgetful:
            self.note(f"nobody notes that {decision.batch} is committed")
            return
        batch = decision.batch
        if batch in self.decisions:
            self.decisions[batch] = replace(self.decisions[batch], is_committed=True)
        before = self.rules.forgotten_before(decision)
        self.decisions = {
            number: kept
            for number, kept in self.decisions.items()
            if number.source != batch.source or not kept.is_committed or kept.attempt >= before
        }

    # --- the target ---------------------------------------------------------------------------

    def in_doubt(self) -> list[Committable]:
        prepared = [Committable(one, len(rows)) for one, rows in self.prepared.items()]
        return prepared + [Committable(one, len(rows), STAGED) for one, rows in self.staged.items()]

    def locked(self, sink: str, rows: Sequence[int]) -> bool:
        """Return whether one of `rows` cannot be written now."""
        others = [other for one, other in self.prepared.items() if one.sink_id == sink]
        return self.keyed and any(row in other for other in others for row in rows)

    def prepare(self, transaction: TransactionId, rows: list[int]) -> None:
        self.prepared[transaction] = rows
        self.prepared_at[transaction] = self.steps

    def stage(self, transaction: TransactionId, rows: list[int]) -> None:
        self.staged[transaction] = rows
        self.prepared_at[transaction] = self.steps

    def apply_staged(self, proposed: BatchDecision, batch: Batch) -> None:
        """Apply what is staged in the database of the decisions, or nothing of it."""
        staged = [
            committable.transaction
            for committable in proposed.committables
            if is_staged(committable) and committable.transaction.sink_id in self.in_keeper
        ]
        if any(one not in self.staged for one in staged):
            raise Failed("nothing is staged by this name")
        if any(self.locked(one.sink_id, self.staged[one]) for one in staged):
            raise Failed("staged rows wait for a lock")
        if self.faults and self.chance.random() < 0.02:
            raise Failed("the database refuses a row")
        if batch.replaces:
            self.delete_rows()
        for one in staged:
            self._take(one, self.staged[one], proves=self.rules.proves_applied)
            self.note(f"applies {one} with its decision")

    def delete_rows(self) -> None:
        """Delete all that is visible; proofs of commits stay."""
        self.rows.pop(SINK, None)

    def _take(self, transaction: TransactionId, rows: list[int], *, proves: bool = True) -> None:
        self.rows.setdefault(transaction.sink_id, []).extend(rows)
        if proves:
            self.committed.add(transaction)

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
        where = self.staged if is_staged(one) else self.prepared
        if one.transaction in self.committed and one.transaction not in self.pruned:
            where.pop(one.transaction, None)
            return
        rows = where.get(one.transaction)
        if is_staged(one) and rows and self.locked(one.transaction.sink_id, rows):
            raise Failed(f"{one} waits for a lock")
        where.pop(one.transaction, None)
        if rows is not None:
            self._take(one.transaction, rows)
            self.note(f"commits {one.transaction}")
        elif one.transaction in self.pruned:
            raise Violated(f"the proof of {one} is asked for, and pruned")
        elif one.transaction in self.taken_away:
            raise RowsLost(str(one))
        elif one.transaction not in self.committed:
            raise Violated(f"{one} is decided, and lost")

    def commit_version(self, version: CheckpointId, listed: Sequence[Committable]) -> None:
        """Make all of `listed` visible at once, unless that version or a later one is there."""
        for one in listed:
            if one.transaction not in self.ever_decided:
                raise Violated(f"{one} is committed and no decision names it")
        if version <= self.version:
            return
        names = [one.transaction for one in listed]
        if gone := [name for name in names if name not in self.prepared]:
            if set(gone) <= self.taken_away:
                raise RowsLost(str(gone))
            raise Violated(f"version {version} is to have {gone}, which are not there")
        for name in names:
            self._take(name, self.prepared.pop(name))
        self.version = version
        self.note(f"commits version {version}")

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
