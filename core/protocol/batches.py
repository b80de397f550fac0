"""The rules by which a batch of rows, written by any number of tasks, is committed as a whole.

A batch is what Spark writes at once: a micro-batch of a query, or a DataFrame. Each try of a batch
is an attempt, which claims the sink id and so fences every older try. One decision, made after all
tasks have pre-committed, names every transaction of the batch:

    claim -> settle what older attempts left -> tasks pre-commit -> decide -> commit -> sweep

Invariants:
    a decision of attempt a is made only while a is the newest claim
    a transaction is rolled back only after a newer claim, or after its attempt has decided
    so no decision names a transaction that was rolled back
    a task that is tried again rolls nothing back: only the driver knows whose report counts
    there is one decision per batch, no matter which rows and partitions its other tries had
    checkpoints rise with attempts: checkpoint // TRIES == attempt

The keeper's locks ensure that a decision is either made before a claim or refused: see
`core.spi.batch_decisions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.errors import require
from onceflow.core.protocol.checkpoints.snapshots import commit_order
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId

TRIES = 100
"""The number of checkpoint names of one attempt, for tasks that are tried again or twice at
once."""
RETAINED_ATTEMPTS = 100
"""The number of attempts whose decisions are kept. Spark asks for the last one; the others reveal a
start from an older copy."""


@dataclass(frozen=True, slots=True, order=True)
class BatchId:
    """The identity of a batch, equal for every try of it."""

    source: str
    """The query or application that numbers the batches; empty for a batch that is never
    retried."""
    number: int

    def __str__(self) -> str:
        return f"batch {self.number} of {self.source}" if self.source else f"write {self.number}"


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """The decision of all transactions that become visible with one batch under one sink id."""

    batch: BatchId
    attempt: AttemptId
    fingerprint: str = ""
    """The fingerprint of the input. If the number is equal and the fingerprint differs, it is
    another batch."""
    run: str = ""
    """The run of the query that decided; empty outside of queries."""
    committables: tuple[Committable, ...] = ()
    is_committed: bool = field(default=False, compare=False)
    """True if all transactions are known to be committed."""


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """An attempt that owns the sink id, and the decisions made before it."""

    attempt: AttemptId
    decisions: tuple[BatchDecision, ...] = ()
    """The retained decisions of all batches of the sink id, oldest first."""

    def decision(self, batch: BatchId) -> BatchDecision | None:
        """Return the decision for `batch`, or None if there is none."""
        return next((decision for decision in self.decisions if decision.batch == batch), None)


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """The verdict that the batch is not decided: its rows are to be written."""


@dataclass(frozen=True, slots=True)
class SkipBatch:
    """The verdict that the batch is decided: its rows are written, so they are read and dropped."""

    decision: BatchDecision


@dataclass(frozen=True, slots=True)
class RefuseBatch:
    """The verdict that neither writing nor skipping is safe."""

    reason: str


@dataclass(frozen=True, slots=True)
class RefuseLower:
    """The verdict that the user's batch number is below that of a written batch."""

    last: int
    """The highest number that is written."""
    oldest: int
    """The lowest number that is remembered. A number between `oldest` and `last` was never
    written."""


BatchVerdict: TypeAlias = WriteBatch | SkipBatch | RefuseBatch | RefuseLower


def judge_batch(claim: BatchClaim, batch: BatchId, fingerprint: str = "") -> BatchVerdict:
    """Return the verdict on `batch`, whose input has `fingerprint`; empty if it has none.

    Batches of a source arrive in order, the next one only after the last is committed. So an
    undecided batch below the last decision means that the source's memory is an older copy.
    """
    # A write without a source is never retried under the same name, so no decision can exist.
    if not batch.source:
        return WriteBatch()
    decision = claim.decision(batch)
    # Check this before numbers: a decided batch is skipped even if later ones are decided, because
    # a restarted query repeats its last batch.
    if decision is not None:
        if decision.fingerprint == fingerprint:
            return SkipBatch(decision)
        return RefuseBatch(
            f"attempt {decision.attempt} wrote {batch} from other input: the SHA-256 of its"
            f" offsets was {decision.fingerprint or '(none)'} then and is"
            f" {fingerprint or '(none)'} now"
        )
    of_source = [
        earlier.batch.number for earlier in claim.decisions if earlier.batch.source == batch.source
    ]
    # If no batch of the source is remembered, no number is too low.
    last = max(of_source, default=batch.number)
    if batch.number < last:
        # Without a fingerprint, a user has chosen the number and can choose another.
        if not fingerprint:
            return RefuseLower(last, min(of_source))
        return RefuseBatch(
            f"{batch} arrived after batch {last}, which is already written; the oldest remembered"
            f" decision is for batch {min(of_source)}"
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
    """Return a transaction that another try of the partition has prepared in the same attempt.

    The driver may count that try, so it stays prepared, with its locks, until the batch is decided.
    A task that would wait for these locks stages its rows instead. They are applied after the
    decision.
    """
    return next(
        (
            committable
            for committable in in_doubt
            if committable.transaction.sink_id == sink_id
            and committable.transaction.attempt == attempt
            and committable.transaction.subtask == partition
            and not staged(committable)
        ),
        None,
    )


@dataclass(frozen=True, slots=True)
class Decide:
    """The verdict to record the decision, in the same step that has checked it."""


@dataclass(frozen=True, slots=True)
class Stands:
    """The verdict that the batch is decided already, for instance because an answer was lost.

    The existing decision counts.
    """

    decision: BatchDecision


@dataclass(frozen=True, slots=True)
class Overtaken:
    """The verdict that another try owns the sink id and settles this try's transactions."""

    reason: str


DecisionVerdict: TypeAlias = Decide | Stands | Overtaken


def check_decision(
    proposed: BatchDecision, *, owner: AttemptId | None, existing: BatchDecision | None
) -> DecisionVerdict:
    """Return the verdict whether `proposed` may be recorded.

    Call it in the step that locks the owner's record. `owner` is the newest attempt under this
    source's claim, or None if it has none.
    """
    # Check this before the claim: the attempt may have decided, lost the answer, and been overtaken
    # since.
    if existing is not None and existing.attempt == proposed.attempt:
        return Stands(existing)
    if owner != proposed.attempt:
        reason = f"attempt {owner} has claimed the sink id since" if owner else "its claim is gone"
        return Overtaken(
            f"attempt {proposed.attempt} may not decide {proposed.batch}: {reason}. Another run"
            " of the same job writes under this sink id. This run has written nothing of the"
            " batch"
        )
    return Decide() if existing is None else Stands(existing)


def task_checkpoint(attempt: AttemptId, task_attempt: int, task_id: int) -> CheckpointId:
    """Return the checkpoint by which a task names its transactions.

    Two tries of one partition get different ones. `task_attempt` counts the tries within a stage.
    `task_id`, unique among the application's tasks, distinguishes most tries of a repeated stage.
    If two names are still equal, the target refuses the name and the task is tried once more.

    Raises:
        ValueError: A task was tried more often than there are names.
    """
    if not 0 <= task_attempt < TRIES // 10:
        raise ValueError(
            f"task attempt {task_attempt} is not within 0..{TRIES // 10 - 1}: set"
            f" spark.task.maxFailures to {TRIES // 10} at most"
        )
    # The first of the last two digits is the try, and the second distinguishes stages. An attempt
    # has 100 names, ten for each try.
    return CheckpointId(attempt * TRIES + task_attempt * 10 + task_id % 10)


def batch_checkpoint(attempt: AttemptId) -> CheckpointId:
    """Return the checkpoint under which a target knows all decided transactions of `attempt`."""
    # This is the highest name that a task of the attempt can have.
    return CheckpointId(attempt * TRIES + TRIES - 1)


def decision_of(
    batch: BatchId,
    attempt: AttemptId,
    parts: Iterable[tuple[int, Sequence[Committable]]],
    *,
    fingerprint: str = "",
    run: str = "",
) -> BatchDecision:
    """Return the decision of the transactions pre-committed in `attempt`, by partition number.

    Raises:
        InvariantViolation: A partition occurs twice, or a transaction is of another attempt.
    """
    by_partition: dict[int, tuple[Committable, ...]] = {}
    for partition, committables in parts:
        require(partition not in by_partition, f"{batch}: partition {partition} was reported twice")
        for committable in committables:
            require(
                committable.transaction.attempt == attempt,
                f"{batch}: attempt {attempt} cannot decide {committable}, which belongs to"
                " another attempt",
            )
        by_partition[partition] = tuple(committables)
    listed = _in_order(
        committable for committables in by_partition.values() for committable in committables
    )
    return BatchDecision(batch, attempt, fingerprint, run, listed)


def forgotten_before(decision: BatchDecision) -> AttemptId:
    """Return the attempt below which settled decisions of the same source may be deleted now.

    `decision` is settled, too. A decision without a source is kept until the next one: a process
    may ask for it that aborts because the process of its commit was killed.
    """
    if not decision.batch.source:
        return decision.attempt
    return AttemptId(max(0, decision.attempt - RETAINED_ATTEMPTS))


def oldest_proof(decision: BatchDecision) -> CheckpointId:
    """Return the oldest checkpoint whose proofs of commits may be needed after `decision`."""
    return CheckpointId(max(0, decision.attempt - RETAINED_ATTEMPTS) * TRIES)


def _in_order(committables: Iterable[Committable]) -> tuple[Committable, ...]:
    return tuple(sorted(committables, key=commit_order))
