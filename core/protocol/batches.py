"""The rules by which a batch of rows, written by tasks of any number, is committed as a whole.

A batch is what Spark writes at once: a micro-batch of a query, or a DataFrame. Each try at one is
an attempt, which claims the sink id and so fences every older try. One decision, made after all
tasks have pre-committed, names every transaction of the batch:

    claim -> settle what older attempts left -> tasks pre-commit -> decide -> commit -> sweep

Invariants:
    a decision of attempt a is made only while a is the newest claim
    a transaction is rolled back only after a newer claim, or after its attempt has decided
    so no decision names a transaction that was rolled back
    a task that is tried again rolls nothing back: only the driver knows whose report counts
    one decision a batch, whatever rows and partitions its other tries had
    checkpoints rise with attempts: checkpoint // TRIES == attempt

Who locks what, so that a decision is either before a claim or refused, is the keeper's business:
see `core.spi.batch_decisions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.invariant import require
from onceflow.core.protocol.recovery import commit_order

TRIES = 100
"""Names of checkpoints that one attempt has, for tasks that are tried again or twice at once."""
RETAINED_ATTEMPTS = 100
"""Decisions of so many attempts stay. Spark asks for the last one; the others tell old copies."""


@dataclass(frozen=True, slots=True, order=True)
class BatchId:
    """Which batch: equal for every try at it."""

    source: str
    """What numbers the batches: a query, or an application; empty for one that is never retried."""
    number: int

    def __str__(self) -> str:
        return f"batch {self.number} of {self.source}" if self.source else f"write {self.number}"


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """All that becomes visible with one batch under one sink id."""

    batch: BatchId
    attempt: AttemptId
    fingerprint: str = ""
    """Of the input: a batch of the same number with another one is another batch."""
    run: str = ""
    """The run of the query that decided; empty outside of queries."""
    committables: tuple[Committable, ...] = ()
    is_committed: bool = field(default=False, compare=False)
    """Whether all of it is known to be committed."""


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """An attempt that owns the sink id, and what was decided before it."""

    attempt: AttemptId
    decisions: tuple[BatchDecision, ...] = ()
    """Those retained, of all batches of the sink id, oldest first."""

    def decision(self, batch: BatchId) -> BatchDecision | None:
        """Return what was decided for `batch`."""
        return next((one for one in self.decisions if one.batch == batch), None)


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """The batch is not decided: its rows are to be written."""


@dataclass(frozen=True, slots=True)
class SkipBatch:
    """The batch is decided: its rows are there, and are read and dropped now."""

    decision: BatchDecision


@dataclass(frozen=True, slots=True)
class RefuseBatch:
    """Neither is safe."""

    reason: str


@dataclass(frozen=True, slots=True)
class RefuseLower:
    """Its number, which a user has given it, is below that of a batch that is written."""

    last: int
    """The highest that is written."""
    oldest: int
    """The lowest that is remembered. A number between the two was never written."""


BatchVerdict: TypeAlias = WriteBatch | SkipBatch | RefuseBatch | RefuseLower


def judge_batch(claim: BatchClaim, batch: BatchId, fingerprint: str = "") -> BatchVerdict:
    """Return what is to be done with `batch`, whose input has `fingerprint`; empty: nobody's.

    Batches of a source come in order, and the next one only when the last is committed. So one
    below the last decision that was not decided itself is of an older copy of the source's memory.
    """
    # A write without a number is never tried again under the same name, so there is nothing to
    # find.
    if not batch.source:
        return WriteBatch()
    decision = claim.decision(batch)
    # Before numbers are compared: a batch that is decided is skipped, also when later ones are, for
    # a query that starts again repeats its last batch.
    if decision is not None:
        if decision.fingerprint == fingerprint:
            return SkipBatch(decision)
        return RefuseBatch(
            f"{batch} was written by attempt {decision.attempt} from other input: then its offsets"
            f" had the SHA-256 {decision.fingerprint or '(none)'}, now {fingerprint or '(none)'}"
        )
    of_source = [one.batch.number for one in claim.decisions if one.batch.source == batch.source]
    # Nothing remembered of the source: no number is too low.
    last = max(of_source, default=batch.number)
    if batch.number < last:
        # Without a fingerprint a user has chosen the number, and can choose another.
        if not fingerprint:
            return RefuseLower(last, min(of_source))
        return RefuseBatch(
            f"{batch} comes after batch {last}, which is written; the oldest decision that is"
            f" remembered is for batch {min(of_source)}"
        )
    return WriteBatch()


def find_prepared_twin(
    in_doubt: Iterable[Committable],
    *,
    sink_id: str,
    attempt: AttemptId,
    partition: int,
    staged: Callable[[Committable], bool],
) -> Committable | None:
    """Return what another try of a task's partition has prepared in the same attempt.

    It may be the one that counts, so it stays prepared, with its locks, until the batch is decided.
    A task that would wait for them stages its rows instead, and they are applied after that.
    """
    return next(
        (
            one
            for one in in_doubt
            if one.transaction.sink_id == sink_id
            and one.transaction.attempt == attempt
            and one.transaction.subtask == partition
            and not staged(one)
        ),
        None,
    )


@dataclass(frozen=True, slots=True)
class Decide:
    """The decision is to be recorded, in the step that has looked."""


@dataclass(frozen=True, slots=True)
class Stands:
    """The batch is decided: an answer was lost, say. What was decided is what counts."""

    decision: BatchDecision


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Another try has the sink id, and settles what this one has prepared."""

    reason: str


DecisionVerdict: TypeAlias = Decide | Stands | Overtaken


def check_decision(
    proposed: BatchDecision, *, owner: AttemptId | None, existing: BatchDecision | None
) -> DecisionVerdict:
    """Return whether `proposed` may be recorded, in the step that locks the owner's record.

    `owner` is the newest attempt under this source's claim, None when it has none.
    """
    # Looked at before the claim: this attempt may have decided, lost the answer, and been overtaken
    # since.
    if existing is not None and existing.attempt == proposed.attempt:
        return Stands(existing)
    if owner != proposed.attempt:
        reason = f"attempt {owner} has claimed it since" if owner else "its claim is gone"
        return Overtaken(
            f"attempt {proposed.attempt} may not decide {proposed.batch}: {reason}. Another run of"
            " the same job writes under this sink id, and nothing of this one is written"
        )
    return Decide() if existing is None else Stands(existing)


def task_checkpoint(attempt: AttemptId, task_attempt: int, task_id: int) -> CheckpointId:
    """Return the checkpoint by which a task names what it prepares.

    Two tries of one partition get different ones: `task_attempt` counts them within a stage, and
    `task_id`, which no other task of the application has, tells most of those of a stage that is
    tried again. Where it does not, the target refuses the name and the task is tried once more.

    Raises:
        ValueError: A task was tried more often than there are names.
    """
    if not 0 <= task_attempt < TRIES // 10:
        raise ValueError(
            f"task attempt {task_attempt} is not within 0..{TRIES // 10 - 1}: set"
            f" spark.task.maxFailures to {TRIES // 10} at most"
        )
    # Of the last two digits the first is the try, the second tells stages apart: of 100 names an
    # attempt has, ten are for each try.
    return CheckpointId(attempt * TRIES + task_attempt * 10 + task_id % 10)


def batch_checkpoint(attempt: AttemptId) -> CheckpointId:
    """Return the checkpoint by which a target knows all that `attempt` has decided."""
    # The highest name that a task of the attempt can have.
    return CheckpointId(attempt * TRIES + TRIES - 1)


def decision_of(
    batch: BatchId,
    attempt: AttemptId,
    parts: Iterable[tuple[int, Sequence[Committable]]],
    *,
    fingerprint: str = "",
    run: str = "",
) -> BatchDecision:
    """Return the decision of what each partition, by number, has pre-committed in `attempt`.

    Raises:
        InvariantViolation: A partition comes twice, or something is of another attempt.
    """
    by_partition: dict[int, tuple[Committable, ...]] = {}
    for partition, committables in parts:
        require(partition not in by_partition, f"{batch}: partition {partition} came twice")
        for one in committables:
            require(
                one.transaction.attempt == attempt,
                f"{batch}: attempt {attempt} cannot decide {one}, which is of another attempt",
            )
        by_partition[partition] = tuple(committables)
    listed = _in_order(one for committables in by_partition.values() for one in committables)
    return BatchDecision(batch, attempt, fingerprint, run, listed)


def forgotten_before(decision: BatchDecision) -> AttemptId:
    """Return the attempt below which settled decisions of the same source may go now.

    `decision` is settled, too. One that has no source is asked for until the next one: by whoever
    aborts because the process of its commit was killed.
    """
    if not decision.batch.source:
        return decision.attempt
    return AttemptId(max(0, decision.attempt - RETAINED_ATTEMPTS))


def oldest_proof(decision: BatchDecision) -> CheckpointId:
    """Return the oldest checkpoint whose proofs of commits may be asked for after `decision`."""
    return CheckpointId(max(0, decision.attempt - RETAINED_ATTEMPTS) * TRIES)


def _in_order(committables: Iterable[Committable]) -> tuple[Committable, ...]:
    return tuple(sorted(committables, key=commit_order))
