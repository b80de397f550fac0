"""Tests commits, aborts and refusals: S3, S7, S17, S18, S31-S35 of Flink's tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from onceflow.core.commit.planner import plan_commits
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.memory import Coverage, LogMemory


def tx(attempt: int, checkpoint: int, subtask: int = 0, sink_id: str = "job.sink") -> Committable:
    return Committable(TransactionId(sink_id, attempt, checkpoint, subtask))


def test_decided_is_committed_and_the_rest_of_older_attempts_aborted() -> None:
    """S3, S17, S18."""
    plan = plan_commits(
        [tx(1, 4), tx(1, 3)],
        [tx(1, 4), tx(1, 5), tx(1, 6)],
        sink_ids=("job.sink",),
        attempt=AttemptId(2),
    )
    assert plan.commit == (tx(1, 3), tx(1, 4))
    assert plan.abort == (tx(1, 5), tx(1, 6))


def test_decided_transaction_that_the_target_does_not_list_is_still_asked_for() -> None:
    """It was committed, or somebody rolled it back: only the committer can tell, so it must ask."""
    plan = plan_commits([tx(1, 4)], [], sink_ids=("job.sink",), attempt=AttemptId(2))
    assert plan.commit == (tx(1, 4),)


def test_other_sinks_are_never_touched_even_if_their_name_begins_alike() -> None:
    """L16: "job.sink" is not "job.sink2"."""
    other = tx(1, 5, sink_id="job.sink2")
    plan = plan_commits([other], [other], sink_ids=("job.sink",), attempt=AttemptId(2))
    assert plan.commit == plan.abort == ()
    assert plan.keep == (other,)


def test_transactions_of_this_and_newer_attempts_are_left_alone() -> None:
    """The sweep runs beside the attempt's own writers; a newer attempt's mean we are fenced."""
    own, newer = tx(2, 7), tx(3, 7)
    plan = plan_commits([], [own, newer, tx(1, 7)], sink_ids=("job.sink",), attempt=AttemptId(2))
    assert plan.keep == (own, newer)
    assert plan.abort == (tx(1, 7),)


def test_ownership_does_not_depend_on_subtask_or_parallelism() -> None:
    """S7, S32, S33: five subtasks left transactions, and now there is one."""
    left = [tx(1, 5, subtask) for subtask in range(5)]
    plan = plan_commits(left[3:], left, sink_ids=("job.sink",), attempt=AttemptId(2))
    assert plan.commit == tuple(left[3:])
    assert plan.abort == tuple(left[:3])


def test_commits_are_ordered_by_checkpoint_over_attempts_and_subtasks() -> None:
    """I8: a transaction of attempt 1 that an aborted checkpoint left, decided by attempt 2's."""
    decided = [tx(2, 8, 1), tx(2, 8, 0), tx(1, 7, 1), tx(2, 9, 0)]
    plan = plan_commits(decided, [], sink_ids=("job.sink",), attempt=AttemptId(3))
    assert plan.commit == (tx(1, 7, 1), tx(2, 8, 0), tx(2, 8, 1), tx(2, 9, 0))


def test_restoring_an_older_checkpoint_aborts_what_only_a_later_one_decided() -> None:
    """Still in doubt: its records are sent again. (Already committed: they come twice.)"""
    older, later = [tx(1, 3)], tx(1, 4)
    plan = plan_commits(older, [later], sink_ids=("job.sink",), attempt=AttemptId(2))
    assert plan.abort == (later,)


def test_transaction_listed_twice_is_committed_once() -> None:
    plan = plan_commits([tx(1, 3), tx(1, 3)], [], sink_ids=("job.sink",), attempt=AttemptId(2))
    assert plan.commit == (tx(1, 3),)


transactions = st.builds(
    tx, st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.sampled_from(["a", "b"])
)


@given(
    decided=st.lists(transactions, max_size=8),
    in_doubt=st.lists(transactions, max_size=8, unique=True),
    attempt=st.integers(1, 5),
)
def test_plan_names_everything_in_doubt_once_and_aborts_nothing_decided(
    decided: list[Committable], in_doubt: list[Committable], attempt: int
) -> None:
    plan = plan_commits(decided, in_doubt, sink_ids=("a",), attempt=AttemptId(attempt))
    assert not set(plan.abort) & set(decided)
    assert set(plan.commit) == {c for c in decided if c.transaction.sink_id == "a"}
    assert all(c.transaction.sink_id == "a" for c in plan.commit + plan.abort)
    assert all(c.transaction.attempt < attempt for c in plan.abort)
    named = [*plan.abort, *plan.keep]
    assert len(named) == len(set(named))
    assert set(named) == set(in_doubt) - set(plan.commit)


def memory_of(since: int, decided: list[Committable], committed: list[Committable]) -> LogMemory:
    memory = replace(LogMemory(), since=since, committed=tuple(committed))
    return memory.remember_decided([*decided, *committed])


@given(
    listed=st.lists(transactions, max_size=6),
    in_doubt=st.lists(transactions, max_size=8, unique=True),
    attempt=st.integers(1, 5),
    memory=st.builds(
        memory_of,
        st.integers(1, 3),
        st.lists(transactions, max_size=3),
        st.lists(transactions, max_size=3, unique=True),
    ),
)
def test_each_transaction_in_doubt_is_committed_aborted_kept_or_refused_as_decisions_say(
    listed: list[Committable], in_doubt: list[Committable], attempt: int, memory: LogMemory
) -> None:
    plan = plan_commits(
        listed, in_doubt, sink_ids=("a", "b"), attempt=AttemptId(attempt), memory=memory
    )
    assert set(in_doubt) <= {*plan.commit, *plan.abort, *plan.keep, *plan.refuse}
    assert not set(plan.abort) & {*plan.commit, *plan.keep, *plan.refuse}
    assert {*listed, *plan.returned, *memory.committed} == set(plan.commit)
    assert not set(listed) & {*plan.abort, *plan.keep, *plan.refuse}
    assert all(memory.coverage(c.transaction) is Coverage.UNDECIDED for c in plan.abort)
    assert all(memory.coverage(c.transaction) is Coverage.DECIDED for c in plan.returned)
    assert all(c.transaction.attempt < memory.since for c in plan.refuse)
    assert all(c.transaction.attempt >= attempt for c in plan.keep)
    over = (*plan.abort, *plan.refuse, *plan.returned)
    assert all(c.transaction.attempt < attempt for c in over)
