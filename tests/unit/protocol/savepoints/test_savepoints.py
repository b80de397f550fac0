"""Tests which savepoints a job may start from, and the contents of the decision that records it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.protocol.checkpoints.coordination import SINKS, SOURCES

from onceflow.core.errors import SavepointRefused
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    InFlight,
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
    committables_of,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.rules import LogEntry, LogView, apply, next_claim, next_decision
from onceflow.core.protocol.log.target_records import to_record
from onceflow.core.protocol.savepoints.savepoint import (
    UNSEEN_CHECKPOINTS,
    Savepoint,
    build_first_decision,
    check_savepoint,
    is_restored,
    is_staged_for,
    seed_view,
)

LOG_ID = "log"
STATE = StateHandle("s", "state/1", 1, "x", 0, 7)


def transaction(attempt: int, checkpoint: int) -> Committable:
    return Committable(TransactionId("out", AttemptId(attempt), CheckpointId(checkpoint), 0), 5)


def cut(attempt: int, number: int, at: int, *listed: Committable) -> CompletedCheckpoint:
    snapshots = (
        SubtaskSnapshot(SOURCES[0], (OperatorSnapshot("source", lists={"splits": (b"%d" % at,)}),)),
        SubtaskSnapshot(
            SINKS[0],
            (
                OperatorSnapshot("sum", keyed=(STATE,)),
                OperatorSnapshot("sink", committables=listed),
            ),
        ),
    )
    return CompletedCheckpoint(CheckpointId(number), AttemptId(attempt), 2, 8, snapshots, 0, 0)


def claimed(view: LogView) -> LogView:
    return apply(view, LogEntry(next_claim(view, "me", ["out"]), "c"))


def decided(view: LogView, completed: CompletedCheckpoint) -> LogView:
    return apply(view, LogEntry(next_decision(view, completed), f"d{completed.checkpoint}"))


RAN = decided(claimed(LogView()), cut(1, 1, 10, transaction(1, 1)))
"""A log of one attempt with one checkpoint, which stands at 10."""
TAKEN = Savepoint(
    "id",
    "job",
    LOG_ID,
    CheckpointKind.SAVEPOINT,
    cut(1, 2, 20, transaction(1, 1), transaction(1, 2)),
    RAN.memory,
)
"""Taken after it, at 20."""


def check(savepoint: Savepoint, view: LogView, *, rewind: bool = False, last: int = 1) -> None:
    check_savepoint(
        savepoint,
        view,
        job="job",
        log_id=LOG_ID if view.last_sequence else "",
        last_attempt=AttemptId(last),
        allow_rewind=rewind,
    )


def listed(completed: CompletedCheckpoint) -> list[Committable]:
    return list(committables_of(completed))


def test_what_the_savepoint_has_prepared_is_decided_by_the_attempt_that_comes_next() -> None:
    check(TAKEN, RAN)
    view = claimed(RAN)
    begun = build_first_decision(TAKEN, view, attempt=view.attempt, now_ms=7)
    assert (begun.checkpoint, begun.attempt) == (3, 2)
    assert listed(begun) == [transaction(1, 1), transaction(1, 2)]
    decided(view, begun)


def test_what_a_later_attempt_has_rolled_back_is_never_counted_on() -> None:
    """Restoring it would lose the rows between the last decision and the savepoint."""
    view = claimed(RAN)
    with pytest.raises(SavepointRefused, match=r"1 transactions \(5 rows\).*out/1/2/0"):
        check(TAKEN, view, last=2)
    with pytest.raises(SavepointRefused, match="rolls them back"):
        check(TAKEN, decided(view, cut(2, 5, 50)), last=2, rewind=True)


def test_a_savepoint_before_the_last_decision_is_refused_unless_told_otherwise() -> None:
    view = decided(RAN, cut(1, 3, 30, transaction(1, 2), transaction(1, 3)))
    with pytest.raises(SavepointRefused, match=r"checkpoints 3-3 were committed since, with"):
        check(TAKEN, view)
    check(TAKEN, view, rewind=True)
    begun = build_first_decision(TAKEN, claimed(view), attempt=AttemptId(2), now_ms=7)
    assert begun.checkpoint == 4
    assert listed(begun) == [transaction(1, 2), transaction(1, 3)], "what the last decision lists"
    assert begun.operator("sum")[0][1].keyed == (STATE,)


@pytest.mark.parametrize("number", [3, 4])
def test_what_a_later_attempt_decided_under_an_earlier_or_the_same_number_counts_as_later(
    number: int,
) -> None:
    """The attempt that took the savepoint ended undecided, and the next one numbered anew."""
    nothing_written = cut(1, 4, 20, transaction(1, 1))
    view = decided(claimed(RAN), cut(2, number, 50, transaction(2, number)))
    with pytest.raises(SavepointRefused, match=rf"checkpoint {number} of attempt 2.* 5 rows"):
        check(replace(TAKEN, completed=nothing_written), view, last=2)


def test_a_decision_that_commits_no_more_than_the_savepoint_holds_is_no_later_one() -> None:
    """That of the job which stopped with the savepoint."""
    check(TAKEN, decided(RAN, cut(1, 3, 20, transaction(1, 2))))


@pytest.mark.parametrize("kind", [CheckpointKind.SAVEPOINT, CheckpointKind.SAVEPOINT_STOP])
def test_a_decision_that_commits_more_is_a_later_one_although_nothing_was_read(
    kind: CheckpointKind,
) -> None:
    """Timers make rows while the sources are idle; the log need not hold that decision any more."""
    taken = replace(TAKEN, kind=kind)
    view = decided(RAN, cut(1, 3, 20, transaction(1, 2)))
    view = decided(claimed(view), cut(2, 4, 20, transaction(2, 4)))
    with pytest.raises(SavepointRefused, match="with at least 5 rows under sink id 'out'"):
        check(taken, view, last=2)
    view = decided(decided(view, cut(2, 5, 20)), cut(2, 6, 20))
    pruned = replace(view, decided=view.decided[-1:])
    with pytest.raises(SavepointRefused, match="with at least 5 rows under sink id 'out'"):
        check(taken, pruned, last=2)


def test_what_a_writer_prepares_after_a_stop_savepoint_is_empty_and_no_reason_to_refuse() -> None:
    view = decided(RAN, cut(1, 3, 20, transaction(1, 2), transaction(1, 3)))
    with pytest.raises(SavepointRefused, match="were committed since"):
        check(TAKEN, view)
    check(replace(TAKEN, kind=CheckpointKind.SAVEPOINT_STOP), view)
    check(replace(TAKEN, kind=CheckpointKind.SAVEPOINT_DRAIN), view)


def test_a_new_log_goes_on_where_the_savepoints_log_has_ended() -> None:
    stopped = replace(TAKEN, kind=CheckpointKind.SAVEPOINT_STOP)
    check(stopped, LogView())
    view = claimed(seed_view(LogView(), stopped))
    assert view.attempt == 2
    begun = build_first_decision(stopped, view, attempt=view.attempt, now_ms=7)
    assert begun.checkpoint == 2 + UNSEEN_CHECKPOINTS
    assert listed(begun) == [transaction(1, 1), transaction(1, 2)]
    after = decided(view, begun)
    assert after.memory.sinks == ("out",)
    assert after.memory.coverage(transaction(1, 1).transaction).value == "decided"


def test_the_first_decision_has_a_number_that_no_target_knows() -> None:
    """A target takes a number that it knows for a commit that it has, and the rows are lost."""
    record = to_record("out", 1, [transaction(1, 500).transaction])
    for view in (claimed(RAN), claimed(seed_view(LogView(), TAKEN))):
        begun = build_first_decision(TAKEN, view, attempt=view.attempt, now_ms=7, records=[record])
        assert begun.checkpoint > 500


def test_without_its_log_nobody_knows_what_followed_a_savepoint_of_a_job_that_went_on() -> None:
    with pytest.raises(SavepointRefused, match="not known which rows were committed since"):
        check(TAKEN, LogView())
    check(TAKEN, LogView(), rewind=True)


def test_a_savepoint_of_another_job_or_log_is_refused() -> None:
    with pytest.raises(SavepointRefused, match="'theirs' belongs to another job than 'job'"):
        check(replace(TAKEN, job="theirs"), RAN)
    with pytest.raises(SavepointRefused, match="decision log elsewhere"):
        check(replace(TAKEN, log_id="elsewhere"), RAN)


def test_a_job_that_has_begun_from_a_savepoint_knows_it_for_ever() -> None:
    memory = replace(RAN.memory, savepoint="id /kept/here")
    view = decided(replace(RAN, memory=memory), cut(1, 3, 30))
    assert is_restored(view, "/moved", TAKEN)
    assert is_restored(view, "/kept/here"), "claimed, and deleted"
    assert not is_restored(view, "/elsewhere")
    assert not is_restored(view, "/kept/here", replace(TAKEN, id="another"))


def test_rows_in_flight_of_a_checkpoint_are_begun_with() -> None:
    """A retained checkpoint may be an unaligned one: its rows in flight are nowhere else."""
    rows = InFlight("sum", sent=False, handle=STATE)
    first, second = cut(1, 1, 10, transaction(1, 1)).snapshots
    unaligned = replace(
        cut(1, 1, 10, transaction(1, 1)),
        snapshots=(first, replace(second, in_flight=(rows,))),
    )
    view = decided(decided(claimed(LogView()), unaligned), cut(1, 2, 20, transaction(1, 2)))
    checkpoint = Savepoint("id", "job", LOG_ID, CheckpointKind.PERIODIC, unaligned, view.memory)
    with pytest.raises(SavepointRefused, match="^checkpoint 1 of job"):
        check(checkpoint, view)
    check(checkpoint, view, rewind=True)
    begun = build_first_decision(checkpoint, claimed(view), attempt=AttemptId(2), now_ms=7)
    assert begun.in_flight("sum") == (rows,)
    assert listed(begun) == [transaction(1, 2)], "what the last decision lists"


def test_staged_rows_behind_the_barrier_are_no_part_of_a_savepoint() -> None:
    completed = cut(1, 2, 20)
    staged = [transaction(1, number).transaction for number in (1, 2, 3)]
    assert [one.checkpoint for one in staged if is_staged_for(one, completed)] == [1, 2]
