"""Tests that the commits of targets decide which log or savepoint a job may start from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.protocol.savepoints.test_savepoints import (
    RAN,
    TAKEN,
    claimed,
    cut,
    decided,
    transaction,
)

from onceflow.core.commit.planner import plan_commits
from onceflow.core.errors import SavepointRefused, StorageBehind
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import committables_of
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.log.target_records import (
    TargetRecord,
    is_set_back,
    require_not_behind,
    to_record,
)
from onceflow.core.protocol.savepoints.savepoint import (
    build_first_decision,
    check_targets,
    is_put_back,
    lacks_own_commits,
    seed_view,
    sinks_to_import,
    view_before,
)

STOPPED = replace(TAKEN, kind=CheckpointKind.SAVEPOINT_STOP)


def record(*committed: tuple[int, int], attempt: int = 1) -> TargetRecord:
    return to_record("out", attempt, (Decided(*one) for one in committed))


def check(savepoint: object, view: LogView, told: TargetRecord, *, rewind: bool = False) -> None:
    check_targets(savepoint, view, [told], all_tell=True, allow_rewind=rewind)  # type: ignore[arg-type]


@pytest.mark.parametrize("committed", [(1, 2), (2, 1)])
def test_a_log_that_does_not_know_a_commit_is_behind_also_with_a_newer_attempt(
    committed: tuple[int, int],
) -> None:
    view = RAN
    require_not_behind(view, [record((1, 1))], "storage")
    for _ in range(3):
        with pytest.raises(StorageBehind, match=r"ends at checkpoint 1 of attempt 1"):
            require_not_behind(view, [record((1, 1), committed)], "storage")
        view = claimed(view)


def test_a_log_without_decisions_is_behind_whatever_was_committed() -> None:
    with pytest.raises(StorageBehind, match="has decided nothing"):
        require_not_behind(claimed(LogView()), [record((1, 1))], "storage")
    require_not_behind(claimed(LogView()), [record()], "storage")


def test_a_log_that_lacks_a_whole_commit_is_behind() -> None:
    require_not_behind(RAN, [TargetRecord("out", through=RAN.completed[-1].checkpoint)], "s")
    with pytest.raises(StorageBehind, match="checkpoint 2 of this job"):
        require_not_behind(RAN, [TargetRecord("out", through=cut(1, 2, 2).checkpoint)], "s")


def test_what_a_savepoint_lists_is_known_after_it_was_begun_from() -> None:
    """Also once the log has forgotten the transaction itself."""
    view = claimed(seed_view(LogView(), STOPPED))
    view = decided(view, build_first_decision(STOPPED, view, attempt=view.attempt, now_ms=7))
    for number in (103, 104):
        view = decided(view, cut(2, number, 30, transaction(2, number)))
    require_not_behind(view, [record((1, 2), (2, 104))], "storage")


def test_a_target_that_has_gone_on_since_the_savepoint_refuses_it_in_any_storage() -> None:
    view = claimed(seed_view(LogView(), TAKEN))
    check(TAKEN, view, record((1, 2)))
    with pytest.raises(SavepointRefused, match="has committed since, last checkpoint 3"):
        check(TAKEN, view, record((1, 3)))
    check(STOPPED, view, record((1, 3)))  # empty: its attempt has emitted nothing more
    with pytest.raises(SavepointRefused, match="has committed since"):
        check(STOPPED, view, record((2, 3)))
    check(STOPPED, view, record((2, 3)), rewind=True)


def test_a_log_that_is_behind_the_savepoint_goes_on_as_the_savepoints_log() -> None:
    """The job was moved to other storage, and comes back."""
    elsewhere = claimed(seed_view(LogView(), STOPPED))
    elsewhere = decided(
        elsewhere, build_first_decision(STOPPED, elsewhere, attempt=elsewhere.attempt, now_ms=7)
    )
    back = replace(STOPPED, completed=cut(2, 120, 90, transaction(2, 120)), memory=elsewhere.memory)
    view = claimed(seed_view(RAN, back))
    assert view.attempt == 3
    told = record((1, 2), (2, 120), attempt=2)
    check(back, view, told)
    begun = build_first_decision(back, view, attempt=view.attempt, now_ms=7, records=[told])
    assert begun.checkpoint > 120
    assert committables_of(begun) == (transaction(2, 120),), "and nothing of the older log"
    after = decided(view_before(back, view, [told]), begun)
    require_not_behind(after, [told], "storage")
    with pytest.raises(SavepointRefused, match="not every sink's target records"):
        check_targets(back, view, [], all_tell=False, allow_rewind=False)


def test_a_rewind_asks_a_target_that_was_put_back_for_the_savepoints_own_alone() -> None:
    view = claimed(decided(RAN, cut(1, 3, 30, transaction(1, 3))))
    told = record((1, 1))
    assert is_set_back(told, [transaction(1, 3)])
    begun = build_first_decision(TAKEN, view, attempt=AttemptId(2), now_ms=7, records=[told])
    assert committables_of(begun) == (transaction(1, 1), transaction(1, 2))
    assert sinks_to_import(TAKEN, view, [told]) == {"out"}
    after = decided(view_before(TAKEN, view, [told]), begun)
    assert after.memory.committed == ()
    assert after.memory.coverage(transaction(1, 3).transaction).value == "undecided"


def test_a_target_that_proves_its_last_commit_alone_is_not_taken_for_one_that_was_put_back() -> (
    None
):
    known = [transaction(1, 3), transaction(2, 4)]
    assert not is_set_back(record((2, 4)), known)
    assert not is_set_back(record((3, 5)), known)
    assert is_set_back(record((1, 3)), known)
    assert is_set_back(record(), known)
    assert not is_set_back(TargetRecord("out", through=cut(1, 4, 2).checkpoint), known)
    assert is_set_back(TargetRecord("out", through=cut(1, 3, 2).checkpoint), known)


def test_a_target_that_has_a_part_of_a_checkpoint_lacks_the_rest_unless_its_proofs_are_pruned() -> (
    None
):
    """A copy of it was made while one of two transactions was committed, and the other was not."""
    first, second = (replace(transaction(1, 2).transaction, subtask=n) for n in (0, 1))
    stopped = replace(STOPPED, completed=cut(1, 2, 20, Committable(first, 1), Committable(second)))
    view = claimed(decided(RAN, cut(1, 3, 20, Committable(first, 1), Committable(second))))
    before = transaction(1, 1).transaction

    def list_record(*proofs: TransactionId) -> list[TargetRecord]:
        return [to_record("out", 1, proofs, proofs=proofs)]

    assert lacks_own_commits(stopped, view, list_record(before, first), ())
    assert lacks_own_commits(stopped, view, list_record(first), ())
    assert not lacks_own_commits(stopped, view, list_record(before, first), {second})
    assert not lacks_own_commits(stopped, view, list_record(before, first, second), ())
    later = transaction(1, 3).transaction
    assert not lacks_own_commits(stopped, view, list_record(later), ()), "nobody can tell any more"
    again = decided(view, cut(2, 4, 20))
    assert is_put_back(stopped, again, list_record(before, first), ())
    assert not is_put_back(stopped, again, list_record(before, first, second), ())


def test_a_rewind_asks_a_target_that_has_gone_on_for_nothing_of_before() -> None:
    view = claimed(decided(RAN, cut(1, 3, 30, transaction(1, 3))))
    told = record((1, 3))
    begun = build_first_decision(TAKEN, view, attempt=AttemptId(2), now_ms=7, records=[told])
    assert committables_of(begun) == ()
    assert sinks_to_import(TAKEN, view, [told]) == frozenset()
    after = decided(view_before(TAKEN, view, [told]), begun)
    assert after.memory.committed == ()
    require_not_behind(after, [told], "storage")  # it was accepted
    with pytest.raises(StorageBehind):
        require_not_behind(after, [record((1, 4))], "storage")


@pytest.mark.parametrize(("proved", "asked"), [((), 1), (((1, 1),), 1), (((1, 2),), 0)])
def test_a_target_is_asked_for_no_proof_below_a_later_one_of_the_same_attempt(
    proved: tuple[tuple[int, int], ...], asked: int
) -> None:
    """The job may have committed more while it stopped, and pruned the proofs of before."""
    known = replace(STOPPED.memory, committed=(transaction(1, 1),))
    stopped = replace(STOPPED, memory=known, completed=cut(1, 2, 20, transaction(1, 2)))
    view = claimed(seed_view(LogView(), stopped))
    after = view_before(stopped, view, [record(*proved)])
    assert len(after.memory.committed) == asked


def test_a_rewind_commits_what_the_savepoint_lists_and_a_target_that_has_gone_on_has_in_doubt() -> (
    None
):
    """Another subtask has committed since; this one was killed before it could."""
    view = claimed(seed_view(LogView(), TAKEN))
    told = record((1, 3))
    begun = build_first_decision(TAKEN, view, attempt=view.attempt, now_ms=7, records=[told])
    after = decided(view_before(TAKEN, view, [told]), begun)
    in_doubt = [transaction(1, 2), transaction(1, 3)]
    plan = plan_commits(
        committables_of(begun),
        in_doubt,
        sink_ids=("out",),
        attempt=view.attempt,
        memory=after.memory,
    )
    assert plan.commit == (transaction(1, 2),)
    assert plan.abort == (transaction(1, 3),)


def test_a_rewind_asks_a_target_that_proves_its_last_commits_alone_for_all_of_the_savepoint() -> (
    None
):
    """It has gone on, and one of its subtasks may not have."""
    told = to_record("out", 1, (Decided(1, 3),), proves_each=False)
    view = claimed(seed_view(LogView(), TAKEN))
    assert sinks_to_import(TAKEN, view, [told]) == {"out"}
    begun = build_first_decision(TAKEN, view, attempt=view.attempt, now_ms=7, records=[told])
    assert committables_of(begun) == (transaction(1, 1), transaction(1, 2))
    require_not_behind(decided(view_before(TAKEN, view, [told]), begun), [told], "storage")
    with pytest.raises(SavepointRefused, match="has committed since, last checkpoint 3"):
        check(TAKEN, view, told)
    # In the job's own storage its staged rows and proofs are where they were.
    own = claimed(decided(RAN, cut(1, 3, 30, transaction(1, 3))))
    assert sinks_to_import(TAKEN, own, [told]) == frozenset()
    back = build_first_decision(TAKEN, own, attempt=own.attempt, now_ms=7, records=[told])
    assert committables_of(back) == (transaction(1, 3),)


def test_a_whole_checkpoint_that_a_later_attempt_has_committed_refuses_the_savepoint() -> None:
    """Its own job may commit more while it stops: that alone is no later commit."""
    view = claimed(seed_view(LogView(), STOPPED))
    own = TargetRecord("out", AttemptId(1), through=cut(1, 3, 2).checkpoint)
    check(STOPPED, view, own)
    check(STOPPED, view, replace(own, claims=(Decided(1, 0),)))
    check(STOPPED, view, replace(own, claims=(Decided(1, 0), Decided(2, 3))))
    gone_on = replace(own, through=cut(1, 9, 2).checkpoint, claims=(Decided(1, 0), Decided(2, 3)))
    with pytest.raises(SavepointRefused, match="has committed since, last checkpoint 9"):
        check(STOPPED, view, gone_on)
    check(STOPPED, view, gone_on, rewind=True)


def _of_sink(sink_id: str, attempt: int, checkpoint: int) -> Committable:
    transaction_id = TransactionId(sink_id, AttemptId(attempt), CheckpointId(checkpoint), 0)
    return Committable(transaction_id, 5)


def test_a_rewind_keeps_what_was_decided_of_a_target_that_does_not_tell_and_of_no_other() -> None:
    """Two sinks have something of one decision: of one it is committed, of the other sent again."""
    told, silent = transaction(1, 3), _of_sink("silent", 1, 3)
    ran = replace(RAN, memory=RAN.memory.with_sinks(["silent"]))
    view = claimed(decided(ran, cut(1, 3, 30, told, silent)))
    begun = build_first_decision(
        TAKEN, view, attempt=AttemptId(2), now_ms=7, records=[record((1, 1))]
    )
    assert silent in committables_of(begun)
    after = decided(view_before(TAKEN, view, [record((1, 1))]), begun)
    for _ in range(2):
        assert after.memory.coverage(told.transaction).value == "undecided"
        assert after.memory.coverage(silent.transaction).value == "decided"
        after = decided(claimed(after), cut(after.attempt + 1, after.next_checkpoint, 40))
    # Nor by another rewind, whose savepoint lists what is kept.
    second = replace(
        TAKEN, completed=cut(2, after.next_checkpoint, 50, silent), memory=after.memory
    )
    view = claimed(decided(after, cut(after.attempt, after.next_checkpoint, 60)))
    told_now = [record((1, 1))]
    begun = build_first_decision(second, view, attempt=view.attempt, now_ms=7, records=told_now)
    after = decided(view_before(second, view, told_now), begun)
    assert after.memory.coverage(told.transaction).value == "undecided"
    assert after.memory.coverage(silent.transaction).value == "decided"
    assert after.memory.without_sinks(["silent"]).kept == ()


def test_a_rewind_knows_what_targets_had_committed_at_the_rewind_before() -> None:
    """The target was not put back then, and the savepoint of the second was taken after it."""
    view = claimed(decided(RAN, cut(1, 9, 30, transaction(1, 9))))
    begun = build_first_decision(
        TAKEN, view, attempt=AttemptId(2), now_ms=7, records=[record((1, 9))]
    )
    after = decided(view_before(TAKEN, view, [record((1, 9))]), begun)
    second = replace(TAKEN, completed=cut(2, 11, 50, transaction(2, 11)), memory=after.memory)
    view = claimed(decided(after, cut(2, 12, 60, transaction(2, 12))))
    begun = build_first_decision(
        second, view, attempt=AttemptId(3), now_ms=7, records=[record((1, 9))]
    )
    after = decided(view_before(second, view, [record((1, 9))]), begun)
    require_not_behind(after, [record((1, 9), (2, 11))], "storage")
    with pytest.raises(StorageBehind):
        require_not_behind(after, [record((1, 10))], "storage")


def test_a_target_that_lacks_what_the_last_decision_lists_was_put_back_or_has_it_in_doubt() -> None:
    view = claimed(decided(RAN, cut(1, 3, 30, transaction(1, 3))))
    begun = build_first_decision(
        TAKEN, view, attempt=AttemptId(2), now_ms=7, records=[record((1, 1))]
    )
    view = decided(view_before(TAKEN, view, [record((1, 1))]), begun)
    last = transaction(2, 9)
    view = decided(view, cut(2, 9, 40, last))
    assert is_put_back(TAKEN, view, [record((1, 2))], ())
    assert not is_put_back(TAKEN, view, [record((1, 2))], {last.transaction}), (
        "its commit was not over"
    )
    assert not is_put_back(TAKEN, view, [record((1, 2), (2, 9))], ())
    assert not is_put_back(TAKEN, view, [], ()), "nobody tells"
    # What is known to be committed was there.
    later = decided(view, cut(2, 10, 50))
    assert is_put_back(TAKEN, later, [record((1, 2))], {last.transaction})


def test_a_stop_savepoints_rows_are_needed_where_a_target_was_put_back_to_before_them() -> None:
    view = claimed(decided(RAN, cut(1, 3, 20, transaction(1, 2))))
    own, copy = transaction(1, 2).transaction, [record((1, 1))]
    assert lacks_own_commits(STOPPED, view, copy, ())
    assert sinks_to_import(STOPPED, view, copy, lacks_own=True) == {"out"}
    assert not lacks_own_commits(STOPPED, view, copy, {own}), "its commit was not over"
    assert not lacks_own_commits(STOPPED, view, [record((1, 1), (1, 2))], ())
    assert not lacks_own_commits(STOPPED, LogView(), copy, ()), "new storage has decided nothing"
    assert sinks_to_import(STOPPED, view, copy) == frozenset()
