"""Tests the log's memory of transactions whose decisions are pruned, and the recovery from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.core.commit.planner import plan_commits
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
    retain_ledger_from,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log import rules
from onceflow.core.protocol.log.memory import ATTEMPTS_MAX, Coverage, Decided, LogMemory

SINK = "job.sink"


def tx(attempt: int, checkpoint: int, sink_id: str = SINK) -> Committable:
    return Committable(TransactionId(sink_id, attempt, checkpoint, 0), rows=5)


class Log:
    """A log in memory that keeps no more than its last decision."""

    def __init__(self, retained: int = 1) -> None:
        self.retained = retained
        self.entries: list[rules.LogEntry] = []

    @property
    def view(self) -> rules.LogView:
        """Return the log as a reader sees it who has only the records that are not pruned."""
        return rules.replay(self.entries)

    def claim(self, *sinks: str) -> AttemptId:
        record = rules.next_claim(self.view, "driver", sinks or (SINK,))
        self.entries.append(rules.LogEntry(record, f"digest {record.sequence}"))
        return record.attempt

    def decide(self, checkpoint: int, *listed: Committable) -> None:
        view = self.view
        operators = (OperatorSnapshot("out", committables=listed),)
        completed = CompletedCheckpoint(
            checkpoint=CheckpointId(checkpoint),
            attempt=view.attempt,
            parallelism=1,
            max_parallelism=1,
            snapshots=(SubtaskSnapshot(SubtaskRef("out", 0), operators),),
            triggered_at_ms=0,
            completed_at_ms=0,
        )
        record = rules.next_decision(view, completed)
        entry = rules.LogEntry(record, f"digest {record.sequence}")
        gone = rules.prunable(rules.apply(view, entry), self.retained)
        self.entries = [e for e in (*self.entries, entry) if e.record.sequence not in gone]


def test_what_a_pruned_decision_covers_is_committed_again_and_never_rolled_back() -> None:
    log = Log()
    log.claim()
    log.decide(1, tx(1, 1))
    log.decide(2, tx(1, 2))
    log.claim()
    log.decide(3, tx(2, 3))
    log.claim()
    view = log.view
    assert len(view.decided) == 1
    in_doubt = [tx(1, 1), tx(1, 2), tx(1, 3), tx(2, 3), tx(2, 4)]
    listed = [tx(2, 3)]
    plan = plan_commits(
        listed, in_doubt, sink_ids=(SINK,), attempt=view.attempt, memory=view.memory
    )
    assert plan.commit == (tx(1, 1), tx(1, 2), tx(2, 3))
    assert plan.returned == (tx(1, 1), tx(1, 2))
    assert plan.abort == (tx(1, 3), tx(2, 4))


def test_an_attempt_that_decided_nothing_leaves_only_what_is_rolled_back() -> None:
    log = Log()
    log.claim()
    log.decide(1, tx(1, 1))
    log.claim()  # dies before its first checkpoint
    log.claim()
    view = log.view
    plan = plan_commits(
        [tx(1, 1)], [tx(2, 2)], sink_ids=(SINK,), attempt=view.attempt, memory=view.memory
    )
    assert (plan.commit, plan.abort) == ((tx(1, 1),), (tx(2, 2),))


def test_the_proof_of_the_last_commit_is_asked_for_when_the_last_checkpoint_lists_nothing() -> None:
    log = Log()
    log.claim()
    log.decide(1, tx(1, 1))
    log.decide(2, tx(1, 2))
    for checkpoint in range(3, 9):
        log.decide(checkpoint)  # no rows come
    log.claim()
    view = log.view
    plan = plan_commits([], [], sink_ids=(SINK,), attempt=view.attempt, memory=view.memory)
    assert plan.commit == (tx(1, 2),)
    assert retain_ledger_from(view.completed, view.list_committed_last(SINK)) == 2
    assert retain_ledger_from(view.completed, view.list_committed_last("job.other")) == 8


def test_what_the_last_decision_still_lists_is_not_yet_called_committed() -> None:
    log = Log()
    log.claim()
    log.decide(1, tx(1, 1))
    log.decide(2, tx(1, 1), tx(1, 2))
    assert log.view.memory.of_sink(SINK) == ()
    log.decide(3, tx(1, 3))
    assert log.view.memory.of_sink(SINK) == (tx(1, 2),)


def test_thousands_of_attempts_leave_a_bounded_memory_that_says_where_it_ends() -> None:
    log = Log()
    for checkpoint in range(1, ATTEMPTS_MAX * 3):
        log.claim()
        log.decide(checkpoint, tx(checkpoint, checkpoint))
    log.claim()
    view = log.view
    memory = view.memory
    assert len(memory.decided) == ATTEMPTS_MAX
    oldest = memory.since
    plan = plan_commits(
        [],
        [tx(oldest - 1, oldest - 1), tx(oldest, oldest), tx(oldest, oldest + 1)],
        sink_ids=(SINK,),
        attempt=view.attempt,
        memory=memory,
    )
    assert plan.refuse == (tx(oldest - 1, oldest - 1),)
    assert plan.returned == (tx(oldest, oldest),)
    assert plan.abort == (tx(oldest, oldest + 1),)


def test_a_sink_id_is_remembered_until_it_is_settled() -> None:
    log = Log()
    log.claim("a", "b")
    log.decide(1, tx(1, 1, "a"))
    log.decide(2)
    log.claim("a")
    assert log.view.sinks == {"a", "b"}
    log.decide(3)
    assert log.view.sinks == {"a", "b"}, "nobody has said that b is settled"
    memory = log.view.memory.without_sinks(["b"])
    assert (memory.sinks, memory.of_sink("a")) == (("a",), (tx(1, 1, "a"),))
    assert memory.without_sinks(["a"]) == LogMemory(memory.since, memory.decided)


@given(
    st.lists(
        st.one_of(st.just("claim"), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 3),
)
def test_pruning_changes_nothing_that_is_remembered(steps: list[object], retained: int) -> None:
    pruned, whole = Log(retained), Log(retained=1000)
    for log in (pruned, whole):
        log.claim()
        for checkpoint, step in enumerate(steps, start=1):
            if step == "claim":
                log.claim()
            else:
                listed = [tx(log.view.attempt, checkpoint)] if step else []
                log.decide(checkpoint, *listed)
    assert pruned.view.memory == whole.view.memory


def savepoint(attempt: int, number: int, *listed: Committable) -> CompletedCheckpoint:
    operators = (OperatorSnapshot("out", committables=listed),)
    snapshots = (SubtaskSnapshot(SubtaskRef("out", 0), operators),)
    return CompletedCheckpoint(CheckpointId(number), AttemptId(attempt), 1, 1, snapshots, 0, 0)


def test_a_savepoint_knows_nothing_of_what_was_decided_behind_its_barrier() -> None:
    """Its job goes on while it is written: a target that has taken more is ahead of it."""
    log = Log()
    first = log.claim()
    log.decide(1, tx(first, 1))
    # The barrier of a savepoint has number 2; two checkpoints are decided before it is written.
    log.decide(3, tx(first, 3))
    log.decide(4)
    assert log.view.memory.knows(Decided(first, 4))
    taken = log.view.memory_at(savepoint(first, 2))
    assert taken.knows(Decided(first, 2))
    assert not taken.knows(Decided(first, 3))
    assert taken.of_sink(SINK) == ()
    assert taken.coverage(tx(first, 3).transaction) is Coverage.UNDECIDED


@pytest.mark.parametrize("decided_since", [False, True])
def test_a_savepoint_knows_that_what_it_does_not_list_again_is_committed(
    decided_since: bool,
) -> None:
    """A start from it in other storage asks the target for that, and for nothing of later."""
    log = Log(retained=2)
    first = log.claim()
    log.decide(1, tx(first, 1))
    log.decide(2, tx(first, 2))
    if decided_since:
        log.decide(4, tx(first, 4))
    assert log.view.memory_at(savepoint(first, 3, tx(first, 3))).of_sink(SINK) == (tx(first, 2),)
    still = savepoint(first, 3, tx(first, 2), tx(first, 3))
    assert log.view.memory_at(still).of_sink(SINK) == (tx(first, 1),)
