"""Tests decisions, refusals and pruning around a batch."""

from __future__ import annotations

import pytest

from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol.batches import (
    RETAINED_ATTEMPTS,
    TRIES,
    BatchClaim,
    BatchDecision,
    BatchId,
    Decide,
    Overtaken,
    RefuseBatch,
    RefuseLower,
    SkipBatch,
    Stands,
    WriteBatch,
    check_decision,
    decision_of,
    find_prepared_twin,
    forgotten_before,
    judge_batch,
    oldest_proof,
    task_checkpoint,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId


def prepared(attempt: int, subtask: int = 0, sink_id: str = "ledger") -> Committable:
    return Committable(TransactionId(sink_id, attempt, attempt * TRIES, subtask), rows=1)


def decision(
    attempt: int, *committables: Committable, number: int = 0, settled: bool = False
) -> BatchDecision:
    batch = BatchId("query", number or attempt)
    return BatchDecision(batch, AttemptId(attempt), committables=committables, is_committed=settled)


def claim(attempt: int, *decisions: BatchDecision) -> BatchClaim:
    return BatchClaim(AttemptId(attempt), decisions)


def test_proofs_are_kept_for_as_many_attempts_as_decisions_are_remembered_for() -> None:
    """Where nobody could note that a batch is committed, its proof is asked for again."""
    last = decision(RETAINED_ATTEMPTS + 7)
    assert oldest_proof(last) == 7 * TRIES
    assert forgotten_before(last) == 7
    assert (oldest_proof(decision(3)), forgotten_before(decision(3))) == (0, 0)
    assert task_checkpoint(AttemptId(7), 0, 0) >= oldest_proof(last)


def test_a_write_without_a_name_is_remembered_until_the_next_one_is_committed() -> None:
    write = BatchDecision(BatchId("", 9), AttemptId(9))
    assert forgotten_before(write) == 9


def test_a_batch_is_judged_by_its_own_decision_and_by_those_after_it() -> None:
    seen = claim(9, decision(3, number=4), decision(5, number=6))
    assert isinstance(judge_batch(seen, BatchId("query", 6)), SkipBatch)
    assert isinstance(judge_batch(seen, BatchId("query", 6), "other"), RefuseBatch)
    assert isinstance(judge_batch(seen, BatchId("query", 5), "any"), RefuseBatch)
    assert judge_batch(seen, BatchId("query", 5)) == RefuseLower(last=6, oldest=4)
    assert isinstance(judge_batch(seen, BatchId("query", 7)), WriteBatch)
    assert isinstance(judge_batch(seen, BatchId("other query", 1)), WriteBatch)
    assert isinstance(judge_batch(seen, BatchId("", 4)), WriteBatch)


def test_only_the_newest_attempt_decides_and_once() -> None:
    proposed, other = decision(5, number=8), decision(4, number=8)
    assert isinstance(check_decision(proposed, owner=AttemptId(5), existing=None), Decide)
    assert isinstance(check_decision(proposed, owner=AttemptId(6), existing=None), Overtaken)
    assert isinstance(check_decision(proposed, owner=AttemptId(4), existing=None), Overtaken)
    assert isinstance(check_decision(proposed, owner=None, existing=None), Overtaken)
    assert check_decision(proposed, owner=AttemptId(6), existing=proposed) == Stands(proposed)
    assert check_decision(proposed, owner=AttemptId(5), existing=other) == Stands(other)


def test_a_twin_is_of_the_same_partition_attempt_and_sink_and_holds_locks() -> None:
    def twin(*in_doubt: Committable, staged: bool = False) -> Committable | None:
        return find_prepared_twin(
            in_doubt,
            sink_id="ledger",
            attempt=AttemptId(4),
            partition=1,
            staged=lambda _: staged,
        )

    others = (prepared(4), prepared(3, 1), prepared(4, 1, "ledger2"))
    assert twin(*others) is None
    assert twin(*others, prepared(4, 1)) == prepared(4, 1)
    assert twin(prepared(4, 1), staged=True) is None


def test_two_tries_of_a_task_have_names_of_their_own() -> None:
    names = {
        task_checkpoint(AttemptId(3), tried, task) for tried in range(10) for task in range(10)
    }
    assert len(names) == TRIES
    assert min(names) == 3 * TRIES
    assert max(names) < 4 * TRIES
    with pytest.raises(ValueError, match="maxFailures"):
        task_checkpoint(AttemptId(3), 10, 0)


def test_a_decision_names_transactions_of_its_own_attempt_and_each_partition_once() -> None:
    batch = BatchId("query", 1)
    parts = [(1, [prepared(4, 1)]), (0, [prepared(4)])]
    decided = decision_of(batch, AttemptId(4), parts)
    assert decided.committables == (prepared(4), prepared(4, 1))
    with pytest.raises(InvariantViolation, match="was reported twice"):
        decision_of(batch, AttemptId(4), [*parts, (0, [prepared(4)])])
    with pytest.raises(InvariantViolation, match="attempt 4 cannot decide"):
        decision_of(batch, AttemptId(4), [(0, [prepared(3)])])
