"""Tests the commits and rollbacks around a batch."""

from __future__ import annotations

from onceflow.core.commit.planner import around_roll_backs, plan_claimed, plan_sweep
from onceflow.core.protocol.batches import TRIES, BatchClaim, BatchDecision, BatchId
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId

SINKS = ("ledger",)


def prepared(attempt: int, subtask: int = 0, sink_id: str = "ledger") -> Committable:
    return Committable(TransactionId(sink_id, attempt, attempt * TRIES, subtask), rows=1)


def decision(
    attempt: int, *committables: Committable, number: int = 0, settled: bool = False
) -> BatchDecision:
    batch = BatchId("query", number or attempt)
    return BatchDecision(batch, AttemptId(attempt), committables=committables, is_committed=settled)


def claim(attempt: int, *decisions: BatchDecision) -> BatchClaim:
    return BatchClaim(AttemptId(attempt), decisions)


def test_what_is_decided_is_committed_also_when_the_target_does_not_list_it() -> None:
    """It may be gone: then the committer says so, and nobody takes its rows for committed."""
    decided = decision(3, prepared(3), prepared(3, 1))
    plan = plan_claimed(claim(4, decided), [prepared(3, 1)], sink_ids=SINKS)
    assert plan.commit == (prepared(3), prepared(3, 1))
    assert plan.abort == ()


def test_what_is_known_to_be_committed_is_asked_for_only_when_it_is_in_doubt_again() -> None:
    decided = decision(3, prepared(3), prepared(3, 1), settled=True)
    assert plan_claimed(claim(4, decided), [], sink_ids=SINKS).commit == ()
    plan = plan_claimed(claim(4, decided), [prepared(3, 1)], sink_ids=SINKS)
    assert plan.commit == (prepared(3, 1),)
    assert plan.abort == ()


def test_what_other_sinks_and_newer_attempts_hold_is_left_alone() -> None:
    in_doubt = [prepared(2), prepared(2, sink_id="ledger2"), prepared(4), prepared(5)]
    plan = plan_claimed(claim(4), in_doubt, sink_ids=SINKS)
    assert plan.abort == (prepared(2),)
    swept = plan_sweep(decision(4, prepared(4)), in_doubt, sink_ids=SINKS)
    assert swept == (prepared(2),)


def test_the_sweep_takes_what_older_attempts_have_prepared_late() -> None:
    """No batch may follow that would find it: a DataFrame is written once."""
    decided = decision(4, prepared(4))
    in_doubt = [prepared(1), prepared(3), prepared(4), prepared(4, 1), prepared(5)]
    swept = plan_sweep(decided, in_doubt, sink_ids=SINKS)
    assert swept == (prepared(1), prepared(3), prepared(4, 1))


def test_what_is_decided_of_a_sink_that_is_named_no_more_is_not_passed_over() -> None:
    """Its committer is missing, and says so: its rows are decided."""
    decided = decision(3, prepared(3), prepared(3, sink_id="audit"))
    plan = plan_claimed(claim(4, decided), [], sink_ids=SINKS)
    assert set(plan.commit) == {prepared(3), prepared(3, sink_id="audit")}


def test_what_is_committed_again_is_what_the_decision_lists() -> None:
    """The target may list a name alone; how many rows it has, the decision knows."""
    listed = Committable(TransactionId("ledger", 3, 3 * TRIES, 0), rows=7, payload=b"file")
    plan = plan_claimed(claim(4, decision(3, listed, settled=True)), [prepared(3)], sink_ids=SINKS)
    assert plan.commit == plan.returned == (listed,)


def test_all_that_is_decided_is_committed_around_roll_backs_and_staged_rows_come_last() -> None:
    decided = [prepared(4, subtask) for subtask in range(4)]
    staged = {decided[1], decided[2]}
    before, after = around_roll_backs(decided, staged=staged.__contains__)
    assert before == (decided[0], decided[3])
    assert after == (decided[1], decided[2])
